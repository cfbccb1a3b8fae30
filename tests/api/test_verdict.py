"""Whether the server says that it helps when it does, and names what goes wrong with a command that helps."""

from __future__ import annotations

import asyncio
import re
import signal
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from api_helpers import MIB, NOBODYS, Engine, ServerProcess, access_file, attach, eventually, keys, manifest, raw
from msgspec.structs import replace
from server_fixtures import fresh_server
from tier_server import mover, movers, with_disk

from kvdock.api.access.access_file import entry
from kvdock.api.record.hits import MOST_ENGINES, Lately, Whose
from kvdock.api.record.troubles import Troubles
from kvdock.api.reports import verdict as rules
from kvdock.api.reports.verdict import fall_of
from kvdock.client.client import Client
from kvdock.protocol import schemas as s
from kvdock.protocol.hits import HitTotals
from kvdock.protocol.outcomes import Outcome, OutcomeView
from kvdock.protocol.reports import REMEDIES, DayOfHits, Verdict

server = fresh_server()
TEAM_A = "team-a-" + "1" * 32


def ended(engine: Engine, prompt: int, **more: Any) -> None:
    engine.heartbeat(outcomes=[Outcome(request="r", prompt_tokens=prompt, **more)])


def codes(found: Verdict) -> list[str]:
    assert all(finding.remedy.startswith(REMEDIES[finding.code]) for finding in found.findings)
    return [finding.code for finding in found.findings]


def metrics(server: ServerProcess) -> dict[str, float]:
    """`kvdock_finding` by code, as a scraper without a token sees it."""
    text = raw(server.http, "GET", "/metrics", headers=NOBODYS)[2].decode()
    return {code: float(value) for code, value in re.findall(r'^kvdock_finding\{code="(\w+)"\} (\S+)$', text, re.M)}


def test_the_headline_says_whether_it_helps_and_by_how_much(client: Client) -> None:
    idle = client.verdict()
    assert (idle.effect, idle.headline, idle.findings) == ("idle", "kvdock is up. No request has ended yet.", [])
    engine = attach(client)
    engine.lookup(keys(4), "r")
    silent = client.verdict()
    assert (silent.effect, "asked for 64 tokens" in silent.headline) == ("not_reported", True)
    ended(engine, 20)
    useless = client.verdict()
    assert useless.effect == "not_helping"
    assert useless.headline == "kvdock is up and not helping yet: none of 20 prompt tokens was loaded."
    ended(engine, 80, local_tokens=20, loaded_tokens=30, load_us=10_000, prefill_tokens_per_s=1000.0)
    helping = client.verdict()
    assert (helping.effect, helping.findings) == ("helping", [])
    assert "30 % of prompt tokens were loaded; 20 % were in the engines' own caches" in helping.headline
    ended(engine, 100, loaded_tokens=30, load_us=90_000_000, prefill_tokens_per_s=1000.0)
    costing = client.verdict()
    assert (costing.effect, codes(costing)) == ("costing", ["loads_cost_time"])
    assert "costs time" in costing.headline and costing.findings[0].severity == "bad"
    engine.close()


def test_after_many_tokens_it_is_not_said_that_help_may_still_come(client: Client) -> None:
    engine = attach(client)
    ended(engine, 1_000_000)
    assert client.verdict().headline == "kvdock is up and not helping: none of 1,000,000 prompt tokens was loaded."
    engine.close()


def test_an_engine_that_died_and_damaged_chunks_are_named_until_somebody_has_seen_them(client: Client) -> None:
    engine, dying = attach(client, label="engine A"), attach(client, label="engine B")
    engine.store(keys(2))
    lease = engine.lookup(keys(2), "r").lease
    assert lease is not None
    client.mismatch(s.ReportMismatch(session=engine.session, lease=lease, chunks=[1]))
    dying.close()
    eventually(lambda: len(client.verdict().findings) == 2)
    found = client.verdict()
    assert codes(found) == ["chunks_damaged", "engine_died"], "the worst comes first"
    assert "(engine A)" in found.findings[0].text and "(engine B)" in found.findings[1].text
    assert all(finding.at is not None for finding in found.findings)
    assert client.acknowledge().troubles == 2
    assert client.verdict().findings == [] and client.acknowledge().troubles == 0
    assert client.status().counters["dead_members"] == 1
    engine.close()


def test_an_engine_that_sends_no_heartbeats_is_named() -> None:
    with ServerProcess(heartbeat_s=0.05, missed_heartbeats=1, watch_s=0.02) as server, Client(server.unix) as client:
        engine = attach(client, label="engine A")
        eventually(lambda: codes(client.verdict()) == ["engine_silent"])
        assert "(engine A)" in client.verdict().findings[0].text
        engine.heartbeat()
        engine.close()


def test_a_caller_who_may_not_read_sees_no_names(server: ServerProcess, client: Client) -> None:
    dying = attach(client, label="engine B")
    dying.close()
    eventually(lambda: bool(client.verdict().findings))
    with Client(server.http) as nobody:
        assert "engine B" not in nobody.verdict().findings[0].text


def test_engines_of_one_model_that_share_nothing_are_named_with_what_differs(client: Client) -> None:
    engines = [
        attach(client, model=model, kv_dtype=dtype)
        for model, dtype in (("/models/Llama", "bfloat16"), ("meta/llama", "float8_e4m3fn"), ("other", "float16"))
    ]
    for engine in engines:
        for number in range(8):
            engine.lookup(keys(40, f"{number}"), f"r{number}")
    (finding,) = client.verdict().findings
    assert finding.code == "shares_nothing"
    assert "2 kinds of engines of the model llama share nothing: they differ in model, kv_dtype" in finding.text
    for engine in engines:
        engine.close()


def test_engines_that_pack_and_engines_that_do_not_are_named_as_such() -> None:
    raw = manifest().groups
    how = s.Packed(planes=1, marks=176, units=40, bytes=raw[0].part_bytes - 64)
    packed = [replace(group, packed=how) for group in raw]
    with ServerProcess() as server, Client(server.unix) as client:
        engines = [attach(client, groups=tuple(groups)) for groups in (raw, packed)]
        for engine in engines:
            for number in range(20):
                engine.lookup(keys(40, f"{number}"), f"r{number}")
        (finding,) = client.verdict().findings
        assert finding.code == "shares_nothing"
        assert finding.text.endswith("they differ in whether and how KV is packed (the connectors' setting pack).")
        for engine in engines:
            engine.close()


def test_a_pool_that_is_too_small_for_what_comes_again_is_thrashing() -> None:
    pool: dict[str, Any] = {"pool_bytes": 8 * MIB, "segment_bytes": 8 * MIB, "eviction": "lru"}
    with ServerProcess(**pool) as server, Client(server.unix) as client:
        engine = attach(client)
        for round_ in range(4):
            for number in range(100):  # 800 chunks of 16 KiB each, in a pool of 512
                engine.lookup(keys(8, f"{number}"), f"{round_}-{number}")
                engine.store(keys(8, f"{number}"))
        (finding,) = client.verdict().findings
        assert metrics(server)["thrashing"] == 1 and metrics(server)["tier_off"] == 0
        assert finding.code == "thrashing" and finding.remedy == "kvdock size"
        assert finding.cost_share > 0.5 and "2 times as large" in finding.text
        engine.close()


@pytest.mark.parametrize("more", [{"cache_salt": "mine"}, {"adapter": "mine"}, {"layers": 4}])
def test_engines_that_are_apart_on_purpose_are_no_finding(client: Client, more: dict[str, Any]) -> None:
    """A salt and an adapter keep engines apart, and another number of layers is another model."""
    engines = [attach(client, model="/a/snapshot"), attach(client, model="/a/snapshot", **more)]
    for engine in engines:
        for number in range(8):
            engine.lookup(keys(40, f"{number}"), f"r{number}")
    assert client.verdict().findings == []
    for engine in engines:
        engine.close()


def test_one_engine_with_dear_loads_is_named_beside_others_that_save_more(client: Client) -> None:
    good, dear = attach(client, label="good"), attach(client, label="dear")
    ended(good, 100_000, loaded_tokens=90_000, load_us=10_000, prefill_tokens_per_s=100.0)
    for _ in range(2):
        ended(dear, 1000, loaded_tokens=500, load_us=30_000_000, prefill_tokens_per_s=100.0)
    found = client.verdict()
    assert (found.effect, codes(found)) == ("helping", ["loads_cost_time"])
    assert "In the last hour, loads of dear took 50.0 s longer" in found.findings[0].text
    assert found.findings[0].cost_share == pytest.approx(1000 / 102_000)
    good.close()
    dear.close()


def test_the_last_hour_has_what_ended_in_it_by_engine() -> None:
    now = {"s": 1_764_000_000.0}
    lately = Lately(lambda: now["s"])
    for number in range(30):
        engine = Whose("a" if number % 2 else "b", "m", "e")
        lately.ended(engine, OutcomeView(prompt_tokens=1, local_tokens=0, found_tokens=0, loaded_tokens=0))
        now["s"] += 300
    found = asyncio.run(lately.sums(lambda tenant: True))
    assert {engine.tenant: hits.prompt_tokens for engine, hits in found.items()} == {"a": 6, "b": 6}
    assert set(asyncio.run(lately.sums(lambda tenant: tenant == "a"))) == {Whose("a", "m", "e")}
    now["s"] += 3600
    assert asyncio.run(lately.sums(lambda tenant: True)) == {}
    for number in range(MOST_ENGINES + 5):
        lately.ended(Whose("", "m", f"{number}"), OutcomeView(
            prompt_tokens=1, local_tokens=0, found_tokens=0, loaded_tokens=0
        ))
    assert len(asyncio.run(lately.sums(lambda tenant: True))) == MOST_ENGINES + 1


def test_a_pool_full_of_one_tenant_is_told_if_others_lost_chunks_to_it() -> None:
    with TemporaryDirectory() as folder:
        tokens = access_file(Path(folder), entry("a", TEAM_A, ["engine"], "team-a"))
        with ServerProcess(access_file=str(tokens)) as server, Client(server.unix) as client:
            mine = attach(client, groups=(s.Group(part_bytes=MIB),))
            with Client(server.http, access_token=TEAM_A) as theirs:
                other = attach(theirs, groups=(s.Group(part_bytes=MIB),))
                mine.store(keys(1, "mine"))
                for number in range(20):
                    other.store(keys(1, f"{number}"))
                other.lookup(keys(1, "0"), "own")
                other.heartbeat(outcomes=[Outcome(request="own", prompt_tokens=16, why="")])
                assert client.verdict().findings == [], "they evicted only their own"
                mine.lookup(keys(1, "mine"), "lost")
                mine.heartbeat(outcomes=[Outcome(request="lost", prompt_tokens=16, why="")])
                (finding,) = client.verdict().findings
                assert finding.code == "full_of_one_tenant" and "100 % of what is stored is of the tenant team-a" in (
                    finding.text
                ) and "others computed 16 tokens" in finding.text
                assert finding.remedy.startswith("kvdock quota team-a --bytes 50% --namespaces "), "others stay"
                other.close()
            mine.close()


def impatient() -> None:
    rules.OLD_GRANT_S = 0.0


class Impatient(ServerProcess):
    before = staticmethod(impatient)


def test_a_lease_that_nobody_gives_back_is_named() -> None:
    with Impatient() as server, Client(server.unix) as client:
        engine = attach(client, label="engine A")
        engine.store(keys(1))
        assert client.verdict().findings == []
        lease = engine.lookup(keys(1), "r").lease
        eventually(lambda: codes(client.verdict()) == ["grants_old"])
        assert client.verdict().findings[0].text.startswith("A lease of engine A is open for ")
        with Client(server.http) as nobody:
            assert "engine A" not in nobody.verdict().findings[0].text
        engine.release(lease, 0)
        assert client.verdict().findings == []
        engine.close()


def test_what_went_wrong_is_told_after_a_restart_until_somebody_has_seen_it() -> None:
    with ServerProcess(on_exit="keep") as first:
        with Client(first.unix) as client:
            attach(client, label="engine B").close()
            eventually(lambda: codes(client.verdict()) == ["engine_died"])
            before = client.verdict().findings
        first.stop()
        with ServerProcess(**first.settings) as second, Client(second.unix) as client:
            assert second.pool_id == first.pool_id and client.verdict().findings == before
            client.acknowledge()
            second.stop()
        with ServerProcess(**first.settings) as third, Client(third.unix) as client:
            assert third.pool_id == first.pool_id and client.verdict().findings == []


@pytest.mark.tiers
def test_a_mover_that_ends_is_no_engine_that_died(tmp_path: Path) -> None:
    with with_disk(tmp_path) as first:
        with Client(first.unix) as client:
            engine = attach(client)
            engine.store(keys(1))
            eventually(lambda: sessions_of_movers(client) == 1)
            old = mover(first)
            old.kill()
            eventually(lambda: {one.pid for one in movers(first)} - {old.pid} != set())
            eventually(lambda: sessions_of_movers(client) == 1)
            assert "engine_died" not in codes(client.verdict()) and client.status().counters["dead_members"] == 0
            engine.leave()
        first.stop(signal.SIGKILL)
        with ServerProcess(**first.settings) as second, Client(second.unix) as client:
            assert second.pool_id == first.pool_id
            attach(client, label="an engine").close()
            eventually(lambda: "engine_died" in codes(client.verdict()))
            (finding,) = [one for one in client.verdict().findings if one.code == "engine_died"]
            assert finding.text.startswith("An engine's process ended without leaving (an engine) at ")


def sessions_of_movers(client: Client) -> int:
    return sum(view.label == s.MOVER_LABEL for view in client.sessions().sessions)


# ------------------------------------------------------------------ what the rules look at


@pytest.mark.parametrize("count", [1, 100])
def test_only_the_last_troubles_of_a_kind_are_kept(count: int) -> None:
    now = {"s": 0.0}
    troubles = Troubles(lambda: 0.0, lambda: now["s"])
    troubles.add("misread", "", "another kind")
    for number in range(count):
        now["s"] = float(number)
        troubles.add("died", "", f"engine {number}")
    found = troubles.within("died", now["s"] + 1)
    assert len(found) == min(count, 64) and found[-1].who == f"engine {count - 1}"
    assert troubles.within("damaged", 1e9) == [] and len(troubles.within("misread", 1e9)) == 1
    assert troubles.within("died", 0.0) == []


@pytest.mark.parametrize(("shares", "prompt", "today", "wanted"), [
    ((0.6, 0.6, 0.1), 1_000_000, 12, (0.1, 0.6, 2)),
    ((0.6, 0.6, 0.1), 1_000_000, 13, None),  # nothing was asked today
    ((0.6, 0.6, 0.5), 1_000_000, 12, None),
    ((0.6, 0.1), 1000, 11, None),
    ((0.1,), 1_000_000, 10, None),
    ((0.0, 0.0), 1_000_000, 11, None),
    ((0.9, *[0.5] * 7, 0.2), 1_000_000, 18, (0.2, 0.5, 7)),
    ((0.9, None, None, None, None, None, None, None, 0.2), 1_000_000, 18, None),  # eight days ago is no week ago
])
def test_a_day_is_compared_with_the_week_before(
    shares: tuple[float | None, ...], prompt: int, today: int, wanted: tuple[float, float, int] | None
) -> None:
    days = [
        DayOfHits(date=f"2026-11-{10 + number}", tenant="", model="m", hits=HitTotals(
            requests=1, prompt_tokens=prompt, loaded={"memory": round(share * prompt)},
        )) for number, share in enumerate(shares) if share is not None
    ]
    found = fall_of(days, f"2026-11-{today}")
    assert found == (None if wanted is None else pytest.approx(wanted))
    assert fall_of([], "2026-11-10") is None
