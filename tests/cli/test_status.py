"""`kvdock status`: first whether the server helps, then what it holds; no zeros, and no blanks at line ends."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import msgspec
import pytest
from api_helpers import MIB, OPERATOR, ServerProcess, attach, eventually, keys, raw, unique
from cli_helpers import kvdock

from kvdock.api.record.counters import Counters
from kvdock.cli.render import brief, counted, percent
from kvdock.cli.status import GROUPS, folded, meaning_of, pending_in_words, rates_of
from kvdock.client.client import Client
from kvdock.protocol.outcomes import Outcome
from kvdock.protocol.reports import Series, Stats, TierView

ENDED = Outcome(request="r", prompt_tokens=70, local_tokens=16, found_tokens=48, loaded_tokens=32, load_us=500_000,
                prefill_tokens_per_s=16.0)
"""It looked up 4 chunks and found 3: 16 tokens local, 32 loaded, 16 never stored, 6 left over. It saved 1.5 s."""
HELPS = (
    "kvdock is up and helping: 46 % of prompt tokens were loaded; 23 % were in the engines' own caches. That saved "
    "1.5 s of computing."
)


@pytest.fixture
def fresh() -> Iterator[ServerProcess]:
    """A server whose history is long enough for rates after a second."""
    with ServerProcess(history_interval_s=0.2, missed_heartbeats=3, heartbeat_s=1.0) as server:
        yield server


def first_line(server: ServerProcess, **environ: str) -> str:
    return kvdock("status", "--server", server.unix, **environ).stdout.splitlines()[0]


def test_the_first_line_says_whether_it_helps(fresh: ServerProcess) -> None:
    assert first_line(fresh) == "kvdock is up. No request has ended yet."
    with Client(fresh.unix) as client:
        engine = attach(client, label="helped")
        engine.store(keys(3, "stored"))
        engine.lookup(keys(4, "stored"))
        asked = "kvdock is up. Engines asked for 64 tokens, and have reported no request that has ended."
        assert first_line(fresh) == asked
        engine.heartbeat(outcomes=[ENDED])
        assert first_line(fresh) == HELPS
        said = ""

        def is_live() -> bool:
            nonlocal said
            engine.heartbeat()  # it is live for three seconds
            said = kvdock("status", "--server", fresh.unix).stdout
            return "1 engine attached, live: helped" in said

        eventually(is_live)
        rows = {line.split("  ")[0]: line.split() for line in reversed(said.splitlines()) if line}
        assert rows["loaded"][-2:] == ["46", "%"] and rows["own cache"][-2:] == ["23", "%"]
        assert rows["computed"][-2:] == ["31", "%"] and rows["prompts"][-2:] == ["70", "tok"]
        assert rows["asked for"][-2:] == ["64", "tok"] and rows["bytes stored"][-2:] == ["48.0", "KiB"]
        assert "saved" in rows and " 1.5 s of computing\n" in said
        assert "since the start\n" in said and "mismatch" not in said and "trouble" not in said
        eventually(lambda: "suspect (helped is suspect)" in kvdock("status", "--server", fresh.unix).stdout)
        engine.close()


def test_a_server_that_is_not_ready_says_why(tmp_path: Path) -> None:
    with ServerProcess(pool_bytes=MIB, segment_bytes=MIB) as server, Client(server.unix) as client:
        engine = attach(client)
        engine.reserve(keys(100, "all of it"))
        first, second, *_ = kvdock("status", "--server", server.unix).stdout.splitlines()
        assert first == "kvdock is up and gives out no slots."
        assert second.startswith("✗ No slot can be given out: every byte of the pool is held by engines")
        engine.close()


def test_a_server_that_is_full_says_of_what_since_when_and_who_has_most(tmp_path: Path) -> None:
    with ServerProcess(tcp_connections=4) as server, ExitStack() as held:
        for _ in range(4):
            client = held.enter_context(Client(server.http, access_token=OPERATOR))
            assert client.status().status in ("ok", "degraded")
        wanted = re.compile(
            r"state +degraded: all TCP connections that there may be are open: new ones are refused until one ends "
            r"\(for [\d.]+ m?s\); most are of the own user: 4 TCP connections$", re.MULTILINE,
        )
        eventually(lambda: bool(wanted.search(kvdock("status", "--server", server.unix).stdout)))
        server_line = kvdock("doctor", "--server", server.unix, "--json").stdout
        (check,) = [one for one in json.loads(server_line)["checks"] if one["check"] == "server"]
        assert check["level"] == "note" and "degraded: all TCP connections" in check["found"]


@pytest.mark.parametrize("columns", [40, 80, 120])
def test_no_line_is_too_wide_or_ends_in_blanks(fresh: ServerProcess, columns: int) -> None:
    with Client(fresh.unix) as client:
        engine = attach(client, label=unique("an-engine-with-quite-a-long-name"))
        engine.store(keys(3))
        engine.lookup(keys(3))
        for command in (["status"], ["status", "--all"], ["sessions"], ["requests"], ["leases"], ["config", "get"]):
            said = kvdock(*command, "--server", fresh.unix, COLUMNS=str(columns)).stdout
            wrong = [line for line in said.splitlines() if len(line) > columns or line != line.rstrip()]
            assert said and not wrong, (command, wrong)
        engine.close()


def test_json_has_the_servers_answer_and_the_rates(fresh: ServerProcess) -> None:
    with Client(fresh.unix) as client:
        engine = attach(client)
        engine.store(keys(1))
        engine.lookup(keys(2))

        def figures() -> dict[str, Any]:
            """With a request that has just ended: the series of this server are short, and begin with a sample."""
            engine.heartbeat(outcomes=[Outcome(request="r", prompt_tokens=32, found_tokens=16, loaded_tokens=16)])
            found: dict[str, Any] = json.loads(kvdock("status", "--json", "--server", fresh.unix).stdout)
            return found

        eventually(lambda: any(one["loaded_share"] == 0.5 for one in figures()["rates"]))
        found, own = figures(), json.loads(raw(fresh.unix, "GET", "/v1/status")[2])
        assert set(found) == set(own) | {"loaded_share", "local_share", "rates", "verdict"}
        assert (found["loaded_share"], found["local_share"]) == (0.5, 0.0)
        assert isinstance(found["rates"], list) and found["rates"][-1]["loaded_share"] == 0.5
        engine.close()


def test_without_an_access_token_totals_are_shown_and_nobodys_name(fresh: ServerProcess) -> None:
    with Client(fresh.unix) as client:
        engine = attach(client, label="secretive")
        said = kvdock("status", "--server", fresh.http.removeprefix("http://")).stdout
        assert "1 attached; an access token shows their names" in said and "secretive" not in said
        engine.close()


def test_all_shows_every_counter_with_its_meaning(fresh: ServerProcess) -> None:
    said = kvdock("status", "--all", "--server", fresh.unix).stdout
    for name in Counters.__struct_fields__:
        assert f"\n{name} " in said and meaning_of(name) in said


def test_every_counter_is_in_one_group_and_only_what_counts_is_said() -> None:
    named = [name for group in GROUPS.values() for name in group]
    assert sorted(named) == sorted(Counters.__struct_fields__)
    counted_so_far = msgspec.structs.asdict(Counters(lookups=1, stored_bytes=2048, reservations=1, mismatches=2))
    assert dict(folded(counted_so_far | {"of_tomorrow": 3})) == {
        "lookups": "1 made", "stored": "2.0 KiB, 1 reservation", "trouble": "2 chunks with a wrong checksum",
        "others": "3 of tomorrow",
    }
    routine = dict(folded(msgspec.structs.asdict(Counters(refusals=2))))
    assert list(routine) == ["calls"] and "normal" in routine["calls"]


def series(**values: list[float | None]) -> Stats:
    shown = [
        Series(name=name, title="", unit="ratio" if name.endswith("share") else "per_s", chart="", values=list(found))
        for name, found in values.items()
    ]
    return Stats(interval_s=1.0, age_s=0.0, series=shown)


def test_rates_are_of_the_last_minute_and_of_all_that_is_remembered() -> None:
    prompts: list[float | None] = [100.0] * 240 + [None] + [50.0] * 59
    loaded: list[float | None] = [0.0] * 240 + [None] + [0.5] * 59
    minute, whole = rates_of(series(prompt_tokens=prompts, loaded_share=loaded, local_share=loaded))
    assert (minute.seconds, minute.loaded_share, minute.prompt_tokens_per_s) == (60.0, 0.5, 50.0)
    assert (minute.local_share, minute.computed_share) == (0.5, 0.0)
    assert whole.seconds == 300.0 and whole.loaded_share == pytest.approx(25 * 59 / (24000 + 50 * 59))
    idle, = rates_of(series(prompt_tokens=[0.0] * 30, loaded_share=[None] * 30))
    assert (idle.seconds, idle.loaded_share, idle.computed_share, idle.prompt_tokens_per_s) == (30.0, None, None, 0.0)
    assert rates_of(series(prompt_tokens=[])) == []


@pytest.mark.parametrize(("amount", "text"), [
    (0, "0"), (0.25, "0.2"), (12.34, "12.3"), (999.4, "999"), (1000, "1 k"), (12345, "12.3 k"), (2.5e6, "2.5 M"),
])
def test_amounts_in_words(amount: float, text: str) -> None:
    assert brief(amount) == text


def test_counts_and_shares_in_words() -> None:
    assert (counted(1, "lease"), counted(1200, "lease")) == ("1 lease", "1,200 leases")
    shares = (None, 0, 0.0004, 0.0782, 0.0994, 0.0999, 0.7824, 0.9999, 1.0)
    assert [percent(share) for share in shares] == [
        "-", "0 %", "<0.1 %", "7.8 %", "9.9 %", "10 %", "78 %", "99.9 %", "100 %",
    ]
    assert percent(0.7824, 1) == "78.2 %"


@pytest.mark.parametrize(("count", "said"), [(1, "1 clear or deletion pending"), (2, "2 clears and deletions pending")])
def test_what_is_pending_is_counted_in_words(count: int, said: str) -> None:
    assert pending_in_words(TierView(name="disk", state="open", pending_orders=count)) == said
