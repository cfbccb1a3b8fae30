"""Engines and requests for which vLLM declares that prefixes are unfit for reuse, beside ones for which it does not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sched_engine import CONFIG, SchedEngine
from sched_scenarios import prompt
from vllm.config import PoolerConfig
from vllm.model_executor.models.config import MODELS_CONFIG_MAP
from warnings_heard import warnings_heard

TOKENS = 150
ARCHITECTURE = CONFIG["architectures"][0]


class Rules:
    """The answers of a model, as vLLM asks for them when it starts."""

    @staticmethod
    def verify_and_update_config(config: Any) -> None:
        config.cache_config.enable_prefix_caching = False


class RulesThatRaise:
    @staticmethod
    def verify_and_update_config(config: Any) -> None:
        raise ValueError("this version wants more")


class RulesThatLeaveIt:
    @staticmethod
    def verify_and_update_config(config: Any) -> None:
        """They are about something else."""


def _experts(config: Any) -> None:
    if hasattr(config, "aux_output_config"):
        config.aux_output_config.enable_return_routed_experts = True
    else:
        config.model_config.enable_return_routed_experts = True


def _mean(config: Any) -> None:
    config.model_config.pooler_config = PoolerConfig(seq_pooling_type="MEAN")


def _last(config: Any) -> None:
    config.model_config.pooler_config = PoolerConfig(seq_pooling_type="LAST")


def _nothing(config: Any) -> None:
    """As it is."""


KINDS: dict[str, tuple[bool, Callable[[Any], None], type | None]] = {
    "usual": (True, _nothing, None),
    "switched off": (False, _nothing, None),
    "switched off beside rules": (False, _nothing, RulesThatLeaveIt),
    "last": (True, _last, None),
    "experts": (True, _experts, None),
    "mean": (True, _mean, None),
    "rules": (False, _nothing, Rules),
    "rules that raise": (False, _nothing, RulesThatRaise),
}
"""Whether vLLM's prefix cache is on, what else of its configuration changes, and its rules for the model."""


class DeclaredEngine(SchedEngine):
    """`other`: the address of the server that its worker is attached to; "": the scheduler's."""

    def __init__(self, address: str, kind: str = "usual", other: str = "", **more: Any) -> None:
        self._kind, self._other = kind, other
        super().__init__(address, prefix_caching=KINDS[kind][0], blocks=100, **more)

    def connect(self, kv_config: Any) -> None:
        _, change, rules = KINDS[self._kind]
        change(self.config)
        settings = self.config.kv_transfer_config.kv_connector_extra_config
        own = settings["address"]
        settings["address"] = self._other or own
        known = MODELS_CONFIG_MAP.get(ARCHITECTURE)
        if rules is not None:
            MODELS_CONFIG_MAP[ARCHITECTURE] = rules
        try:
            super().connect(kv_config)
        finally:
            settings["address"] = own
            if rules is not None:
                del MODELS_CONFIG_MAP[ARCHITECTURE]
            if known is not None:
                MODELS_CONFIG_MAP[ARCHITECTURE] = known


def run(engine: SchedEngine, name: str, **made: Any) -> int:
    """Tokens that the request loads. Nothing is in vLLM's own cache."""
    engine.forget_prefixes()
    before = engine.loaded_tokens
    request = engine.add(name, prompt(1, TOKENS), 2)
    for field, value in made.items():
        setattr(request, field, value)
    engine.run()
    return int(engine.loaded_tokens - before)


def declared(address: str, kind: str) -> dict[str, Any]:
    """What a declared engine, another one and a usual one load, in this order, and what is warned of."""
    with warnings_heard() as said:
        first = DeclaredEngine(address, kind)
        loaded = [run(first, "stores"), run(first, "again")]
    usual = DeclaredEngine(address)
    loaded.append(run(usual, "usual"))
    for engine in (first, usual):
        engine.close()
    return {"loaded": loaded, "said": [line for line in said if "loads nothing" in line], "wrong": len(first.bad_reads)}


def skipping(address: str) -> dict[str, Any]:
    """Requests that are not to read vLLM's prefix cache store all the same."""
    engine = DeclaredEngine(address)
    loaded = [
        run(engine, "stores", skip_reading_prefix_cache=True), run(engine, "skips", skip_reading_prefix_cache=True),
        run(engine, "usual"),
    ]
    engine.close()
    return {"loaded": loaded, "wrong": len(engine.bad_reads)}


def elsewhere(address: str, other: str) -> dict[str, Any]:
    """A worker that is attached to another server than the scheduler's side, and one that is not."""
    usual = DeclaredEngine(address)
    loaded = [run(usual, "stores"), run(usual, "loads")]
    with warnings_heard() as said:
        apart = DeclaredEngine(address, other=other)
        loaded += [run(apart, "one"), run(apart, "two")]
    for engine in (usual, apart):
        engine.close()
    said = [line for line in said if "nothing is loaded" in line]
    return {"loaded": loaded, "said": said, "wrong": len(apart.bad_reads)}
