"""Wrappers drop no verb, keep a connector conforming in any order, and do what they are for."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence

import pytest
from api_helpers import ServerProcess, eventually
from connector_helpers import CHUNK, PER_CHUNK, Rig, tokens_of

from kvdock.client.client import Client
from kvdock.connectors import conformance
from kvdock.connectors.chunk_statistics import ChunkStatistics
from kvdock.connectors.conformance import Bench
from kvdock.connectors.connector import KvdockConnector
from kvdock.connectors.interface import BlocksRead, Connector, GroupBlocks, LoadDone, Progress
from kvdock.connectors.wrappers import (
    HitLimit,
    LoadLimits,
    MinimumLoad,
    OptOut,
    Use,
    Wrapper,
    WrapperError,
    limited,
)
from tests.connectors.test_conformance import SEEDS, OurSubject

VERBS = {name: verb for name, verb in vars(Connector).items() if inspect.isfunction(verb) and name[0] != "_"}

MAKERS: dict[type[Wrapper], Callable[[Connector], Wrapper]] = {
    Wrapper: Wrapper,
    HitLimit: lambda inner: HitLimit(inner, max_tokens=1 << 20, max_share=1.0),
    MinimumLoad: lambda inner: MinimumLoad(inner, min_tokens=1),
    OptOut: lambda inner: OptOut(inner, lambda request_id: Use()),
    ChunkStatistics: lambda inner: ChunkStatistics(inner, chunk_tokens=CHUNK),
}


class Recorder:
    """A connector that has every verb of the protocol, taken from the protocol; it notes calls and answers."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, tuple[object, ...]]] = []

    def lookup(self, *given: object) -> int:
        self.calls.append(("lookup", given))
        return 128

    def begin_load(self, *given: object) -> None:
        self.calls.append(("begin_load", given))

    def begin_store(self, *given: object) -> BlocksRead:
        self.calls.append(("begin_store", given))
        return ((7, 8),)

    def poll(self, *given: object) -> Progress:
        self.calls.append(("poll", given))
        return Progress((LoadDone("r", 128),))

    def finished(self, *given: object) -> None:
        self.calls.append(("finished", given))

    def close(self, *given: object) -> None:
        self.calls.append(("close", given))


SAMPLES: dict[str, object] = {
    "request_id": "r", "token_ids": list(range(128)), "local_tokens": 64, "block_ids": [[3, 4]], "hit_tokens": 128,
    "computed_tokens": 128, "timeout_s": 0.25,
}


def dropped(make: Callable[[Connector], Wrapper]) -> list[str]:
    """Verbs of the protocol that do not reach the inner connector as they are, or whose answer does not come back."""
    lost = []
    for name, verb in VERBS.items():
        given = tuple(SAMPLES[parameter] for parameter in list(inspect.signature(verb).parameters)[1:])
        inner = Recorder()
        wanted = getattr(Recorder(), name)(*given)
        if getattr(make(inner), name)(*given) != wanted or inner.calls != [(name, given)]:
            lost.append(name)
    return lost


def every_wrapper(kind: type[Wrapper] = Wrapper) -> set[type[Wrapper]]:
    found = {kind}.union(*(every_wrapper(sub) for sub in kind.__subclasses__()))
    return {one for one in found if one.__module__.startswith("kvdock.")}


def test_every_wrapper_there_is_is_checked() -> None:
    assert every_wrapper() == MAKERS.keys()
    assert VERBS.keys() == {name for name in vars(Wrapper) if name[0] != "_"}


@pytest.mark.parametrize("kind", MAKERS, ids=lambda kind: kind.__name__)
def test_no_verb_is_dropped(kind: type[Wrapper]) -> None:
    assert dropped(MAKERS[kind]) == []


@pytest.mark.parametrize("verb", VERBS)
def test_a_wrapper_that_drops_a_verb_is_found_out(verb: str) -> None:
    broken = type("Broken", (Wrapper,), {verb: lambda self, *given: None})
    broken.__module__ = "tests"
    assert dropped(broken) == [verb]


class AllWrapped(OurSubject):
    """OurSubject behind every wrapper, in a given order."""

    def __init__(self, address: str, name: str, order: Sequence[type[Wrapper]], model: str) -> None:
        super().__init__(address, name, KvdockConnector, model)
        for kind in order:
            self.connector = MAKERS[kind](self.connector)


KINDS = [kind for kind in MAKERS if kind is not Wrapper]


@pytest.mark.parametrize("check", conformance.CHECKS, ids=lambda check: check.__name__)
@pytest.mark.parametrize("model", ["tiny", "tiny-hybrid3"])
@pytest.mark.parametrize("order", [KINDS, KINDS[::-1]], ids=["in order", "reversed"])
def test_the_wrapped_connector_conforms(
    server: ServerProcess, order: list[type[Wrapper]], model: str, check: Callable[[Bench], None]
) -> None:
    check(Bench(lambda name: AllWrapped(server.unix, name, order, model), server.unix, seed=next(SEEDS)))


def asked(connector: Connector, tokens: list[int], local: int = 0, request: str = "r") -> int:
    for _ in range(400):
        if (found := connector.lookup(request, tokens, local)) is not None:
            return found
        connector.poll(0.05)
    raise AssertionError("the lookup was never answered")


@pytest.mark.parametrize(
    ("tokens", "share", "local", "hit"),
    [(None, 1.0, 0, 4), (2 * CHUNK, 1.0, 0, 2), (2 * CHUNK, 1.0, CHUNK, 3), (2 * CHUNK - 1, 1.0, 0, 1), (0, 1.0, 0, 0),
     (None, 0.5, 0, 2), (CHUNK, 0.5, 0, 1), (None, 0.0, CHUNK, 1)],
)
def test_a_hit_limit_caps_what_is_loaded(
    server: ServerProcess, tokens: int | None, share: float, local: int, hit: int
) -> None:
    prompt = tokens_of(11, 4)
    with Rig(server.unix, salt="limit") as rig:
        blocks = list(range(4 * PER_CHUNK))
        rig.store("w", prompt, blocks)
        wrapped = HitLimit(rig.connector, max_tokens=tokens, max_share=share)
        assert asked(wrapped, prompt, local) == hit * CHUNK
        if hit * CHUNK > local:
            done = rig.load("r", blocks[: hit * PER_CHUNK], local, hit * CHUNK)
            assert done.valid_tokens == hit * CHUNK
        wrapped.finished("r")


def test_a_load_below_the_minimum_is_declined_and_its_lease_given_up(server: ServerProcess) -> None:
    prompt = tokens_of(12, 2)
    with Rig(server.unix, salt="minimum") as rig, Client(server.unix) as client:
        rig.store("w", prompt, list(range(2 * PER_CHUNK)))
        assert asked(MinimumLoad(rig.connector, min_tokens=2 * CHUNK), prompt) == 2 * CHUNK
        rig.connector.finished("r")
        wrapped = MinimumLoad(rig.connector, min_tokens=2 * CHUNK + 1)
        assert [asked(wrapped, prompt, request="s") for _ in range(3)] == [0, 0, 0]
        eventually(lambda: client.status().leases == 0)
        wrapped.finished("s")
        wrapped.min_tokens = 1
        assert asked(wrapped, prompt, request="s") == 2 * CHUNK, "after `finished` it is asked anew"
        wrapped.finished("s")


def test_a_request_that_opts_out_neither_loads_nor_stores(server: ServerProcess) -> None:
    uses = {"alone": Use(load=False, store=False), "writes": Use(load=False), "reads": Use(store=False)}
    prompt, columns = tokens_of(13, 2), [list(range(2 * PER_CHUNK))]
    with Rig(server.unix, salt="out") as rig:
        wrapped = OptOut(rig.connector, lambda request_id: uses.get(request_id, Use()))
        for name in ("alone", "reads"):
            assert wrapped.begin_store(name, prompt, columns, len(prompt)) == ()
        read = wrapped.begin_store("writes", prompt, columns, len(prompt))
        assert rig.wait_store("writes", read).block_ids == read
        found = {name: asked(wrapped, prompt, request=name) for name in (*uses, "plain")}
        assert found == {"alone": 0, "writes": 0, "reads": 2 * CHUNK, "plain": 2 * CHUNK}
        for name in found:
            wrapped.finished(name)


class Answers(Wrapper):
    """Says what a test wants; loads end at once."""

    def __init__(self) -> None:
        super().__init__(Recorder())
        self.found: int | None = 0
        self.loads: list[LoadDone] = []

    def lookup(self, request_id: str, token_ids: Sequence[int], local_tokens: int) -> int | None:
        return self.found

    def begin_load(self, request_id: str, block_ids: GroupBlocks, local_tokens: int, hit_tokens: int) -> None:
        self.loads.append(LoadDone(request_id, hit_tokens))

    def poll(self, timeout_s: float = 0.0) -> Progress:
        done, self.loads = tuple(self.loads), []
        return Progress(done)


def test_chunks_are_counted_once_a_request_and_by_what_came_of_them() -> None:
    inner = Answers()
    wrapped = ChunkStatistics(inner, chunk_tokens=4)
    tokens = list(range(12))
    for request, found in (("a", 0), ("b", 8), ("c", 8)):
        inner.found = None
        wrapped.lookup(request, tokens, 0)
        inner.found = found
        for _ in range(3):
            wrapped.lookup(request, tokens, 0)
    wrapped.begin_load("b", [[0, 1]], 0, 8)
    wrapped.finished("b")  # aborted while it loads
    wrapped.begin_load("c", [[0, 1]], 4, 8)
    wrapped.poll()
    assert [(u.end_tokens, u.looked_up, u.hit, u.loaded) for u in wrapped.top()] == [
        (4, 3, 2, 1), (8, 3, 2, 2), (12, 3, 0, 0)
    ]
    assert (wrapped.totals.looked_up, wrapped.totals.hit, wrapped.totals.loaded) == (9, 4, 3)
    text = wrapped.summary(2).splitlines()
    assert text[0] == "chunks: 9 looked up, 4 hit, 3 loaded; 3 remembered, 0 forgotten"
    assert len(text) == 4


def test_what_was_not_seen_for_longest_is_forgotten() -> None:
    inner = Answers()
    wrapped = ChunkStatistics(inner, chunk_tokens=4, max_chunks=2)
    for number in (1, 2, 1, 3):
        wrapped.lookup(f"r{number}", [number] * 4, 0)
        wrapped.finished(f"r{number}")
    assert sorted(use.looked_up for use in wrapped.top()) == [1, 2]
    assert (wrapped.forgotten, wrapped.totals.looked_up) == (1, 4)


def test_limits_stack_what_they_ask_for_and_refuse_the_unknown() -> None:
    inner = Recorder()
    assert limited(inner, LoadLimits()) is inner
    both = limited(inner, LoadLimits.of({"max_load_tokens": 512, "max_load_share": 0.5, "min_load_tokens": 64}))
    assert isinstance(both, MinimumLoad) and isinstance(both.inner, HitLimit)
    assert (both.min_tokens, both.inner.max_tokens, both.inner.max_share) == (64, 512, 0.5)


@pytest.mark.parametrize(
    ("settings", "named"),
    [({"max_loads": 1}, "max_loads"), ({"min_load_tokens": -1}, "min_load_tokens"), ({"max_load_share": 1.5}, "1.5"),
     ({"max_load_tokens": 2.5}, "2.5"), ({"min_load_tokens": None}, "min_load_tokens"),
     ({"max_load_share": None}, "max_load_share"),
     ({"max_load_tokens": 10, "min_load_tokens": 20}, "min_load_tokens=20")],
)
def test_wrong_limits_are_refused_by_name(settings: dict[str, int | float | None], named: str) -> None:
    with pytest.raises(WrapperError, match=named):
        LoadLimits.of(settings)
