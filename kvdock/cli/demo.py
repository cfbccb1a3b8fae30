"""`kvdock demo`: one server, two engines that share it, and a third engine without kvdock for comparison.

All are real processes. The two engines take turns answering questions about a long document, so in each turn one of
them gets text whose KV the other has computed. Each row shows the time to the first token with and without reuse, how
much was loaded, and whether the tokens are the same. Afterwards the server stays up until Ctrl-C.
"""

from __future__ import annotations

import itertools
import json
import os
import shlex
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.live import Live
from rich.spinner import Spinner
from rich.table import Table

from kvdock.api.access.edits import add_token
from kvdock.api.errors import StartupError
from kvdock.api.http.listen import bind_tcp
from kvdock.api.server import ending_signals
from kvdock.api.settings import effective
from kvdock.cli.errors import DONE, FAILED, CommandError
from kvdock.client.client import Client
from kvdock.engine import tokenizer

CHUNK_TOKENS = 256
ANSWER_TOKENS = 24
END_TIMEOUT_S = 30.0


@dataclass(frozen=True)
class Turn:
    """One question to one engine, and the answer's figures."""

    turn: int
    engine: str
    prompt_tokens: int
    loaded_tokens: int
    loaded_bytes: int
    ttft_alone_s: float
    ttft_kvdock_s: float
    same_tokens: bool

    @property
    def speedup(self) -> float:
        return self.ttft_alone_s / self.ttft_kvdock_s


def _started(module: str, *arguments: str, pass_fds: Sequence[int] = ()) -> subprocess.Popen[str]:
    """Starts a module of kvdock.cli in a process session of its own, so that Ctrl-C reaches only the demo, which then
    ends the module's process."""
    return subprocess.Popen(
        [sys.executable, "-m", f"kvdock.cli.{module}", *arguments], pass_fds=pass_fds,
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True,
    )


class DemoEngine:
    """One engine, reached through two pipes."""

    def __init__(self, name: str, address: str | None) -> None:
        self.name, self.address = name, address
        reads, to_it = os.pipe()
        from_it, writes = os.pipe()
        self.its_ends = reads, writes
        self._to_it, self._from_it = os.fdopen(to_it, "w"), os.fdopen(from_it)

    def wait_ready(self) -> None:
        self._read()

    def ask(self, prompt: list[int]) -> dict[str, Any]:
        with suppress(BrokenPipeError):  # the engine has ended: the read below reports that
            self._to_it.write(json.dumps({"prompt": prompt, "max_tokens": ANSWER_TOKENS}) + "\n")
            self._to_it.flush()
        return self._read()

    def close(self) -> None:
        with suppress(BrokenPipeError):
            self._to_it.close()
        self._from_it.close()

    def _read(self) -> dict[str, Any]:
        line = self._from_it.readline()
        if not line:
            raise CommandError(f"{self.name} ended early (see above)", FAILED)
        found: dict[str, Any] = json.loads(line)
        return found


@contextmanager
def computing(address: str, preset: str) -> Iterator[list[DemoEngine]]:
    """Starts two engines with the server and one without. One process imports torch, and forks the others."""
    engines = [DemoEngine("engine A", address), DemoEngine("engine B", address), DemoEngine("engine alone", None)]
    settings = [
        {"name": engine.name, "address": engine.address, "preset": preset, "chunk_tokens": CHUNK_TOKENS,
         "reads": engine.its_ends[0], "writes": engine.its_ends[1]}
        for engine in engines
    ]
    its_ends = [end for engine in engines for end in engine.its_ends]
    process = _started("demo_engine", json.dumps(settings), pass_fds=its_ends)
    for end in its_ends:
        os.close(end)
    try:
        yield engines
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGTERM)
        for engine in engines:
            engine.close()
        _reap(process)


def _reap(process: subprocess.Popen[str]) -> None:
    """Waits for a process to end; after a timeout, kills it and the processes that it has started."""
    assert process.stdin is not None and process.stdout is not None
    process.stdin.close()
    try:
        process.wait(END_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    process.stdout.close()


@contextmanager
def serving(port: int, pool_bytes: str, folder: Path) -> Iterator[tuple[subprocess.Popen[str], str, str]]:
    """Starts a server; yields its process, the URL of its page, and its Unix address."""
    socket_path = folder / "kvdock.sock"
    process = _started(
        "demo_server", "--port", str(port), "--socket-path", str(socket_path), "--pool-bytes", pool_bytes,
        "--log-level", "warning",
        "--access-file", str(folder / "access.toml"),
    )
    assert process.stdout is not None
    try:
        line = process.stdout.readline()
        if not line:
            raise CommandError("the server did not start (see above)", FAILED)
        url = next(word for word in line.split() if word.startswith("http://"))
        yield process, f"{url}/", f"unix:{socket_path}"
    finally:
        _reap(process)


def run_turns(engines: list[DemoEngine], alone: DemoEngine, turns: int, show: Screen) -> list[Turn]:
    """In turn 1 both engines answer: the first computes and stores the document, the second loads it."""
    done: list[Turn] = []
    package = files("kvdock.cli")
    questions = package.joinpath("demo_questions.txt").read_text().splitlines()
    prompt = tokenizer.encode(package.joinpath("demo_document.txt").read_text())
    for number, question in enumerate(itertools.islice(itertools.cycle(questions), turns), 1):
        prompt += tokenizer.encode(f"\n\nQuestion: {question}\nAnswer: ", bos=False)
        show.working(f"turn {number}: an engine without kvdock, for comparison")
        base = alone.ask(prompt)
        for engine in engines if number == 1 else [engines[(number - 1) % len(engines)]]:
            show.working(f"turn {number}: {engine.name}")
            got = engine.ask(prompt)
            done.append(Turn(
                number, engine.name, got["prompt_tokens"], got["loaded_tokens"], got["loaded_bytes"],
                base["ttft_s"], got["ttft_s"], got["tokens"] == base["tokens"],
            ))
            show.row(done[-1])
        prompt += base["tokens"]
    return done


class Screen(Live):
    """The terminal's output: one row for each answer, and a spinner while an engine works. The rows stay at the end."""

    def __init__(self, console: Console) -> None:
        super().__init__(
            Spinner("dots", "starting a server, two engines that share it, and one without"), console=console
        )
        self._table = Table(title="Seconds to the first token of each answer", title_justify="left", box=None,
                            pad_edge=False, padding=(0, 2, 0, 0))
        for title in ("turn", "engine", "prompt", "from kvdock", "MiB", "alone", "kvdock", "faster", "tokens"):
            self._table.add_column(title, justify="left" if title in ("engine", "tokens") else "right", no_wrap=True)

    def stop(self) -> None:
        self.update(self._table if self._table.row_count else "")
        super().stop()

    def working(self, what: str) -> None:
        grid = Table.grid()
        if self._table.row_count:
            grid.add_row(self._table)
        grid.add_row(Spinner("dots", what))
        self.update(grid)

    def row(self, turn: Turn) -> None:
        loaded = turn.loaded_tokens > 0
        self._table.add_row(
            str(turn.turn), turn.engine, str(turn.prompt_tokens),
            str(turn.loaded_tokens) if loaded else "stores", f"{turn.loaded_bytes / 2**20:.0f}" if loaded else "",
            f"{turn.ttft_alone_s:.2f}", f"{turn.ttft_kvdock_s:.2f}", f"{turn.speedup:.1f}x" if loaded else "",
            "same" if turn.same_tokens else "DIFFERENT",
        )
        self.update(self._table)


def figures(turns: list[Turn], counters: dict[str, int], seconds: float) -> dict[str, Any]:
    reused = [turn for turn in turns if turn.loaded_tokens]
    return {
        "turns": [asdict(turn) | {"speedup": round(turn.speedup, 2)} for turn in turns],
        "tokens_identical": all(turn.same_tokens for turn in turns),
        "turns_with_reuse": len(reused),
        "loaded_bytes": sum(turn.loaded_bytes for turn in turns),
        "stored_bytes": counters.get("stored_bytes", 0),
        "median_speedup": round(statistics.median(turn.speedup for turn in reused), 2) if reused else None,
        "seconds": round(seconds, 1),
    }


def _interrupt(*_: object) -> None:
    """Unwinds the stack once, which ends all processes; further signals are ignored meanwhile."""
    for number in ending_signals():
        signal.signal(number, signal.SIG_IGN)
    raise KeyboardInterrupt


def _refuse_taken_port(host: str, port: int) -> None:
    """Raises CommandError when another program uses the port, StartupError for a wrong host. Called before anything is
    started."""
    try:
        with bind_tcp(host, port):
            pass
    except StartupError as error:
        if error.code != "address_in_use":
            raise
        raise CommandError(f"{error}: PORT=8000 make run, or kvdock demo --port 8000", FAILED) from error


def demo(*, port: int, as_json: bool, preset: str, turns: int, pool_bytes: str) -> int:
    """Runs the demo; returns the exit status: 0 when all tokens were the same and some were loaded.

    Raises SettingsError, and CommandError when one of its processes ends early.
    """
    settings = effective(os.environ, flags={"port": str(port), "pool_bytes": pool_bytes}).settings
    _refuse_taken_port(settings.host, port)
    console = Console(stderr=as_json)
    for number in ending_signals():
        signal.signal(number, _interrupt)
    began = time.monotonic()
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="kvdock-demo-")))
        screen = stack.enter_context(Screen(console))
        token = add_token(str(folder / "access.toml"), "page", ["read"])
        server, url, address = stack.enter_context(serving(port, pool_bytes, folder))
        engines = stack.enter_context(computing(address, preset))
        for engine in engines:
            engine.wait_ready()
        console.print(f"kvdock serves at {url} (open it in a browser) and at {address}", soft_wrap=True)
        console.print(f"The page shows totals, and more with this access token: {token}", soft_wrap=True)
        results = run_turns(engines[:2], engines[2], turns, screen)
        with Client(address) as client:
            found = figures(results, client.status().counters, time.monotonic() - began)
        screen.stop()
        if as_json:
            print(json.dumps(found))
        else:
            linger(console, server, url, address, found)
        return DONE if found["tokens_identical"] and found["turns_with_reuse"] else FAILED


def _program() -> str:
    """The command line that runs this program."""
    program = sys.argv[0]
    return f"{sys.executable} -m kvdock" if program.endswith("__main__.py") else shlex.quote(program)


def linger(
    console: Console, server: subprocess.Popen[str], url: str, address: str, found: dict[str, Any]
) -> None:
    """Keeps the server and both engines up until Ctrl-C. Raises CommandError when the server ends by itself."""
    same = "identical" if found["tokens_identical"] else "DIFFERENT"
    console.print(
        f"\nTokens {same} in every turn; {found['stored_bytes'] / 2**20:.1f} MiB stored, "
        f"{found['loaded_bytes'] / 2**20:.1f} MiB loaded by the other engine, "
        f"time to first token {found['median_speedup']}x shorter (median)."
    )
    try:
        console.print(
            f"The server stays up: open {url} in a browser, or run: {_program()} status --server {address}\n"
            "Ctrl-C ends it and removes every segment.", soft_wrap=True,
        )
        status = server.wait()
    except KeyboardInterrupt:
        console.print("\nstopping")
    else:
        raise CommandError(f"the server ended with status {status}", FAILED)
