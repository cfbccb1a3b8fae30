"""A prompt whose KV was loaded from the server has the same bits as one whose KV never left the engine.

Engine A computes and stores; engine B, in another process, loads. The reference is an engine alone whose own
prefix cache is limited to what B had loaded: chunks of the server and of prefill are both 64
tokens, so equal lengths mean equal shapes, and equal shapes must mean equal bits, of every logit.

The negative controls show that a difference would be seen: one damaged block changes the logits of every prompt, and
one flipped bit of stored memory is caught, counted, recomputed and never offered again.
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from random import Random

import pytest
import torch
from api_helpers import ServerProcess
from connector_helpers import CHUNK, Spectator, engine_over, kvdock_of
from engine_helpers import config, make_engine, prompt, run_one, sampling
from same_tokens_helpers import StandIn
from torch import Tensor

from kvdock.client.client import Client
from kvdock.connectors.engine_connector import EngineConnector
from kvdock.connectors.interface import BlocksRead, GroupBlocks
from kvdock.engine.blocks import held
from kvdock.engine.engine import Engine
from kvdock.engine.kv_cache import KVCache
from kvdock.engine.request import Completion

pytestmark = pytest.mark.same_tokens

TOKENS = 3
PROMPTS = 54
SETTINGS = config(num_blocks=512)


@dataclass(frozen=True)
class Served:
    """The result of one prompt: `at_hand` tokens were not computed, and `loaded` of them came from kvdock."""

    output: list[int]
    logits: Tensor
    loaded: int
    at_hand: int


def served(done: Completion) -> Served:
    metrics = done.metrics
    return Served(
        done.output_tokens, torch.stack(done.logits), metrics.loaded_tokens,
        metrics.loaded_tokens + metrics.local_hit_tokens,
    )


def serve(address: str, salt: str, prompts: Sequence[list[int]]) -> list[Served]:
    """A fresh engine B, run in the other process, with its own prefix cache as in practice."""
    engine = engine_over(address, SETTINGS, label="B", salt=salt)
    found = [served(run_one(engine, tokens, sampling(TOKENS))) for tokens in prompts]
    assert engine.drain(20.0)
    engine.close()
    return found


def make_prompts() -> list[tuple[list[int], int]]:
    """(tokens, first chunk of its own): 70…500 tokens, no length a multiple of 64; a third share prefixes.

    Prompts with a common prefix differ before their last whole chunk, so each has a chunk of its own."""
    random = Random(20)
    fronts = [prompt(1000 + number, 300) for number in range(4)]
    made = []
    for number in range(PROMPTS):
        length = random.randrange(70, 501)
        length += length % CHUNK == 0
        shared = random.randrange(length // CHUNK * CHUNK) if number % 3 == 0 else 0
        shared = min(shared, 300)
        front = fronts[random.randrange(4)][:shared]
        made.append((front + prompt(number, length - shared), shared // CHUNK))
    return made


MADE = make_prompts()
ALL = [tokens for tokens, _ in MADE]


@pytest.fixture(scope="module")
def pool() -> Iterator[ServerProcess]:
    with ServerProcess(pool_bytes=64 << 20, segment_bytes=64 << 20) as process:
        yield process


@pytest.fixture(scope="module")
def elsewhere() -> Iterator[ProcessPoolExecutor]:
    """Another process. It is spawned, so it inherits nothing."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as executor:
        yield executor


@pytest.fixture(scope="module")
def alone() -> Engine:
    """The reference engine, which has computed every prompt once."""
    engine = make_engine(config(num_blocks=2500))
    for tokens in ALL:
        run_one(engine, tokens, sampling(1))
    return engine


def reference(alone: Engine, tokens: list[int], at_hand: int) -> Served:
    found = served(run_one(alone, tokens, sampling(TOKENS, max_local_hit_tokens=at_hand)))
    assert (found.at_hand, found.loaded) == (at_hand, 0), "the reference cannot take the same shapes"
    return found


def assert_same(found: Sequence[Served], alone: Engine) -> None:
    for number, (one, tokens) in enumerate(zip(found, ALL, strict=True)):
        wanted = reference(alone, tokens, one.at_hand)
        assert one.output == wanted.output, f"prompt {number}: other tokens"
        assert not one.logits.isnan().any()
        assert torch.equal(one.logits, wanted.logits), (
            f"prompt {number}: logits differ by {(one.logits - wanted.logits).abs().max()}"
        )


def stored_by_a(pool: ServerProcess, salt: str) -> None:
    engine = engine_over(pool.unix, SETTINGS, label="A", salt=salt)
    for tokens in ALL:
        run_one(engine, tokens, sampling(1))
    assert engine.drain(20.0)
    engine.close()


def test_loaded_prompts_give_the_bits_of_prompts_that_never_left_the_engine(
    pool: ServerProcess, elsewhere: ProcessPoolExecutor, alone: Engine
) -> None:
    stored_by_a(pool, "clean")
    found = elsewhere.submit(serve, pool.unix, "clean", ALL).result()
    assert len(found) >= 50
    for one, tokens in zip(found, ALL, strict=True):
        assert one.at_hand == len(tokens) // CHUNK * CHUNK
        assert one.loaded > 0, "its last whole chunk is in no other prompt: it can only be loaded"
    whole = sum(len(tokens) // CHUNK * CHUNK for tokens in ALL)
    assert sum(one.loaded for one in found) > 0.7 * whole
    assert any(one.at_hand - one.loaded > 0 and (one.at_hand - one.loaded) % CHUNK for one in found), (
        "wanted a load that begins in the middle of a chunk"
    )
    assert_same(found, alone)


class Spoiler(StandIn):
    """A connector that overwrites one block of each prompt before it is stored, and puts it back afterwards.

    The checksum is that of the wrong bytes, so it cannot show them. `kv` is the engine's memory."""

    def __init__(self, inner: EngineConnector, kv: KVCache, seed: int) -> None:
        super().__init__(inner, kv)
        self.random = Random(seed)
        self.draw = torch.Generator().manual_seed(seed)
        self.victims: dict[str, int] = {}
        self.spoiled: list[str] = []

    def choose(self, request_id: str, first_own_chunk: int, chunks: int) -> None:
        """One block of one chunk that no other prompt stores."""
        per_chunk = CHUNK // self.kv.block_tokens
        self.victims[request_id] = self.random.randrange(first_own_chunk * per_chunk, chunks * per_chunk)

    def begin_store(
        self, request_id: str, token_ids: Sequence[int], block_ids: GroupBlocks, computed_tokens: int
    ) -> BlocksRead:
        table = held(block_ids)
        victim = table[self.victims[request_id]] if self.victims[request_id] < len(table) else -1
        paged = [*self.kv.k, *self.kv.v]
        before = [one[victim].clone() for one in paged]
        for one in paged:
            one[victim] = torch.randn(one[victim].shape, generator=self.draw)
        blocks = self.stored(request_id, token_ids, block_ids, computed_tokens)
        if victim in held(blocks):
            self.spoiled.append(request_id)
        for one, old in zip(paged, before, strict=True):
            one[victim] = old
        return blocks


def test_one_spoiled_block_in_what_was_stored_changes_the_logits_of_every_prompt(
    pool: ServerProcess, elsewhere: ProcessPoolExecutor, alone: Engine
) -> None:
    engine = engine_over(pool.unix, config(num_blocks=512, max_local_hit_tokens=0), label="A", salt="spoiled")
    spoiler = Spoiler(kvdock_of(engine), engine.kv, seed=5)
    engine.connector = engine.scheduler.connector = spoiler
    for number, (tokens, first_own_chunk) in enumerate(MADE):
        spoiler.choose(f"p{number}", first_own_chunk, len(tokens) // CHUNK)
        engine.add_request(tokens, sampling(1), f"p{number}")
        while engine.has_unfinished:
            engine.step()
    assert engine.drain(20.0)
    engine.close()
    assert spoiler.spoiled == [f"p{number}" for number in range(PROMPTS)]

    found = elsewhere.submit(serve, pool.unix, "spoiled", ALL).result()
    with Client(pool.unix) as client:
        assert client.status().counters["mismatches"] == 0, "the control must not be caught by checksums"
    for number, (one, tokens) in enumerate(zip(found, ALL, strict=True)):
        assert one.loaded > 0
        wanted = reference(alone, tokens, one.at_hand)
        assert not torch.equal(one.logits[-1], wanted.logits[-1]), f"prompt {number}: the damage was not seen"


def test_one_flipped_bit_of_stored_memory_is_caught_recomputed_and_not_offered_again(
    pool: ServerProcess, elsewhere: ProcessPoolExecutor, alone: Engine
) -> None:
    stored_by_a(pool, "flipped")
    random = Random(6)
    probe = engine_over(pool.unix, salt="flipped")
    manifest = kvdock_of(probe).session.manifest
    probe.close()
    damaged: list[int] = []
    with Client(pool.unix) as client, Spectator(client, manifest) as spectator:
        mismatches = client.status().counters["mismatches"]
        for tokens, first_own_chunk in MADE:
            slots = spectator.slots(tokens)
            assert len(slots) == len(tokens) // CHUNK
            damaged.append(random.randrange(first_own_chunk, len(slots)))
            part = slots[damaged[-1]]
            spectator.flip(part, random.randrange(part.length))

        found = elsewhere.submit(serve, pool.unix, "flipped", ALL).result()
        assert client.status().counters["mismatches"] == mismatches + PROMPTS
        for one, chunk in zip(found, damaged, strict=True):
            assert one.at_hand <= max(chunk * CHUNK, one.at_hand - one.loaded), "damaged tokens were used"
        assert_same(found, alone)

        # The recomputed chunks have replaced the damaged ones: another fresh engine finds all of them valid.
        found = elsewhere.submit(serve, pool.unix, "flipped", ALL).result()
        assert client.status().counters["mismatches"] == mismatches + PROMPTS
        assert all(one.at_hand >= len(tokens) // CHUNK * CHUNK for one, tokens in zip(found, ALL, strict=True))
        assert_same(found, alone)
