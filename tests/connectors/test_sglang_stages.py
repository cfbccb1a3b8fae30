"""What the ranks of a pipeline's stages note for each other, over a store of PyTorch's."""

from __future__ import annotations

from pathlib import Path
from threading import Thread
from typing import Any

import pytest

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
def ranks(tmp_path: Path) -> list[Notes]:
    store = Kept(tmp_path / "store")
    return [Notes(store, rank, 3) for rank in range(3)]


def test_a_session_counts_once_all_ranks_are_attached_to_it(ranks: list[Notes]) -> None:
    first = ranks[0]
    assert not first.all_attached("a"), "nobody has noted anything"
    for rank in ranks:
        assert not first.all_attached("a")
        rank.attached("a")
    assert first.all_attached("a") and not first.all_attached("b")
    ranks[2].attached("b")
    assert not first.all_attached("a")
    ranks[2].attached("")
    assert not first.all_attached("a")
    ranks[2].attached("a")
    assert first.all_attached("a")


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
