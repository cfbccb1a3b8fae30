"""kvdock as a KV connector of vLLM, which knows it by its name, KvdockConnector, wherever kvdock is installed.

    connector.py     the class vLLM loads; hands each call to the scheduler or the worker
    setup.py         settings, what is refused, what this engine can do, hashing threads, log lines
    plugin.py        makes the connector known to vLLM by its name
    environment.py   settings from the environment
    groups.py        vLLM's KV cache groups and tensors as kvdock's groups and layouts
    identity.py      the manifest and all that KV bytes depend on; requests whose KV depends on more
    scheduler.py     in the scheduler's process: what to load, what to store, which blocks are being read
    block_budget.py  how many blocks loads in the background may hold
    clearing.py      vLLM's reset of its caches, carried to the server
    announcer.py     which chunks this instance can load, for routers
    stores.py        stores from their offer until no worker reads for them
    tables.py        which blocks requests have, as vLLM names them
    steps.py         what scheduler and workers tell each other with each step
    worker.py        in each worker's process: the copies
    figures.py       what scheduler and workers count
    exports.py       the figures and the announced chunks in vLLM's own types

Lookups, stores and verification are the driver's (kvdock/connectors/driver.py). Only connector.py, exports.py and
plugin.py import vLLM, and nothing here does before vLLM asks for KvdockConnector or calls the plugin.
"""

from __future__ import annotations


def __getattr__(name: str) -> object:
    if name == "KvdockConnector":
        from kvdock.connectors.vllm.connector import KvdockConnector

        return KvdockConnector
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
