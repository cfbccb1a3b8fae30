"""Scenarios of models with recurrent states, beside those of sched_scenarios.py."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from beside_scenarios import BesideEngine
from fingerprints import STATE
from sched_engine import SchedEngine
from sched_scenarios import figures, prompt, warm

from kvdock.connectors.errors import NotSupportedError
from kvdock.connectors.vllm import connector as connector_module, scheduler as scheduler_module
from kvdock.connectors.vllm.groups import KVGroup
from kvdock.connectors.vllm.tables import Table

SHAPE = [None, STATE]


def shared(address: str, sizes: Sequence[int] = (), **settings: Any) -> dict[str, Any]:
    """Prompts that begin alike, in an engine that keeps its own prefixes and then in one that has to load. `loaded`:
    tokens of each prompt there."""
    prompts = {
        "first": prompt(1, 150), "inside": prompt(1, 100) + prompt(2, 30), "again": prompt(1, 100) + prompt(3, 30),
        "shorter": prompt(1, 97), "once more": prompt(1, 97), "longer": prompt(1, 150) + prompt(4, 60),
        "deep": prompt(1, 150) + prompt(4, 100),
    }
    for forgets in (False, True):
        engine, loaded = SchedEngine(address, windows=SHAPE, sizes=sizes, blocks=128, **settings), []
        for name, tokens in prompts.items():
            before = engine.loaded_tokens
            engine.complete(name, tokens)
            loaded.append(engine.loaded_tokens - before)
            if forgets:
                engine.forget_prefixes()
        engine.close()
        found = figures(engine)
        assert not any(found[name] for name in ("bad_reads", "wrong_tokens", "unfinished", "held", "remembered")), found
    return {"loaded": loaded}


def answered(address: str, overlap: bool) -> dict[str, Any]:
    """A conversation: what is asked next begins with the first prompt and its answer, which is longer each time.
    `loaded`: of each."""
    loaded = []
    for count in range(18):
        engine = SchedEngine(
            address, windows=SHAPE, blocks=128, overlap=overlap, weights_digest=f"answered {count} {overlap}"
        )
        first = engine.complete("first", prompt(1, 64 + 5), max_tokens=16 * 3 - 5 + count)
        engine.forget_prefixes()
        engine.complete("next", [*first.all_token_ids, *prompt(2, 20)])
        engine.close()
        assert not engine.bad_reads and not engine.wrong_tokens
        loaded.append(engine.loaded_tokens)
    return {"loaded": loaded}


def aside(address: str, **settings: Any) -> dict[str, Any]:
    """An engine whose connector stands aside: it makes what it makes without. `refused`: or it does not start."""
    try:
        engine = SchedEngine(address, windows=SHAPE, blocks=128, weights_digest="aside", **settings)
    except NotSupportedError as error:
        return {"refused": str(error)}
    for number in range(2):
        engine.complete(f"r{number}", prompt(1, 100) + prompt(number, 30))
    wrong = len(engine.bad_reads) + engine.wrong_tokens
    return {"wrong": wrong, "loaded": engine.loaded_tokens, "stood_aside": engine.scheduler.connector._groups == ()}


def beside(address: str) -> dict[str, Any]:
    """Under MultiConnector, where another connector may have other tokens counted as this engine's own."""
    engine = BesideEngine(address, windows=SHAPE, blocks=128, weights_digest="beside")
    for number in range(3):
        engine.complete(f"r{number}", prompt(1, 150))
        engine.forget_prefixes()
    groups = [half._connectors[0]._groups for half in (engine.worker, engine.scheduler.connector)]
    made = {"wrong": len(engine.bad_reads) + engine.wrong_tokens, "loaded": engine.loaded_tokens}
    return {**made, "groups": [len(one) for one in groups], "has_begun": engine.half is not None}


def unguarded(address: str) -> dict[str, Any]:
    """Negative control: a vLLM that should be refused is not, and the connector stands aside."""
    real = connector_module.refuse_unreconciled_hits
    connector_module.refuse_unreconciled_hits = lambda *said, **more: None
    try:
        return aside(address, load_async=False)
    finally:
        connector_module.refuse_unreconciled_hits = real


def misplaced(address: str) -> dict[str, Any]:
    """Negative control: each state is stored as that of the block before."""
    real = scheduler_module.settled

    def early(groups: Sequence[KVGroup], columns: Table, *settles: Any) -> Table:
        left = real(groups, columns, *settles)
        return [
            [*column[1:], None] if group.state else column for column, group in zip(left, groups, strict=True)
        ]

    scheduler_module.settled = early
    try:
        return warm(address, SHAPE)
    finally:
        scheduler_module.settled = real
