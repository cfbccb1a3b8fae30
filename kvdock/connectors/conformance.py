"""Checks that every connector must pass: kvdock's own, and one that is written for another engine.

    for check in CHECKS:
        check(Bench(factory, server_address))          # AssertionError says which claim did not hold

or, with pytest, `@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)`.

`factory(name)` makes a Subject: a connector that is attached to the server, with KV memory of its own that the check
can fill and read. Checks number the blocks of a request from 0. A Bench turns these numbers into block ids, from a
separate range for each KV group, and into None where a window has left the block behind. Checks use new tokens each
time, so they may share one server, even a busy one.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol

from kvdock.client.client import Client
from kvdock.connectors.interface import BlocksRead, Connector, Hit, LoadDone, Miss, StoreDone

ANSWER_S = 10.0
LONGEST_CALL_S = 0.25
"""The most seconds that a call of `lookup` may take, because the engine's scheduling loop waits for it."""


class Subject(Protocol):
    """An engine process that has a connector."""

    @property
    def connector(self) -> Connector:
        """The connector under test."""
    @property
    def label(self) -> str:
        """The label of the connector's session at the server."""
    @property
    def chunk_tokens(self) -> int:
        """Tokens of a chunk."""
    @property
    def block_tokens(self) -> int:
        """Tokens of a block, as in the manifest."""
    @property
    def num_blocks(self) -> int:
        """The blocks of all KV groups together; each group needs those of at least 8 chunks."""
    @property
    def windows(self) -> Sequence[int | None]:
        """For each KV group, the length of its sliding window in tokens; None: full attention."""
    def fill(self, block: int, seed: int) -> None:
        """Writes bytes to a block that differ for each seed."""
    def contents(self, block: int) -> bytes:
        """All bytes of a block."""
    def close(self) -> None:
        """Ends the engine process and its connector."""


class Bench:
    """The tools of the checks: subjects, new tokens, and calls of the connector that return when their work has ended.

    `seed`: a different one for each check, or None, so that no check looks up the tokens of another one.
    """

    def __init__(self, factory: Callable[[str], Subject], address: str, *, seed: int | None = None) -> None:
        self._factory, self.address = factory, address
        self._source = random.Random(seed)

    @contextmanager
    def subject(self, name: str) -> Iterator[Subject]:
        """A context in which a new subject of that name runs."""
        made = self._factory(name)
        try:
            yield made
        finally:
            made.close()

    def tokens(self, count: int) -> list[int]:
        """That many tokens that no other check uses."""
        return [self._source.randrange(256) for _ in range(count)]

    def table(self, subject: Subject, blocks: Sequence[int], hit: int = 0) -> list[list[int | None]]:
        """For each group, the ids of `blocks`; None for a block that the group's window has left behind at token
        `hit`."""
        share = subject.num_blocks // len(subject.windows)
        behind = [max(0, hit - window) // subject.block_tokens if window else 0 for window in subject.windows]
        return [
            [group * share + block if at >= first else None for at, block in enumerate(blocks)]
            for group, first in enumerate(behind)
        ]

    def contents(self, subject: Subject, blocks: Sequence[int], hit: int = 0) -> list[bytes]:
        """For each of `blocks`, its bytes in all groups that need it for a hit of `hit` tokens."""
        rows = zip(*self.table(subject, blocks, hit), strict=True)
        return [b"".join(subject.contents(block) for block in row if block is not None) for row in rows]

    def fill(self, subject: Subject, blocks: Sequence[int]) -> None:
        """Writes new bytes to the blocks."""
        for column in self.table(subject, blocks):
            for block in column:
                assert block is not None
                subject.fill(block, self._source.randrange(1 << 30))

    def hit(self, subject: Subject, request: str, tokens: list[int], local: int = 0) -> int:
        """Calls lookup until it is not Pending. Returns the length of the prefix that can be loaded or is local."""
        end = time.monotonic() + ANSWER_S
        while time.monotonic() < end:
            began = time.monotonic()
            found = subject.connector.lookup(request, tokens, local)
            took_s = time.monotonic() - began
            assert took_s < LONGEST_CALL_S, f"lookup took {took_s:.2f} s: answer Pending and ask in the background"
            if isinstance(found, Hit):
                assert found.tokens > local, f"lookup: found {found}, wanted more than the local {local}"
                return found.tokens
            if isinstance(found, Miss):
                return local
            subject.connector.poll(0.01)
        raise AssertionError(f"lookup: found no answer within {ANSWER_S} s")

    def load(self, subject: Subject, request: str, blocks: Sequence[int], local: int, hit: int) -> int:
        """Loads, and returns the valid tokens of the LoadDone."""
        subject.connector.begin_load(request, self.table(subject, blocks, hit), local, hit)
        done = self._await(subject, lambda done: isinstance(done, LoadDone) and done.request_id == request)
        assert isinstance(done, LoadDone)
        return done.valid_tokens

    def store(self, subject: Subject, request: str, tokens: list[int], blocks: Sequence[int], computed: int) -> None:
        """Offers the computed tokens, and returns when their store has ended."""
        held = subject.connector.begin_store(request, tokens, self.table(subject, blocks), computed)
        if held:
            self.await_store(subject, held)

    def await_store(self, subject: Subject, held: BlocksRead) -> None:
        """Returns when the StoreDone has come that names these blocks."""
        self._await(subject, lambda done: isinstance(done, StoreDone) and done.block_ids == held)

    def stored(self, subject: Subject, chunks: int) -> tuple[list[int], list[bytes]]:
        """Stores `chunks` chunks of new tokens from the subject's first blocks. Returns the tokens, and for each block
        the bytes that a hit of all tokens loads."""
        tokens = self.tokens(chunks * subject.chunk_tokens)
        blocks = list(range(chunks * subject.chunk_tokens // subject.block_tokens))
        self.fill(subject, blocks)
        contents = self.contents(subject, blocks, len(tokens))
        self.store(subject, "writer", tokens, blocks, len(tokens))
        subject.connector.finished("writer")
        return tokens, contents

    def leases(self, subject: Subject) -> int:
        """How many leases and reservations the subject's session still has at the server."""
        with Client(self.address) as client:
            sessions = [s for s in client.sessions().sessions if s.label == subject.label]
        assert sessions, f"the server shows no session labelled {subject.label!r}"
        return sum(s.leases + s.reservations for s in sessions)

    def loaded(self, subject: Subject, request: str, tokens: list[int], blocks: list[int], wanted: list[bytes]) -> None:
        """Looks up all of `tokens`, loads them into `blocks`, and expects their bytes to be `wanted`."""
        expect("hit", self.hit(subject, request, tokens), len(tokens))
        expect("valid tokens", self.load(subject, request, blocks, 0, len(tokens)), len(tokens))
        expect("loaded", self.contents(subject, blocks, len(tokens)), wanted)

    def _await(self, subject: Subject, wanted: Callable[[LoadDone | StoreDone], bool]) -> LoadDone | StoreDone:
        found: list[LoadDone | StoreDone] = []
        end = time.monotonic() + ANSWER_S
        while not found and time.monotonic() < end:
            found += self._reports(subject, wanted)
        assert found, f"found no report of the end within {ANSWER_S} s, wanted exactly one"
        found += self._reports(subject, wanted)
        assert len(found) == 1, f"reports: found {len(found)}, wanted exactly one"
        return found[0]

    def _reports(self, subject: Subject, wanted: Callable[[LoadDone | StoreDone], bool]) -> list[LoadDone | StoreDone]:
        progress = subject.connector.poll(0.05)
        ended: list[LoadDone | StoreDone] = [*progress.loads, *progress.stores]
        return [done for done in ended if wanted(done)]


def expect(what: str, found: object, wanted: object) -> None:
    """Raises AssertionError, with both values, unless they are equal."""
    if isinstance(found, list) and isinstance(wanted, list):
        wrong = [at for at, (a, b) in enumerate(zip(found, wanted, strict=True)) if a != b]
        assert not wrong, f"{what}: blocks {wrong} of {len(wanted)} hold other bytes than wanted"
    assert found == wanted, f"{what}: found {found}, wanted {wanted}"


def unknown_tokens_are_a_miss(bench: Bench) -> None:
    """Tokens that nobody has stored are a miss."""
    with bench.subject("reader") as reader:
        tokens = bench.tokens(3 * reader.chunk_tokens)
        expect("hit", bench.hit(reader, "r", tokens), 0)
        local = reader.block_tokens
        expect("hit beyond the local tokens", bench.hit(reader, "r2", tokens, local), local)


def what_one_stores_another_loads_byte_for_byte(bench: Bench) -> None:
    """Another subject's blocks have the stored bytes after its load."""
    with bench.subject("writer") as writer, bench.subject("reader") as reader:
        tokens, contents = bench.stored(writer, 3)
        blocks = list(range(len(contents)))[::-1]  # in the reverse order of the writer's
        bench.fill(reader, blocks)
        bench.loaded(reader, "r", tokens, blocks, contents)


def tokens_that_differ_anywhere_before_are_a_miss(bench: Bench) -> None:
    """One other token makes all chunks from there on a miss."""
    with bench.subject("writer") as writer, bench.subject("reader") as reader:
        tokens, _ = bench.stored(writer, 3)
        middle = reader.chunk_tokens + 1
        changed = [*tokens[:middle], tokens[middle] ^ 1, *tokens[middle + 1 :]]
        expect("hit", bench.hit(reader, "r", changed), reader.chunk_tokens)


def a_partial_chunk_is_not_stored(bench: Bench) -> None:
    """Only whole chunks are stored."""
    with bench.subject("writer") as writer, bench.subject("reader") as reader:
        tokens = bench.tokens(2 * writer.chunk_tokens)
        blocks = list(range(len(tokens) // writer.block_tokens))
        bench.fill(writer, blocks)
        computed = 2 * writer.chunk_tokens - 1
        bench.store(writer, "w", tokens, blocks, computed)
        expect("hit", bench.hit(reader, "r", tokens), writer.chunk_tokens)
        bench.store(writer, "w", tokens, blocks, computed + 1)
        expect("hit", bench.hit(reader, "r2", tokens), len(tokens))


def asking_again_changes_nothing(bench: Bench) -> None:
    """A repeated lookup has the same answer, and takes no second lease."""
    with bench.subject("writer") as writer, bench.subject("reader") as reader:
        tokens, _ = bench.stored(writer, 2)
        for _ in range(5):
            expect("hit", bench.hit(reader, "r", tokens), len(tokens))
        expect("leases after many questions", bench.leases(reader), 1)


def blocks_the_engine_shares_are_never_written(bench: Bench) -> None:
    """A load leaves the blocks before `local_tokens` as they are."""
    with bench.subject("writer") as writer, bench.subject("reader") as reader:
        tokens, contents = bench.stored(writer, 3)
        for local_blocks in range(len(contents)):
            request, local = f"r{local_blocks}", local_blocks * reader.block_tokens
            blocks = list(range(len(contents)))
            bench.fill(reader, blocks)
            guard = bench.contents(reader, blocks)
            if bench.hit(reader, request, tokens, local) == local:
                continue
            expect("valid tokens", bench.load(reader, request, blocks, local, len(tokens)), len(tokens))
            found = bench.contents(reader, blocks)
            expect(f"shared blocks before token {local}", found[:local_blocks], guard[:local_blocks])
            found = bench.contents(reader, blocks, len(tokens))
            expect("loaded behind them", found[local_blocks:], contents[local_blocks:])


def a_store_reads_no_block_after_its_report(bench: Bench) -> None:
    """What is written to a block after its StoreDone is not what was stored."""
    with bench.subject("writer") as writer, bench.subject("reader") as reader:
        tokens = bench.tokens(2 * writer.chunk_tokens)
        blocks = list(range(len(tokens) // writer.block_tokens))
        bench.fill(writer, blocks)
        contents = bench.contents(writer, blocks, len(tokens))
        bench.store(writer, "w", tokens, blocks, len(tokens))
        bench.fill(writer, blocks)  # the engine gives them to another request
        bench.loaded(reader, "r", tokens, blocks, contents)


def nothing_is_held_when_all_requests_have_ended(bench: Bench) -> None:
    """No lease and no reservation is left."""
    with bench.subject("writer") as writer, bench.subject("reader") as reader:
        tokens, contents = bench.stored(writer, 2)
        bench.hit(reader, "aborted", tokens)
        reader.connector.finished("aborted")
        bench.hit(reader, "served", tokens)
        bench.load(reader, "served", list(range(len(contents))), 0, len(tokens))
        reader.connector.finished("served")
        end = time.monotonic() + ANSWER_S
        while (held := bench.leases(reader) + bench.leases(writer)) and time.monotonic() < end:
            reader.connector.poll(0.05)
        expect("leases and reservations", held, 0)


def what_a_window_leaves_behind_is_neither_required_nor_written(bench: Bench) -> None:
    """The store starts after the windows have left the first chunk behind, so that chunk is stored for full attention
    only."""
    with bench.subject("writer") as writer, bench.subject("reader") as reader:
        chunk, per_chunk = writer.chunk_tokens, writer.chunk_tokens // writer.block_tokens
        longest = max((window for window in writer.windows if window is not None), default=0)
        tokens = bench.tokens((-(-max(longest, 1) // chunk) + 1) * chunk)
        blocks = list(range(len(tokens) // writer.block_tokens))
        bench.fill(writer, blocks)
        windowed = bench.table(writer, blocks)
        for window, column in zip(writer.windows, windowed, strict=True):
            column[:per_chunk] = column[:per_chunk] if window is None else [None] * per_chunk
        bench.await_store(writer, writer.connector.begin_store("w", tokens, windowed, len(tokens)))
        expect("hit", bench.hit(reader, "r", tokens), len(tokens))
        bench.fill(reader, blocks)
        ids = [block for column in bench.table(reader, blocks) for block in column if block is not None]
        guard = {block: reader.contents(block) for block in ids}
        expect("valid tokens", bench.load(reader, "r", blocks, 0, len(tokens)), len(tokens))
        expect("loaded", bench.contents(reader, blocks, len(tokens)), bench.contents(writer, blocks, len(tokens)))
        asked = {block for column in bench.table(reader, blocks, len(tokens)) for block in column}
        for block in guard.keys() - asked:
            expect(f"block {block}, which was left behind", reader.contents(block), guard[block])
        first = bench.hit(reader, "shorter", tokens[: len(tokens) - chunk])
        whole = all(window is None for window in writer.windows)
        expect("hit that ends in the first chunk", first > 0, whole)


def a_preempted_request_comes_back_under_its_id(bench: Bench) -> None:
    """It is looked up and loaded again under its old id."""
    with bench.subject("writer") as writer, bench.subject("reader") as reader:
        tokens, contents = bench.stored(writer, 2)
        for turn in range(3):
            blocks = [block + turn for block in range(len(contents))]
            bench.fill(reader, blocks)
            bench.loaded(reader, "again", tokens, blocks, contents)
            reader.connector.finished("again")


CHECKS: tuple[Callable[[Bench], None], ...] = (
    unknown_tokens_are_a_miss,
    what_one_stores_another_loads_byte_for_byte,
    tokens_that_differ_anywhere_before_are_a_miss,
    a_partial_chunk_is_not_stored,
    asking_again_changes_nothing,
    blocks_the_engine_shares_are_never_written,
    a_store_reads_no_block_after_its_report,
    nothing_is_held_when_all_requests_have_ended,
    what_a_window_leaves_behind_is_neither_required_nor_written,
    a_preempted_request_comes_back_under_its_id,
)
