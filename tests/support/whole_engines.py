"""Whole engines of vLLM and SGLang in processes of their own, as tests start and ask them.

Stories that both tell alike are in tests/whole. tests/vllm/support/engines.py and tests/sglang/support/engines.py say
where each engine's environment is; tests/vllm/support/stories.py and tests/sglang/support/stories.py say what is an
engine's own in those stories.
"""

from __future__ import annotations

import atexit
import fcntl
import json
import os
import random
import re
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, ClassVar, Self

import pytest
from paths import ROOT, SUPPORT
from ports import held_port

HITS, NOTHING = [128, 320, 512], [0, 0, 0]
"""Tokens in whole chunks of three prompts, of 64 tokens a chunk."""


def prompts_of(seed: int) -> list[list[int]]:
    """Three prompts that share no chunk with those of another seed. A local hit, of whole blocks of 16 or 32 tokens,
    ends where a load ends."""
    draw = random.Random(seed)
    return [[draw.randrange(5, 590) for _ in range(length)] for length in (140, 333, 520)]


PROMPTS, OTHERS = prompts_of(0), prompts_of(1)
CROWD = [prompt for seed in range(2, 10) for prompt in prompts_of(seed)]


@dataclass(frozen=True)
class Load:
    """An engine that stores, and another one that loads it. `how`, `reader`: what they are told; `reader` is None where
    there is none. `hits`: tokens of PROMPTS; `shape`: groups and writers of their namespace."""

    kind: str
    how: dict[str, Any] = field(default_factory=dict)
    reader: dict[str, Any] | None = field(default_factory=dict)
    hits: list[int] = field(default_factory=lambda: HITS)
    shape: tuple[int, int] = (1, 1)
    reads_the_same: bool = True
    """They have as many ranks, so that they round alike."""


WITH, LATER, NEVER = "flushed with it", "flushed later", "never flushed"
CONNECTOR, BEFORE = "flushed with the connector", "flushed before it"
"""What becomes of an engine's own prefix cache when its weights change."""


def tokens_of(runs: Sequence[Sequence[tuple[int, str]]]) -> list[list[int]]:
    """The tokens of what WholeEngine.generate gives."""
    return [[token for token, _ in run] for run in runs]


def comes_back(engine: WholeEngine, prompts: Sequence[Sequence[int]] = PROMPTS) -> tuple[list[Any], list[int]]:
    """What it generates with nothing in its own cache."""
    engine.flush()
    return engine.generate(prompts)


def python_path(*folders: Path) -> str:
    """PYTHONPATH with `folders` before those that it has."""
    return ":".join([*map(str, folders), *filter(None, [os.environ.get("PYTHONPATH")])])


def with_support() -> dict[str, str]:
    """The environment of a program that imports from tests/support."""
    return {**os.environ, "PYTHONPATH": python_path(SUPPORT)}


@cache
def _forker(*program: Path) -> socket.socket:
    """A program that calls engine_forker.fork_engines(), started when its first engine is."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with theirs:
        process = subprocess.Popen(
            [*program, str(theirs.fileno())], pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL, env=with_support()
        )

    def end() -> None:
        ours.close()
        process.wait(60)

    atexit.register(end)
    return ours


class EngineFork:
    """A process forked from `program`: its pipes, and how it ended."""

    def __init__(self, program: tuple[Path, ...], said: dict[str, Any], log_fd: int) -> None:
        (stdin, to), (out, stdout), (news, status) = os.pipe(), os.pipe(), os.pipe()
        socket.send_fds(_forker(*program), [json.dumps(said).encode()], [stdin, stdout, log_fd, status])
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
        """Kills it if it still runs, and every process that it has started."""
        if self._status is None:
            with suppress(ProcessLookupError):
                os.killpg(self.pid, signal.SIGKILL)
        self.stdout.close()
        self._news.close()


class WholeEngine:
    """A whole engine on the CPU. It starts while the caller goes on; `about` and the first job wait for it. With the
    block of a `with` that raises nothing it must end well."""

    program: ClassVar[tuple[Path, Path]]
    """The Python of the engine's environment, and the program that engines are forked from."""

    def __init__(self, model: Path, address: str | None, **said: Any) -> None:
        self.address = address
        self._log = (model / f"engine-{os.urandom(4).hex()}.log").open("w+")
        self.process = EngineFork(self.program, {"model": str(model), "address": address, **said}, self._log.fileno())
        self._about: dict[str, Any] | None = None

    @property
    def about(self) -> dict[str, Any]:
        """How the engine is set up: the first line that it writes."""
        if self._about is None:
            self._about = self.answer()
        return self._about

    def generate(self, prompts: Sequence[Sequence[int]], **how: Any) -> tuple[list[Any], list[int]]:
        """([(token, log-probability as hex)] a prompt, tokens a prompt that were not computed)."""
        answer = self.done(self.do("generate", prompts=prompts, **how))
        return answer["runs"], answer["cached"]

    def done(self, answer: dict[str, Any]) -> dict[str, Any]:
        """The answer to a job "generate", of which no request failed."""
        assert set(answer["why"]) == {"length"}, f"{answer['why']}\n{self.log_text()[-4000:]}"
        return answer

    def flush(self, **how: Any) -> None:
        """Empties the engine's own prefix cache, which must be idle."""
        assert self.do("flush", **how)["flushed"]

    def drain(self) -> None:
        """Waits until what the engine has computed is stored."""
        self.do("drain")

    def change(self, route: str, folder: Path | None = None, **how: Any) -> None:
        """Gives it the weights of a model's folder. The routes are those of tests/vllm/support/weight_routes.py
        or tests/sglang/support/weight_routes.py."""
        self.do("change", route=route, folder=str(folder), **how)

    def figures(self) -> dict[str, float]:
        """What it exports for Prometheus, by name without the engine's."""
        samples = re.findall(r"^\w+:(\w+)(?:\{.*\})? (\S+)$", self.do("metrics")["text"], re.MULTILINE)
        return {name: float(value) for name, value in samples if not name.endswith("_created")}  # those are times

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
        assert line, f"the engine ended:\n{self.log_text()[-6000:]}"
        answer: dict[str, Any] = json.loads(line)
        return answer

    def log_text(self) -> str:
        return Path(self._log.name).read_text()

    def close(self) -> int:
        self.process.stdin.close()
        try:
            return self.process.wait(60)
        finally:
            self.process.close()
            self._log.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, raised: type[BaseException] | None, *exc: object) -> None:
        status = self.close()
        assert raised is not None or status == 0, self.log_text()[-4000:]


def make_models(factory: pytest.TempPathFactory, python: Path, script: Path, kinds: Sequence[str]) -> dict[str, Path]:
    """Folders by kind, weights and all, made by `script`. Workers of pytest-xdist share them."""
    base = factory.getbasetemp()
    shared = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base
    folders = {kind: shared / f"model-{kind}" for kind in kinds}
    with (shared / "models.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (shared / "models.made").exists():
            for folder in folders.values():
                folder.mkdir()
            words = [str(word) for pair in folders.items() for word in pair]
            subprocess.run([python, script, *words], check=True, capture_output=True, env=with_support())
            (shared / "models.made").touch()
    return folders


# ---------------------------------------------------------------------- programs that start engines


def run_to_its_end(
    command: Sequence[str | Path], seconds: float, environ: dict[str, str]
) -> subprocess.CompletedProcess[str]:
    """However it ends, nothing that it started goes on."""
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, errors="replace", env=environ,
        start_new_session=True,
    ) as process:
        try:
            out, err = process.communicate(timeout=seconds)
        finally:
            if process.poll() is None:
                process.terminate()  # it ends its children, servers among them that remove their memory
                with suppress(subprocess.TimeoutExpired):
                    process.wait(30)
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
    return subprocess.CompletedProcess(command, process.returncode, out, err)


EXAMPLE: list[str | Path] = ["sh", ROOT / "examples" / "two_instances.sh"]


def run_example(engine: str, program: str, folder: Path, seconds: float, **environ: str) -> tuple[int, list[str]]:
    """examples/two_instances.sh, as it is. Both instances answer alike, and the first from nothing. Returns how many
    tokens the second has loaded, and the logs of both."""
    done, logs = run_instances(engine, program, folder, seconds, **environ)
    answers = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    ours, theirs = (answer["choices"][0]["text"] for answer in answers)
    assert ours == theirs and ours
    cold, loaded = ((answer["usage"]["prompt_tokens_details"] or {}).get("cached_tokens", 0) for answer in answers)
    assert cold == 0
    return loaded, logs


def run_instances(
    engine: str, program: str, folder: Path, seconds: float, **environ: str
) -> tuple[subprocess.CompletedProcess[str], list[str]]:
    """examples/two_instances.sh, which ends well. `program`: the shell's command in the place of `engine serve`. With
    the logs of both instances."""
    (folder / "kvdock").symlink_to(Path(sys.executable).parent / "kvdock")
    (folder / engine).write_text(f"#!/bin/sh\nshift\nexec {program}\n")
    (folder / engine).chmod(0o755)
    ports = [str(held_port()), str(held_port())]
    done = run_to_its_end(EXAMPLE, seconds, {
        **os.environ, "PATH": f"{folder}:{os.environ['PATH']}", "ENGINE": engine, "POOL": "64MiB", "FIRST": ports[0],
        "SECOND": ports[1], "SENTENCES": "30", "LOGS": str(folder), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1",
        **environ,
    })
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    return done, [(folder / f"{port}.log").read_text() for port in ports]


def make_model(script: Path, kind: str, folder: Path) -> Path:
    """With this Python, which has the engine for a GPU."""
    (folder / kind).mkdir(exist_ok=True)
    subprocess.run([sys.executable, script, kind, folder / kind], check=True, capture_output=True, env=with_support())
    return folder / kind


def run_on_gpu(script: Path, *said: object, seconds: float = 300.0, **environ: str) -> Any:
    """The JSON that a script prints last, with this Python."""
    path = os.pathsep.join(sys.path)
    command: list[str | Path] = [sys.executable, script, *map(str, said)]
    done = run_to_its_end(command, seconds, {**os.environ, "PYTHONPATH": path, **environ})
    assert done.returncode == 0, done.stderr[-6000:]
    return json.loads(done.stdout.splitlines()[-1])
