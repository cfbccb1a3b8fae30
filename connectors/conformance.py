"""Checks that any connector must pass: for who writes one for another engine, and for our own.

    for check in CHECKS:
        check(Bench(factory, server_address))          # AssertionError says what did not hold

or, with pytest, `@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)`.

`factory(name)` makes a Subject: a connector at the server, over KV memory of its own that the check
can fill and read. Checks use new tokens each time, so they may share one server, also a busy one.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol

from kvdock.api.client import Client
from kvdock.connectors.interface import Connector, LoadDone, StoreDone

ANSWER_S = 10.0
LONGEST_CALL_S = 0.25
"""No verb of the engine thread may take longer: a scheduling loop waits for it."""


class Subject(Protocol):
    """One engine process, as far as a connector can tell."""

    @property
    def connector(self) -> Connector: ...
    @property
    def label(self) -> str:
        """The label under which its session shows at the server."""
    @property
    def chunk_tokens(self) -> int: ...
    @property
    def block_tokens(self) -> int: ...
    @property
    def num_blocks(self) -> int:
        """At least 8 chunks' worth."""
    def fill(self, block: int, seed: int) -> None:
        """Writes bytes to a block that no other seed gives."""
    def contents(self, block: int) -> bytes:
        """All bytes of a block."""
    def close(self) -> None: ...


class Bench:
    """What the checks work with: subjects, fresh tokens, and the verbs run to their end.

    `seed`: another one for each check, or None: no check must meet the tokens of another.
    """

    def __init__(self, factory: Callable[[str], Subject], address: str, *, seed: int | None = None) -> None:
        self._factory, self.address = factory, address
        self._source = random.Random(seed)

    @contextmanager
    def subject(self, name: str) -> Iterator[Subject]:
        made = self._factory(name)
        try:
            yield made
        finally:
            made.close()

    def tokens(self, count: int) -> list[int]:
        return [self._source.randrange(256) for _ in range(count)]

    def fill(self, subject: Subject, blocks: Sequence[int]) -> list[bytes]:
        for block in blocks:
            subject.fill(block, self._source.randrange(1 << 30))
        return [subject.contents(block) for block in blocks]

    def hit(self, subject: Subject, request: str, tokens: list[int], local: int = 0) -> int:
        """lookup, asked until it answers."""
        end = time.monotonic() + ANSWER_S
        while time.monotonic() < end:
            began = time.monotonic()
            found = subject.connector.lookup(request, tokens, local)
            took_s = time.monotonic() - began
            assert took_s < LONGEST_CALL_S, f"lookup took {took_s:.2f} s: answer None and ask in the background"
            if found is not None:
                assert found >= local, f"lookup: found {found}, wanted at least the local {local}"
                return found
            subject.connector.poll(0.01)
        raise AssertionError(f"lookup: found no answer within {ANSWER_S} s")

    def load(self, subject: Subject, request: str, blocks: Sequence[int], local: int, hit: int) -> int:
        subject.connector.begin_load(request, blocks, local, hit)
        done = self._await(subject, lambda load, store: load is not None and load.request_id == request)
        assert isinstance(done, LoadDone)
        return done.valid_tokens

    def store(self, subject: Subject, request: str, tokens: list[int], blocks: Sequence[int], computed: int) -> None:
        held = subject.connector.begin_store(request, tokens, blocks, computed)
        if held:
            self._await(subject, lambda load, store: store is not None and store.block_ids == held)

    def stored(self, subject: Subject, chunks: int) -> tuple[list[int], list[bytes]]:
        """Tokens of that many chunks, stored from the subject's first blocks; and the blocks' bytes."""
        tokens = self.tokens(chunks * subject.chunk_tokens)
        blocks = list(range(chunks * subject.chunk_tokens // subject.block_tokens))
        contents = self.fill(subject, blocks)
        self.store(subject, "writer", tokens, blocks, len(tokens))
        subject.connector.finished("writer")
        return tokens, contents

    def leases(self, subject: Subject) -> int:
        """Leases and reservations the server still counts for the subject's session."""
        with Client(self.address) as client:
            sessions = [s for s in client.sessions().sessions if s.label == subject.label]
        assert sessions, f"the server shows no session labelled {subject.label!r}"
        return sum(s.leases + s.reservations for s in sessions)

    def _await(
        self, subject: Subject, wanted: Callable[[LoadDone | None, StoreDone | None], bool]
    ) -> LoadDone | StoreDone:
        found: list[LoadDone | StoreDone] = []
        end = time.monotonic() + ANSWER_S
        while not found and time.monotonic() < end:
            progress = subject.connector.poll(0.05)
            found += [load for load in progress.loads if wanted(load, None)]
            found += [store for store in progress.stores if wanted(None, store)]
        assert found, f"found no report within {ANSWER_S} s, wanted exactly one"
        quiet = subject.connector.poll(0.05)
        found += [load for load in quiet.loads if wanted(load, None)]
        found += [store for store in quiet.stores if wanted(None, store)]
        assert len(found) == 1, f"reports: found {len(found)}, wanted exactly one"
        return found[0]


def expect(what: str, found: object, wanted: object) -> None:
    if isinstance(found, list) and isinstance(wanted, list):
        wrong = [at for at, (a, b) in enumerate(zip(found, wanted, strict=True)) if a != b]
        assert not wrong, f"{what}: blocks {wrong} of {len(wanted)} hold other bytes than wanted"
    assert found == wanted, f"{what}: found {found}, wanted {wanted}"


def unknown_tokens_are_a_miss(bench: Bench) -> None:
    with bench.subject("reader") as reader:
        tokens = bench.tokens(3 * reader.chunk_tokens)
        expect("hit", bench.hit(reader, "r", tokens), 0)
        local = reader.block_tokens
        expect("hit beyond the local tokens", bench.hit(reader, "r2", tokens, local), local)


def what_one_stores_another_loads_byte_for_byte(bench: Bench) -> None:
    with bench.subject("writer") as writer, bench.subject("reader") as reader:
        tokens, contents = bench.stored(writer, 3)
        blocks = list(range(len(contents)))[::-1]  # other places than the writer's
        bench.fill(reader, blocks)
        expect("hit", bench.hit(reader, "r", tokens), len(tokens))
        expect("valid tokens", bench.load(reader, "r", blocks, 0, len(tokens)), len(tokens))
        expect("loaded", [reader.contents(block) for block in blocks], contents)


def tokens_that_differ_anywhere_before_are_a_miss(bench: Bench) -> None:
    with bench.subject("writer") as writer, bench.subject("reader") as reader:
        tokens, _ = bench.stored(writer, 3)
        middle = reader.chunk_tokens + 1
        changed = [*tokens[:middle], tokens[middle] ^ 1, *tokens[middle + 1 :]]
        expect("hit", bench.hit(reader, "r", changed), reader.chunk_tokens)


def a_partial_chunk_is_not_stored(bench: Bench) -> None:
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
    with bench.subject("writer") as writer, bench.subject("reader") as reader:
        tokens, _ = bench.stored(writer, 2)
        for _ in range(5):
            expect("hit", bench.hit(reader, "r", tokens), len(tokens))
        expect("leases after many questions", bench.leases(reader), 1)


def blocks_the_engine_shares_are_never_written(bench: Bench) -> None:
    with bench.subject("writer") as writer, bench.subject("reader") as reader:
        tokens, contents = bench.stored(writer, 3)
        for local_blocks in range(len(contents)):
            request, local = f"r{local_blocks}", local_blocks * reader.block_tokens
            blocks = list(range(len(contents)))
            guard = bench.fill(reader, blocks)
            if bench.hit(reader, request, tokens, local) == local:
                continue
            expect("valid tokens", bench.load(reader, request, blocks, local, len(tokens)), len(tokens))
            found = [reader.contents(block) for block in blocks]
            expect(f"shared blocks before token {local}", found[:local_blocks], guard[:local_blocks])
            expect("loaded behind them", found[local_blocks:], contents[local_blocks:])


def a_store_reads_no_block_after_its_report(bench: Bench) -> None:
    with bench.subject("writer") as writer, bench.subject("reader") as reader:
        tokens = bench.tokens(2 * writer.chunk_tokens)
        blocks = list(range(len(tokens) // writer.block_tokens))
        contents = bench.fill(writer, blocks)
        bench.store(writer, "w", tokens, blocks, len(tokens))
        bench.fill(writer, blocks)  # the engine gives them to somebody else
        expect("hit", bench.hit(reader, "r", tokens), len(tokens))
        expect("valid tokens", bench.load(reader, "r", blocks, 0, len(tokens)), len(tokens))
        expect("loaded", [reader.contents(block) for block in blocks], contents)


def nothing_is_held_when_all_requests_have_ended(bench: Bench) -> None:
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


def a_preempted_request_comes_back_under_its_id(bench: Bench) -> None:
    with bench.subject("writer") as writer, bench.subject("reader") as reader:
        tokens, contents = bench.stored(writer, 2)
        for turn in range(3):
            blocks = [block + turn for block in range(len(contents))]
            bench.fill(reader, blocks)
            expect("hit", bench.hit(reader, "again", tokens), len(tokens))
            expect("valid tokens", bench.load(reader, "again", blocks, 0, len(tokens)), len(tokens))
            expect("loaded", [reader.contents(block) for block in blocks], contents)
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
    a_preempted_request_comes_back_under_its_id,
)
