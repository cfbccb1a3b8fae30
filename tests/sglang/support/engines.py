"""Engines in processes of their own, in the environment that `make test-sglang` makes."""

from __future__ import annotations

import atexit
import json
import os
import random
import select
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

from api_helpers import ServerProcess

from kvdock.client.client import Client

HERE = Path(__file__).parent
ROOT = HERE.parent.parent.parent
ENGINE_PYTHON = ROOT / ".venv-sglang-cpu" / "bin" / "python"

HITS = [128, 320, 512]
"""Whole pages of the prompts below: 64 tokens a page."""


TP2 = {"engine": {"tp_size": 2}, "environ": {"SGLANG_CPU_OMP_THREADS_BIND": "0|1"}}
"""What an engine of two ranks is told."""


def prompts_of(seed: int) -> list[list[int]]:
    return [[random.Random(seed + at).randrange(5, 590) for _ in range(n)] for at, n in enumerate((150, 333, 530))]


PROMPTS = prompts_of(0)


def tokens_of(runs: Sequence[Sequence[tuple[int, str]]]) -> list[list[int]]:
    """The tokens of what Engine.generate gives."""
    return [[token for token, _ in run] for run in runs]


@cache
def _forker() -> socket.socket:
    """The program that engines are forked from, started when the first one is."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with theirs:
        program = [ENGINE_PYTHON, HERE / "engine_process.py", str(theirs.fileno())]
        process = subprocess.Popen(program, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL)

    def end() -> None:
        ours.close()
        process.wait(60)

    atexit.register(end)
    return ours


class EngineFork:
    """A process of engine_process.py: its pipes, and how it ended."""

    def __init__(self, said: dict[str, Any], log_fd: int) -> None:
        (stdin, to), (out, stdout), (news, status) = os.pipe(), os.pipe(), os.pipe()
        socket.send_fds(_forker(), [json.dumps(said).encode()], [stdin, stdout, log_fd, status])
        for fd in (stdin, stdout, status):
            os.close(fd)
        self.stdin, self.stdout = os.fdopen(to, "w"), os.fdopen(out)
        self._news = os.fdopen(news, "rb", buffering=0)  # select() sees what no buffer holds
        self._pid = 0
        self._status: int | None = None

    @property
    def pid(self) -> int:
        if self._pid == 0:
            self._pid = int(self._news.readline())
        return self._pid

    def wait(self, timeout_s: float) -> int:
        """Its exit status, negative for a signal."""
        if self._status is None:
            assert self.pid
            if not select.select([self._news], [], [], timeout_s)[0]:
                raise subprocess.TimeoutExpired("an engine", timeout_s)
            self._status = int(self._news.readline())
        return self._status

    def close(self) -> None:
        """Kills it if it still runs, and whatever it has started."""
        if self._status is None:
            with suppress(ProcessLookupError):
                os.killpg(self.pid, signal.SIGKILL)
        self.stdout.close()
        self._news.close()


def contract_of(model: Path, address: str) -> dict[str, dict[str, str]]:
    """What contract.py finds."""
    with (model / "contract.log").open("w+") as log:
        fork = EngineFork({"contract": [str(model), address]}, log.fileno())
        said = fork.stdout.read()
        fork.stdin.close()
        assert fork.wait(60) == 0, (model / "contract.log").read_text()[-4000:]
        fork.close()
    found: dict[str, dict[str, str]] = json.loads(said.splitlines()[-1])
    return found


class Engine:
    """A whole SGLang on the CPU (engine_process.py). It starts while the caller goes on: the first job waits for it."""

    def __init__(self, model: Path, address: str | None, **said: Any) -> None:
        self._log = (model / f"engine-{os.urandom(4).hex()}.log").open("w+")
        self.process = EngineFork({"model": str(model), "address": address, **said}, self._log.fileno())
        self._is_ready = False

    def generate(self, prompts: Sequence[Sequence[int]], **how: Any) -> tuple[list[Any], list[int]]:
        """([(token, log-probability as hex)] a prompt, tokens a prompt that were not computed)."""
        answer = self.do("generate", prompts=prompts, **how)
        assert all(run is not None for run in answer["runs"]), f"{answer['why']}\n{self.log_text()[-4000:]}"
        return answer["runs"], answer["cached"]

    def do(self, what: str, **more: Any) -> dict[str, Any]:
        self.tell(what, **more)
        return self.answer()

    def tell(self, what: str, **more: Any) -> None:
        """A job whose answer() is to be taken later."""
        self.ready()
        self.process.stdin.write(json.dumps({"do": what, **more}) + "\n")
        self.process.stdin.flush()

    def ready(self) -> None:
        if not self._is_ready:
            assert self.answer()["ready"]
            self._is_ready = True

    def has_answered(self) -> bool:
        return bool(select.select([self.process.stdout], [], [], 0)[0])

    def answer(self) -> dict[str, Any]:
        line = self.process.stdout.readline()
        assert line, f"the engine ended:\n{self.log_text()[-6000:]}"
        answer: dict[str, Any] = json.loads(line)
        return answer

    def drain(self, server: ServerProcess) -> None:
        """Waits until what the engine has offered is stored."""
        with Client(server.unix) as client:
            assert comes_true(lambda: self._is_stored(client)), self.log_text()[-4000:]

    def _is_stored(self, client: Client) -> bool:
        """A pause in which nobody stores: an offer is reserved within a few turns of SGLang's loop."""
        before = client.status().counters["stored_chunks"]
        time.sleep(0.1)
        status = client.status()
        return not status.reservations and status.counters["stored_chunks"] == before

    def log_text(self) -> str:
        return Path(self._log.name).read_text()

    def close(self) -> int:
        self.process.stdin.close()
        try:
            return self.process.wait(60)
        finally:
            self.process.close()
            self._log.close()

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def comes_true(holds: Callable[[], bool], seconds: float = 30.0) -> bool:
    """Whether it comes to be."""
    end = time.monotonic() + seconds
    while not holds():
        if time.monotonic() > end:
            return False
        time.sleep(0.2)  # between two looks
    return True
