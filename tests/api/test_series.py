"""Time series of minutes, hours and days, at times that the test sets; and that the next server of a pool has them."""

from __future__ import annotations

import signal
import stat
from pathlib import Path

import msgspec
import pytest
from api_helpers import ServerProcess, eventually, kept_of

from kvdock.api.pool.kept_object import KeptObject
from kvdock.api.record.counters import Counters
from kvdock.api.record.history import KEPT_LEVELS, History
from kvdock.client.client import Client
from kvdock.protocol.reports import Over, PoolView
from kvdock.shm.objects import SHM_DIR, pool_objects

HOURS, DAYS = KEPT_LEVELS
EMPTY = PoolView(
    limit_bytes=1000, allocated_bytes=1000, prefaulted_bytes=0, free_bytes=1000, reserved_bytes=0, ready_bytes=0,
    quarantined_bytes=0, held_bytes=0, segments=1,
)


class Server:
    """One whose requests have prompts of 10 tokens a second, of which `found` are loaded, on a clock of its own."""

    def __init__(self, kept: KeptObject, wall_s: float, start_s: float = 5.0) -> None:
        self.wall_s, self.now_s, self.counters, self.ready_bytes = wall_s, start_s, Counters(), 0
        self.history = History(300, 1.0, kept=kept, wall_s=lambda: self.wall_s)

    def run(self, seconds: int, found: int = 5) -> None:
        for _ in range(seconds):
            self.history.sample(
                self.counters, msgspec.structs.replace(EMPTY, ready_bytes=self.ready_bytes), [], self.now_s
            )
            self.counters.prompt_tokens += 10
            self.counters.loaded_tokens += found
            self.ready_bytes += 2
            self.wall_s, self.now_s = self.wall_s + 1.003, self.now_s + 1.003  # rounds come a little late

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


def test_the_next_server_goes_on_with_hours_and_days_and_a_gap_where_there_was_none(kept: KeptObject) -> None:
    first = Server(kept, 1e9)
    first.run(3700, found=3)
    first.history.keep(first.now_s)
    second = Server(kept, first.wall_s + 600, start_s=0.0)
    before = first.values("hours")
    assert len(before) == 61 and second.values("minutes") == []
    assert second.values("hours")[:61] == before
    assert second.values("hours")[61:] in ([None] * 10, [None] * 11)
    second.run(121, found=9)
    assert second.values("hours")[-1] == pytest.approx(0.9)
    assert second.values("days")[:2] == pytest.approx([0.3, 0.3])


def test_rings_stay_as_long_as_they_are(kept: KeptObject) -> None:
    first = Server(kept, 1e9)
    first.run(200)
    first.history.keep(first.now_s)
    for _ in range(3):
        later = Server(kept, first.wall_s + 40 * 86400)
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
    assert len(Server(KeptObject(path, "the history"), server.wall_s).values("hours")) == 1


def test_what_others_may_write_is_not_read(tmp_path: Path) -> None:
    path = tmp_path / "kvdock-history"
    first = Server(KeptObject(path, "the history"), 1e9)
    first.run(130)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    path.chmod(0o666)
    assert Server(KeptObject(path, "the history"), first.wall_s).values("hours") == []


def test_a_series_that_is_new_has_no_values_of_before(kept: KeptObject) -> None:
    first = Server(kept, 1e9)
    first.run(200)
    doc = msgspec.json.decode(kept.read())
    for level in doc["levels"].values():
        level["series"] = [one for one in level["series"] if one["name"] != "loaded_share"]
    kept.write(msgspec.json.encode(doc))
    second = Server(kept, first.wall_s)
    assert second.values("hours") == [None] * 3 and len(second.values("hours", "prompt_tokens")) == 3


def test_a_real_server_keeps_hours_with_its_pool_and_the_next_one_shows_them() -> None:
    with ServerProcess(on_exit="keep") as server:
        pool_id = server.pool_id
        server.stop(signal.SIGTERM)
        path = kept_of(pool_id, "history")
        other = Server(KeptObject(path, "the history"), 0.0)
        doc = msgspec.json.decode(path.read_bytes())
        other.wall_s = doc["at"] - 200
        path.unlink()
        other.run(190, found=4)
        with ServerProcess(**{**server.settings, "on_exit": "remove"}) as second, Client(second.unix) as client:
            assert second.pool_id == pool_id
            (hits,) = (one for one in client.stats("hours").series if one.name == "loaded_share")
            assert hits.values[:3] == pytest.approx([0.4] * 3)
            second.stop(signal.SIGTERM)
        eventually(lambda: pool_id not in pool_objects() and not list(SHM_DIR.glob(f"*{pool_id:016x}*")))
