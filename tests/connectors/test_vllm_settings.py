"""Settings, groups and room of the vLLM connector: what needs no vLLM to be checked."""

from __future__ import annotations

import json
import re
from dataclasses import fields
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest
import torch

from kvdock.connectors.errors import NotSupportedError
from kvdock.connectors.vllm.groups import KVGroup, groups_of
from kvdock.connectors.vllm.identity import hashing_of, manifest_of, revision
from kvdock.connectors.vllm.plugin import register
from kvdock.connectors.vllm.setup import (
    DRAFTS_WITH_KV,
    DRAFTS_WITHOUT_KV,
    Settings,
    drafts_with_kv,
    loads_by_layer,
    place_of,
    refuse_what_is_not_supported,
    reports_early,
    undoes_steps,
    warn_of_version,
    workers_here,
)
from kvdock.connectors.vllm.tables import BlockBudget
from kvdock.connectors.vllm.worker import BESIDE_STEPS, beside_steps
from kvdock.connectors.worker import MOST_HASH_THREADS, cores_of, hash_threads
from kvdock.datapath.cuda import CopyTuning
from kvdock.protocol.keys import namespace_digest


@pytest.mark.parametrize(("extra", "named"), [
    ({"address": "localhost:1"}, "address is 'localhost:1'"),
    ({"address": "unix:/s", "chunk_token": 64}, "'chunk_token' is no setting"),
    ({"address": "unix:/s", "chunk_tokens": "64"}, "chunk_tokens is '64'"),
    ({"address": "unix:/s", "chunk_tokens": True}, "chunk_tokens is True"),
    ({"address": "unix:/s", "chunk_tokens": 0}, "chunk_tokens is 0, and more than 0 is wanted"),
    ({"address": "unix:/s", "min_load_tokens": -1}, "min_load_tokens: found -1, wanted at least 0"),
    ({"address": "unix:/s", "max_load_share": 1.5}, "max_load_share: found 1.5, wanted 0.0 to 1.0"),
    ({"address": "unix:/s", "max_load_tokens": 10, "min_load_tokens": 20}, "at least min_load_tokens=20"),
    ({"address": "unix:/s", "max_load_tokens": "10"}, "max_load_tokens is '10'"),
    ({"address": "unix:/s", "max_load": 10}, "'max_load' is no setting"),
])
def test_wrong_settings_are_refused_by_name(extra: dict[str, object], named: str) -> None:
    with pytest.raises(NotSupportedError, match=named.replace("(", r"\(")):
        Settings.load(extra, {})


def test_whole_seconds_are_a_timeout() -> None:
    assert Settings.load({"address": "unix:/s", "timeout_s": 3}, {}).timeout_s == 3.0


@pytest.mark.parametrize(("environ", "address"), [
    ({"XDG_RUNTIME_DIR": "/"}, "unix:/kvdock.sock"),
    ({"KVDOCK_SOCKET_PATH": "/a"}, "unix:/a"),
    ({"KVDOCK_SOCKET_PATH": "/a", "KVDOCK_ADDRESS": "http://h:1"}, "http://h:1"),
    ({"KVDOCK_ADDRESS": "unix:/b", "KVDOCK_VLLM_ADDRESS": "unix:/c"}, "unix:/c"),
])
def test_the_address_is_where_the_server_of_the_same_environment_listens(
    environ: dict[str, str], address: str
) -> None:
    assert Settings.load({}, environ).address == address
    assert Settings.load({"address": "unix:/mine"}, environ).address == "unix:/mine"


def test_every_setting_may_come_from_the_environment() -> None:
    changed: dict[str, object] = {
        "address": "unix:/s", "load_by_layer": "eager", "timeout_s": 2.5, "compute_once": 1.5, "copy_threads": 3,
    }
    for field in fields(Settings):
        value = changed.get(field.name, field.default)
        if isinstance(value, bool):
            value = not value
        environ = {f"KVDOCK_VLLM_{field.name.upper()}": str(value)}
        assert getattr(Settings.load({}, environ), field.name) == value, field.name
    environ = {"KVDOCK_VLLM_CHUNK_TOKENS": "64", "KVDOCK_POOL_BYTES": "1GiB"}
    assert Settings.load({"chunk_tokens": 256}, environ).chunk_tokens == 256, "what is said to vLLM wins"


@pytest.mark.parametrize(("environ", "named"), [
    ({"KVDOCK_VLLM_CHUNK_TOKEN": "64"}, "KVDOCK_VLLM_CHUNK_TOKEN: 'chunk_token' is no setting"),
    ({"KVDOCK_VLLM_CHUNK_TOKENS": "many"}, "KVDOCK_VLLM_CHUNK_TOKENS is 'many', and int is wanted"),
    ({"KVDOCK_VLLM_LOAD_ASYNC": "maybe"}, "KVDOCK_VLLM_LOAD_ASYNC is 'maybe', and true or false is wanted"),
    ({"KVDOCK_VLLM_LOOKUP_WAIT_S": "5"}, "KVDOCK_VLLM_…: lookup_wait_s is 5.0"),
    ({"KVDOCK_ADDRESS": "localhost:1"}, "address is 'localhost:1'"),
])
def test_wrong_variables_are_refused_by_name(environ: dict[str, str], named: str) -> None:
    with pytest.raises(NotSupportedError, match=re.escape(named)):
        Settings.load({}, environ)


def test_vllm_finds_the_connector_among_its_plugins() -> None:
    """The entry point of the installed distribution is the function that registers it."""
    (found,) = metadata.entry_points(group="vllm.general_plugins", name="kvdock")
    assert found.load() is register


class Model:
    """As much of vLLM's ModelConfig as is asked for. `layers`: of each pipeline stage."""

    def __init__(self, layers: list[int], name: str = "model", weights: str = "main", **config: object) -> None:
        self.layers, self.model, self.revision, self.hf_config = layers, name, weights, self
        self.config, self.quantization, self.dtype, self.seed = config, None, "half", 0
        self.enforce_eager, self.architecture, self.max_model_len = True, "SomeModel", 1024
        self._commit_hash = weights

    def get_layers_start_end_indices(self, parallel: SimpleNamespace) -> tuple[int, int]:
        stage = parallel.rank // parallel.tensor_parallel_size
        return sum(self.layers[:stage]), sum(self.layers[: stage + 1])

    def to_json_string(self, use_diff: bool) -> str:
        return json.dumps(self.config)


class Attention:
    """Named as vLLM's."""


def config(*, layers: list[int] | None = None, drafts: object = None, **parallel: int) -> SimpleNamespace:
    sizes = {"tensor_parallel_size": 1, "pipeline_parallel_size": 1, "rank": 0, **parallel}
    return SimpleNamespace(
        parallel_config=SimpleNamespace(**sizes), kv_transfer_config=SimpleNamespace(kv_role="kv_both"),
        speculative_config=drafts, cache_config=SimpleNamespace(), model_config=Model(layers or [4]),
        load_config=SimpleNamespace(load_format="auto", download_dir=None, model_loader_extra_config={}),
        device_config=SimpleNamespace(device_type="cuda"),
        scheduler_config=SimpleNamespace(async_scheduling=False), use_v2_model_runner=False,
        compilation_config=SimpleNamespace(static_forward_context={"layer.0": Attention()}),
    )


def drafting(method: str, model: Model | None = None) -> SimpleNamespace:
    return SimpleNamespace(method=method, draft_model_config=model)


@pytest.mark.parametrize("name", ["decode_context_parallel_size", "prefill_context_parallel_size"])
def test_context_parallelism_is_refused_at_start(name: str) -> None:
    set_up = config()
    setattr(set_up.parallel_config, name, 1)
    refuse_what_is_not_supported(set_up, 1, Settings())
    setattr(set_up.parallel_config, name, 2)
    with pytest.raises(NotSupportedError, match=f"{name} is 2, and 1 is wanted"):
        refuse_what_is_not_supported(set_up, 1, Settings())


def test_a_pipeline_is_served_when_its_stages_hold_equally_much() -> None:
    refuse_what_is_not_supported(config(pipeline_parallel_size=2, tensor_parallel_size=2, layers=[3, 3]), 1, Settings())
    uneven = config(pipeline_parallel_size=2, tensor_parallel_size=2, layers=[4, 3])
    with pytest.raises(NotSupportedError, match=r"found \[4, 3\]: choose a pipeline_parallel_size that divides 7"):
        refuse_what_is_not_supported(uneven, 1, Settings())
    with pytest.raises(NotSupportedError, match="one KV cache group, found 3"):
        refuse_what_is_not_supported(config(pipeline_parallel_size=2, layers=[3, 3]), 3, Settings())
    with pytest.raises(NotSupportedError, match="'eagle' drafts with pipeline parallelism"):
        refuse_what_is_not_supported(
            config(pipeline_parallel_size=2, layers=[3, 3], drafts=drafting("eagle")), 1, Settings()
        )


@pytest.mark.parametrize(
    ("workers", "bound", "installed", "quota", "threads"),
    [
        (1, 16, 16, None, MOST_HASH_THREADS),
        (1, 256, 256, "max 100000", MOST_HASH_THREADS),
        (1, 256, 256, "400000 100000", 2),  # a container's limit of four cores
        (1, 256, 256, "50000 100000", 1),
        (8, 64, 64, None, 4),
        (8, 8, 64, None, 4),  # each is bound to cores of its own
        (8, 32, 64, "max", 4),  # to a NUMA node
        (4, 256, 256, "1600000 100000", 2),
        (16, 8, 8, None, 1),
    ],
)
def test_a_worker_hashes_with_half_of_what_is_its_own(
    workers: int, bound: int, installed: int, quota: str | None, threads: int, tmp_path: Path
) -> None:
    if quota is not None:
        (tmp_path / "cpu.max").write_text(f"{quota}\n")
    assert hash_threads(cores_of(workers, bound=bound, installed=installed, quota=tmp_path / "cpu.max")) == threads
    assert 1 <= hash_threads(cores_of(1)) <= MOST_HASH_THREADS


def test_loads_beside_steps_take_few_multiprocessors_and_the_workers_threads() -> None:
    measured = CopyTuning(piece_bytes=1 << 20, load_ctas=16, store_ctas=7)
    assert beside_steps(measured, 3) == CopyTuning(
        piece_bytes=1 << 20, load_ctas=BESIDE_STEPS, store_ctas=7, hash_threads=3
    )
    assert beside_steps(CopyTuning(load_ctas=2), 8) == CopyTuning(load_ctas=2, hash_threads=8)


@pytest.mark.parametrize(("algorithm", "seed", "fixed", "hashing"), [
    ("sha256", None, None, ("blake2b-256", "")),  # vLLM's are random: keys come from tokens
    ("sha256", "7", None, ("vllm sha256", "7")),
    ("sha256", None, "root", ("vllm sha256", "root")),
    ("sha256_cbor", "7", "root", ("vllm sha256_cbor", "7")),
    ("xxhash", "7", "root", ("blake2b-256", "")),  # two prompts could be made to meet
    ("xxhash_cbor", "7", "root", ("blake2b-256", "")),
])
def test_vllms_hashes_make_keys_when_the_next_process_makes_the_same(
    algorithm: str, seed: str | None, fixed: str | None, hashing: tuple[str, str]
) -> None:
    assert hashing_of(algorithm, seed=seed, fixed_seed=fixed) == hashing


def test_workers_of_one_machine_are_counted_over_its_engines() -> None:
    assert workers_here(config(local_world_size=4, data_parallel_size_local=2)) == 8
    assert workers_here(config(local_world_size=4, data_parallel_size_local=0)) == 4  # all engines are elsewhere


def test_kv_whose_scales_are_found_at_run_time_is_refused() -> None:
    set_up = config()
    set_up.cache_config.calculate_kv_scales = False
    refuse_what_is_not_supported(set_up, 1, Settings())
    set_up.cache_config.calculate_kv_scales = True
    with pytest.raises(NotSupportedError, match="scales are found at run time: calculate_kv_scales is on"):
        refuse_what_is_not_supported(set_up, 1, Settings())


@pytest.mark.parametrize("kind", ["int8_per_token_head", "fp8_per_token_head"])
def test_kv_that_a_cpu_lays_out_otherwise_than_it_says_is_refused_there(kind: str) -> None:
    def refuse(kind: str, device: str) -> None:
        set_up = config()
        set_up.cache_config.cache_dtype, set_up.device_config.device_type = kind, device
        refuse_what_is_not_supported(set_up, 1, Settings())

    for fine in ("auto", "fp8", "fp8_e5m2"):
        refuse(fine, "cpu")
    refuse(kind, "cuda")
    with pytest.raises(NotSupportedError, match=f"--kv-cache-dtype {kind} on a CPU, .*: auto or fp8 is wanted"):
        refuse(kind, "cpu")


def test_more_workers_than_a_lease_has_readers_are_refused() -> None:
    refuse_what_is_not_supported(config(tensor_parallel_size=128), 1, Settings())
    with pytest.raises(NotSupportedError, match="up to 128 workers an engine, found 256"):
        refuse_what_is_not_supported(config(tensor_parallel_size=128, pipeline_parallel_size=2), 1, Settings())


@pytest.mark.parametrize("method", ["extract_hidden_states", "custom_class"])
def test_methods_of_drafting_whose_kv_is_not_known_are_refused_by_name(method: str) -> None:
    for known in (*DRAFTS_WITH_KV, *DRAFTS_WITHOUT_KV):
        refuse_what_is_not_supported(config(drafts=drafting(known)), 1, Settings())
    with pytest.raises(NotSupportedError, match=f"the speculative method '{method}' keeps"):
        refuse_what_is_not_supported(config(drafts=drafting(method)), 1, Settings())


@pytest.mark.parametrize("latent", [False, True])
@pytest.mark.parametrize(("shards", "stages"), [(1, 1), (2, 1), (1, 3), (2, 3)])
def test_every_part_has_one_writer_and_its_readers_have_its_bytes(shards: int, stages: int, latent: bool) -> None:
    groups = [KVGroup(None, 16, {"a": 128}, latent)]
    writers: dict[int, tuple[int, int]] = {}
    readers: dict[int, set[tuple[int, int]]] = {}
    ranks = set()
    for rank in range(shards * stages):
        place = place_of(
            SimpleNamespace(tensor_parallel_size=shards, pipeline_parallel_size=stages, rank=rank), groups
        )
        held = (rank // shards, 0 if latent else rank % shards)  # which bytes: stage, shard
        ranks.add(place.rank)
        readers.setdefault(place.rank % place.writers, set()).add(held)
        if place.rank < place.writers:
            writers[place.rank] = held
        assert place.writers == (stages if latent else shards * stages) and place.ranks == shards * stages
    assert ranks == set(range(shards * stages)) and set(writers) == set(range(place.writers))
    assert readers == {part: {held} for part, held in writers.items()}


def test_a_draft_model_is_part_of_what_kv_depends_on() -> None:
    def told(drafts: object, digest: str = "") -> str:
        return revision(config(), digest, drafts)

    draft = drafting("eagle", Model([1], "head", hidden=64))
    others = [
        drafting("eagle3", Model([1], "head", hidden=64)), drafting("eagle", Model([1], "other", hidden=64)),
        drafting("eagle", Model([1], "head", hidden=32)),
        drafting("eagle", Model([1], "head", "newer", hidden=64)), None,
    ]
    assert told(draft) == told(drafting("eagle", Model([1], "head", hidden=64)))
    assert len({told(draft), *(told(other) for other in others)}) == 6
    assert told(draft, "weights") != told(others[3], "weights"), "the digest names the model's weights alone"


@pytest.mark.parametrize(("name", "other"), [("quantization", "fp8"), ("dtype", "bfloat16")])
def test_the_models_quantization_and_type_are_part_of_what_kv_depends_on(name: str, other: str) -> None:
    """The same files can be quantized while they are read."""
    changed = config()
    setattr(changed.model_config, name, other)
    assert revision(changed, "", None) != revision(config(), "", None)


def test_engines_whose_caches_differ_in_their_type_alone_share_nothing() -> None:
    """Both types are one byte an element, so their tensors look alike."""
    groups = [KVGroup(None, 16, {"layer.0": 128}, False)]
    tensors = {"layer.0": torch.zeros((4, 128), dtype=torch.uint8)}

    def namespace(kind: str) -> bytes:
        set_up = config()
        set_up.cache_config.cache_dtype = kind
        vars(set_up.model_config).update(
            served_model_name="model", get_total_num_kv_heads=lambda: 2, get_head_size=lambda: 64
        )
        set_up.compilation_config.static_forward_context = {}
        described = manifest_of(
            set_up, "0.24.0", groups, tensors, place_of(set_up.parallel_config, groups), num_blocks=4,
            chunk_tokens=16, weights_digest="w", hashing=("f", "s"),
        )
        return namespace_digest(msgspec.to_builtins(described))

    assert namespace("fp8_e4m3") == namespace("fp8_e4m3") != namespace("fp8_e5m2")


def test_the_layers_of_drafts_are_asked_for_too_late_to_be_loaded_one_by_one() -> None:
    settings = Settings(address="unix:/s", load_by_layer="eager")
    groups = [KVGroup(None, 16, {"layer.0": 128}, False)]
    assert loads_by_layer(config(), settings, groups)
    assert loads_by_layer(config(drafts=drafting("ngram")), settings, groups)
    assert not loads_by_layer(config(drafts=drafting("eagle")), settings, groups)


def test_layers_that_are_no_attention_are_not_asked_for_and_so_not_loaded_one_by_one() -> None:
    settings, set_up = Settings(address="unix:/s", load_by_layer="eager"), config()
    groups = [KVGroup(None, 16, {"layer.0": 128, "layer.0.indexer": 128}, True)]
    assert not loads_by_layer(set_up, settings, groups)
    set_up.compilation_config.static_forward_context["layer.0.indexer"] = object()
    assert not loads_by_layer(set_up, settings, groups)


@pytest.mark.parametrize(("parallel", "zeroes", "latent", "reports"), [
    ({"tensor_parallel_size": 2}, False, False, True),
    ({}, False, True, True),
    ({"tensor_parallel_size": 2}, False, True, False),
    ({"pipeline_parallel_size": 2}, False, False, False),
    ({}, True, False, False),
])
def test_loads_are_reported_early_only_where_nobody_else_depends_on_their_end(
    parallel: dict[str, int], zeroes: bool, latent: bool, reports: bool
) -> None:
    set_up = config()
    vars(set_up.parallel_config).update(parallel)
    place = place_of(set_up.parallel_config, [KVGroup(None, 16, {"layer.0": 128}, latent)])
    assert reports_early(set_up, SimpleNamespace(needs_kv_cache_zeroing=zeroes), place) == reports
    assert reports_early(set_up, SimpleNamespace(), place) == (reports or zeroes)


def test_steps_are_undone_only_where_none_run_ahead() -> None:
    assert undoes_steps(config(tensor_parallel_size=2))
    assert not undoes_steps(config(pipeline_parallel_size=2))
    ahead = config()
    ahead.scheduler_config.async_scheduling = True
    assert not undoes_steps(ahead)


def test_drafts_that_keep_no_kv_change_nothing() -> None:
    assert drafts_with_kv(config(drafts=drafting("ngram"))) is None
    eagle = drafting("eagle")
    assert drafts_with_kv(config(drafts=eagle)) is eagle


def test_kinds_of_kv_that_a_prefix_does_not_name_are_refused() -> None:
    class CrossAttentionSpec:
        block_size, page_size_bytes = 16, 128

    group = SimpleNamespace(kv_cache_spec=CrossAttentionSpec(), layer_names=["a"])
    with pytest.raises(NotSupportedError, match="KV of kind CrossAttentionSpec"):
        groups_of(SimpleNamespace(kv_cache_groups=[group]))


def test_background_loads_always_leave_blocks_for_the_largest_request() -> None:
    room = BlockBudget([KVGroup(None, 16, {"a": 128}, False)], blocks=20, longest_tokens=1024, step_tokens=64)
    small, other, large = (
        SimpleNamespace(request_id=name, num_prompt_tokens=tokens, max_tokens=0)
        for name, tokens in (("small", 64), ("other", 64), ("large", 160))
    )
    for request in (small, other, large):
        room.add(request)
    assert room.fits(small)  # 5 + 11 <= 20
    room.take(small)
    assert not room.fits(other)  # 5 + 5 + 11 > 20
    room.remove("large")
    assert room.fits(other)  # 5 + 5 + 5 <= 20
    room.take(other)
    room.give_back("small")
    room.add(large)
    assert not room.fits(large)  # 5 + 11 + 11 > 20


@pytest.mark.parametrize(("version", "warns"), [
    ("0.23.1", True), ("0.24.0", False), ("0.32.0+cpu", False), ("0.33.1rc1.dev3+g0123", False), ("0.34.0", True),
    ("1.0.0", True), ("dev", True),
])
def test_versions_that_were_not_tried_get_one_warning(
    version: str, warns: bool, caplog: pytest.LogCaptureFixture
) -> None:
    warn_of_version(version)
    assert caplog.messages == [
        f"found vLLM {version}, and kvdock was tried with 0.24 to 0.33: watch for errors, or choose one of those"
    ] * warns
