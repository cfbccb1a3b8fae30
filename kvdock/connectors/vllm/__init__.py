"""kvdock as a KV connector of vLLM. Where kvdock is installed, vLLM finds it under the name KvdockConnector.

vLLM makes the connector of connector.py in the scheduler's process, where it passes each call to scheduler.py, and in
each worker's process, where it passes each call to worker.py. The scheduler connector (kvdock/connectors/scheduler.py)
calls the server and verifies. Nothing here imports vLLM before vLLM asks for KvdockConnector or calls the plug-in.
"""

from __future__ import annotations


def __getattr__(name: str) -> object:
    if name == "KvdockConnector":
        from kvdock.connectors.vllm.connector import KvdockConnector

        return KvdockConnector
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
