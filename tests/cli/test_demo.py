"""`kvdock demo`: its figures, and that it leaves neither processes nor memory behind, however it ends."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import get_args

import pytest
from api_helpers import ServerProcess, eventually
from cli_helpers import KVDOCK, TIMEOUT_S, clean_environ, kvdock, refusal

from kvdock.cli.commands import Preset
from kvdock.client.client import Client
from kvdock.engine.config import PRESETS
from kvdock.shm.objects import pool_objects

pytest.importorskip("torch", reason="the demo's engines need torch: pip install 'kvdock[engine]'")

TINY = ("demo", "--preset", "tiny", "--port", "0", "--turns", "1", "--pool-bytes", "64MiB")


@contextmanager
def lingering(folder: Path) -> Iterator[tuple[subprocess.Popen[str], int]]:
    """A demo that has shown everything, and its pool."""
    with subprocess.Popen(
        [*KVDOCK, *TINY], env=clean_environ(TMPDIR=str(folder), COLUMNS="80"), stdout=subprocess.PIPE,
        stderr=subprocess.PIPE, text=True,
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
                yield demo, int(client.segments().pool_id, 16)
        finally:
            demo.kill()


def test_the_figures_say_what_was_reused() -> None:
    done = kvdock(*TINY, "--json")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["tokens_identical"] and found["turns_with_reuse"] == 1 and found["loaded_bytes"] > 0
    assert [turn["engine"] for turn in found["turns"]] == ["engine A", "engine B"]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_ends_all_of_it(tmp_path: Path, number: signal.Signals) -> None:
    with lingering(tmp_path) as (demo, pool):
        assert pool in pool_objects()
        demo.send_signal(number)
        assert demo.wait(TIMEOUT_S) == 0
        assert pool not in pool_objects() and not list(tmp_path.glob("kvdock-demo-*"))


def test_its_server_ends_with_a_demo_that_was_killed(tmp_path: Path) -> None:
    with lingering(tmp_path) as (demo, pool):
        demo.kill()
        eventually(lambda: pool not in pool_objects() and not list(tmp_path.glob("kvdock-demo-*/kvdock.sock")))


def test_a_demo_whose_server_is_lost_says_so(tmp_path: Path) -> None:
    with lingering(tmp_path) as (demo, _):
        children = Path(f"/proc/{demo.pid}/task/{demo.pid}/children").read_text().split()
        (server,) = (pid for pid in children if b"demo_server" in Path(f"/proc/{pid}/cmdline").read_bytes())
        os.kill(int(server), signal.SIGKILL)
        assert demo.wait(TIMEOUT_S) == 1
        assert demo.stderr is not None
        assert "kvdock: the server ended with status -9" in demo.stderr.read().splitlines()


def test_a_demo_whose_server_cannot_start_says_so(tmp_path: Path, server: ServerProcess) -> None:
    port = server.http.rpartition(":")[2]
    done = kvdock("demo", "--port", port, TMPDIR=str(tmp_path))
    assert done.returncode == 1 and done.stdout.strip() == "" and not list(tmp_path.iterdir())
    assert done.stderr.splitlines() == [
        f"kvdock: port {port} on 127.0.0.1 is in use: choose another",
        "kvdock: the server did not start (see above)",
    ]


@pytest.mark.parametrize(("flags", "said"), [
    (("--port", "99999"), "65535"), (("--preset", "huge"), "'huge'"), (("--pool-bytes", "4 gigs"), "'4 gigs'"),
])
def test_wrong_flags_are_refused_before_anything_starts(flags: tuple[str, str], said: str) -> None:
    assert said in refusal(kvdock("demo", *flags), 2)


def test_every_preset_can_be_named() -> None:
    assert sorted(get_args(Preset)) == sorted(PRESETS)
