"""kvdock as a KV connector of vLLM: `kv_connector_module_path: kvdock.connectors.vllm`.

    connector.py       the class vLLM loads; hands each call to one of the two sides
    scheduler_side.py  in the scheduler's process: what to load, what to store, which blocks are being read
    worker_side.py     in each worker's process: the copies
    groups.py          vLLM's KV cache groups and tensors as kvdock's groups and layouts
    identity.py        the manifest: what the bytes depend on; requests whose KV depends on more
    config.py          settings, from kv_connector_extra_config
    orders.py          what the sides tell each other
    figures.py         what the sides count
    metrics.py         the figures as vLLM's statistics and Prometheus metrics
    layers.py          bands of layers, and which of them a step has asked for
    cores.py           how many CPU threads may hash
    checked.py         promises only what was seen to be whole
    room.py            how much may load in the background
    clearing.py        vLLM's reset, as far as the server
    background.py      threads of our own
    announcer.py       which chunks a router is told of
    events.py          the same as vLLM's KV cache events
    logs.py            kvdock's log lines among vLLM's

Only connector.py, metrics.py and events.py import vLLM, and nothing here does before KvdockConnector is asked for.
"""

from __future__ import annotations


def __getattr__(name: str) -> object:
    if name == "KvdockConnector":
        from kvdock.connectors.vllm.connector import KvdockConnector

        return KvdockConnector
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
