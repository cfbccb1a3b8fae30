"""kvdock as an external cache linker of SGLang, which loads it by the name of its class and of this module.

SGLang makes the linker of linker.py in each rank. Rank 0 looks pages up and promises them to SGLang (lookups.py); each
rank loads and stores (loads.py, offloads.py). The scheduler connector (kvdock/connectors/scheduler.py) calls the server
and verifies for rank 0. Nothing here imports SGLang before SGLang asks for a linker or calls the plug-in.
"""

from __future__ import annotations


def __getattr__(name: str) -> object:
    if name in ("KvdockLinker", "KvdockLinkerOrNone"):
        from kvdock.connectors.sglang import linker

        return getattr(linker, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
