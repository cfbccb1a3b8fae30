"""Whether the server says that it helps when it does, and names what goes wrong with a command that helps."""

from __future__ import annotations

from typing import Any

import pytest
from api_helpers import MIB, Engine, ServerProcess, attach, eventually, keys, manifest
from msgspec.structs import replace
from server_fixtures import fresh_server

from kvdock.api.record.troubles import Troubles
from kvdock.api.reports.verdict import fall_of
from kvdock.client.client import Client
from kvdock.protocol import schemas as s
from kvdock.protocol.hits import HitTotals
from kvdock.protocol.outcomes import Outcome
from kvdock.protocol.reports import DayOfHits
from kvdock.protocol.verdict import REMEDIES, Verdict

server = fresh_server()


def ended(engine: Engine, prompt: int, **more: Any) -> None:
    engine.heartbeat(outcomes=[Outcome(request="r", prompt_tokens=prompt, **more)])


def codes(found: Verdict) -> list[str]:
    assert all(finding.remedy == REMEDIES[finding.code] for finding in found.findings)
    return [finding.code for finding in found.findings]


def test_the_headline_says_whether_it_helps_and_by_how_much(client: Client) -> None:
    idle = client.verdict()
    assert (idle.effect, idle.headline, idle.findings) == ("idle", "kvdock is up. No request has ended yet.", [])
    engine = attach(client)
    engine.lookup(keys(4), "r")
    silent = client.verdict()
    assert (silent.effect, "asked for 64 tokens" in silent.headline) == ("not_reported", True)
    ended(engine, 20)
    useless = client.verdict()
    assert useless.effect == "not_helping" and "none of 20 prompt tokens was loaded" in useless.headline
    ended(engine, 80, local_tokens=20, loaded_tokens=30, load_us=10_000, prefill_tokens_per_s=1000.0)
    helping = client.verdict()
    assert (helping.effect, helping.findings) == ("helping", [])
    assert "30 % of prompt tokens were loaded; 20 % were in the engines' own caches" in helping.headline
    ended(engine, 100, loaded_tokens=30, load_us=90_000_000, prefill_tokens_per_s=1000.0)
    costing = client.verdict()
    assert (costing.effect, codes(costing)) == ("costing", ["loads_cost_time"])
    assert "costs time" in costing.headline and costing.findings[0].severity == "bad"
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
        for number in range(20):
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
        assert finding.code == "thrashing" and finding.remedy == "kvdock size"
        assert finding.cost_share > 0.5 and "2 times as large" in finding.text
        engine.close()


# ------------------------------------------------------------------ what the rules look at


@pytest.mark.parametrize("count", [1, 100])
def test_only_the_last_troubles_are_kept(count: int) -> None:
    now = {"s": 0.0}
    troubles = Troubles(lambda: now["s"])
    for number in range(count):
        now["s"] = float(number)
        troubles.add("died", "", f"engine {number}")
    found = troubles.since("died", -1.0)
    assert len(found) == min(count, 64) and found[-1].who == f"engine {count - 1}"
    assert troubles.since("damaged", -1.0) == []
    assert troubles.since("died", now["s"]) == []


@pytest.mark.parametrize(("shares", "prompt", "wanted"), [
    ((0.6, 0.6, 0.1), 1_000_000, (0.1, 0.6, 2)),
    ((0.6, 0.6, 0.5), 1_000_000, None),
    ((0.6, 0.1), 1000, None),
    ((0.1,), 1_000_000, None),
    ((0.0, 0.0), 1_000_000, None),
    ((0.9, *[0.5] * 7, 0.2), 1_000_000, (0.2, 0.5, 7)),
])
def test_a_day_is_compared_with_the_week_before(
    shares: tuple[float, ...], prompt: int, wanted: tuple[float, float, int] | None
) -> None:
    days = [
        DayOfHits(date=f"2026-11-{10 + number}", tenant="", model="m", hits=HitTotals(
            requests=1, prompt_tokens=prompt, loaded={"memory": round(share * prompt)},
        )) for number, share in enumerate(shares)
    ]
    found = fall_of(days)
    assert found == (None if wanted is None else pytest.approx(wanted))
    assert fall_of([]) is None
