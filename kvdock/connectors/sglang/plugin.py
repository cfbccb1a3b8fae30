"""The entry point of SGLang's group of plugins: SGLang calls it in each of its processes, before it reads its settings.

Where a scheduler may run it registers hooks (hooks.py). They do nothing without a linker of kvdock's.

    SGLANG_KVDOCK=1 sglang serve --model-path MODEL

is then the whole configuration: pages get 64 tokens unless --page-size is set. The variable may be set for all engines
of a machine, so it never ends one: where kvdock cannot serve an engine, the log says why in one sentence, and SGLang
runs as without kvdock. Without the variable, SGLang's own flags must name the linker, and what is refused is an error.
"""

from __future__ import annotations

import logging
import os
import sys
from typing import Any

from kvdock.connectors.sglang.hooks import install
from kvdock.connectors.sglang.setup import PAGES, UNSERVED, WANTED_PAGES, is_set, setting_named

log = logging.getLogger("kvdock.sglang")

VARIABLE = "SGLANG_KVDOCK"
SCHEDULES = "sglang.srt.managers.scheduler"
"""The module of SGLang's schedulers. A process that runs one has loaded it before it calls register()."""
SETTLES = "sglang.srt.arg_groups.hicache_hook.handle_hicache"
"""The function that resolves SGLang's settings of linkers. The size of pages is resolved by then."""
LINKER = {"linker": "KvdockLinker", "linker_module_path": "kvdock.connectors.sglang"}
LINKER_OR_NONE = LINKER | {"linker": "KvdockLinkerOrNone"}
"""Where a variable names it: what it cannot serve runs as without it."""
ALONE = {
    "disable_radix_cache": "there is no prefix cache to extend",
    "radix_cache_backend": "SGLang lets linkers extend its own prefix cache alone",
    "enable_hierarchical_cache": "SGLang serves one of HiCache and a linker",
    "hicache_storage_backend": "SGLang serves one of HiCache and a linker",
    "enable_lmcache": "SGLang serves one of LMCache and a linker",
    "enable_flexkv": "SGLang serves one of FlexKV and a linker",
    "enable_kv_cache_sharding": "SGLang serves no linker beside it",
    "enable_multi_layer_eagle": "SGLang serves one pool of drafts beside a linker",
}
"""Settings for which SGLang itself refuses a linker, or ignores it, with the reason."""


def register() -> None:
    if SCHEDULES in sys.modules:
        install()
    if os.environ.get(VARIABLE, "") not in ("", "0"):
        from sglang.srt.plugins.hook_registry import HookRegistry, HookType

        HookRegistry.register(SETTLES, _name_the_linker, HookType.BEFORE)


def _name_the_linker(server_args: Any) -> None:
    """Names kvdock's linker, unless another one is named or kvdock cannot serve the settings."""
    from sglang.srt.arg_groups.overrides import declare_resolution, resolving_view

    settings = resolving_view(server_args)
    if settings.enable_unified_cache_external_linker:
        return
    asked = getattr(server_args, "_raw_input", {}).get("page_size")
    if why := why_not(settings, asked):
        log.warning("SGLang runs as without kvdock, although %s is set: %s.", VARIABLE, why)
        return
    declare_resolution(
        server_args, "kvdock", enable_unified_cache_external_linker=True,
        unified_cache_external_linker_backend="dynamic",
        unified_cache_external_linker_config={**LINKER_OR_NONE, "linker_extra_config": {}},
        **({} if settings.page_size in PAGES else {"page_size": PAGES[0]}),
    )


def why_not(settings: Any, asked_page_tokens: int | None) -> str:
    """Why SGLang's `settings` cannot be served; empty: they can, as far as they tell. `asked_page_tokens`: what was set
    for --page-size; None: nothing."""
    for name, why in (ALONE | UNSERVED).items():
        if is_set(settings, name):
            return f"kvdock does not serve {setting_named(settings, name)} under SGLang, because {why}"
    if settings.page_size in PAGES:
        return ""
    wanted = f"--page-size is {settings.page_size}, and {WANTED_PAGES} is wanted"
    if asked_page_tokens is not None or settings.page_size != 1:
        return wanted
    if getattr(settings, "mamba_radix_cache_strategy", None) == "no_buffer":
        return f"{wanted}, which recurrent states have with --mamba-radix-cache-strategy extra_buffer alone"
    if branches_of(settings) > 1:
        return f"{wanted}, which not all kernels have beside drafts of several branches"
    return ""


def branches_of(settings: Any) -> int:
    """How many branches the drafts have; 0: one, or there are no drafts. SGLang sets the number for NGRAM later, from a
    setting of its own."""
    name = "speculative_eagle_topk"
    if getattr(settings, "speculative_algorithm", None) == "NGRAM":
        name = "speculative_ngram_max_bfs_breadth"
    return int(getattr(settings, name, None) or 0)
