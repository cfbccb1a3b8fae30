"""`kvdock top` on a real terminal: what it shows at each width, how it ends, and what it does without a server."""

from __future__ import annotations

import io
import json
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from api_helpers import Engine, ServerProcess, attach, eventually, keys, unique
from cli_helpers import KVDOCK, TIMEOUT_S, clean_environ, kvdock, refusal
from frozen import frozen
from pty_screen import ENTER, LEAVE, PtyProgram
from rich.console import Console

from kvdock.cli.top import Look, pool_bar, show_top, sparkline
from kvdock.client.client import Client
from kvdock.protocol.outcomes import Outcome
from kvdock.protocol.reports import PoolView


@pytest.fixture
def engine(client: Client) -> Iterator[Engine]:
    """An engine that has stored 3 chunks, loaded 2 of 4, had one itself, and holds a lease on them. It saved 1 ms."""
    attached = attach(client, label="watched \x1b[31m", model=unique("model"))
    attached.store(keys(3, "top"))
    request = f"cmpl-{attached.member}"
    attached.lookup(keys(4, "top"), request=request)
    attached.heartbeat(outcomes=[Outcome(
        request=request, prompt_tokens=70, local_tokens=16, found_tokens=48, loaded_tokens=32, load_us=1000,
        prefill_tokens_per_s=16_000.0,
    )])
    yield attached
    attached.leave()


def environ() -> dict[str, str]:
    """The environment in a terminal, without COLUMNS, so that the program asks the terminal for its size."""
    found = clean_environ(TERM="xterm-256color", LANG="C.UTF-8")
    return {name: text for name, text in found.items() if name not in ("COLUMNS", "LINES", "NO_COLOR", "ENV")}


def watching(address: str, columns: int = 100, rows: int = 30) -> PtyProgram:
    return PtyProgram([*KVDOCK, "top", "--server", address, "--interval", "0.2"], environ(), columns, rows)


def has(text: str, shown: list[str]) -> bool:
    return any(text in line for line in shown)


def test_top_shows_the_server_its_engines_and_their_requests(server: ServerProcess, engine: Engine) -> None:
    with watching(server.unix, 120) as program:
        request = f"cmpl-{engine.member}"
        shown = program.wait_for(lambda lines: has(request, lines) and has("% since start", lines))
        assert shown[0].startswith("kvdock ready  up ") and server.unix in shown[0]
        row, = (line.split() for line in shown if line.startswith("watched"))
        assert row == [
            "watched", "�[31m", "live", "23", "%", "46", "%", "0", "B", *["48.0", "KiB"] * 2, "1.0", "ms",
        ]
        assert has("kvdock is up and helping: ", shown) and has("% of prompt tokens were loaded", shown)
        assert has(" of 16.0 MiB used (", shown) and has("48.0 KiB by 1 lease, 0 reservations", shown)
        asked, = (line.split() for line in shown if request in line)
        assert asked[1] == "lookup" and asked[5:10] == ["64", "16", "32", "22", "as"]
        engine.lookup(keys(2, "top"), request="cmpl-later")
        program.wait_for(lambda lines: has("cmpl-later", lines))
        program.press("q")
        assert program.ended() == 0


@pytest.mark.parametrize("size", [(40, 15), (40, 24), (80, 24), (120, 40), (20, 5)])
def test_a_picture_fits_the_window_and_follows_it(server: ServerProcess, engine: Engine, size: tuple[int, int]) -> None:
    with watching(server.unix, *size) as program:
        shown = program.wait_for(lambda lines: has("loaded", lines))
        assert len(shown) <= size[1] and max(map(len, shown)) <= size[0]
        assert not any(line != line.rstrip() for line in shown)
        assert has("own caches.", shown) == (size in [(40, 24), (80, 24), (120, 40)]), "a low window cuts the headline"
        program.resize(33, 8)
        program.wait_for(lambda lines: len(lines) == 8 and max(map(len, lines)) <= 33)
        program.press("Q")
        assert program.ended() == 0


@pytest.mark.parametrize("how", ["q", "\x03", signal.SIGTERM, signal.SIGHUP])
def test_it_ends_cleanly_and_the_terminal_is_as_it_was(server: ServerProcess, how: str | signal.Signals) -> None:
    with watching(server.unix) as program:
        program.wait_for(lambda lines: has("own cache", lines))
        assert program.settings() != program.before, "keys come without Return"
        if isinstance(how, str):
            program.press(how)
        else:
            program.process.send_signal(how)
        assert program.ended() == 0
        assert program.settings() == program.before
        assert (program.text.count(ENTER), program.text.count(LEAVE)) == (1, 1)
        assert program.text.endswith("\x1b[?25h\x1b[?1049l") and "Traceback" not in program.text


def test_ctrl_z_gives_the_terminal_back_until_it_goes_on(server: ServerProcess) -> None:
    """Runs under a shell, because Ctrl-Z cannot stop a program for which no shell waits."""
    with PtyProgram(["sh", "-i"], environ()) as shell:
        shell.press(f"{shlex.join([*KVDOCK, 'top', '--server', server.unix, '--interval', '0.2'])}\n")
        shell.wait_for(lambda lines: has("own cache", lines))
        shell.press("\x1a")
        eventually(lambda: "Stopped" in shell.text.rpartition(LEAVE)[2])
        assert shell.settings() == shell.before
        drawn = shell.pictures()
        shell.press("fg\n")
        eventually(lambda: shell.pictures() > drawn and shell.text.rpartition(ENTER)[2].count(LEAVE) == 0)
        assert shell.settings() != shell.before
        shell.press("q")
        eventually(lambda: shell.settings() == shell.before)
        shell.press("exit\n")
        assert shell.ended() == 0


_STOPPED_WHILE_IT_DRAWS = """
import io, os, signal
from kvdock.cli.top import Terminal

class Out(io.FileIO):
    def write(self, data):
        done = super().write(data)
        if b"picture" in bytes(data):
            os.kill(os.getpid(), signal.SIGTSTP)
        return done

terminal = Terminal(io.TextIOWrapper(io.BufferedWriter(Out(1, "w"))))
with terminal.held():
    terminal.draw("picture")
    while terminal.key(30.0) != "q":
        pass
"""


def test_ctrl_z_while_a_picture_is_written_waits_until_it_is_there() -> None:
    """No shell waits for this program, so it goes on at once."""
    with PtyProgram([sys.executable, "-c", _STOPPED_WHILE_IT_DRAWS], environ()) as program:
        eventually(lambda: program.text.count(ENTER) == 2)
        program.press("q")
        assert program.ended() == 0
        assert program.text.count(LEAVE) == 2 and program.text.index("\x1b[J") < program.text.index(LEAVE)


def test_a_lost_server_is_said_and_comes_back(tmp_path: Path) -> None:
    fixed = {"socket_path": str(tmp_path / "s.sock")}
    address = f"unix:{tmp_path}/s.sock"
    with watching(address) as program:
        shown = program.wait_for(lambda lines: has("no answer", lines))
        assert has("trying again", shown) and not has("own cache", shown), "there was none yet"
        with ServerProcess(**fixed) as server:
            program.wait_for(lambda lines: has("kvdock ready", lines))
            server.stop()
            shown = program.wait_for(lambda lines: has("no answer since", lines))
            assert has("own cache", shown), "the last picture stays"
        with ServerProcess(**fixed):
            program.wait_for(lambda lines: has("kvdock ready", lines) and not has("no answer", lines))
        program.press("q")
        assert program.ended() == 0


def test_a_server_that_hangs_does_not_hold_the_keys(server: ServerProcess) -> None:
    with watching(server.unix) as program:
        program.wait_for(lambda lines: has("kvdock ready", lines))
        with frozen(server.process):
            program.wait_for(lambda lines: has("no answer within", lines))
            program.press("q")
            assert program.ended() == 0


def test_without_an_access_token_it_shows_totals(server: ServerProcess, engine: Engine) -> None:
    with watching(server.http.removeprefix("http://")) as program:
        shown = program.wait_for(lambda lines: has("an access token shows them", lines))
        assert has("1 engine attached", shown) and not has("watched", shown) and not has("cmpl-", shown)
        program.press("q")
        assert program.ended() == 0


def test_without_a_terminal_it_is_one_picture(server: ServerProcess, engine: Engine) -> None:
    for arguments in ([], ["--once"]):
        done = kvdock("top", *arguments, "--server", server.unix, COLUMNS="80")
        assert (done.returncode, done.stderr) == (0, "") and "\x1b" not in done.stdout
        lines = done.stdout.splitlines()
        assert lines[0].startswith("kvdock ready") and "watched" in done.stdout
        assert not [line for line in lines if len(line) > 80 or line != line.rstrip()]


@pytest.mark.parametrize("environ", [
    {"PYTHONIOENCODING": "ascii"}, {"FORCE_COLOR": "1"}, {"TERM": "dumb"},
])
def test_one_picture_needs_neither_block_characters_nor_a_terminal(
    server: ServerProcess, engine: Engine, environ: dict[str, str]
) -> None:
    command = [*KVDOCK, "top", "--server", server.unix]
    done = subprocess.run(command, env=clean_environ(**environ), capture_output=True, text=True, timeout=TIMEOUT_S)
    assert (done.returncode, done.stderr) == (0, "") and "own cache" in done.stdout and ENTER not in done.stdout
    assert done.stdout.isascii() or "ascii" not in environ.values()


def test_a_terminal_that_cannot_move_its_cursor_gets_one_picture(server: ServerProcess) -> None:
    command = [*KVDOCK, "top", "--server", server.unix]
    with PtyProgram(command, {**environ(), "TERM": "dumb"}) as program:
        assert program.ended() == 0
        assert "own cache" in program.text and "\x1b" not in program.text


def test_json_once_is_one_object_and_a_failure_is_a_problem(
    server: ServerProcess, engine: Engine, tmp_path: Path
) -> None:
    found = json.loads(kvdock("top", "--once", "--json", "--server", server.unix).stdout)
    assert found["reachable"] and found["problem"] is None and 0 < found["loaded_share"] < 1
    figures, = found["engines"]
    assert (figures["lookup_tokens"], figures["state"]) == (64, "live")
    assert figures["hits"] == {
        "requests": 1, "prompt_tokens": 70, "local_tokens": 16, "loaded": {"memory": 32},
        "computed": {"never_stored": 16, "tail": 6}, "reloaded_tokens": 0, "saved_s": pytest.approx(0.001),
    }
    assert (figures["loaded_share"], figures["local_share"]) == (32 / 70, 16 / 70)
    assert (figures["loaded_bytes"], figures["stored_bytes"]) == (0, 3 * 16384), "it still holds its lease"
    assert found["status"]["pool_id"] == f"{server.pool_id:016x}" and len(found["requests"]) >= 2
    for more in ([], ["--once"], ["--once", "--json"]):
        said = refusal(kvdock("top", *more, "--server", f"unix:{tmp_path}/nobody.sock"), 1)
        assert "no server answers" in said
    assert "--interval" in refusal(kvdock("top", "--interval", "0", "--json"), 2)


class Reader(io.StringIO):
    """Presses Ctrl-C after the fifth line."""

    def write(self, text: str) -> int:
        written = super().write(text)
        if self.getvalue().count("\n") == 5:
            raise KeyboardInterrupt
        return written


def test_json_goes_on_where_answers_take_longer_than_the_interval(server: ServerProcess) -> None:
    reader = Reader()
    show_top(server.unix, interval_s=1e-9, once=False, as_json=True, console=Console(file=reader))
    assert [json.loads(line)["reachable"] for line in reader.getvalue().splitlines()] == [True] * 5


def test_json_is_an_object_for_each_interval_server_or_not(tmp_path: Path) -> None:
    command = [*KVDOCK, "top", "--json", "--interval", "0.2", "--server", f"{tmp_path}/s.sock"]
    with subprocess.Popen(
        command, env=clean_environ(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None

        def until(reachable: bool) -> dict[str, object]:
            assert process.stdout is not None
            for line in process.stdout:
                tick: dict[str, object] = json.loads(line)
                if tick["reachable"] is reachable:
                    return tick
            raise AssertionError("it ended")

        try:
            problem = until(False)["problem"]
            assert isinstance(problem, dict) and problem["code"] == "no_server"
            with ServerProcess(socket_path=str(tmp_path / "s.sock")):
                assert until(True)["rates"] is not None
            assert until(False)["status"] is None
            process.send_signal(signal.SIGINT)
            _, stderr = process.communicate(timeout=TIMEOUT_S)
            assert (process.returncode, stderr) == (0, "")
        finally:
            process.kill()


def test_a_reader_that_has_seen_enough_ends_it_without_a_word(server: ServerProcess) -> None:
    command = [*KVDOCK, "top", "--json", "--interval", "0.2", "--server", server.unix]
    with subprocess.Popen(command, env=clean_environ(), stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None and process.stderr is not None
        process.stdout.readline()
        process.stdout.close()
        assert process.wait(TIMEOUT_S) == -signal.SIGPIPE and process.stderr.read() == b""


# --------------------------------------------------------------------------- its parts


@pytest.mark.parametrize(("values", "columns", "drawn"), [
    ([0.0, 0.5, 1.0, None], 10, "▁▅█·"), ([1.0, 0.0, None, None, 0.5, None], 3, "▅·▅"), ([], 5, ""),
    ([0.0, 1.0, 1.0], 2, "▁█"),
])
def test_a_sparkline_keeps_the_newest_on_the_right(values: list[float | None], columns: int, drawn: str) -> None:
    assert sparkline(values, columns, plain=False) == drawn
    assert sparkline(values, columns, plain=True).isascii()


def test_a_pool_bar_shows_what_is_stored_what_is_on_its_way_and_what_is_free() -> None:
    pool = PoolView(limit_bytes=100, allocated_bytes=100, prefaulted_bytes=100, free_bytes=50, reserved_bytes=10,
                    ready_bytes=30, quarantined_bytes=10, held_bytes=0, segments=1)
    assert pool_bar(pool, 10, plain=True) == "###++....." and pool_bar(pool, 10, plain=False) == "███▒▒·····"
    assert Look(60, 20).narrow and not Look(80, 20).narrow
