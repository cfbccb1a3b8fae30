"""Scenarios around a real Scheduler. Each raises, or leaves its figures to the test that ran it.

    python sched_process.py < jobs       as the tests run them

Prompts depend on seeds alone.
"""

from __future__ import annotations

import dataclasses
import os
import random
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from chaos import Chaos
from lockstep import into_lockstep
from sched_engine import BLOCK, SchedEngine, Standstill
from vllm.v1.request import RequestStatus

from kvdock.connectors.vllm.scheduler import VllmScheduler
from kvdock.connectors.vllm.tables import BlockBudget
from kvdock.protocol.keys import HashedChain, KeyChain
from kvdock.protocol.schemas import Lookup

Windows = Sequence[int | None]


def prompt(seed: int, count: int) -> list[int]:
    source = random.Random(seed)
    return [source.randrange(5, 900) for _ in range(count)]


def figures(engine: SchedEngine, **more: Any) -> dict[str, Any]:
    return {
        "bad_reads": len(engine.bad_reads),
        "wrong_tokens": engine.wrong_tokens,
        "unfinished": sum(not request.is_finished() for request in engine.requests.values()),
        "held": engine.held_blocks,
        "remembered": engine.remembered,
        "loaded": engine.loaded_tokens,
        "preempted": sum(request.num_preemptions for request in engine.requests.values()),
        **engine.seen,
        **more,
    }


def warm(address: str, windows: Windows = (None,), sizes: Sequence[int] = (), **settings: Any) -> dict[str, Any]:
    """Cold, then loaded after the engine's own prefix cache was dropped."""
    engine = SchedEngine(address, windows=windows, sizes=sizes, blocks=64 * len(windows), **settings)
    engine.complete("cold", prompt(1, 150))
    engine.forget_prefixes()
    engine.complete("warm", prompt(1, 150))
    engine.close()
    return figures(engine)


def hashing(address: str, algorithm: str, seeds: Sequence[str | None]) -> dict[str, Any]:
    """One engine after another, as in processes of their own: each hashes from a root of its own making, by its
    PYTHONHASHSEED. What each loads of what others have stored, how keys are made, and by which the server finds what it
    has computed."""
    found: list[list[Any]] = []
    for seed in seeds:
        with hash_seed(seed):
            engine = SchedEngine(address, algorithm=algorithm, weights_digest=f"hashing {algorithm} {seeds}")
            request = engine.complete("r", prompt(1, 150), max_tokens=20)
            half = engine.scheduler.connector._scheduler._connector
            attached = half.session.attachment
            assert attached is not None
            chains = KeyChain(attached.namespace, 32), HashedChain(attached.namespace, 32, request.block_hashes, BLOCK)
            for chain in chains:
                chain.follow(request.all_token_ids)
            client = half.session.client
            by_tokens, by_hashes = (
                client.lookup(Lookup(namespace=attached.namespace.hex(), keys=b"".join(chain.keys))).hit_tokens
                for chain in chains
            )
            found.append([engine.loaded_tokens, half.session.manifest.hash_function, by_tokens, by_hashes])
            engine.close()
        assert not engine.wrong_tokens and not engine.bad_reads
    return {"found": found}


def two_seeds(address: str) -> dict[str, Any]:
    """How a scheduler says that its process has another PYTHONHASHSEED than its worker's."""
    engine = SchedEngine(address, weights_digest="two seeds")
    try:
        with hash_seed("7"):
            engine.scheduler.connector.set_xfer_handshake_metadata({0: engine.worker.get_handshake_metadata()})
    except ValueError as error:
        return {"refused": str(error)}
    finally:
        engine.close()
    return {"refused": ""}


@contextmanager
def hash_seed(seed: str | None) -> Iterator[None]:
    before = os.environ.pop("PYTHONHASHSEED", None)
    try:
        if seed is not None:
            os.environ["PYTHONHASHSEED"] = seed
        yield
    finally:
        os.environ.pop("PYTHONHASHSEED", None)
        if before is not None:
            os.environ["PYTHONHASHSEED"] = before


def pressure(
    address: str, windows: Windows, first: int, end: int, sizes: Sequence[int] = (), by_hand: bool = True,
    likely: float = 0.03, verified: bool = False, **settings: Any,
) -> dict[str, Any]:
    """Random requests with shared prefixes in a pool too small for them, and misfortunes. Seeds [first, end).

    Sums; `wrong`: the seeds that went wrong, each with what happened."""
    total: Counter[str] = Counter()
    wrong = {}
    for seed in range(first, end):
        try:
            found = one_seed(address, windows, seed, sizes, by_hand, likely, verified, settings)
        except Exception as error:  # whatever it was: the test says which seed
            found = {"raised": f"{type(error).__name__}: {error}"}
        if any(found.get(name) for name in ("raised", "bad_reads", "wrong_tokens", "unfinished", "held", "remembered")):
            wrong[seed] = found
        total.update({name: count for name, count in found.items() if isinstance(count, int)})
    return {**total, "wrong": wrong}


def one_seed(
    address: str, windows: Windows, seed: int, sizes: Sequence[int], by_hand: bool, likely: float,
    verified: bool, settings: dict[str, Any],
) -> dict[str, Any]:
    source = random.Random(seed)
    share = sum(BLOCK / size for size in sizes) if sizes else len(windows)  # of a pool of one group
    engine = SchedEngine(
        address, windows=windows, sizes=sizes, seqs=4, budget=source.choice((64, 64, 200)),
        blocks=int(source.choice((40, 64, 96) if verified else (24, 32, 48)) * share) // 2 + 1,  # else few fit
        **{"overlap": source.random() < 0.5, "runner": source.choice((1, 2)), **settings},
        weights_digest=f"seed {seed}",
    )
    most_steps, waits = source.choice((0, 1, 3)), ("never", "misses", "asks again")[seed % 3]
    failures = into_lockstep(engine, source, most_steps, verified=verified, waits=waits) if by_hand else []
    if verified:
        worker = engine.worker._worker
        worker._traits = dataclasses.replace(worker._traits, loads_by_layer=source.random() < 0.5)
        count_verified(engine)
    try:
        chaos = Chaos(engine, source, likely)
        bases = [prompt(100 + at, 160) for at in range(3)]
        for half in range(2):
            for number in range(8):
                head = source.choice(bases)[: source.randrange(20, 150)]
                own = prompt(1000 + 8 * half + number, 5)
                engine.add(f"{half}-{number}", head + own, source.randrange(1, 20))
                for _ in range(source.randrange(1, 5)):
                    chaos.step()
            engine.run()
            if source.random() < 0.5:
                engine.forget_prefixes()
            chaos.damage(int(20 * likely))
    finally:
        engine.close()
    if failures:
        raise failures[0]
    return figures(engine, **chaos.seen)


def count_verified(engine: SchedEngine) -> None:
    """`reported_verified`: loads that were reported before they ended."""
    worker = engine.worker._worker
    report = worker._report_verified

    def counted() -> None:
        before = [load for load in worker._running if not load.reported]
        report()
        engine.seen["reported_verified"] += sum(load.reported for load in before)

    worker._report_verified = counted


def abort(address: str) -> dict[str, Any]:
    """A request is aborted while it waits for its load; its blocks come back."""
    engine = SchedEngine(address)
    engine.complete("cold", prompt(2, 150), 1)
    engine.forget_prefixes()
    request = engine.add("warm", prompt(2, 150), 1)
    while request.status != RequestStatus.WAITING_FOR_REMOTE_KVS:
        engine.step()
    engine.scheduler.finish_requests("warm", RequestStatus.FINISHED_ABORTED)
    engine.run()
    engine.close()
    return figures(engine)


def load_error(address: str, windows: Windows = (None,), **settings: Any) -> dict[str, Any]:
    """A byte is flipped when a load begins: what does not hash is computed, and nothing wrong is read."""
    engine = SchedEngine(address, windows=windows, blocks=64 * len(windows), **settings)
    engine.complete("cold", prompt(3, 150), 2)
    engine.forget_prefixes()
    chaos = Chaos(engine, random.Random(0), 1.0)
    engine.complete("warm", prompt(3, 150), 2)
    engine.close()
    return figures(engine, **chaos.seen)


def damaged_before(address: str, windows: Windows, **settings: Any) -> dict[str, Any]:
    """A byte of everything stored is flipped before anybody asks for it. `loads`: tokens that vLLM was told to load for
    each of the requests that follow."""
    engine = SchedEngine(address, windows=windows, blocks=64 * len(windows), **settings)
    chaos = Chaos(engine, random.Random(0), 0.0)
    engine.complete("cold", prompt(3, 150), 2)
    chaos.damage(1000)
    loads = []
    for name in ("first", "second", "third"):
        engine.forget_prefixes()
        before = engine.loaded_tokens
        engine.complete(name, prompt(3, 150), 2)
        loads.append(engine.loaded_tokens - before)
        await_reports(engine)
    engine.close()
    return figures(engine, **chaos.seen, loads=loads)


def await_reports(engine: SchedEngine, most_s: float = 20.0) -> None:
    """Until the server has answered all reports of loads that have ended: by then it has judged what was damaged."""
    engine.worker._worker._reports._reporting.run(lambda: None).result(most_s)


def crowd(address: str, runs: Sequence[tuple[int, int]], capped: bool) -> dict[str, Any]:
    """14 requests in 25 blocks, one group of full attention beside one of windows, loads in the background. Each of
    `runs` is a seed and how many steps background work may be late. `stuck`: the runs that stood still. Not `capped`:
    the connector loads in the background as much as it likes."""
    stuck, total = [], Counter[str]()
    for seed, most_steps in runs:
        source = random.Random(seed)
        engine = SchedEngine(
            address, windows=(None, 48), blocks=25, seqs=4, budget=64, weights_digest=f"{seed} {most_steps} {capped}"
        )
        into_lockstep(engine, source, most_steps)
        bases, number = [prompt(100 + at, 160) for at in range(3)], 0
        with no_cap(not capped):
            try:
                for _ in range(60):
                    if number < 14 and source.random() < 0.5:
                        head = source.choice(bases)[: source.randrange(20, 150)]
                        engine.add(f"r{number}", head + prompt(1000 + number, 5), source.randrange(1, 20))
                        number += 1
                    engine.step()
                engine.run()
            except Standstill:
                stuck.append([seed, most_steps])
        engine.close()
        total.update(figures(engine))
    return {**total, "stuck": stuck}


@contextmanager
def no_cap(really: bool) -> Iterator[None]:
    real = BlockBudget.fits
    if really:
        BlockBudget.fits = lambda self, request: True  # type: ignore[method-assign]  # what the cap is there to prevent
    try:
        yield
    finally:
        BlockBudget.fits = real  # type: ignore[method-assign]  # as it was


def wrong_order(address: str, windows: Windows = (None,), sizes: Sequence[int] = ()) -> dict[str, Any]:
    """Negative control: a load that fills each block with what the one before should hold."""
    real = VllmScheduler.allocated

    def shifted(self: VllmScheduler, request: Any, table: Any, external: int) -> None:
        real(self, request, [[*column[1:], *column[:1]] for column in table] if external else table, external)

    VllmScheduler.allocated = shifted  # type: ignore[method-assign]  # the defect that the check must see
    try:
        return warm(address, windows, sizes)
    finally:
        VllmScheduler.allocated = real  # type: ignore[method-assign]  # as it was
