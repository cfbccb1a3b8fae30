"""Adapters that vLLM loads before any request names them: by EngineCore.add_lora, as its servers do.

Connectors meet an adapter before a worker reads its files (adapters.py). What else makes workers read adapters, a
collective_rpc with "lora" in its name or a function, is noted: from then on only files that are older than the engine
are known for sure. Both are hooks that prove to be in force (hooks.py).
"""

from __future__ import annotations

import logging
import sys
from typing import Any

from kvdock.connectors.vllm.arrivals import CORE
from kvdock.connectors.vllm.hooks import Hook, hook

log = logging.getLogger("kvdock.vllm")


class AdapterLoads:
    """What is heard of all cores of this process."""

    def __init__(self) -> None:
        self._hooks: tuple[Hook, ...] = ()
        self._is_unheard = False
        """Workers may have read adapters without a word."""

    def listen(self) -> None:
        """From now on cores tell their connectors of each adapter before they load it, by
        `kvdock_adapter(lora_request)`."""
        core = getattr(sys.modules.get(CORE), "EngineCore", None)  # not loaded: this process has no core
        if core is None or self._hooks:
            return
        loads, calls = hook(core, "add_lora"), hook(core, "collective_rpc")
        loads.listen_before(self._load)
        calls.listen_before(self._call)
        self._hooks = loads, calls

    def hears(self) -> bool:
        """Whether every adapter is met before a worker reads it."""
        return bool(self._hooks) and not self._is_unheard and not any(one.why_not() for one in self._hooks)

    def miss(self) -> None:
        """Nobody was there to meet an adapter."""
        self._is_unheard = True

    def _load(self, core: Any, args: tuple[Any, ...], more: dict[str, Any]) -> None:
        try:
            asked = (*args, *more.values())[0]
            connector = core.scheduler.connector
            for one in (connector, *getattr(connector, "_connectors", ())):  # MultiConnector has several
                if hasattr(one, "kvdock_adapter"):
                    one.kvdock_adapter(asked)
        except Exception:  # vLLM loads its adapter all the same, whatever its version's core is like
            self._is_unheard = True
            log.exception("adapters that are written after the start are not cached from now on")

    def _call(self, core: Any, args: tuple[Any, ...], more: dict[str, Any]) -> None:
        method = args[0] if args else more.get("method")
        if not isinstance(method, str) or "lora" in method.lower():
            self._is_unheard = True


LOADS = AdapterLoads()
