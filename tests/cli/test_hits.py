"""What commands say of where prompts' tokens came from: by source, reason, day, model and time."""

from __future__ import annotations

import io
import json
import re
import time
from collections.abc import Iterator
from datetime import datetime

import msgspec
import pytest
import typer
from api_helpers import ServerProcess, attach, eventually, keys, raw
from cli_helpers import kvdock, refusal
from rich.console import Console
from rich.text import Text
from server_fixtures import fresh_server

from kvdock.cli.errors import CommandError
from kvdock.cli.help import Moment, parse_moment
from kvdock.cli.history import Rows, as_stats, length, part_of, rows_of
from kvdock.cli.hits import computed_of, hits_table, loaded_of, reason_in_words
from kvdock.cli.main import app
from kvdock.cli.render import say, say_table
from kvdock.cli.status import finding_in_words, headline
from kvdock.client.client import Client
from kvdock.protocol.hits import HitTotals, PromptRun
from kvdock.protocol.outcomes import Outcome, OutcomeView
from kvdock.protocol.reports import REMEDIES, Finding, Series, Stats, Verdict

server = fresh_server()


def said(server: ServerProcess, *words: str) -> list[str]:
    done = kvdock(*words, "--server", server.unix, COLUMNS="160")
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def cells(line: str) -> list[str]:
    return re.split(r"  +", line)


# --------------------------------------------------------------------------- words


def shown(hits: HitTotals, *, everything: bool = False) -> list[list[str]]:
    console = Console(file=io.StringIO(), width=160)
    say(console, hits_table(hits, everything=everything))
    assert isinstance(console.file, io.StringIO)
    return [cells(line) for line in console.file.getvalue().splitlines()]


MIXED = HitTotals(
    requests=12, prompt_tokens=1000, local_tokens=400, loaded={"memory": 200, "waited": 20, "disk\u202e": 100},
    computed={"room": 150, "tail": 40, "short": 50, "late": 10, "never_stored": 30}, reloaded_tokens=64,
)


def test_loaded_tokens_are_shown_by_source_and_computed_ones_by_the_largest_reasons() -> None:
    assert shown(MIXED) == [
        ["prompts", "1 k tok", "100 %", "in 12 ended requests"],
        ["own cache", "400 tok", "40 %", "that the engines had themselves"],
        ["loaded", "200 tok", "20 %", "from memory"],
        ["loaded", "100 tok", "10 %", "from the tier disk�"],
        ["loaded", "20 tok", "2.0 %", "after a wait for another engine's store"],
        ["computed", "150 tok", "15 %", "they were evicted to make room for a store"],
        ["computed", "50 tok", "5.0 %", "the prompt is shorter than a chunk"],
        ["computed", "40 tok", "4.0 %", "they do not fill a chunk"],
        ["computed", "40 tok", "4.0 %", "for 2 other reasons"],
        ["reloaded", "64 tok", "by preempted requests when they came back, in no other row"],
    ]
    every = shown(MIXED, everything=True)
    assert [row[1] for row in every if row[0] == "computed"] == ["150 tok", "50 tok", "40 tok", "30 tok", "10 tok"]
    assert reason_in_words("of_tomorrow") == "of tomorrow"


def ended(*runs: PromptRun, why: str = "") -> OutcomeView:
    return OutcomeView(prompt_tokens=0, local_tokens=0, found_tokens=0, loaded_tokens=0, runs=list(runs), why=why)


def run(tokens: int, source: str = "", why: str = "") -> PromptRun:
    origin = "loaded" if source else "computed" if why else "local"
    return msgspec.convert({"tokens": tokens, "origin": origin, "source": source, "why": why}, PromptRun)


def test_a_requests_loaded_tokens_name_their_sources_unless_all_are_from_memory() -> None:
    assert loaded_of(ended(run(10), run(5, why="tail"))) == "0"
    assert loaded_of(ended(run(1000, "memory"), run(24, "memory"))) == "1,024"
    assert loaded_of(ended(run(32, "disk"))) == "32 from the tier disk"
    assert loaded_of(ended(run(32, "disk"), run(64, "memory"))) == "96 (64 from memory, 32 from the tier disk)"


def test_a_requests_computed_tokens_name_the_reason_for_most_of_them() -> None:
    assert computed_of(ended(run(10), run(5, "memory"))) == (0, "")
    runs = run(16, why="room"), run(20, why="late"), run(16, why="room")
    assert computed_of(ended(*runs)) == (52, "they were evicted to make room for a store")


FOUND = Verdict(effect="costing", headline="kvdock is up\u202e.", findings=[
    Finding(code="engine_died", severity="warn", text="It died\u202e.", remedy="kvdock sessions"),
    Finding(code="tier_off", severity="bad", text="The tier is off.", remedy="kvdock status"),
])


def test_a_headline_and_its_findings_are_styled_and_name_the_command_that_helps() -> None:
    assert (headline(FOUND).plain, headline(FOUND).style) == ("kvdock is up�.", "red")
    calm = headline(Verdict(effect="helping", headline="It helps."))
    assert (calm.plain, calm.style) == ("It helps.", "")
    died, off = map(finding_in_words, FOUND.findings)
    assert (died.plain, died.style) == ("! It died�. → kvdock sessions", "yellow")
    assert (off.plain, off.style) == ("✗ The tier is off.", "red"), "the status itself says more"
    assert finding_in_words(FOUND.findings[1], "kvdock top").plain == "✗ The tier is off. → kvdock status"


@pytest.mark.parametrize("command", sorted(set(REMEDIES.values())))
def test_every_remedy_is_a_command(command: str) -> None:
    program, name, *options = command.split()
    known = typer.main.get_group(app).commands
    assert program == "kvdock" and name in known, command
    flags = {flag for param in known[name].params for flag in param.opts}
    assert {option for option in options if option.startswith("--")} <= flags


def test_a_request_that_is_found_by_how_its_id_begins_is_named(server: ServerProcess, client: Client) -> None:
    engine = attach(client)
    engine.lookup(keys(1), "chatcmpl-abc-0-1a2b3c4d")
    assert said(server, "explain", "chatcmpl-abc")[0] == "request chatcmpl-abc-0-1a2b3c4d"
    assert said(server, "explain", "chatcmpl-abc-0-1a2b3c4d")[0].startswith("At ")
    engine.close()


def test_a_finding_is_shown_until_it_is_acknowledged(server: ServerProcess, client: Client) -> None:
    attach(client, label="gone\u202e").close()
    eventually(lambda: client.verdict().findings != [])
    lines = said(server, "status")
    assert lines[1].startswith("! An engine's process ended without leaving (gone�) at ")
    assert lines[1].endswith(f" → {REMEDIES['engine_died']}")
    assert any("ended without leaving (gone�) at " in line for line in said(server, "top", "--once"))
    assert said(server, "acknowledge") == ["1 event acknowledged: dead engines, damage, pools left out"]
    assert json.loads(kvdock("acknowledge", "--json", "--server", server.unix).stdout) == {"troubles": 0}
    assert said(server, "status")[1] == ""


# --------------------------------------------------------------------------- by day and by model


@pytest.fixture
def two_models(server: ServerProcess) -> Iterator[list[str]]:
    """A server of which one model was helped and one was not, and a third has not told. Yields the first lines of
    `saved`, and today's date."""
    before = time.strftime("%Y-%m-%d")
    with Client(server.unix) as client:
        helped, slowed = attach(client, model="helped"), attach(client, model="slowed\u202e")
        mute = attach(client, model="mute")
        for engine, load_us in ((helped, 500_000), (slowed, 4_000_000)):
            engine.store(keys(3, "stored"))
            engine.lookup(keys(4, "stored"), "r")
            engine.heartbeat(outcomes=[Outcome(
                request="r", prompt_tokens=70, local_tokens=16, found_tokens=48, loaded_tokens=32, load_us=load_us,
                prefill_tokens_per_s=16.0,
            )])
        mute.lookup(keys(4, "stored"), "r")
        yield [before, time.strftime("%Y-%m-%d")]
        for engine in (helped, slowed, mute):
            engine.close()


def test_saved_is_shown_by_day_tenant_and_model(server: ServerProcess, two_models: list[str]) -> None:
    head, helped, slowed, together = map(cells, said(server, "saved"))
    assert head == ["day", "tenant", "model", "requests", "prompt tokens", "own cache", "loaded", "computed", "saved"]
    assert helped[0] in two_models
    assert helped[1:] == ["-", "helped", "1", "70", "23 %", "46 %", "31 %", "1.5 s"]
    assert slowed[1:] == ["-", "slowed�", "1", "70", "23 %", "46 %", "31 %", "-2.0 s"]
    assert together == ["together", "2", "140", "23 %", "46 %", "31 %", "-500.0 ms"]
    coloured = kvdock("saved", "--server", server.unix, FORCE_COLOR="1").stdout
    assert re.findall(r"\x1b\[31m *(\S+ m?s)", coloured) == ["-2.0 s", "-500.0 ms"]
    own = json.loads(raw(server.unix, "GET", "/v1/hits")[2])
    for more in ([], ["--all"], ["--days", "1"]):
        assert json.loads(kvdock("saved", *more, "--json", "--server", server.unix).stdout) == own
    assert len(own["days"]) == 2
    assert "--days" in refusal(kvdock("saved", "--days", "0"), 2)


def test_saved_without_a_request_that_ended_says_so(server: ServerProcess) -> None:
    assert said(server, "saved") == ["no request has ended that an engine has reported"]
    assert json.loads(kvdock("saved", "--json", "--server", server.unix).stdout) == {"days": []}


def test_status_of_one_model_has_its_hits_and_its_engines_alone(server: ServerProcess, two_models: list[str]) -> None:
    lines = said(server, "status", "--model", "helped")
    shares = "46 % of prompt tokens were loaded; 23 % were in the engines' own caches"
    assert lines[0] == f"helped: {shares}; saved: 1.5 s of computing"
    table = [cells(line) for line in lines]
    assert ["prompts", "70 tok", "100 %", "in 1 ended request"] in table
    assert ["loaded", "32 tok", "46 %", "from memory"] in table
    assert ["computed", "6 tok", "8.6 %", "they do not fill a chunk"] in table
    assert not any("slowed" in line or "mute" in line for line in lines)
    assert said(server, "status", "--model", "slowed\u202e")[0] == (
        f"slowed�: {shares}; cost: loads took 2.0 s longer than computing would have"
    )
    assert said(server, "status", "--model", "mute")[0] == (
        "mute: asked for 64 tokens; the engines do not report what they loaded"
    )
    found = json.loads(kvdock("status", "--model", "helped", "--json", "--server", server.unix).stdout)
    assert (found["model"], found["hits"]["loaded"], found["loaded_share"]) == ("helped", {"memory": 32}, 32 / 70)
    assert [day["model"] for day in found["days"]] == ["helped"]
    assert [engine["lookup_tokens"] for engine in found["engines"]] == [64]


def test_status_of_an_unknown_model_names_the_known_ones(server: ServerProcess, two_models: list[str]) -> None:
    sentence = refusal(kvdock("status", "--model", "helper", "--server", server.unix), 2)
    assert sentence == "kvdock: --model: found 'helper', wanted one of: helped, mute, slowed�"


def test_status_of_a_model_before_any_engine_came(server: ServerProcess) -> None:
    sentence = refusal(kvdock("status", "--model", "m", "--json", "--server", server.unix), 2)
    assert sentence.endswith("wanted a model, but no engine is attached and no request has ended")


def test_status_names_the_engines_that_report_nothing(server: ServerProcess, two_models: list[str]) -> None:
    mute = next(view for view in json.loads(raw(server.unix, "GET", "/v1/sessions")[2])["sessions"]
                if view["model"] == "mute")
    row, = (cells(line) for line in said(server, "status") if line.startswith("unreported"))
    assert row[1] == f"{mute['instance']} asked for 64 tokens; what they load is not reported"
    lines = said(server, "sessions")
    assert any("asked for 64 tok" in line and "mute" in line for line in lines)
    assert any(re.search(r" 23 % +46 % ", line) and "helped" in line for line in lines)


# --------------------------------------------------------------------------- by time


def test_a_time_is_iso_or_so_long_ago() -> None:
    assert parse_moment("--from", "") is None
    ago, iso, day = (parse_moment("--from", text) for text in ("-2h", "2026-11-25T02:00+00:00", "2026-11-25"))
    assert ago == Moment("-2h", 7200.0, True) and ago.at(10_000.0) == 2800.0
    assert iso is not None and iso.at(5.0) == 1795572000.0
    assert day is not None and day.seconds == datetime(2026, 11, 25).timestamp()


@pytest.mark.parametrize("text", ["yesterday", "2h", "-", "-2weeks", "--2h", "2026-13-01", "25:00", "-2h ago",
                                  f"-{'9' * 400}d", f"-{'9' * 300}d", "-१h"])
def test_nonsense_is_no_time(text: str) -> None:
    with pytest.raises(CommandError, match=re.escape(
        f"--from: wanted a time like 2026-11-25T02:00, or -2h for two hours ago, found {text!r}"
    )):
        parse_moment("--from", text)


@pytest.mark.parametrize(("arguments", "told"), [
    (["history", "--from", "yesterday"], "--from: wanted a time like 2026-11-25T02:00, or -2h"),
    (["history", "--to", "soon"], "--to: wanted a time like"), (["events", "--since", "x"], "--since: wanted a time"),
    (["history", "--step", "often"], "--step: wanted a duration like 90s, 15min, 12h or 7d, found 'often'"),
    (["history", "--step", "9" * 400], "--step: wanted a duration like 90s, 15min, 12h or 7d, found '999"),
    (["history", "--over", "weeks"], "--over"), (["events", "--limit", "0"], "--limit"),
])
def test_nonsense_is_refused_before_any_server_is_asked(arguments: list[str], told: str) -> None:
    assert told in refusal(kvdock(*arguments, "--server", "unix:/nobody"), 2)


@pytest.mark.parametrize(("arguments", "told"), [
    (["--from", "-1h", "--to", "-2h"], "--to: wanted a time after --from '-1h', found '-2h'"),
    (["--from", "2199-01-01"], "--from: wanted a time before now, found '2199-01-01'"),
    (["--step", "10s"], "--step: wanted at least 1 min 0 s, the time between two measurements here, found 10.0 s; "
     "with --over minutes it is shortest"),
])
def test_times_that_do_not_fit_are_refused(server: ServerProcess, arguments: list[str], told: str) -> None:
    assert told in refusal(kvdock("history", *arguments, "--server", server.unix), 2)


def past(interval_s: float, count: int) -> Stats:
    """Values of prompts with as many tokens per second as the value has before it. Where that number is odd, all
    was loaded, of the others nothing."""
    made = {"prompt_tokens": [float(at) for at in range(count)], "loaded_share": [float(at % 2) for at in range(count)],
            "local_share": [0.0] * count}
    return Stats(interval_s=interval_s, age_s=interval_s / 4, series=[
        Series(name=name, title="", unit="ratio" if name.endswith("share") else "per_s", chart="", values=list(values))
        for name, values in made.items()
    ])


NOW_S = 1_800_000_000.0


def values(rows: Rows, name: str = "prompt_tokens") -> list[float | None]:
    return next(series.values for series in as_stats(rows).series if series.name == name)


def test_a_part_of_the_history_has_the_values_between_its_times() -> None:
    stats = past(60.0, 10)  # it began 615 s ago, and ended 15 s ago
    whole = part_of(stats, NOW_S, 0.0, NOW_S)
    assert length(whole) == 10 and whole.age_s == 15.0
    inside = part_of(stats, NOW_S, NOW_S - 240, NOW_S - 120)
    assert inside.series[0].values == [6.0, 7.0] and inside.age_s == 15.0 + 120
    assert length(part_of(stats, NOW_S, NOW_S - 5000, NOW_S - 4000)) == 0


def test_rows_are_of_the_step_and_the_first_has_the_rest() -> None:
    rows = rows_of(past(60.0, 10), NOW_S, 240.0)
    assert rows.parts == [(0, 2), (2, 6), (6, 10)] and rows.began_s == NOW_S - 615
    assert values(rows) == [0.5, 3.5, 7.5]
    assert values(rows, "loaded_share") == [1.0, 8 / 14, 16 / 30], "weighted by tokens"
    assert as_stats(rows).interval_s == 240.0
    assert rows_of(past(60.0, 8), NOW_S, 240.0).parts == [(0, 4), (4, 8)]
    assert rows_of(past(60.0, 3), NOW_S, 240.0).parts == [(0, 3)]
    assert rows_of(past(60.0, 0), NOW_S, None).parts == []
    unlimited = rows_of(past(60.0, 100), NOW_S, None).parts
    assert len(unlimited) == 20 and unlimited[-1] == (95, 100), "24 at most"
    with pytest.raises(CommandError, match=r"--step: wanted at least 1 min 0 s, .* found 59.0 s"):
        rows_of(past(60.0, 10), NOW_S, 59.0)


def test_history_of_a_part_has_a_row_for_each_step(server: ServerProcess, client: Client) -> None:
    eventually(lambda: length(client.stats()) >= 20)
    began_s = client.status().now
    lines = said(server, "history", "--from", "-1s", "--step", "0.2s")
    assert 4 <= len(lines) - 1 <= 6 and all(re.match(r"\w{3} \d\d:\d\d:\d\d  ", line) for line in lines[1:])
    asked = ("history", "--from", "-1s", "--step", "0.2s", "--json", "--server", server.unix)
    found = json.loads(kvdock(*asked).stdout)
    assert found["interval_s"] == pytest.approx(0.2) and 4 <= len(found["series"][0]["values"]) <= 6
    at = datetime.fromtimestamp(began_s - 1).isoformat()
    named = json.loads(kvdock(
        "history", "--over", "minutes", "--from", at, "--to", datetime.fromtimestamp(began_s).isoformat(),
        "--step", "0.1s", "--json", "--server", server.unix,
    ).stdout)
    assert len(named["series"][0]["values"]) in (9, 10, 11) and named["interval_s"] == pytest.approx(0.1)
    first, = said(server, "history", "--over", "minutes", "--to", "2020-01-01")
    assert first.startswith("nothing was measured in that time: the history of 100.0 ms a value begins at ")
    before = said(server, "history", "--from", "-10min", "--step", "1s")
    assert len(before) >= 3, "a server that began later has what there is, as fine as it is"
    whole = json.loads(kvdock("history", "--over", "minutes", "--json", "--server", server.unix).stdout)
    assert whole["interval_s"] == 0.1 and len(whole["series"][0]["values"]) >= 20


def test_a_table_leaves_columns_out_where_it_would_cut_words_and_figures() -> None:
    heads = ("model", "prompt tokens", "asked for", "saved")
    rows = [("example/chat-70b-instruct", "30.9 k/s", "15.6 MiB/s", Text("-12 min 55 s", style="red"))]

    def shown(columns: int) -> list[str]:
        console = Console(width=columns, file=io.StringIO(), force_terminal=False)
        say_table(console, heads, rows, texts=("model",), yields=("asked for", "prompt tokens"))
        assert isinstance(console.file, io.StringIO)
        return console.file.getvalue().splitlines()

    assert shown(66) == [
        "model                      prompt tokens   asked for         saved",
        "example/chat-70b-instruct       30.9 k/s  15.6 MiB/s  -12 min 55 s",
    ]
    narrow = shown(53)
    assert narrow[-1] == "not shown, for want of space: asked for"
    assert "30.9 k/s" in narrow[2] and "-12 min 55 s" in narrow[2]
    assert " ".join(shown(36)).endswith("not shown, for want of space: asked for, prompt tokens")
    assert all(len(line) <= 53 for line in narrow)


# --------------------------------------------------------------------------- events


def test_events_are_the_last_ones_or_those_since_a_time(server: ServerProcess, client: Client) -> None:
    for number in range(4):
        attach(client, label=f"engine {number}").close()
    asked = ("events", "--kinds", "attached", "--json")

    def labels(*more: str) -> list[str]:
        return [json.loads(line)["label"] for line in said(server, *asked, *more)]

    assert labels() == [f"engine {number}" for number in range(4)]
    assert labels("--limit", "2") == ["engine 2", "engine 3"] and len(labels("--limit", "9")) == 4
    assert len(labels("--since", "-1h")) == 4 and labels("--since", "2199-01-01") == []
    at = [json.loads(line)["at"] for line in said(server, *asked)]
    between = datetime.fromtimestamp((at[2] + at[3]) / 2)
    assert labels("--since", between.isoformat(timespec="microseconds")) == ["engine 3"]
    assert labels("--since", "-1h", "--limit", "1") == ["engine 3"]
