"""Requests of a public trace of conversations: JSON lines with `timestamp` (ms), `input_length` and `output_length`
(tokens) and `hash_ids`, one for each 512 tokens of the prompt, equal where the prefixes are equal. A line may name its
`session`; of others the third block tells it, since conversations have a system prompt in common.

It is the format that Qin et al. published with "Mooncake: Trading More Storage for Less Computation" (FAST 2025).
"""

from __future__ import annotations

import gzip
import json
import random
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

BLOCK_TOKENS = 512
OWN_TOKENS = 8
"""The last tokens of each prompt, which no other has."""


@dataclass(frozen=True)
class Request:
    """`number`: its line in the trace; `session`: common to all requests of a conversation; `blocks`: one id for each
    512 tokens; the last block may be shorter."""

    number: int
    session: int
    at_ms: int
    blocks: tuple[int, ...]
    tokens: int
    new_tokens: int

    @property
    def whole_blocks(self) -> tuple[int, ...]:
        return self.blocks[: self.tokens // BLOCK_TOKENS]


def read(path: Path) -> list[Request]:
    """Reads a trace. Raises OSError, and ValueError naming a line that is no request."""
    found = []
    with (gzip.open(path, "rt") if path.suffix == ".gz" else path.open()) as lines:
        for number, line in enumerate(lines):
            try:
                row = json.loads(line)
                blocks, tokens = tuple(row["hash_ids"]), int(row["input_length"])
                session = row.get("session", blocks[2] if len(blocks) > 2 else blocks[0])
                found.append(Request(number, session, row["timestamp"], blocks, tokens, int(row["output_length"])))
            except (ValueError, KeyError, IndexError, TypeError) as error:
                raise ValueError(f"{path}, line {number + 1}: found {line[:60]!r}, wanted a request: {error}") from None
    return found


def sampled_sessions(
    trace: Sequence[Request], *, count: int, seed: int, most: int, longest_tokens: int, lengths: range = range(3, 31)
) -> list[Request]:
    """The first `most` requests, in the order of the trace, of `count` sessions. Requests of more than `longest_tokens`
    are left out, and then sessions whose number of requests is not in `lengths`. Raises ValueError: there are fewer."""
    sessions: dict[int, list[Request]] = defaultdict(list)
    for request in trace:
        if len(request.blocks) > 2 and request.tokens <= longest_tokens:
            sessions[request.session].append(request)
    wanted = [one for one in sessions.values() if len(one) in lengths]
    if len(wanted) < count:
        raise ValueError(
            f"found {len(wanted)} sessions of {lengths.start} to {lengths.stop - 1} requests, wanted {count}"
        )
    chosen = random.Random(seed).sample(wanted, count)
    return sorted((one for session in chosen for one in session), key=lambda one: one.number)[:most]


def by_turns(requests: Sequence[Request]) -> list[Request]:
    """The first request of each session, then the second of each, and so on: between two requests of a session comes
    one of every other session."""
    seen: Counter[int] = Counter()
    turns = []
    for request in requests:
        turns.append((seen[request.session], request))
        seen[request.session] += 1
    return [request for _, request in sorted(turns, key=lambda one: one[0])]


def prompts(
    requests: Iterable[Request], *, seed: int, vocabulary: int, block_tokens: int = BLOCK_TOKENS
) -> list[list[int]]:
    """Token ids, `block_tokens` for each block. Two prompts are equal as far as their prefixes are equal in the
    trace."""
    made: dict[int, list[int]] = {}
    usable = range(3, vocabulary)

    def block(number: int) -> list[int]:
        if number not in made:
            made[number] = random.Random(f"{seed}:{number}").choices(usable, k=block_tokens)
        return made[number]

    found = []
    for request in requests:
        ids = [token for number in request.blocks for token in block(number)]
        ids = ids[: max(2 * OWN_TOKENS, request.tokens * block_tokens // BLOCK_TOKENS)]
        found.append(ids[:-OWN_TOKENS] + random.Random(f"tail:{seed}:{request.number}").choices(usable, k=OWN_TOKENS))
    return found
