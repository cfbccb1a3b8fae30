"""`kvdock demo`: its figures, and that it leaves neither processes nor memory behind, however it ends."""

from __future__ import annotations

import json
import math
import os
import shlex
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from io import StringIO
from itertools import islice
from pathlib import Path
from typing import get_args

import psutil  # type: ignore[import-untyped]  # it has no stubs here
import pytest
from api_helpers import ServerProcess, access_file, eventually
from cli_helpers import KVDOCK, TIMEOUT_S, clean_environ, complaints, kvdock, refusal
from rich.console import Console

from kvdock.cli import demo as demo_module
from kvdock.cli.demo import DemoServer, Screen, asked, linger
from kvdock.cli.errors import FAILED, CommandError
from kvdock.cli.main import Preset
from kvdock.client.client import Client
from kvdock.engine.config import PRESETS
from kvdock.shm.objects import pool_objects

pytest.importorskip("torch", reason="the demo's engines need torch: pip install 'kvdock[engine]'")

TINY = ("demo", "--preset", "tiny", "--port", "0", "--turns", "1", "--pool-bytes", "64MiB")


@contextmanager
def lingering(folder: Path) -> Iterator[tuple[subprocess.Popen[str], int, str]]:
    """A demo after its last turn, its pool, and its output."""
    with subprocess.Popen(
        [*KVDOCK, *TINY], env=clean_environ(TMPDIR=str(folder), COLUMNS="80"), stdout=subprocess.PIPE,
        stderr=subprocess.PIPE, text=True, start_new_session=True,
    ) as demo:
        try:
            assert demo.stdout is not None
            said = ""
            while "Ctrl-C ends it" not in said:
                line = demo.stdout.readline()
                assert line, said
                said += line
            assert "Tokens identical in every turn" in said and "…" not in said
            (socket_path,) = folder.glob("kvdock-demo-*/kvdock.sock")
            with Client(f"unix:{socket_path}") as client:
                yield demo, int(client.segments().pool_id, 16), said
        finally:
            demo.kill()


def test_the_figures_say_what_was_reused() -> None:
    done = kvdock(*TINY, "--json")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["tokens_identical"] and found["turns_with_reuse"] == 1 and found["loaded_bytes"] > 0
    assert [turn["engine"] for turn in found["turns"]] == ["engine A", "engine B"] and found["model"] == "tiny"


@pytest.mark.parametrize("count", [13, 14])
def test_a_question_comes_again_for_an_engine_that_has_not_answered_it(count: int) -> None:
    questions = [f"{number}?" for number in range(count)]
    turns = [(question, list(numbers)) for question, numbers in islice(asked(questions, 2), 2 * count)]
    assert turns[0] == ("0?", [0, 1]) and [question for question, _ in turns] == questions * 2
    assert [numbers for _, numbers in turns[1:count]] == [[number % 2] for number in range(1, count)]
    pairs = zip(turns[1:count], turns[count + 1 :], strict=True)
    assert all(sorted(first + second) == [0, 1] for (_, first), (_, second) in pairs)


def processes_of(folder: Path) -> list[str]:
    """Command lines of all processes whose temporary folder is this one."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # it has just ended, or is another user's
            if f"TMPDIR={folder}".encode() in (process / "environ").read_bytes().split(b"\0"):
                found.append((process / "cmdline").read_bytes().replace(b"\0", b" ").decode())
    return found


@pytest.mark.parametrize(
    "after_s", [0.6, 1.2, *(pytest.param(time_s, marks=pytest.mark.sweep) for time_s in (0.1, 0.9, 4.0))]
)
def test_ctrl_c_at_any_moment_ends_all_of_it_without_a_traceback(tmp_path: Path, after_s: float) -> None:
    program = ["env", "--block-signal=INT", *KVDOCK, "demo", "--port", "0", "--pool-bytes", "64MiB"]
    with subprocess.Popen(
        program, env=clean_environ(TMPDIR=str(tmp_path), COLUMNS="80"), stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT, text=True, start_new_session=True,
    ) as demo:
        for _ in range(3):  # people press it again
            time.sleep(after_s)
            after_s = 0.1
            with suppress(ProcessLookupError):
                os.killpg(demo.pid, signal.SIGINT)
        said, _ = demo.communicate(timeout=TIMEOUT_S)
    assert demo.returncode == 130 and said.splitlines()[-1] == "kvdock: stopped", said
    assert not any(word in said for word in ("Traceback", "Exception", "WARNING")), said
    assert processes_of(tmp_path) == [] and not list(tmp_path.iterdir())


@pytest.mark.sweep
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_to_the_whole_group_ends_all_of_it_without_a_warning(tmp_path: Path, number: signal.Signals) -> None:
    with lingering(tmp_path) as (demo, pool, _):
        os.killpg(demo.pid, number)
        _, err = demo.communicate(timeout=TIMEOUT_S)
        assert (demo.returncode, complaints(err)) == (0, [])
        assert pool not in pool_objects() and processes_of(tmp_path) == []


@pytest.mark.sweep
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_signal_ends_all_of_it(tmp_path: Path, number: signal.Signals) -> None:
    with lingering(tmp_path) as (demo, pool, _):
        assert pool in pool_objects()
        demo.send_signal(number)
        assert demo.wait(TIMEOUT_S) == 0
        assert pool not in pool_objects() and not list(tmp_path.glob("kvdock-demo-*"))


def test_its_last_hint_runs_as_printed_and_its_server_ends_with_a_demo_that_was_killed(tmp_path: Path) -> None:
    with lingering(tmp_path) as (demo, pool, said):
        hint = said.partition("or run: ")[2].splitlines()[0]
        done = subprocess.run(shlex.split(hint), env=clean_environ(PATH=""), capture_output=True, text=True)
        assert done.returncode == 0 and "engine A" in done.stdout, (hint, done.stderr)
        demo.kill()
        eventually(lambda: pool not in pool_objects() and not list(tmp_path.glob("kvdock-demo-*/kvdock.sock")))


def lose(folder: Path) -> int:
    """Kills the server that this process has started for its demo in the folder; the pool that it served."""
    with Client(f"unix:{folder}/kvdock.sock") as client:
        pool = int(client.segments().pool_id, 16)
    (server,) = (child for child in psutil.Process().children() if str(folder) in "".join(child.cmdline()))
    server.kill()
    return pool


def test_a_server_that_was_lost_is_started_again_and_takes_over_its_pool(tmp_path: Path) -> None:
    notes = StringIO()
    screen = Screen(Console(file=notes))

    def is_noted() -> bool:
        server.keep_up(screen)
        return bool(notes.getvalue())

    access_file(tmp_path)
    server = DemoServer(0, "64MiB", tmp_path, steady_s=0.0)
    try:
        pool = lose(tmp_path)
        eventually(is_noted)
        assert "the server ended with status -9; a new one takes over its pool" in notes.getvalue()
        with Client(server.address) as client:
            assert int(client.segments().pool_id, 16) == pool
    finally:
        server.close()


def test_a_demo_ends_if_its_server_is_lost_soon_after_it_was_started(tmp_path: Path) -> None:
    access_file(tmp_path)
    server = DemoServer(0, "64MiB", tmp_path, steady_s=math.inf)
    lose(tmp_path)
    with pytest.raises(CommandError, match="the server ended with status -9 soon after it was started") as ended:
        linger(server, Screen(Console(quiet=True)))
    assert ended.value.exit_code == FAILED


def test_without_a_limit_it_goes_on_until_ctrl_c(tmp_path: Path) -> None:
    command = [*KVDOCK, *(word for word in TINY if word not in ("--turns", "1"))]
    with subprocess.Popen(
        command, env=clean_environ(TMPDIR=str(tmp_path), COLUMNS="80"), stdout=subprocess.PIPE, text=True,
        start_new_session=True,
    ) as demo:
        try:
            assert demo.stdout is not None
            said = ""
            while "\n3. " not in said:
                line = demo.stdout.readline()
                assert line, said
                said += line
            demo.send_signal(signal.SIGINT)
            rest, _ = demo.communicate(timeout=TIMEOUT_S)
        finally:
            demo.kill()
    assert demo.returncode == 0 and "Tokens identical in every turn" in rest and rest.endswith("stopping\n")
    assert processes_of(tmp_path) == []
    said = " ".join(said.split())
    assert "no gain yet; it computed" in said and "and stored them; same answer" in said and "times as fast" in said
    assert "engine B: " in said.partition(" 2. ")[0], "in the first turn both answer"


def test_without_the_trained_model_it_says_so_and_shows_a_seeded_one(monkeypatch: pytest.MonkeyPatch) -> None:
    notes: list[str] = []
    screen = Screen(Console(quiet=True))
    monkeypatch.setattr(screen, "note", notes.append)
    monkeypatch.setattr(demo_module, "MODEL_PACKAGES", ("no_such_package_1",))
    assert demo_module.choose("smollm2", screen) == "small" and "no_such_package_1" in notes[0]
    assert demo_module.choose("tiny", screen) == "tiny" and len(notes) == 1


def test_a_port_in_use_is_refused_with_the_way_to_another(tmp_path: Path, server: ServerProcess) -> None:
    port = server.http.rpartition(":")[2]
    said = refusal(kvdock("demo", "--port", port, TMPDIR=str(tmp_path)), 1)
    assert f"port {port} on 127.0.0.1 is in use" in said and "PORT=8000 make run" in said
    assert not list(tmp_path.iterdir())


def test_a_demo_whose_server_cannot_start_says_so(tmp_path: Path) -> None:
    done = kvdock("demo", "--port", "0", TMPDIR=str(tmp_path), KVDOCK_ADOPT="require")
    assert done.returncode == 1 and done.stdout.strip() == "" and not list(tmp_path.iterdir())
    reason, said = done.stderr.splitlines()
    assert reason.startswith("kvdock: ") and said == "kvdock: the server did not start (see above)"


@pytest.mark.parametrize(("flags", "said"), [
    (("--port", "99999"), "65535"), (("--preset", "huge"), "'huge'"), (("--pool-bytes", "4 gigs"), "'4 gigs'"),
])
def test_wrong_flags_are_refused_before_anything_starts(flags: tuple[str, str], said: str) -> None:
    assert said in refusal(kvdock("demo", *flags), 2)


def test_every_preset_can_be_named() -> None:
    assert sorted(get_args(Preset)) == sorted([*PRESETS, "smollm2"])
