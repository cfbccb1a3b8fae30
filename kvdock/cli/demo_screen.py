"""What `kvdock demo` prints: questions, answers, and the time to the first token of each, with and without kvdock."""

from __future__ import annotations

from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

from rich.console import Console
from rich.padding import Padding
from rich.text import Text


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
