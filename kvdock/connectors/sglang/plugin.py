"""The entry point of SGLang's group of plugins: SGLang calls it in each of its processes, before it reads its settings.

Where a scheduler may run it registers hooks (hooks.py). They do nothing without a linker of kvdock's.

    SGLANG_KVDOCK=1 sglang serve --model-path MODEL --page-size 64

is then the whole configuration. Without the variable, SGLang's own flags must name the linker.
"""

from __future__ import annotations

import os
import sys
from typing import Any

from kvdock.connectors.sglang.hooks import install

VARIABLE = "SGLANG_KVDOCK"
SCHEDULES = "sglang.srt.managers.scheduler"
"""The module of SGLang's schedulers. A process that runs one has loaded it before it calls register()."""
SETTLES = "sglang.srt.arg_groups.hicache_hook.handle_hicache"
"""The function that resolves SGLang's settings of linkers."""
LINKER = {"linker": "KvdockLinker", "linker_module_path": "kvdock.connectors.sglang"}


def register() -> None:
    if SCHEDULES in sys.modules:
        install()
    if os.environ.get(VARIABLE, "") not in ("", "0"):
        from sglang.srt.plugins.hook_registry import HookRegistry, HookType

        HookRegistry.register(SETTLES, _name_the_linker, HookType.BEFORE)


def _name_the_linker(server_args: Any) -> None:
    """Names kvdock's linker, unless another one is named."""
    from sglang.srt.arg_groups.overrides import declare_resolution, resolving_view

    if not resolving_view(server_args).enable_unified_cache_external_linker:
        declare_resolution(
            server_args, "kvdock", enable_unified_cache_external_linker=True,
            unified_cache_external_linker_backend="dynamic",
            unified_cache_external_linker_config={**LINKER, "linker_extra_config": {}},
        )
