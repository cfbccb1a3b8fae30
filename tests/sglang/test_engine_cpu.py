"""The linker inside whole SGLang engines on the CPU: what becomes of damage, and what SGLang has of its own."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest
from api_helpers import ServerProcess, comes_true
from engines import PP2, TP2, Engine, odd
from whole_engines import HITS, NOTHING, PROMPTS, comes_back, prompts_of, tokens_of

from kvdock.client.client import Client
from kvdock.datapath.segments import AttachedSegments
from kvdock.shm.segment import SegmentInfo

pytestmark = [pytest.mark.sglang, pytest.mark.timeout(400)]

FOUR = [prompts_of(seed)[2] for seed in (100, 200, 300, 400)]


def spoil(server: ServerProcess) -> None:
    """Flips a bit in each page of memory that chunks may lie in."""
    with Client(server.unix) as client:
        pool = client.segments()
    segments = AttachedSegments(int(pool.pool_id, 16))
    try:
        for one in pool.segments:
            segments.attach(SegmentInfo(one.id, one.name, one.bytes, one.data_offset))
            with memoryview(segments.mapping(one.id)) as view:
                for at in range(one.data_offset, one.bytes, 4096):
                    view[at] ^= 1
    finally:
        segments.close()


@pytest.mark.parametrize(("kind", "ranks"), [("llama", {}), ("states", {}), ("llama", PP2)])
def test_four_at_once_under_memory_pressure_load_and_give_the_same_tokens(
    kind: str, ranks: dict[str, Any], models: dict[str, Path], server: ServerProcess
) -> None:
    """The pool holds two of the four, so requests wait, are evicted and come back."""
    small = {"max_total_tokens": 1280, "max_running_requests": 2, "chunked_prefill_size": 128}
    how = {**ranks, "engine": {**small, **ranks.get("engine", {})}}
    with Engine(models[kind], server.unix, **how) as engine:
        alone, _ = engine.generate(FOUR, new=24)
        for _ in range(3):
            engine.drain()
            engine.flush()
            together, cached = engine.generate(FOUR, new=24, at_once=True)
            assert tokens_of(together) == tokens_of(alone)
            assert cached == [512] * 4


def test_a_request_in_the_queue_is_looked_up_before_its_turn(models: dict[str, Path], server: ServerProcess) -> None:
    """The one before it has no whole page, and nothing is looked up for it."""
    both, how = [PROMPTS[0][:40], PROMPTS[2]], {"engine": {"max_running_requests": 1}}
    with Engine(models["llama"], server.unix, **how) as engine, Client(server.unix) as client:
        engine.generate(both)
        (alone_s,) = engine.done(engine.do("generate", prompts=both[:1], new=800))["took_s"]
        engine.drain()
        engine.flush()
        before, began_s = client.status().counters["lookups"], time.monotonic()
        engine.tell("generate", prompts=both, new=800, at_once=True)
        assert comes_true(lambda: client.status().counters["lookups"] > before)
        assert time.monotonic() - began_s < alone_s / 2
        assert engine.done(engine.answer())["cached"] == [0, 512]


def test_no_request_waits_until_sglang_has_compiled_what_hashes_pages(
    models: dict[str, Path], server: ServerProcess, tmp_path: Path
) -> None:
    """SGLang does so when it hashes the first page, and keeps the result on the machine."""
    with Engine(models["llama"], server.unix, environ={"TORCH_EXTENSIONS_DIR": str(tmp_path)}) as engine:
        assert engine.about
        assert list(tmp_path.rglob("hicache_hash_cpp.so"))


def test_what_was_evicted_from_the_device_comes_back(models: dict[str, Path], server: ServerProcess) -> None:
    with Engine(models["llama"], server.unix, engine={"max_total_tokens": 1280}) as engine:
        engine.generate(PROMPTS[2:])
        local, cached = engine.generate(PROMPTS[2:])
        assert cached == [512]
        engine.drain()
        for seed in (500, 600, 700):
            engine.generate(prompts_of(seed))
        assert engine.generate(PROMPTS[2:]) == (local, [512])


def test_packed_pages_come_back_with_the_bits_of_a_local_hit(models: dict[str, Path], server: ServerProcess) -> None:
    told = {"dtype": "bfloat16", "page_size": 128}  # smaller pages of this model do not become smaller
    with Engine(models["llama"], server.unix, extra={"pack": "on"}, engine=told) as engine:
        engine.generate(PROMPTS)
        local, cached = engine.generate(PROMPTS)
        assert cached != NOTHING
        engine.drain()
        assert comes_back(engine) == (local, cached)
        with Client(server.unix) as client:
            pool = client.status().pool
        assert pool.kv_bytes > 1.1 * pool.ready_bytes


def test_damaged_bytes_are_a_miss_and_never_tokens(models: dict[str, Path], server: ServerProcess) -> None:
    with Engine(models["llama"], server.unix, extra={"trust_s": 0.0}) as engine:
        engine.generate(PROMPTS)
        local, _ = engine.generate(PROMPTS)
        engine.drain()
        engine.flush()
        spoil(server)
        found = engine.do("generate", prompts=PROMPTS)
        assert found["cached"] == NOTHING and found["why"] == ["length"] * 3
        assert tokens_of(found["runs"]) == tokens_of(local)
        engine.drain()
        assert comes_back(engine) == (local, HITS), "what was computed has taken its place"


def test_damage_to_what_is_trusted_ends_requests_once_and_is_never_tokens(
    models: dict[str, Path], server: ServerProcess
) -> None:
    """Its loads are hashed as all are. After one that fails nothing is trusted."""
    with Engine(models["llama"], server.unix) as engine:
        engine.generate(PROMPTS)
        local, _ = engine.generate(PROMPTS)
        engine.drain()
        assert comes_back(engine) == (local, HITS), "what was loaded is trusted"
        engine.flush()
        spoil(server)
        failed = engine.do("generate", prompts=PROMPTS[:1])
        assert "External KV cache load failed" in failed["why"][0] or failed["why"] == ["abort"]
        found = engine.do("generate", prompts=PROMPTS)
        assert found["cached"] == NOTHING and found["why"] == ["length"] * 3
        assert tokens_of(found["runs"]) == tokens_of(local)


@pytest.mark.parametrize(("linker", "when"), [("DamagedLinker", "damage"), ("FailingLinker", "fail")])
def test_a_load_that_fails_after_its_promise_ends_its_request_and_no_other(
    linker: str, when: str, models: dict[str, Path], server: ServerProcess, tmp_path: Path
) -> None:
    """SGLang has no way back by then. The pages that it computes next are whole."""
    with Engine(models["llama"], server.unix, **odd(linker, tmp_path)) as engine:
        engine.generate(PROMPTS)
        local, _ = engine.generate(PROMPTS)
        engine.drain()
        engine.flush()
        (tmp_path / when).touch()
        failed = engine.do("generate", prompts=PROMPTS[:1])
        assert "External KV cache load failed" in failed["why"][0] or failed["why"] == ["abort"]
        (tmp_path / when).unlink(missing_ok=True)
        found = engine.do("generate", prompts=PROMPTS)
        assert found["why"] == ["length"] * 3 and tokens_of(found["runs"]) == tokens_of(local)
        engine.drain()
        assert comes_back(engine) == (local, HITS)


def test_bytes_that_were_not_loaded_would_show(models: dict[str, Path], server: ServerProcess, tmp_path: Path) -> None:
    """The control of all the others: zeros in the place of a load change tokens."""
    with Engine(models["llama"], server.unix, **odd("ForgetfulLinker", tmp_path)) as engine:
        engine.generate(PROMPTS)
        local, _ = engine.generate(PROMPTS)
        engine.drain()
        loaded, cached = comes_back(engine)
        assert cached == HITS and all(a != b for a, b in zip(tokens_of(loaded), tokens_of(local), strict=True))


def test_a_hit_of_recurrent_states_ends_where_sglang_has_kept_one(
    models: dict[str, Path], server: ServerProcess
) -> None:
    """Here after 256 tokens, which are a chunk of the prefill, and after the prompt's last whole page."""
    prompt, other = PROMPTS[2], [PROMPTS[2][:400] + PROMPTS[0]]
    with Engine(models["states"], server.unix) as first, Engine(models["states"], server.unix) as second:
        first.generate([prompt])
        first.drain()
        loaded, cached = second.generate(other)
        assert cached == [256]
        second.drain()
        again, cached = first.generate(other)
        assert (tokens_of(again), cached) == (tokens_of(loaded), [512]), "the second has stored what it computed"


@pytest.mark.parametrize("ranks", [{}, TP2], ids=["one rank", "two ranks"])
def test_the_state_at_a_branch_is_stored(
    ranks: dict[str, Any], models: dict[str, Path], server: ServerProcess
) -> None:
    """Two prompts have 448 tokens in common, and the second one's run keeps the state there."""
    branches = [PROMPTS[2][:450] + prompts_of(seed)[0] for seed in (900, 901, 902)]
    with Engine(models["states"], server.unix, **ranks) as first, Engine(models["states"], server.unix, **ranks) as one:
        first.generate(branches[:1])
        first.drain()
        first.generate(branches[1:2])
        first.drain()
        loaded, cached = one.generate(branches[2:])
        assert cached == [448]
        assert tokens_of(loaded) == tokens_of(first.generate(branches[2:])[0])


def test_recurrent_states_are_read_once_they_are_there(
    models: dict[str, Path], server: ServerProcess, tmp_path: Path
) -> None:
    """Layer 0 reads a state, and nothing else that it would wait for."""
    with Engine(models["states"], server.unix, **odd("LateLinker", tmp_path)) as engine:
        engine.generate(PROMPTS)
        local, _ = engine.generate(PROMPTS)
        engine.drain()
        for _ in range(2):
            assert comes_back(engine) == (local, HITS)


def test_the_drafts_kv_is_loaded_with_the_targets(
    models: dict[str, Path], server: ServerProcess, tmp_path: Path
) -> None:
    """The draft model is the target once more. As many drafts are accepted as after a local hit, and fewer without the
    draft's KV. Where two tokens are almost as likely, the rounding of a batch decides, and a draft may be refused."""
    model = models["llama"]
    drafts = {
        **odd("DraftlessLinker", tmp_path), "engine": {
            "speculative_algorithm": "STANDALONE", "speculative_draft_model_path": str(model),
            "speculative_num_steps": 2, "speculative_eagle_topk": 1, "speculative_num_draft_tokens": 3,
        },
    }
    with Engine(model, server.unix, **drafts) as first, Engine(model, server.unix, **drafts) as other:
        assert first.generate(PROMPTS)[1] == NOTHING
        local = first.do("generate", prompts=PROMPTS)
        assert local["cached"] == HITS
        first.drain()
        for engine in (other, first):
            first.flush()
            found = engine.do("generate", prompts=PROMPTS)
            assert {**found, "took_s": 0} == {**local, "took_s": 0}
        (tmp_path / "forget").touch()
        first.flush()
        forgotten = first.do("generate", prompts=PROMPTS)
        assert tokens_of(forgotten["runs"]) == tokens_of(local["runs"]) and forgotten["cached"] == HITS
        assert sum(forgotten["verified"]) > sum(local["verified"]), "drafts without the draft's KV are wrong"
        with Client(server.unix) as client:
            assert [len(space.manifest.groups) for space in client.namespaces().namespaces] == [2]


def test_each_node_is_offered_with_what_comes_before_it(
    models: dict[str, Path], server: ServerProcess, tmp_path: Path
) -> None:
    """SGLang does not say it, so it is read from its tree."""
    with Engine(models["llama"], server.unix, **odd("TellingLinker", tmp_path)) as engine:
        prompt = PROMPTS[2]
        for end in (130, 260, 530):
            engine.generate([prompt[:end]], new=1)
        engine.generate([prompt[:130]], new=1, cache_salt="other")
    offered = [json.loads(line) for line in (tmp_path / "offered").read_text().splitlines()]
    assert [len(pages) for _, pages in offered] == [2, 2, 4, 2]
    (root, first), (above, second), (top, _), (salted, others) = offered
    assert (root, above, top, salted) == ("", first[-1], second[-1], "")
    assert others != first


def test_requests_of_other_salts_and_keys_share_nothing(models: dict[str, Path], server: ServerProcess) -> None:
    """Nor do engines that are set up otherwise."""
    with Engine(models["llama"], server.unix) as first, Engine(models["llama"], server.unix) as second:
        for how in ({}, {"cache_salt": "a"}, {"cache_salt": "b"}, {"extra_key": "a"}):
            assert first.generate(PROMPTS, **how)[1] == NOTHING
            first.drain()
            assert second.generate(PROMPTS, **how)[1] == HITS
        with Engine(models["llama"], server.unix, engine={"enable_fp32_lm_head": True}) as third:
            assert third.generate(PROMPTS)[1] == NOTHING


def test_adapters_share_with_their_own_kind_alone(models: dict[str, Path], server: ServerProcess) -> None:
    paths = [f"{name}={models[f'adapter-{name}']}" for name in ("a", "b")]
    lora = {"engine": {
        "enable_lora": True, "lora_paths": paths, "max_loras_per_batch": 2, "lora_backend": "torch_native",
    }}
    with Engine(models["llama"], server.unix, **lora) as first, Engine(models["llama"], server.unix, **lora) as second:
        seen = []
        for how in ({}, {"lora_path": "a"}, {"lora_path": "b"}):
            assert first.generate(PROMPTS, **how)[1] == NOTHING
            local, cached = first.generate(PROMPTS, **how)
            assert cached == HITS
            first.drain()
            assert second.generate(PROMPTS, **how) == (local, HITS)
            assert local not in seen, "adapters change tokens"
            seen.append(local)
        with Engine(models["llama"], server.unix) as plain:
            assert plain.generate(PROMPTS)[1] == NOTHING, "an engine without them is another one"


@pytest.mark.parametrize(("how", "said"), [
    ({"engine": {"page_size": 16}}, "--page-size is 16, and 64, 128 or 256 is wanted"),
    ({"extra": {"adress": "unix:/s"}}, "'adress' is no setting of kvdock"),
])
def test_what_is_not_served_is_refused_with_one_sentence(
    how: dict[str, object], said: str, models: dict[str, Path], server: ServerProcess
) -> None:
    engine = Engine(models["llama"], server.unix, **how)
    try:
        with pytest.raises(AssertionError, match="the engine ended"):
            assert engine.about
        assert said in engine.log_text()
    finally:
        assert engine.close() != 0


def test_one_variable_is_the_whole_set_up(models: dict[str, Path], server: ServerProcess) -> None:
    """SGLang finds the plugin in what describes the package. Nobody says how large pages are."""
    environ, engine = {"SGLANG_KVDOCK": "1", "KVDOCK_ADDRESS": server.unix}, {"page_size": None}
    with Engine(models["llama"], server.unix) as first:
        assert first.generate(PROMPTS)[1] == NOTHING
        first.drain()
        with Engine(models["llama"], server.unix, plugin=True, environ=environ, engine=engine) as second:
            second.generate(PROMPTS[:1])  # to be asked in a few milliseconds is little on a busy machine
            second.flush()
            assert sum(second.generate(PROMPTS)[1]) > 0


@pytest.mark.parametrize(("engine", "environ", "said"), [
    ({"page_size": 16}, {}, "SGLANG_KVDOCK is set: --page-size is 16, and 64, 128 or 256 is wanted"),
    ({"disable_radix_cache": True}, {}, "SGLANG_KVDOCK is set: kvdock does not serve --disable-radix-cache"),
    (
        {"pp_size": 2}, {**TP2["environ"], "SGLANG_PP_LAYER_PARTITION": "1,3"},
        "runs as without it: kvdock needs pipeline stages of equally many layers, found [1, 3]",
    ),
    ({}, {"KVDOCK_TRUSTED_UID": "me"}, "kvdock stands aside, and SGLang runs as without it: KVDOCK_TRUSTED_UID"),
], ids=["pages", "a cache", "stages", "a setting"])
def test_one_variable_never_ends_an_engine(
    engine: dict[str, object], environ: dict[str, str], said: str, models: dict[str, Path], server: ServerProcess
) -> None:
    environ = {"SGLANG_KVDOCK": "1", "KVDOCK_ADDRESS": server.unix, **environ}
    with Engine(models["llama"], server.unix, plugin=True, environ=environ, engine=engine) as whole:
        assert whole.generate(PROMPTS)[1] == NOTHING
        assert said in whole.log_text()
    with Client(server.unix) as client:
        assert client.status().counters["lookups"] == 0


def test_one_variable_asks_no_pages_of_an_engine_whose_kernels_have_none(
    models: dict[str, Path], server: ServerProcess
) -> None:
    """SGLang's kernels for drafts of several branches, which a GPU alone has, and so no request is sent."""
    environ = {"SGLANG_KVDOCK": "1", "KVDOCK_ADDRESS": server.unix}
    drafts = {"speculative_algorithm": "NGRAM", "speculative_num_draft_tokens": 3, "page_size": None}
    with Engine(models["llama"], server.unix, plugin=True, environ=environ, engine=drafts) as engine:
        assert engine.about
        assert "not all kernels have beside drafts of several branches" in engine.log_text()
