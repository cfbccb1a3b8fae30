"""The mode turns: conversations of several turns (conversations.py) with plain SGLang, HiCache and kvdock.

With one engine, and with two that divide the turns at random, so that about half of the turns come back to another
engine than the turn before. All have equal host memory: HiCache divides it among its engines, which have a cache each;
kvdock's engines share one pool. Plain SGLang has none. The engines of one kind are started, measured and ended before
those of the next kind, because two of each do not fit on one GPU at the same time.
"""

from __future__ import annotations

import argparse
import math
import statistics
import time
from collections.abc import Sequence
from contextlib import closing

from bench.engine_child import CPU_SLOWER, Child, wait_until_pinned
from bench.sglang.conversations import Turn, Workload
from bench.sglang.sizes import PAGE, PLAIN, Figures, Scale, described, say
from kvdock.client.client import Client
from kvdock.protocol.admin_schemas import ClearCache

HELD_S = 280.0
"""Limit of all conversations of one workload."""


class Answers:
    """The answers of plain SGLang, which those of the others are compared with."""

    def __init__(self) -> None:
        self._right: dict[tuple[int, int], Sequence[int]] = {}

    def compared(self, turns: Sequence[Turn]) -> Figures:
        """The first answers that are passed are the right ones. Of a conversation only the turns up to the first other
        answer are compared, because the prompts differ after it."""
        found = {(turn.client, turn.round): turn.answer for turn in turns}
        if not self._right:
            self._right = found
        compared = other = 0
        for client in {client for client, _ in found}:
            for number in range(sum(1 for of, _ in found if of == client)):
                compared += 1
                if list(found[client, number]) != list(self._right[client, number]):
                    other += 1
                    break
        return {"answers_compared": compared, "other_answers": other}


def hit_rate(turns: Sequence[Turn]) -> float | None:
    """The share of the prompts' tokens that were not computed. None: there are no turns."""
    tokens = sum(turn.prompt for turn in turns)
    return sum(turn.cached for turn in turns) / tokens if tokens else None


def times_ms(turns: Sequence[Turn]) -> Figures:
    """The times to first token."""
    taken = sorted(turn.ttft_s * 1e3 for turn in turns)
    return {
        "mean": statistics.fmean(taken), "p50": statistics.median(taken), "p99": taken[math.ceil(len(taken) * 0.99) - 1]
    }


def figures_of(turns: Sequence[Turn], took_s: float) -> Figures:
    """`most_hit_rate`: if all whole pages of earlier turns were hits. `moved_hit_rate`: of the turns that came back
    to another engine than the turn before; `stayed_hit_rate`: to the same one."""
    before = {(turn.client, turn.round + 1): turn.engine for turn in turns}
    later = [turn for turn in turns if turn.round]
    moved = [turn for turn in later if before[turn.client, turn.round] != turn.engine]
    tokens = sum(turn.prompt for turn in turns)
    return {
        "turns": len(turns), "turns_moved": len(moved), "took_s": took_s,
        "hit_rate": hit_rate(turns), "most_hit_rate": sum(turn.known // PAGE * PAGE for turn in turns) / tokens,
        "moved_hit_rate": hit_rate(moved),
        "stayed_hit_rate": hit_rate([turn for turn in later if turn not in moved]),
        "ttft_ms": times_ms(turns),
        "ttft_ms_by_round": {
            str(number): times_ms([turn for turn in turns if turn.round == number])
            for number in sorted({turn.round for turn in turns})
        },
        "input_tokens_per_s": tokens / took_s,
        "output_tokens_per_s": sum(len(turn.answer) for turn in turns) / took_s,
    }


class Conversing:
    """`address`: of the server, whose pool is emptied before each measurement."""

    def __init__(self, chosen: argparse.Namespace, scale: Scale, address: str, vocabulary: int) -> None:
        self._chosen, self._scale, self._address, self._vocabulary = chosen, scale, address, vocabulary
        self._answers = Answers()

    def measured(self, kinds: Sequence[str]) -> Figures:
        """Figures by number of engines and kind."""
        figures: Figures = {}
        for count in self._scale.engines:
            figures[str(count)] = {}
            for kind in sorted(kinds, key=lambda one: one != PLAIN):  # its answers are the right ones
                turns, took_s = self._of(kind, count)
                found = figures_of(turns, took_s)
                if PLAIN in kinds:
                    found |= self._answers.compared(turns)
                figures[str(count)][kind] = found
                say(f"turns: {count} x {kind}: {found}")
        return figures

    def _of(self, kind: str, count: int) -> tuple[list[Turn], float]:
        with Client(self._address) as client:
            client.clear(ClearCache())
        said = described(kind, self._chosen, self._scale, self._address, f"bench-{time.time_ns()}", count)
        is_on_gpu = self._chosen.device == "cuda"
        engine = Child(
            "bench.sglang.engine", said, address=self._address, slower=1 if is_on_gpu else CPU_SLOWER,
            log_at=self._chosen.logs / f"sglang-turns-{kind}-{count}.log",
        )
        with closing(engine):
            engine.started()
            if is_on_gpu and kind == "kvdock":
                wait_until_pinned(self._address)
            if self._scale.warms:
                self._hold(engine, count, "warm")
                engine.do("flush")
                with Client(self._address) as client:
                    client.clear(ClearCache())
            return self._hold(engine, count, "measured")

    def _hold(self, engine: Child, count: int, seed: str) -> tuple[list[Turn], float]:
        scale = self._scale
        load = Workload(
            scale.clients, scale.rounds, scale.question, scale.answer, scale.parallel, scale.rate_per_s, count,
            self._vocabulary, seed,
        )
        seen = engine.do("converse", HELD_S, load=vars(load))
        return [Turn(**one) for one in seen["turns"]], seen["took_s"]
