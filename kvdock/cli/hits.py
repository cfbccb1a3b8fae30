"""Where prompts' tokens came from, in words and tables: what `kvdock status`, `top`, `saved` and the lists share.

kvdock/protocol/hits.py defines the origins of tokens.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from rich.table import Column, Table
from rich.text import Text

from kvdock.cli.render import brief, counted, percent, printable, span
from kvdock.protocol.hits import COMPUTED, MEMORY, WAITED, HitTotals
from kvdock.protocol.outcomes import OutcomeView

FROM = {MEMORY: "from memory", WAITED: "after a wait for another engine's store"}
COSTS = "red"
"""The style of savings below 0."""
MOST_REASONS = 3


def source_in_words(source: str) -> str:
    return FROM.get(source, f"from the tier {source}")


def computed_share(loaded: float | None, local: float | None) -> float | None:
    """The share of prompt tokens that is neither loaded nor the engines' own."""
    return None if loaded is None or local is None else max(0.0, 1 - loaded - local)


def saved_in_words(saved_s: float | None) -> Text:
    if saved_s is None:
        return Text("no engine has reported both how fast it computes and how long its loads took")
    if saved_s < 0:
        return Text(f"loads took {span(-saved_s)} longer than computing would have", style=COSTS)
    return Text(f"{span(saved_s)} of computing")


def saved_cell(saved_s: float | None) -> str:
    """With a minus sign where loads took longer than computing would have; a dash where it is not known."""
    return "-" if saved_s is None else f"-{span(-saved_s)}" if saved_s < 0 else span(saved_s)


def style_of_saved(saved_s: float | None) -> str:
    return COSTS if saved_s is not None and saved_s < 0 else ""


def asked_in_words(tokens: int) -> str:
    """What is known of engines that have looked up tokens, and reported no request that has ended."""
    return f"asked for {counted(tokens, 'token')}; the engines do not report what they loaded"


def loaded_cell(loaded_share: float | None, lookup_tokens: int) -> str:
    """The share of prompt tokens that were loaded. Without a report of ended requests: what was asked for."""
    if loaded_share is None and lookup_tokens:
        return f"asked for {brief(lookup_tokens)} tok"
    return percent(loaded_share)


def hits_table(hits: HitTotals, *, everything: bool) -> Table:
    """A row for each origin of the prompts' tokens, with its share of them. `everything`: a row for each reason why
    tokens were computed; otherwise the smaller ones share a row."""
    table = Table("", Column("tokens", justify="right"), Column("share", justify="right"), "", show_header=False,
                  box=None, pad_edge=False, padding=(0, 2, 0, 0))

    def row(name: str, tokens: int, words: str) -> None:
        share = percent(tokens / hits.prompt_tokens)
        table.add_row(Text(name, style="bold"), f"{brief(tokens)} tok", share, Text(printable(words), overflow="fold"))

    row("prompts", hits.prompt_tokens, f"in {counted(hits.requests, 'ended request')}")
    row("own cache", hits.local_tokens, "that the engines had themselves")
    for source, tokens in _largest({MEMORY: 0, **hits.loaded}):
        row("loaded", tokens, source_in_words(source))
    reasons = _largest(hits.computed)
    shown = reasons if everything or len(reasons) == MOST_REASONS + 1 else reasons[:MOST_REASONS]
    for why, tokens in shown:
        row("computed", tokens, reason_in_words(why))
    if others := reasons[len(shown) :]:
        row("computed", sum(tokens for _, tokens in others), f"for {counted(len(others), 'other reason')}")
    if hits.reloaded_tokens:
        again = "by preempted requests when they came back, in no other row"
        table.add_row(Text("reloaded", style="bold"), f"{brief(hits.reloaded_tokens)} tok", "", again)
    return table


def _largest(tokens: Mapping[str, int]) -> list[tuple[str, int]]:
    return sorted(tokens.items(), key=lambda item: -item[1])


def reason_in_words(why: str) -> str:
    """Why tokens were computed; the word itself where this version does not know it."""
    return next((words for name, words in COMPUTED.items() if name == why), why.replace("_", " "))


def loaded_of(outcome: OutcomeView) -> str:
    """The tokens that a request has loaded, with their sources where they are not all from memory."""
    by_source: Counter[str] = Counter()
    for run in outcome.runs:
        if run.origin == "loaded":
            by_source[run.source] += run.tokens
    if not by_source.keys() - {MEMORY}:
        return f"{by_source.total():,}"
    parts = ", ".join(f"{tokens:,} {source_in_words(source)}" for source, tokens in _largest(by_source))
    return f"{by_source.total():,} ({parts})" if len(by_source) > 1 else parts


def local_of(outcome: OutcomeView) -> int:
    return sum(run.tokens for run in outcome.runs if run.origin == "local")


def computed_of(outcome: OutcomeView) -> tuple[int, str]:
    """The tokens that a request has computed, and the reason for most of them."""
    by_reason: Counter[str] = Counter()
    for run in outcome.runs:
        if run.origin == "computed":
            by_reason[run.why] += run.tokens
    if not by_reason:
        return 0, ""
    why, _ = by_reason.most_common(1)[0]
    words = reason_in_words(why)
    return by_reason.total(), f"{words}: {outcome.why.replace('_', ' ')}" if why == "other" else words
