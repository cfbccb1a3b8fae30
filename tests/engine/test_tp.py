"""Engines of several ranks: which chunks they share with others, and the server's state after one rank is killed."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from api_helpers import ServerProcess, eventually, unique
from connector_helpers import CHUNK, Spectator, engine_over, kvdock_of
from engine_helpers import assert_same_bits, config, make_engine, prompt, run_one, sampling
from engines_to_kill import serve_for_ever
from forks import forked
from tp_helpers import Verb, engine_of_ranks, shared, stick

from kvdock.client.client import Client
from kvdock.engine.config import ConfigError, EngineConfig, preset
from kvdock.engine.engine import Engine
from kvdock.engine.model import Model
from kvdock.engine.ranks import ProcessGroup, Rank, RankLost
from kvdock.engine.request import Completion

TOKENS = prompt(1, 210)
STORED = len(TOKENS) // CHUNK * CHUNK
SECONDS = 60.0
"""The other ranks must have an answer within this time."""


class Share:
    """A rank that computes alone, so its totals are its own partial sums."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size

    def total(self, part: torch.Tensor) -> torch.Tensor:
        return part


@pytest.fixture(scope="module")
def pair() -> Iterator[ProcessGroup]:
    process_group = ProcessGroup(2)
    yield process_group
    process_group.close()


def serve(engine: Engine, tokens: list[int], max_tokens: int = 6) -> Completion:
    """Serves without the engine's own prefix cache, and waits until all is stored."""
    done = run_one(engine, tokens, sampling(max_tokens, max_local_hit_tokens=0))
    assert engine.drain(20.0)
    return done


# ---------------------------------------------------------------------- shares


@pytest.mark.parametrize("name", ["tiny-mha", "tiny-mla"])
def test_the_ranks_shares_are_all_the_weights_once(name: str) -> None:
    model = preset(name).model
    whole, parts = Model(model).layers[1], [Model(model, Share(rank, 4)).layers[1] for rank in range(4)]
    assert torch.equal(torch.cat([part.out for part in parts], 1), whole.out)
    assert torch.equal(torch.cat([part.down for part in parts], 1), whole.down)
    queries = model.heads * model.head_size
    own = [part.qkv[: queries // 4] for part in parts]
    assert torch.equal(torch.cat(own), whole.qkv[:queries])
    gates = [part.gate_up[: model.mlp_hidden // 4] for part in parts]
    assert torch.equal(torch.cat(gates), whole.gate_up[: model.mlp_hidden])
    latent = [torch.equal(part.qkv[queries // 4 :], whole.qkv[queries:]) for part in parts]
    assert latent == [name == "tiny-mla"] * 4, "a latent is everybody's, KV heads are not"


def test_heads_that_do_not_divide_are_refused() -> None:
    with pytest.raises(ConfigError, match="kv_heads: found 2, wanted a multiple of tensor_parallel=4"):
        config(tensor_parallel=4)


@pytest.mark.parametrize("name", ["tiny", "tiny-mla", "tiny-hybrid2"])
def test_two_ranks_say_what_one_says_within_rounding(pair: ProcessGroup, name: str) -> None:
    found = serve(engine_of_ranks(pair, shared(name, 2), None), TOKENS)
    wanted = run_one(make_engine(preset(name)), TOKENS, sampling(6))
    assert found.output_tokens == wanted.output_tokens
    for one, other in zip(found.logits, wanted.logits, strict=True):
        assert (one - other).abs().max() < 1e-3


# ---------------------------------------------------------------------- one server


def test_engines_of_other_sizes_on_one_server_never_hit_each_other(server: ServerProcess, pair: ProcessGroup) -> None:
    """The same model and salt, an instance each; then each engine finds what it stored itself."""
    salt = unique("sizes")
    two = engine_of_ranks(pair, shared("tiny-mla", 2), server.unix, salt=salt)
    one = engine_over(server.unix, preset("tiny-mla"), salt=salt)
    for engine in (two, one):
        assert serve(engine, TOKENS).metrics.loaded_tokens == 0
    found = {engine: serve(engine, TOKENS) for engine in (two, one)}
    for engine, done in found.items():
        assert done.metrics.loaded_tokens == STORED
        wanted = run_one(engine, TOKENS, sampling(6, max_local_hit_tokens=STORED))
        assert_same_bits(done, wanted)
        engine.close()
    with Client(server.unix) as client:
        assert client.status().counters["mismatches"] == 0


def test_a_chunk_has_a_part_of_each_rank_and_of_a_latent_one(server: ServerProcess, pair: ProcessGroup) -> None:
    for name, writers in (("tiny", [0, 1]), ("tiny-mla", [0])):
        engine = engine_of_ranks(pair, shared(name, 2), server.unix)
        serve(engine, TOKENS)
        with Client(server.unix) as client, Spectator(client, kvdock_of(engine).session.manifest) as spectator:
            parts = spectator.slots(TOKENS)
        assert [part.writer for part in parts] == writers * (STORED // CHUNK)
        engine.close()


def test_no_lease_and_no_member_remain_once_all_ranks_have_loaded(server: ServerProcess, pair: ProcessGroup) -> None:
    with Client(server.unix) as client:
        for name in ("tiny", "tiny-mla"):
            engine = engine_of_ranks(pair, shared(name, 2), server.unix, salt=unique("leases"))
            serve(engine, TOKENS)
            assert serve(engine, TOKENS).metrics.loaded_tokens == STORED
            eventually(lambda: client.status().leases == 0)
            session = kvdock_of(engine).session.identity.instance
            mine = next(view for view in client.sessions().sessions if view.instance == session)
            assert sorted(member.ranks for member in mine.members) == [[0], [1]]
            assert sum(member.scheduler for member in mine.members) == 1
            engine.close()
            assert all(view.instance != session for view in client.sessions().sessions)


def test_a_rank_that_is_not_attached_makes_a_miss_and_strands_nothing(
    server: ServerProcess, pair: ProcessGroup
) -> None:
    """Rank 1 has lost its server, so rank 0 releases the lease for it."""
    engine = engine_of_ranks(pair, shared("tiny", 2), server.unix, salt=unique("apart"))
    first = serve(engine, TOKENS)
    pair.ask(forget_attachment)
    again = serve(engine, TOKENS)
    assert again.metrics.loaded_tokens == 0
    assert_same_bits(again, first)
    serve(engine, prompt(2, 150))
    with Client(server.unix) as client:
        eventually(lambda: client.status().leases == client.status().reservations == 0)
    engine.close()


def forget_attachment(rank: Rank) -> None:
    assert rank.worker is not None
    session = rank.worker.session
    session._stop.set()
    # It keeps its lock, so the server takes it to be alive.
    session._attachment, session._suspended = None, session._attachment


# ---------------------------------------------------------------------- a rank is killed


def killed(process_group: ProcessGroup, rank: int) -> float:
    """Sends SIGKILL and returns the time."""
    pid = process_group.processes[rank].pid
    assert pid is not None
    os.kill(pid, signal.SIGKILL)
    return time.monotonic()


def step_until(engine: Engine, done: Callable[[], bool]) -> None:
    until = time.monotonic() + SECONDS
    while not done():
        assert time.monotonic() < until
        engine.step()


def assert_all_comes_back(client: Client) -> None:
    eventually(lambda: client.status().leases == client.status().reservations == 0)
    eventually(lambda: client.status().chunks.reserved == client.status().chunks.quarantined == 0)
    eventually(lambda: client.sessions().sessions == [])


@pytest.mark.parametrize(
    ("name", "size", "victim", "verb"),
    [
        ("tiny", 2, 1, "store"), ("tiny", 2, 1, "load"), ("tiny-mha", 4, 3, "store"),
        pytest.param("tiny-mla", 4, 2, "load", marks=pytest.mark.sweep),
    ],
)
@pytest.mark.kill_matrix
def test_a_rank_killed_in_the_middle_of_a_copy(
    tmp_path: Path, name: str, size: int, victim: int, verb: Verb
) -> None:
    """The other ranks get an error at once, no incomplete chunk is published, and all memory is freed."""
    settings = shared(name, size)
    with ServerProcess() as server, Client(server.unix) as client:
        process_group = ProcessGroup(size, timeout_s=2 * SECONDS)
        engine = engine_of_ranks(process_group, settings, server.unix, salt="killed")
        if verb == "load":
            serve(engine, TOKENS)
        published = client.status().chunks.ready
        sign = tmp_path / "stuck"
        stick(process_group, verb, victim, sign)
        engine.add_request(TOKENS, sampling(6, max_local_hit_tokens=0), "r")
        held = engine.scheduler.loading if verb == "load" else engine.scheduler.storing
        step_until(engine, lambda: bool(held))
        eventually(sign.exists)
        assert held, "done without one of the ranks"
        if verb == "store":
            assert client.status().chunks.reserved > 0

        at = killed(process_group, victim)
        with pytest.raises(RankLost, match=str(victim)):
            step_until(engine, lambda: False)
        assert engine.drain(SECONDS), "somebody waits for the dead"
        engine.close()
        process_group.close()
        assert time.monotonic() - at < SECONDS
        assert_all_comes_back(client)
        assert client.status().chunks.ready == published, "a part of the dead was published"
        assert client.status().counters["mismatches"] == 0
        assert stores_again(server, settings) == STORED


def stores_again(server: ServerProcess, settings: EngineConfig) -> int:
    """How many tokens an engine of this kind loads after another has stored them."""
    process_group = ProcessGroup(settings.tensor_parallel)
    engine = engine_of_ranks(process_group, settings, server.unix, salt="killed")
    first = serve(engine, TOKENS)
    again = serve(engine, TOKENS)
    assert first.output_tokens == again.output_tokens
    engine.close()
    process_group.close()
    return again.metrics.loaded_tokens


def test_a_rank_killed_while_all_compute_is_an_error_at_once(server: ServerProcess) -> None:
    process_group = ProcessGroup(4, timeout_s=2 * SECONDS)
    engine = engine_of_ranks(process_group, shared("tiny-mha", 4), server.unix)
    engine.add_request(TOKENS, sampling(200), "r")
    step_until(engine, lambda: len(engine.requests["r"].output) > 3)
    at = killed(process_group, 2)
    with pytest.raises(RankLost):
        step_until(engine, lambda: False)
    engine.close()
    process_group.close()
    assert time.monotonic() - at < SECONDS
    assert all(process.exitcode is not None for process in process_group.processes.values())


def test_the_first_rank_killed_takes_the_others_with_it() -> None:
    with ServerProcess() as server, Client(server.unix) as client:
        with forked(serve_for_ever, server.unix) as link:
            pids = link.recv()
            assert len(pids) == 3
        eventually(lambda: not any(Path(f"/proc/{pid}").exists() for pid in pids))
        assert_all_comes_back(client)
