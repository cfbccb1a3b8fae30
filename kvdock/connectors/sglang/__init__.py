"""kvdock as an external cache linker of SGLang, which loads it by the name of its class and of this module.

    linker.py        the class SGLang makes in each rank; hands each call on
    plugin.py        names the linker, where SGLANG_KVDOCK asks for it
    setup.py         settings, and what is refused
    pools.py         SGLang's device pools as kvdock's groups and layouts
    identity.py      the manifest
    dependences.py   which of SGLang's settings KV depends on
    lookups.py       rank 0: what is asked, promised and forgotten
    loads.py         in each rank: a batch's loads, and which layers the forward pass has asked for
    offloads.py      in each rank: what is stored, in the order in which SGLang offered it
    ranks.py         what ranks tell each other between SGLang's calls
    figures.py       what is counted, for SGLang's metrics
    hooks.py         what SGLang does not say to a linker: the parent of a node, and that weights change
    updates.py       how SGLang changes weights, and the proof that the hooks around it are in force
    fresh.py         which pages may be stored before SGLang's tree is flushed after a change

Lookups, stores and verification are the driver's (kvdock/connectors/driver.py). Only linker.py and dependences.py
import SGLang when they are loaded, which is when SGLang asks for KvdockLinker; hooks.py and plugin.py do when it calls
them.
"""

from __future__ import annotations


def __getattr__(name: str) -> object:
    if name == "KvdockLinker":
        from kvdock.connectors.sglang.linker import KvdockLinker

        return KvdockLinker
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
