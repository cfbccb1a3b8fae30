"""An engine's page of docs/start: its commands, as they are printed, with engines on the CPU.

Ports, sizes, the model and what starts an engine are the test's. `make wheels` tries out what `pip install` brings.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.error import URLError
from urllib.request import Request, urlopen

import pytest
from api_helpers import comes_true
from engines import MARK
from paths import ROOT
from ports import held_port
from stories import EXAMPLE_ARGS, EXAMPLE_ENVIRON, EXAMPLE_PROGRAM
from whole_engines import run_to_its_end

from kvdock.client.client import Client
from kvdock.protocol.errors import ApiError, ServerUnavailable

pytestmark = [MARK, pytest.mark.timeout(600), pytest.mark.xdist_group("programs")]

PAGE = ROOT / "docs" / "start" / f"{MARK.name}.md"
PROMPT = "The quick brown fox jumps over the lazy dog. " * 30
SMALL = {"vllm": "--enable-prompt-tokens-details", "sglang": "--enable-cache-report"}[MARK.name]
PATIENCE_S = 500.0


def printed(page: Path) -> list[str]:
    """The commands in its blocks of shell, without remarks."""
    blocks = re.findall(r"^```sh\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL)
    lines = "".join(blocks).replace("\\\n", "").splitlines()
    return [line.partition(" #")[0].strip() for line in lines]


def answered(url: str, body: dict[str, Any] | None = None) -> bytes:
    """Empty: not yet."""
    try:
        data = json.dumps(body).encode() if body else None
        with urlopen(Request(url, data, {"content-type": "application/json"}), timeout=PATIENCE_S) as answer:
            return bytes(answer.read()) or b"{}"
    except URLError:
        return b""


@dataclass
class Stranger:
    """Types commands: each that stays goes into a terminal of its own, which ends with `terminals`."""

    folder: Path
    environ: dict[str, str]
    terminals: ExitStack
    engine: str = ""
    """Host and port of the engine that was started last."""

    def starts(self, command: str, ready: Callable[[str], bool], **environ: str) -> None:
        """Waits until it is ready, by what it has printed."""
        log = self.folder / f"{len(list(self.folder.glob('*.log')))}.log"
        process = self.terminals.enter_context(terminal(command, {**self.environ, **environ}, log))
        waited = comes_true(lambda: process.poll() is not None or ready(log.read_text()), PATIENCE_S)
        assert waited and process.poll() is None, log.read_text()[-4000:]

    def asks(self, command: str) -> str:
        done = run_to_its_end(["sh", "-c", command], 60, self.environ)
        assert done.returncode == 0, f"{command}: {done.stdout}{done.stderr}"
        return done.stdout

    def starts_an_engine(self, command: str, model: Path) -> Any:
        """The answer of the new engine to the prompt."""
        port = held_port()
        self.engine = f"127.0.0.1:{port}"
        url = f"http://{self.engine}"
        command = command.replace("MODEL", str(model))
        self.starts(command, lambda _: bool(answered(f"{url}/health")), START_PORT=str(port))
        asked = {"model": "model", "prompt": PROMPT, "max_tokens": 16, "temperature": 0}
        answer = json.loads(answered(f"{url}/v1/completions", asked))
        found = (answer["usage"]["prompt_tokens_details"] or {}).get("cached_tokens", 0)
        return answer["id"], answer["choices"][0]["text"], found


@contextmanager
def terminal(command: str, environ: dict[str, str], log: Path) -> Iterator[subprocess.Popen[bytes]]:
    with log.open("w") as out, subprocess.Popen(
        ["sh", "-c", command], stdin=subprocess.DEVNULL, stdout=out, stderr=out, env=environ, start_new_session=True
    ) as process:
        try:
            yield process
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGINT)
            with suppress(subprocess.TimeoutExpired):
                process.wait(30)
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)


@pytest.fixture
def stranger(tmp_path: Path) -> Iterator[Stranger]:
    (tmp_path / "kvdock").symlink_to(Path(sys.executable).parent / "kvdock")
    engine = tmp_path / MARK.name
    more = f'"$@" {EXAMPLE_ARGS} {SMALL} --served-model-name model --host 127.0.0.1 --port "$START_PORT"'
    engine.write_text(f"#!/bin/sh\nshift\nexec {EXAMPLE_PROGRAM.replace(chr(34) + '$@' + chr(34), more)}\n")
    engine.chmod(0o755)
    # Without COLUMNS, which pytest-xdist sets in its workers: ids would be folded.
    kept = {name: value for name, value in os.environ.items() if not name.startswith("KVDOCK_") and name != "COLUMNS"}
    environ = {
        **kept, **EXAMPLE_ENVIRON,
        "PATH": f"{tmp_path}:{os.environ['PATH']}", "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1",
        "KVDOCK_SOCKET_PATH": str(tmp_path / "kvdock.sock"), "KVDOCK_PORT": "0",
        "KVDOCK_POOL_BYTES": "64MiB",
    }
    with ExitStack() as terminals:
        yield Stranger(tmp_path, environ, terminals)


def stored(client: Client, chunks: int) -> bool:
    with suppress(ServerUnavailable, ApiError):
        return client.status().counters["stored_chunks"] >= chunks
    return False


def test_the_commands_of_its_page_show_a_hit(stranger: Stranger, models: dict[str, Path]) -> None:
    commands, answers, said = printed(PAGE), [], {}
    client = stranger.terminals.enter_context(Client(f"unix:{stranger.environ['KVDOCK_SOCKET_PATH']}"))
    for command in commands:
        if command.startswith("pip"):
            assert command in ("pip install kvdock", "pip uninstall --yes kvdock kvdock-engine")
        elif command.startswith("kvdock serve"):
            stranger.starts(command, lambda _: stored(client, 0))
        elif re.search(rf"\b{MARK.name} serve\b", command):
            answers.append(stranger.starts_an_engine(command, models["llama"]))
            assert comes_true(lambda: stored(client, 1)), "nothing was stored"
        elif command.startswith("curl"):
            as_started = re.sub(r"localhost:\d+", stranger.engine, command.replace("MODEL", "model"))
            said[command] = stranger.asks(as_started)
            assert " -d " not in command or '"prompt_tokens"' in said[command], said[command]
        elif command.endswith("--follow"):
            stranger.starts(command, bool)
        else:
            # A request that has ended is shown within two seconds.
            with_id = command.replace("ID", answers[-1][0])
            is_listed = comes_true(lambda: answers[-1][0] in stranger.asks("kvdock requests"))
            assert is_listed, stranger.asks("kvdock requests; kvdock status")
            said[command] = stranger.asks(with_id)

    (first, text, cold), (second, same_text, loaded) = answers
    assert (cold, same_text) == (0, text) and loaded >= 128, answers
    assert all(said.values()), said
    for name, hit in ((first, False), (second, True)):
        told = stranger.asks(f"kvdock explain {name}")
        assert (f"the server had the first {loaded:,} of them" in told) == hit, told
