"""What the ranks of a pipeline's stages note for each other, over a store of PyTorch's."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta
from functools import partial
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
from api_helpers import eventually

from kvdock.connectors.sglang import stages
from kvdock.connectors.sglang.stages import Notes

torch = pytest.importorskip("torch")


class Kept:
    """A file's store, of which all clones are the same one."""

    def __init__(self, path: Path) -> None:
        self._store: Any = torch.distributed.FileStore(str(path), -1)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    def clone(self) -> Kept:
        return self


@pytest.fixture
def ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Notes]]:
    monkeypatch.setattr(stages, "CATCH_UP_S", 30.0)  # threads may have no turn for long on a busy machine
    store = Kept(tmp_path / "store")
    made = [Notes(store, rank, 3) for rank in range(3)]
    yield made
    for one in made:
        one.close()


def test_a_session_counts_once_all_ranks_are_attached_to_it(ranks: list[Notes]) -> None:
    first = ranks[0]
    assert not first.all_attached("a"), "nobody has noted anything"
    for rank in ranks:
        assert not first.all_attached("a")
        rank.attached("a")
    assert first.all_attached("a"), "the store has all notes by now"
    assert not first.all_attached("b")
    for session in ("b", ""):
        ranks[2].attached(session)
        eventually(lambda: not first.all_attached("a"))
        ranks[2].attached("a")
        assert first.all_attached("a")


class Watched:
    """A store, whose clones count together the waits that have ended without a message."""

    def __init__(self, store: Any, ended: list[str]) -> None:
        self._store, self._ended = store, ended

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    def clone(self) -> Watched:
        return Watched(self._store.clone(), self._ended)

    def wait(self, keys: list[str], timeout: timedelta) -> None:
        try:
            self._store.wait(keys, timeout)
        except torch.distributed.DistStoreError:
            self._ended += keys
            raise


def test_an_engine_that_is_idle_for_long_hears_what_comes_after_that(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stages, "LISTEN_S", 0.01)
    ended = list[str]()
    store = Watched(torch.distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False), ended)
    first, other = Notes(store, 0, 2), Notes(store, 1, 2)
    first.attached("a")
    eventually(lambda: len(ended) > 2)
    other.attached("a")
    assert first.all_attached("a")
    other.stored(1, True)
    eventually(partial(is_known, first, 1))
    first.close()


def test_no_offer_waits_for_notes_that_cannot_be_read_any_more(
    ranks: list[Notes], monkeypatch: pytest.MonkeyPatch
) -> None:
    def gone(keys: list[str], timeout: timedelta) -> None:
        raise torch.distributed.DistNetworkError("the store is gone")

    first = ranks[0]
    monkeypatch.setattr(first._reads, "wait", gone, raising=False)
    first.attached("a")
    eventually(lambda: first.all_stored(1) is False)
    assert not first.all_attached("a")


def test_no_lookup_asks_the_store_once_all_are_attached(ranks: list[Notes], monkeypatch: pytest.MonkeyPatch) -> None:
    first = ranks[0]
    for rank in ranks:
        rank.attached("a")
    assert first.all_attached("a")
    monkeypatch.setattr(first, "_reads", None)
    monkeypatch.setattr(first, "_writes", None)
    assert first.all_attached("a") and first.all_stored(1) is None
    monkeypatch.undo()


def is_known(first: Notes, number: int) -> bool:
    return first.all_stored(number) is not None


def test_an_offer_is_stored_once_all_ranks_have_stored_it(ranks: list[Notes]) -> None:
    first, others = ranks[0], ranks[1:]
    first.attached("a")
    for number, outcomes in enumerate([(True, True), (True, False), (False, True), (True, True)], 1):
        for other, ok in zip(others, outcomes, strict=True):
            assert first.all_stored(number) is None
            other.stored(number, ok)
        eventually(partial(is_known, first, number))
        assert first.all_stored(number) is all(outcomes)
    for number in (5, 6):
        others[0].stored(number, True)  # of offers that SGLang drops
    others[0].stored(7, True)
    others[1].stored(7, True)
    eventually(partial(is_known, first, 7))
    assert first.all_stored(7)
    first.forget_before(7)
    assert list(first._told._stored) == [7], "no offer before it is remembered"


def test_a_batch_has_landed_once_it_has_on_all_ranks(ranks: list[Notes]) -> None:
    for at, outcomes in enumerate([(True, True, True), (True, False, True), (True, True, True)]):
        waited = list[bool]()
        waiting = Thread(target=lambda at=at, waited=waited: waited.append(ranks[0].all_landed(at)))
        waiting.start()
        for rank, ok in zip(ranks, outcomes, strict=True):
            assert not waited
            rank.landed(at, ok)
        waiting.join()
        assert waited == [all(outcomes)] == [rank.all_landed(at) for rank in ranks[:1]]


def test_outcomes_of_long_ago_are_not_kept(ranks: list[Notes], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stages, "KEPT_OUTCOMES", 2)
    (store,) = {id(rank._reads): rank._reads for rank in ranks}.values()
    for at in range(4):
        for rank in ranks:
            rank.landed(at, True)
        assert ranks[1].all_landed(at)
    assert not any(store.check([f"landed {at} {rank}"]) for at in (0, 1) for rank in range(3))
    assert store.check([f"landed {at} {rank}" for at in (2, 3) for rank in range(3)])
