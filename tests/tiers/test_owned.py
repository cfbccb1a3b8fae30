"""Shared stores are owned: what is where, what goes when a limit is reached, and who removes it."""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
from api_helpers import MIB, ServerProcess, eventually
from cli_helpers import kvdock, refusal
from objects_subject import FolderSubject, S3Subject
from tier_engine import CHUNK_TOKENS, TierEngine, manifest
from tier_helpers import KIB, Parts, patient, store_all
from tier_subject import TierSubject, opened
from tier_subjects import DiskSubject

from kvdock.client.client import Client
from kvdock.protocol.admin_schemas import EmptyTier
from kvdock.protocol.mover_schemas import ContentsAnswer, ContentsQuestion
from kvdock.tiers.mover import owner as owner_module
from kvdock.tiers.mover.namespaces import NamespaceSession
from kvdock.tiers.mover.owner import LEASE_S, MARK_S, Lease, Owner, Removal, removals
from kvdock.tiers.mover.tier_handle import TierHandle
from kvdock.tiers.notes import LEASE, Note, begins
from kvdock.tiers.record import folder_of
from kvdock.tiers.stores.objects import ObjectTier
from kvdock.tiers.tier import AGE_S, Deadline, Holding, Limits, Owned, Tier, TierError

pytestmark = pytest.mark.tiers

LABEL = b'{"model": "m", "tenant": "t"}'
DAY_S = 86400.0


@pytest.fixture(scope="module", params=[S3Subject, FolderSubject, DiskSubject], ids=lambda kind: kind.name)
def made(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[TierSubject]:
    subject: TierSubject = request.param(tmp_path_factory.mktemp(request.param.name))
    yield subject
    subject.end()


def of(tier: Owned, namespace: bytes) -> Holding | None:
    return next((one for one in tier.holdings(patient()) if one.namespace == namespace), None)


# --------------------------------------------------------------------------- what a tier has


def test_a_tier_lists_and_removes_what_it_has_of_a_namespace(tier: Tier, parts: Parts) -> None:
    assert isinstance(tier, Owned)
    other = Parts("another namespace")
    tier.change(parts.namespace, begins(1), patient())
    store_all(tier, [*parts.many(5, 10_000), *other.many(2, 10_000)])
    tier.mark(parts.namespace, LABEL, patient())
    found = of(tier, parts.namespace)
    assert found is not None and (found.label, found.objects) == (LABEL, 5)
    assert 50_000 <= found.bytes < 60_000 and found.unused_s < 600
    unmarked = of(tier, other.namespace)
    assert unmarked is not None and (unmarked.label, unmarked.objects) == (b"", 2)
    while tier.empty(parts.namespace, 0.0, patient()):
        pass
    gone, stays = of(tier, parts.namespace), of(tier, other.namespace)
    assert gone is None or gone.objects == 0
    assert stays is not None and stays.objects == 2
    assert tier.notes([parts.namespace], patient()) != [None]
    tier.forget(parts.namespace, patient())
    tier.empty(other.namespace, 0.0, patient())
    tier.forget(other.namespace, patient())


def test_only_what_is_old_enough_is_removed(tmp_path: Path, parts: Parts) -> None:
    """In a folder, where a use counts, not only the store."""
    subject = FolderSubject(tmp_path)
    subject.reset()
    with opened(subject) as tier:
        assert isinstance(tier, ObjectTier)
        folder, batch = tmp_path / "a store", parts.many(3, 10_000)
        store_all(tier, batch)
        for part in batch[:2]:
            path = folder / part.name.text()
            os.utime(path, (time.time() - 3 * DAY_S - 60,) * 2)
        found = of(tier, parts.namespace)
        assert found is not None and sorted(found.by_age) == [0, 3 * DAY_S // AGE_S]
        assert tier.exists([batch[0].name], patient()) == [True]
        assert (folder / batch[0].name.text()).stat().st_mtime < time.time() - 2 * DAY_S, "as if it were another file"
        assert tier.empty(parts.namespace, 2 * DAY_S, patient()) == 1
        assert tier.empty(parts.namespace, 2 * DAY_S, patient()) == 0
        assert tier.exists([part.name for part in batch], patient()) == [True, False, True]
        assert not (folder / batch[1].name.text()).parent.exists(), "an empty folder stays"


def test_what_is_stored_while_the_store_is_listed_is_young(tmp_path: Path, parts: Parts) -> None:
    """Its time is later than that of the list; with an age below 0 it would be removed first."""
    subject = FolderSubject(tmp_path)
    subject.reset()
    with opened(subject) as tier:
        assert isinstance(tier, ObjectTier)
        one = parts.make(10_000)
        store_all(tier, [one])
        os.utime(tmp_path / "a store" / one.name.text(), (time.time() + 60,) * 2)
        found = of(tier, parts.namespace)
        assert found is not None and list(found.by_age) == [0]


@pytest.fixture
def tier(made: TierSubject) -> Iterator[Tier]:
    made.reset()
    with opened(made) as one:
        yield one


# --------------------------------------------------------------------------- what goes


def holding(name: str, size: int, unused_s: float = 0.0, *, tenant: str = "t", **by_age: int) -> Holding:
    label = json.dumps({"model": "m", "tenant": tenant}).encode()
    ages = {int(age[1:]): many for age, many in by_age.items()} or {0: size}
    return Holding(name.encode() * 32, label, 1, size, unused_s, ages)


def test_what_nobody_has_used_for_long_goes_whatever_the_limits_are() -> None:
    found = [holding("a", 10, 31 * DAY_S), holding("b", 10, 29 * DAY_S), holding("c", 10, math.inf)]
    gone = removals(found, Limits(unused_s=30 * DAY_S))
    assert [(one.namespace[:1], one.older_s) for one in gone] == [(b"a", 0.0), (b"c", 0.0)]
    assert removals(found, Limits()) == []
    assert removals([holding("a", 10, MARK_S)], Limits(unused_s=1.0)) == [], "it is in use, and marked by the hour"


def test_beyond_its_limit_a_store_loses_unused_namespaces_first_and_then_the_oldest_parts() -> None:
    cold, colder = holding("a", 30, 3 * DAY_S), holding("b", 30, 4 * DAY_S)
    used, other = holding("c", 60, _0=20, _5=20, _9=20), holding("d", 40, _0=10, _9=30)
    assert removals([cold, colder, used, other], Limits(bytes=160)) == []
    gone = removals([cold, colder, used, other], Limits(bytes=150))
    assert [one.namespace[:1] for one in gone] == [b"b"]
    gone = removals([cold, colder, used, other], Limits(bytes=100))
    assert [(one.namespace[:1], one.older_s) for one in gone] == [
        (b"b", 0.0), (b"a", 0.0), (b"c", 9 * AGE_S), (b"d", 9 * AGE_S),
    ]
    gone = removals([used, other], Limits(bytes=40))
    assert gone == [Removal(one.namespace, 5 * AGE_S, "the store's limit") for one in (used, other)]


def test_each_tenant_has_its_own_limit() -> None:
    found = [holding("a", 80, DAY_S, tenant="x"), holding("b", 30, DAY_S, tenant="x"), holding("c", 90, tenant="y")]
    gone = removals(found, Limits(tenant_bytes=100))
    assert [(one.namespace[:1], one.why) for one in gone] == [(b"a", "the limit of 'x'")]


# --------------------------------------------------------------------------- who removes it


class Noted:
    """A note that several movers change."""

    def __init__(self) -> None:
        self.note: Note | None = None

    def change(self, change: object) -> Note:
        assert callable(change)
        self.note = change(self.note)
        assert self.note is not None
        return self.note


def test_one_mover_has_the_lease_until_it_does_not_renew_it_any_more() -> None:
    """Each goes by its own clock, and theirs are an hour apart."""
    noted, now_s = Noted(), [0.0]
    one, other = (Lease(noted.change, clock) for clock in (lambda: now_s[0], lambda: now_s[0] + 3600))
    assert one.renew() and not other.renew()
    assert one.fence == 1
    for _ in range(5):
        now_s[0] += LEASE_S / 2
        assert one.renew() and not other.renew()
    now_s[0] += LEASE_S
    assert other.renew(), "the note has not changed for so long"
    assert other.fence == 2
    assert not one.renew() and one.fence == 0, "it hung for a while"


def owner_of(tier: Tier, answers: list[ContentsAnswer]) -> Owner:
    handle = TierHandle(tier, clock=time.monotonic, lost=lambda error: None)
    return Owner(handle, list, lambda _: None, answers.append, round_s=0.05)


@contextmanager
def opened_folder(subject: FolderSubject) -> Iterator[ObjectTier]:
    with opened(subject) as tier:
        assert isinstance(tier, ObjectTier)
        yield tier


def test_a_mark_that_failed_is_made_again_soon(
    tmp_path: Path, parts: Parts, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else a namespace that is served counted as unused after two such failures."""
    monkeypatch.setattr(owner_module, "MARK_AGAIN_S", 0.0)
    space = NamespaceSession(parts.namespace, manifest(KIB), None)  # type: ignore[arg-type]  # it is not asked
    subject = FolderSubject(tmp_path)
    subject.reset()
    with opened_folder(subject) as tier:
        owner = Owner(
            TierHandle(tier, clock=time.monotonic, lost=lambda error: None), lambda: [space], lambda _: None,
            lambda _: None,
        )
        store_all(tier, [parts.make(KIB)])
        in_its_place = tmp_path / "a store" / folder_of(parts.namespace) / "used" / "x"
        in_its_place.mkdir(parents=True)
        with pytest.raises(TierError):
            owner._mark(tier)
        in_its_place.rmdir()
        in_its_place.parent.rmdir()
        owner._mark(tier)
        found = of(tier, parts.namespace)
        assert found is not None and json.loads(found.label)["model"] == "tiers"


def test_a_mover_that_has_lost_the_lease_removes_nothing_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It hung while it removed a page, and another one has taken over."""
    subject, calls = FolderSubject(tmp_path), list[bytes]()
    subject.reset()
    with opened_folder(subject) as tier:

        def empty(namespace: bytes, older_s: float, deadline: Deadline) -> int:
            calls.append(namespace)
            tier.change(LEASE, lambda note: Note(1, note.generation + 1 if note else 1, 1), patient())
            return 1000

        monkeypatch.setattr(tier, "holdings", lambda deadline: [holding("a", 10, DAY_S), holding("b", 10, DAY_S)])
        monkeypatch.setattr(tier, "empty", empty)
        tier.limits = Limits(bytes=1)
        owner = owner_of(tier, [])
        owner.start()
        eventually(lambda: bool(calls), 30.0)
        owner.close()
        assert calls == [b"a" * 32]
        (lease,) = tier.notes([LEASE], patient())
        assert lease is not None and (lease.birth, lease.generation) == (1, 2)


def test_of_two_movers_one_keeps_the_limits_of_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(owner_module, "MARK_S", 0.0)
    subject, left, gone = FolderSubject(tmp_path), Parts("left"), Parts("gone")
    subject.reset()
    with ExitStack() as stack:
        tiers = [stack.enter_context(opened_folder(subject)) for _ in range(2)]
        for tier in tiers:
            tier.limits = Limits(unused_s=0.3)
        store_all(tiers[0], [*left.many(3, 10_000), *gone.many(3, 10_000)])
        tiers[0].change(gone.namespace, begins(1), patient())
        for parts in (left, gone):
            tiers[0].mark(parts.namespace, LABEL, patient())
        owners = [owner_of(tier, []) for tier in tiers]
        for owner in owners:
            owner.start()
            stack.callback(owner.close)

        def is_gone() -> bool:
            tiers[0].mark(left.namespace, LABEL, patient())
            return of(tiers[1], gone.namespace) is None

        eventually(is_gone, 30.0)
        stays = of(tiers[1], left.namespace)
        assert stays is not None and stays.objects == 3
        assert tiers[0].notes([gone.namespace], patient()) == [None]
        (lease,) = tiers[0].notes([LEASE], patient())
        assert lease is not None and lease.generation == 1, "the other has not taken it over"


# --------------------------------------------------------------------------- what an operator sees and removes


@pytest.mark.parametrize("kind", ["folder", "disk"])
def test_the_command_lists_what_tiers_have_and_removes_it(tmp_path: Path, kind: str) -> None:
    folder = tmp_path / "tier"
    folder.mkdir()
    tier = {"objects_url": folder.as_uri()} if kind == "folder" else {"disk_path": str(folder), "disk_bytes": 32 * MIB}
    name = "objects" if kind == "folder" else "disk"
    with ServerProcess(tier_asks=1, heartbeat_s=0.1, pool_bytes=16 * MIB, **tier) as server:
        at = ("--server", server.unix)
        engine = TierEngine(server.unix, manifest(64 * KIB, model="org/model", writers=2), "owned")
        keys = engine.chain(4)
        engine.store(keys)

        def listed() -> list[dict[str, object]]:
            done = kvdock("tiers", "--json", *at)
            assert done.returncode == 0, done.stderr
            (one,) = json.loads(done.stdout)["tiers"]
            assert one["tier"] == name and one["error"] in ("", "it is being opened")
            found: list[dict[str, object]] = one["namespaces"]
            return found

        records = 4 if kind == "folder" else 8
        eventually(lambda: [one["objects"] for one in listed()] == [records], 30.0)
        (found,) = listed()
        assert found["namespace"] == engine.attachment.namespace.hex() and found["is_served"]
        eventually(lambda: listed()[0]["model"] == "org/model", 30.0)
        said = kvdock("tiers", *at).stdout
        assert "org/model" in said and " now" in said
        clear = ("tiers", "clear", *at)
        assert "needs one of --tier" in refusal(kvdock(*clear), 2)
        assert "asks for confirmation" in refusal(kvdock(*clear, "--tier", name), 2)
        assert f"wanted one of {name}" in refusal(kvdock(*clear, "--tier", "shelf"), 2)
        assert kvdock(*clear, "--model", "another", "--yes").stdout == "there is nothing of the kind\n"
        said = kvdock(*clear, "--model", "org/model", "--tier", name, "--yes").stdout
        assert said.startswith(f"{records} records removed: 1 namespace, ")
        assert listed() == []
        with Client(server.unix) as client:
            again = client.empty_tier(EmptyTier(tier=name, namespaces=[engine.attachment.namespace.hex()]))
        assert (again.objects, again.left_objects, again.error) == (0, 0, "")
        assert engine.lookup(keys).hit_tokens == 4 * CHUNK_TOKENS, "the pool has it still"
        engine.close()


def test_a_tier_that_cannot_list_says_so(tmp_path: Path) -> None:
    answers: list[ContentsAnswer] = []

    class Shelf:
        name, limits = "shelf", None

    owner = owner_of(Shelf(), answers)  # type: ignore[arg-type]  # it has none of the verbs
    owner.ask(ContentsQuestion(7, "shelf"))
    owner.start()
    eventually(lambda: bool(answers), 10.0)
    owner.close()
    assert (answers[0].number, answers[0].contents.error) == (7, "it cannot list what it has")


def test_the_sizes_and_days_of_a_url_are_the_limits(tmp_path: Path) -> None:
    from kvdock.tiers.stores.objects import open_tier

    for query, limits in (
        ("", Limits(unused_s=30 * DAY_S)), ("?unused_days=0", Limits()),
        ("?bytes=2TiB&tenant_bytes=512GiB&unused_days=7", Limits(2 << 40, 512 << 30, 7 * DAY_S)),
    ):
        tier = open_tier(tmp_path.as_uri() + query, patient())
        assert tier.limits == limits
        tier.close(patient())
