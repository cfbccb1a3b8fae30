"""What the tables of kvdock/connectors/vllm/identity.py say about this version of vLLM."""

from __future__ import annotations

import inspect
import pkgutil
import re
from importlib import import_module
from typing import Any

from sched_engine import SchedEngine
from vllm import envs
from vllm.model_executor.layers import rotary_embedding

from kvdock.connectors.vllm import identity as d


def tables() -> dict[str, Any]:
    """`unknown`: rows that this version has no setting for. `said`: what it says of an engine in which nothing is set.
    `kinds`: of rotary embeddings, those that no table names. `readers`: modules of them that look at max_model_len."""
    config = SchedEngine("").config
    rows = [(config.model_config, path) for path in d.UNUSUAL_MODEL] + [(config, path) for path in d.UNUSUAL_ENGINE]
    kinds = re.findall(r'scaling_type (?:==|in) (\[.*?\]|".*?")', inspect.getsource(rotary_embedding.get_rope), re.S)
    named = {name for found in kinds for name in re.findall(r'"([\w-]+)"', found)}
    modules = [module.name for module in pkgutil.iter_modules(rotary_embedding.__path__)]
    return {
        "unknown": [path for whole, path in rows if not has(whole, path)]
        + [name for name in d.UNUSUAL_ENVIRONMENT if name not in envs.environment_variables],
        "said": sorted({**d.unusual_of(config.model_config), **d.unusual_around(config, {})}),
        "named": sorted(named),
        "kinds": sorted(named - {*d.NEVER, *d.MOVING}),
        "readers": [
            name for name in modules
            if re.search("max_model_len|get_current_vllm_config", inspect.getsource(
                import_module(f"{rotary_embedding.__name__}.{name}")
            ))
        ],
    }


def has(whole: Any, path: str) -> bool:
    for name in path.split("."):
        if not hasattr(whole, name):
            return False
        whole = getattr(whole, name)
    return True
