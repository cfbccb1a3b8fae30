"""Conversations of several turns, in the shape of SGLang's own multi-turn benchmark.

Each client has one conversation. A turn sends the conversation so far and a new question of random tokens, and appends
the answer. Whose turn is next is drawn among the conversations that wait, so the turns of one conversation lie far
apart, and other conversations may drive its KV from the device meanwhile.

The questions, and which engine gets which turn, are drawn before the first turn: they are the same for all engines that
are compared. The order of the turns depends on how fast the answers come.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True)
class Workload:
    """`clients` conversations of `rounds` turns. `question`, `answer`: tokens that each turn adds. `parallel`: how many
    turns are under way at most. `rate_per_s`: the turns that begin in a second, at random times; 0: the next turn
    begins when one ends. `engines`: how many engines the turns go to. `seed`: what all draws follow from."""

    clients: int
    rounds: int
    question: int
    answer: int
    parallel: int
    rate_per_s: float
    engines: int
    vocabulary: int
    seed: str

    @property
    def longest(self) -> int:
        """Tokens of a conversation at its end."""
        return self.rounds * (self.question + self.answer)


@dataclass(frozen=True)
class Turn:
    """`known`: the tokens of the conversation before the question; `cached`: the tokens of the prompt that the engine
    did not compute; `ttft_s`: the seconds from the request to the first token."""

    client: int
    round: int
    engine: int
    prompt: int
    known: int
    cached: int
    ttft_s: float
    answer: Sequence[int]


Answered = tuple[float, int, list[int]]
"""Seconds until the first token, cached tokens, and the tokens of the answer."""
Ask = Callable[[int, list[int], int], Awaitable[Answered]]
"""Called with the number of an engine, a prompt, and how many tokens are wanted in the answer."""


class Conversations:
    def __init__(self, load: Workload) -> None:
        self._load, draw = load, random.Random(load.seed)
        turns = range(load.rounds)
        self._questions = [
            [[draw.randrange(3, load.vocabulary) for _ in range(load.question)] for _ in turns]
            for _ in range(load.clients)
        ]
        self._engines = [[draw.randrange(load.engines) for _ in turns] for _ in range(load.clients)]
        self._order = draw
        self._said: list[list[int]] = [[] for _ in range(load.clients)]
        self._turns: list[Turn] = []

    async def run(self, ask: Ask) -> dict[str, Any]:
        """Holds all conversations. Returns their turns, in the order of their ends, and the seconds that they took."""
        load, waiting, began_s = self._load, list(range(self._load.clients)), time.perf_counter()
        slots, may_go_on = asyncio.Semaphore(load.parallel), asyncio.Semaphore(load.clients)

        async def turn(client: int) -> None:
            await self._turn(client, ask)
            slots.release()
            if len(self._said[client]) < load.longest:
                waiting.append(client)
                may_go_on.release()

        async with asyncio.TaskGroup() as group:
            for _ in range(load.clients * load.rounds):
                if load.rate_per_s:
                    await asyncio.sleep(self._order.expovariate(load.rate_per_s))  # the time until the next turn
                await slots.acquire()
                await may_go_on.acquire()
                group.create_task(turn(waiting.pop(self._order.randrange(len(waiting)))))
        return {"turns": [asdict(one) for one in self._turns], "took_s": time.perf_counter() - began_s}

    async def _turn(self, client: int, ask: Ask) -> None:
        said = self._said[client]
        number = len(said) // (self._load.question + self._load.answer)
        prompt, engine = said + self._questions[client][number], self._engines[client][number]
        ttft_s, cached, answer = await ask(engine, prompt, self._load.answer)
        if len(answer) != self._load.answer:
            raise ValueError(f"answer of turn {number}: found {len(answer)} tokens, wanted {self._load.answer}")
        self._turns.append(Turn(client, number, engine, len(prompt), len(said), cached, ttft_s, answer))
        self._said[client] = prompt + answer
