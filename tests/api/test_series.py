"""Time series of minutes, hours and days, at times that the test sets; and that the next server of a pool has them."""

from __future__ import annotations

import asyncio
import signal
import stat
from pathlib import Path

import msgspec
import pytest
from api_helpers import NOBODYS, ServerProcess, access_file, eventually, kept_of, raw

from kvdock.api.access.access_file import entry
from kvdock.api.pool.kept_object import KeptObject
from kvdock.api.record.counters import Counters
from kvdock.api.record.history import KEPT_LEVELS, MOST_MARKS, History
from kvdock.client.client import Client
from kvdock.protocol.admin_schemas import AskedQuota, PatchConfig
from kvdock.protocol.events import LimitsChanged
from kvdock.protocol.reports import Over, PoolView
from kvdock.shm.objects import SHM_DIR, pool_objects

HOURS, DAYS = KEPT_LEVELS
EMPTY = PoolView(
    limit_bytes=1000, allocated_bytes=1000, prefaulted_bytes=0, free_bytes=1000, reserved_bytes=0, ready_bytes=0,
    quarantined_bytes=0, held_bytes=0, segments=1,
)


class Server:
    """One on a clock of its own. Each second, requests have prompts of 10 tokens, `found` of them are loaded, and
    `filled` bytes are stored."""

    def __init__(self, kept: KeptObject, boot_s: float, start_s: float = 5.0) -> None:
        self.boot_s, self.now_s, self.counters, self.ready_bytes = boot_s, start_s, Counters(), 0
        self.history = History(300, 1.0, kept=kept, boot_s=lambda: self.boot_s)

    def run(self, seconds: int, found: int = 5, filled: int = 2) -> None:
        for _ in range(seconds):
            pool = msgspec.structs.replace(EMPTY, ready_bytes=self.ready_bytes)
            if self.history.sample(self.counters, pool, [], self.now_s):
                asyncio.run(self.history.keep_in_slices(self.now_s))
            self.counters.prompt_tokens += 10
            self.counters.loaded_tokens += found
            self.ready_bytes += filled
            self.pass_s(1.003)  # rounds come a little late
            self.now_s += 1.003

    def pass_s(self, seconds: float) -> None:
        """Time passes on all clocks but the server's own, which stands still while the server is stopped."""
        self.boot_s += seconds

    def values(self, over: Over, name: str = "loaded_share") -> list[float | None]:
        (series,) = (one for one in self.history.view(over, self.now_s).series if one.name == name)
        return series.values


@pytest.fixture
def kept(tmp_path: Path) -> KeptObject:
    return KeptObject(tmp_path / "kvdock-history", "the history")


def test_each_level_has_a_value_an_interval_of_all_that_lay_in_it(kept: KeptObject) -> None:
    server = Server(kept, 1e9)
    server.run(150, found=2)
    server.run(151, found=8)
    assert len(server.values("minutes")) == 300 and set(server.values("minutes")) == {0.2, 0.8}
    hours = server.values("hours")
    assert len(hours) == 5 and hours[0] == pytest.approx(0.2) and hours[-1] == pytest.approx(0.8)
    assert hours[2] == pytest.approx(0.5), "the minute in which it changed"
    assert server.values("days") == []
    assert server.values("hours", "prompt_tokens") == pytest.approx([10 / 1.003] * 5, rel=1e-6)
    assert server.history.filling_bytes_per_s() == pytest.approx(2.0)
    server.run(100, found=8, filled=0)
    assert server.history.filling_bytes_per_s() == 0, "it does not fill any more"


def test_the_next_server_goes_on_with_hours_and_days_and_a_gap_where_there_was_none(kept: KeptObject) -> None:
    first = Server(kept, 1e9)
    first.run(3700, found=3)
    first.history.keep(first.now_s)
    second = Server(kept, first.boot_s + 600, start_s=0.0)
    before = first.values("hours")
    assert len(before) == 61 and second.values("minutes") == []
    assert second.values("hours")[:61] == before
    assert second.values("hours")[61:] in ([None] * 10, [None] * 11)
    second.run(121, found=9)
    assert second.values("hours")[-1] == pytest.approx(0.9)
    assert second.values("days")[:2] == pytest.approx([0.3, 0.3])


def test_a_time_in_which_the_server_was_stopped_is_a_gap(kept: KeptObject) -> None:
    server = Server(kept, 1e9)
    server.run(150, found=3)
    server.pass_s(600.0)
    server.run(100, found=9)
    hours = server.values("hours")
    assert hours[:2] == pytest.approx([0.3, 0.3]) and hours[2:12] == [None] * 10
    assert hours[12] == pytest.approx(0.6, abs=0.02) and len(hours) == 14
    minutes = server.values("minutes")
    assert len(minutes) == 300 and minutes[:-100] == [None] * 200 and set(minutes[-100:]) <= {0.3, 0.9}
    assert server.values("minutes", "free_bytes")[0] is None, "of all series"


def marks_of(server: Server, over: Over) -> list[tuple[int, str, list[str], int | None]]:
    """(age, kind, limits, size of the pool), the age in whole seconds."""
    return [
        (round(one.age_s), one.kind, one.limits, one.pool_bytes)
        for one in server.history.view(over, server.now_s).marks
    ]


def test_starts_and_changes_of_limits_are_marked_and_kept(kept: KeptObject) -> None:
    first = Server(kept, 1e9)
    first.run(200)
    first.history.marks.take(LimitsChanged(changed={"pool_bytes": [1, 2], "low_water": [0.1, 0.2]}, source="call"))
    first.history.marks.quotas_changed()
    first.run(100)
    first.history.marks.quotas_changed()
    changes = [(100, "limits", ["pool_bytes", "low_water", "quotas"], 2), (0, "limits", ["quotas"], None)]
    assert marks_of(first, "minutes") == [(301, "started", [], None), *changes]
    assert marks_of(first, "hours") == marks_of(first, "minutes")
    first.run(1)  # marks are kept at once
    second = Server(kept, first.boot_s + 600)
    assert [(kind, limits) for _, kind, limits, _ in marks_of(second, "hours")] == [
        ("started", []), ("limits", ["pool_bytes", "low_water", "quotas"]), ("limits", ["quotas"]), ("started", []),
    ]
    assert marks_of(second, "hours")[-1][0] == 0 and marks_of(second, "hours")[0][0] == pytest.approx(902, abs=3)
    second.run(10)
    assert [kind for _, kind, _, _ in marks_of(second, "minutes")] == ["started"], "as far as the series reach back"


def test_no_more_marks_are_kept_than_fit(kept: KeptObject) -> None:
    server = Server(kept, 1e9)
    for _ in range(2 * MOST_MARKS):
        server.boot_s += 2
        server.history.marks.quotas_changed()
    server.run(62)
    assert len(Server(kept, server.boot_s).history.marks.within(1e9)) == MOST_MARKS


def test_rings_stay_as_long_as_they_are(kept: KeptObject) -> None:
    first = Server(kept, 1e9)
    first.run(200)
    first.history.keep(first.now_s)
    for _ in range(3):
        later = Server(kept, first.boot_s + 40 * 86400)
        assert len(later.values("hours")) == HOURS.values and set(later.values("hours")[100:]) == {None}
        later.history.keep(later.now_s)


@pytest.mark.parametrize("content", [b"", b"{", b"[1,2]", b'{"at": 1.0, "levels": {"hours": 7}}', b"\xff" * 100])
def test_what_cannot_be_read_begins_anew(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "kvdock-history"
    path.write_bytes(content)
    path.chmod(0o600)
    server = Server(KeptObject(path, "the history"), 1e9)
    assert server.values("hours") == []
    server.run(70)
    assert len(Server(KeptObject(path, "the history"), server.boot_s).values("hours")) == 1


def test_what_others_may_write_is_not_read(tmp_path: Path) -> None:
    path = tmp_path / "kvdock-history"
    first = Server(KeptObject(path, "the history"), 1e9)
    first.run(130)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    path.chmod(0o666)
    assert Server(KeptObject(path, "the history"), first.boot_s).values("hours") == []


def test_a_series_that_is_new_has_no_values_of_before(kept: KeptObject) -> None:
    first = Server(kept, 1e9)
    first.run(200)
    doc = msgspec.json.decode(kept.read())
    for level in doc["levels"].values():
        level["series"] = [one for one in level["series"] if one["name"] != "loaded_share"]
    kept.write(msgspec.json.encode(doc))
    second = Server(kept, first.boot_s)
    assert second.values("hours") == [None] * 3 and len(second.values("hours", "prompt_tokens")) == 3


def test_a_real_server_keeps_hours_with_its_pool_and_the_next_one_shows_them() -> None:
    with ServerProcess(on_exit="keep") as server:
        pool_id = server.pool_id
        server.stop(signal.SIGTERM)
        path = kept_of(pool_id, "history")
        other = Server(KeptObject(path, "the history"), 0.0)
        doc = msgspec.json.decode(KeptObject(path, "the history").read())
        other.boot_s = doc["at_boot_s"] - 200
        path.unlink()
        other.run(190, found=4)
        with ServerProcess(**{**server.settings, "on_exit": "remove"}) as second, Client(second.unix) as client:
            assert second.pool_id == pool_id
            (hits,) = (one for one in client.stats("hours").series if one.name == "loaded_share")
            assert hits.values[:3] == pytest.approx([0.4] * 3)
            second.stop(signal.SIGTERM)
        eventually(lambda: pool_id not in pool_objects() and not list(SHM_DIR.glob(f"*{pool_id:016x}*")))


def test_a_real_server_marks_its_start_its_limits_and_quotas_and_names_no_tenant(tmp_path: Path) -> None:
    """What the access file has at the start is no change."""
    path = access_file(tmp_path, entry("one", "t" * 40, ["engine"], "team-a") + "caps = {sessions = 4}\n")
    with ServerProcess(access_file=str(path)) as server, Client(server.unix) as client:
        eventually(lambda: bool(client.stats().series[0].values))
        assert [(one.kind, one.limits) for one in client.stats().marks] == [("started", [])]
        client.configure(PatchConfig(session_grants=77, tenants={"team-b": AskedQuota(sessions=2)}))
        eventually(lambda: [sorted(one.limits) for one in client.stats().marks] == [[], ["quotas", "session_grants"]])
        changed = client.stats().marks[1]
        assert changed.kind == "limits"
        assert changed.pool_bytes is None and changed.age_s < 60
        status, _, body = raw(server.http, "GET", "/v1/stats", None, NOBODYS)
        assert status == 200 and b"team-" not in body
