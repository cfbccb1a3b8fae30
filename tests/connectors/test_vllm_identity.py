"""The manifest of a vLLM engine: which engines share their KV, and which do not."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import torch

from kvdock.connectors.errors import NotSupportedError
from kvdock.connectors.vllm.groups import KVGroup
from kvdock.connectors.vllm.identity import (
    LLAMA4_TOKENS,
    UNUSUAL_ENGINE,
    UNUSUAL_ENVIRONMENT,
    UNUSUAL_MODEL,
    manifest_of,
    revision,
    served_name,
)
from kvdock.connectors.vllm.setup import place_of
from kvdock.protocol.keys import namespace_digest

GIVEN = "given"
"""A weights_digest."""
LONGROPE = {"rope_type": "longrope", "short_factor": [1.0], "long_factor": [4.0]}


class HFConfig:
    """As transformers' PreTrainedConfig says itself."""

    def __init__(self, said: dict[str, Any], commit: str | None) -> None:
        self._said, self._commit_hash = said, commit

    def to_json_string(self, use_diff: bool) -> str:
        return json.dumps(self._said)


def engine(
    name: object = "org/model", *, hf: dict[str, Any] | None = None, load: str = "auto", commit: str | None = None,
    model: dict[str, Any] | None = None,
) -> SimpleNamespace:
    """As much of vLLM's configuration as is asked for. `hf`: the model's own; `model`: fields of ModelConfig."""
    fields: dict[str, Any] = {
        "model": str(name), "served_model_name": str(name), "revision": None, "hf_config": HFConfig(hf or {}, commit),
        "dtype": torch.bfloat16, "quantization": None, "seed": 0, "max_model_len": 4096, "original_max_model_len": 4096,
        "architecture": "LlamaForCausalLM", "model_weights": "", "get_total_num_kv_heads": lambda: 2,
        "get_head_size": lambda: 64, **(model or {}),
    }
    return SimpleNamespace(
        model_config=SimpleNamespace(**fields),
        load_config=SimpleNamespace(load_format=load, download_dir=None, model_loader_extra_config={}),
        parallel_config=SimpleNamespace(tensor_parallel_size=1, pipeline_parallel_size=1, rank=0),
        speculative_config=None, compilation_config=SimpleNamespace(static_forward_context={}),
        cache_config=SimpleNamespace(cache_dtype="auto"),
    )


def nowhere(name: str, revision: str | None, downloads: str | None) -> Path | None:
    return None


def told(set_up: SimpleNamespace, given: str = GIVEN, **environ: str) -> str:
    return revision(set_up, given, set_up.speculative_config, environ=environ, find_snapshot=nowhere)


def namespace(set_up: SimpleNamespace, given: str = GIVEN) -> bytes:
    groups = [KVGroup(None, 16, {"layer.0": 4096}, False)]
    tensors = {"layer.0": torch.zeros((4, 2048), dtype=torch.bfloat16)}
    return namespace_digest(msgspec.to_builtins(manifest_of(
        set_up, "0.33.0", groups, tensors, place_of(set_up.parallel_config, groups), num_blocks=4, chunk_tokens=16,
        weights_digest=given, hashing=("f", "s"), find_snapshot=nowhere,
    )))


def longest(tokens: int, hf: dict[str, Any], **model: Any) -> SimpleNamespace:
    return engine(hf=hf, model={"max_model_len": tokens, "original_max_model_len": tokens, **model})


# --------------------------------------------------------------------------- positions


@pytest.mark.parametrize("hf", [
    {"rope_parameters": {**LONGROPE, "original_max_position_embeddings": 1024}},
    {"rope_parameters": LONGROPE, "original_max_position_embeddings": 1024},  # as Phi-3's own file has it
    {"rope_scaling": {"type": "longrope"}, "original_max_position_embeddings": 1024},
    {"text_config": {"rope_parameters": {"full_attention": {**LONGROPE, "original_max_position_embeddings": 1024}}}},
])
def test_longrope_engines_share_while_they_use_the_same_factors(hf: dict[str, Any]) -> None:
    short, same, long, longer = (told(longest(tokens, hf)) for tokens in (512, 1024, 1025, 4096))
    assert short == same != long == longer
    # What the model was made for is not known any more, when vLLM has shortened it to what fits.
    shortened, more = (longest(tokens, hf, original_max_model_len=-1) for tokens in (512, 768))
    assert told(shortened) == told(more) not in (short, long)


@pytest.mark.parametrize("kind", ["default", "linear", "llama3", "yarn", "deepseek_yarn", "proportional", "ntk"])
def test_max_model_len_means_nothing_where_positions_do_not_depend_on_it(kind: str) -> None:
    hf = {"rope_parameters": {"rope_type": kind, "factor": 4.0}, "max_position_embeddings": 4096}
    assert told(longest(1024, hf)) == told(longest(8192, hf))
    assert told(longest(1024, {**hf, "max_model_len": 1024})) == told(longest(8192, {**hf, "max_model_len": 8192}))


def test_positions_of_an_unknown_kind_may_depend_on_max_model_len() -> None:
    hf = {"rope_parameters": {"rope_type": "of tomorrow"}, "max_position_embeddings": 4096}
    assert told(longest(4096, hf)) != told(longest(8192, hf))
    assert told(longest(8192, hf)) == told(longest(8192, hf))
    assert told(longest(4096, {"rope_parameters": LONGROPE})) != told(longest(8192, {"rope_parameters": LONGROPE}))


def test_a_dynamic_rotary_embedding_may_take_the_smaller_length() -> None:
    hf: dict[str, Any] = {
        "rope_parameters": {"rope_type": "dynamic", "factor": 2.0}, "max_position_embeddings": 4096
    }
    assert told(longest(2048, hf)) != told(longest(4096, hf)) == told(longest(8192, hf))
    hf["rope_parameters"] = {"rope_type": "dynamic", "alpha": 1000.0}  # Hunyuan: the base says it all
    assert told(longest(2048, hf)) == told(longest(4096, hf))


def test_llama_4_weighs_attention_by_distance_where_prompts_may_be_long() -> None:
    hf = {"text_config": {"model_type": "llama4_text"}}
    assert told(longest(LLAMA4_TOKENS, hf)) != told(longest(LLAMA4_TOKENS + 1, hf)) == told(longest(1 << 20, hf))


@pytest.mark.parametrize(("kind", "limit"), [
    ("longrope", "original_max_position_embeddings"), ("dynamic", "max_position_embeddings"),
])
def test_positions_that_transformers_chooses_batch_by_batch_are_refused(kind: str, limit: str) -> None:
    hf = {"rope_parameters": {"rope_type": kind}, limit: 1024}
    told(longest(1024, hf, using_transformers_backend=lambda: True))
    told(longest(1025, hf, using_transformers_backend=lambda: False))
    with pytest.raises(NotSupportedError, match=f"{kind!r} rotary .* a max_model_len of at most 1024 is wanted"):
        told(longest(1025, hf, using_transformers_backend=lambda: True))


def test_drafts_depend_on_either_length() -> None:
    hf = {"rope_parameters": LONGROPE, "original_max_position_embeddings": 1024}

    def drafting(own: int, targets: int) -> str:
        set_up, draft = longest(targets, {}), longest(own, hf).model_config
        set_up.speculative_config = SimpleNamespace(method="eagle", draft_model_config=draft)
        return told(set_up)

    assert drafting(512, 1024) == drafting(1024, 512)
    assert len({drafting(512, 512), drafting(512, 2048), drafting(2048, 2048)}) == 3


# --------------------------------------------------------------------------- settings


@pytest.mark.parametrize("field", UNUSUAL_MODEL)
def test_settings_of_the_model_that_change_kv_keep_engines_apart(field: str) -> None:
    assert told(engine(model={field: "another"})) != told(engine())


@pytest.mark.parametrize("path", UNUSUAL_ENGINE)
def test_settings_around_the_model_that_change_kv_keep_engines_apart(path: str) -> None:
    part, _, field = path.rpartition(".")

    def with_it(value: object) -> str:
        set_up = engine()
        where = set_up if not part else vars(set_up).setdefault(part, SimpleNamespace())
        setattr(where, field, value)
        return told(set_up)

    assert with_it(["another"]) != with_it(["a third"]) != with_it(None)
    usual: tuple[object, ...] = (None, False, "auto", [], {})
    assert {with_it(value) for value in usual} == {told(engine())}


@pytest.mark.parametrize(("name", "usual"), [(name, usual) for name, (usual, _) in UNUSUAL_ENVIRONMENT.items()])
def test_switches_of_the_environment_that_change_kv_keep_engines_apart(name: str, usual: tuple[str, ...]) -> None:
    other = "0" if "1" in usual else "1"
    assert told(engine(), **{name: other}) != told(engine())
    assert {told(engine(), **{name: value.upper()}) for value in usual} == {told(engine())}
    assert told(engine(), SOME_OTHER_VARIABLE=other) == told(engine())


@pytest.mark.parametrize("name", [
    "VLLM_OF_NEXT_YEAR", "VLLM_ROCM_USE_AITER_MHA", "VLLM_FUSED_LOG_TAU", "VLLM_DIRECT_FAST_PATH", "VLLM_DEBUG_REVERT",
    "VLLM_TUNED_CONFIG_FOLDER", "VLLM_MARLIN_USE_ATOMIC_ADD", "VLLM_TEST_FORCE_LOAD_FORMAT", "FLASHINFER_OF_NEXT_YEAR",
    "NVIDIA_TF32_OVERRIDE", "TORCHINDUCTOR_EMULATE_PRECISION_CASTS", "CUBLAS_WORKSPACE_CONFIG", "NCCL_ALGO",
    "ONEDNN_DEFAULT_FPMATH_MODE", "K_SCALE_CONSTANT",
])
def test_switches_of_kernels_that_nobody_knows_keep_engines_apart(name: str) -> None:
    assert len({told(engine(), **{name: value}) for value in ("0", "1")} | {told(engine())}) == 3
    assert told(engine(), **{name: ""}) == told(engine())


@pytest.mark.parametrize("name", [
    "VLLM_PORT", "VLLM_HOST_IP", "VLLM_DP_RANK", "VLLM_LOGGING_LEVEL", "VLLM_LOG_STATS_INTERVAL", "VLLM_CACHE_ROOT",
    "VLLM_DIST_IDENT", "VLLM_SERVER_DEV_MODE", "VLLM_API_KEY", "VLLM_CPU_KVCACHE_SPACE", "VLLM_PLUGINS",
    "VLLM_WORKER_MULTIPROC_METHOD", "VLLM_HTTP_TIMEOUT_KEEP_ALIVE", "VLLM_OF_NEXT_YEAR_TIMEOUT_S", "LOCAL_RANK",
    "CUDA_VISIBLE_DEVICES", "OMP_NUM_THREADS", "NCCL_SOCKET_IFNAME", "NCCL_DEBUG", "TORCH_NCCL_TRACE_BUFFER_SIZE",
    "TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR", "PYTORCH_CUDA_ALLOC_CONF", "HF_HOME", "TORCHDYNAMO_DISABLE",
])
def test_variables_of_processes_and_places_keep_nobody_apart(name: str) -> None:
    assert told(engine(), **{name: "1"}) == told(engine())


def test_how_recurrent_states_lie_keeps_only_models_apart_that_have_some() -> None:
    for has_states in (True, False):
        one = engine(model={"has_inner_state": has_states})
        assert (told(one, VLLM_SSM_CONV_STATE_LAYOUT="DS") == told(one)) is not has_states


def test_a_configuration_is_the_same_wherever_it_was_saved() -> None:
    inner = {"hidden_size": 64, "auto_map": {"AutoConfig": "code.Config"}}
    hub = {"_name_or_path": "org/model", "transformers_version": "5", "text_config": {
        **inner, "_name_or_path": "org/text", "auto_map": {"AutoConfig": "org/model--code.Config"},
    }}
    local = {"_name_or_path": "/models/model", "transformers_version": "4", "text_config": inner}
    assert told(engine(hf=hub)) == told(engine(hf=local))
    assert told(engine(hf=local)) != told(engine(hf={"text_config": {**inner, "hidden_size": 32}}))


def test_the_models_own_type_of_kv_may_be_spelled_out() -> None:
    spelled, automatic, rounded = engine(), engine(), engine()
    spelled.cache_config.cache_dtype, rounded.cache_config.cache_dtype = "bfloat16", "fp8"
    assert namespace(spelled) == namespace(automatic) != namespace(rounded)
    asked_for = engine(model={"dtype": torch.float16})  # KV of bfloat16: not the model's, the checkpoint wants it
    asked_too = engine(model={"dtype": torch.float16})
    asked_too.cache_config.cache_dtype = "float16"
    assert namespace(asked_for) != namespace(asked_too)


def test_groups_that_swap_their_backends_share_nothing() -> None:
    groups = [KVGroup(None, 16, {"a": 4096}, False), KVGroup(64, 16, {"b": 4096}, False)]
    tensors = {name: torch.zeros((4, 2048), dtype=torch.bfloat16) for name in "ab"}

    def order(*backends: str) -> str:
        set_up = engine()
        for name, backend in zip("ab", backends, strict=True):
            named = SimpleNamespace(get_name=lambda backend=backend: backend)
            layer = SimpleNamespace(get_attn_backend=lambda named=named: named)
            set_up.compilation_config.static_forward_context[name] = layer
        return manifest_of(
            set_up, "0.33.0", groups, tensors, place_of(set_up.parallel_config, groups), num_blocks=4,
            chunk_tokens=16, weights_digest=GIVEN, hashing=("f", "s"),
        ).token_order

    assert order("FLASH", "TRITON") != order("TRITON", "FLASH")
    assert " FLASH " in order("FLASH", "FLASH")


def described(
    *, version: str = "0.33.0", chunk: int = 16, block: int = 16, ranks: int = 1, latent: bool = False,
    hashing: tuple[str, str] = ("f", "s"), swapped: bool = False, layers: int = 1,
) -> bytes:
    """The namespace of an engine whose pages are like this. `swapped`: K and V stand the other way round in a page."""
    set_up = engine()
    set_up.parallel_config.tensor_parallel_size = ranks
    names = [f"layer.{number}" for number in range(layers)]
    groups = [KVGroup(None, block, dict.fromkeys(names, 4096), latent)]
    one = torch.zeros((4, 2, 1024), dtype=torch.bfloat16)
    tensors = {name: one.as_strided((4, 2, 1024), (2048, 1, 2)) if swapped else one.clone() for name in names}
    return namespace_digest(msgspec.to_builtins(manifest_of(
        set_up, version, groups, tensors, place_of(set_up.parallel_config, groups), num_blocks=4, chunk_tokens=chunk,
        weights_digest=GIVEN, hashing=hashing, find_snapshot=nowhere,
    )))


def test_minor_versions_are_kept_apart_and_patches_are_not() -> None:
    assert described(version="0.33.0") == described(version="0.33.7") != described(version="0.32.0")


def test_the_split_over_workers_keeps_engines_apart_but_for_latent_attention() -> None:
    assert described() == described(ranks=1) != described(ranks=2)
    assert described(latent=True, ranks=1) == described(latent=True, ranks=2)


@pytest.mark.parametrize("other", [
    {"chunk": 32}, {"block": 8}, {"swapped": True}, {"layers": 2}, {"hashing": ("g", "s")}, {"hashing": ("f", "t")},
])
def test_the_form_of_pages_and_chunks_keeps_engines_apart(other: dict[str, Any]) -> None:
    assert described() == described() != described(**other)


# --------------------------------------------------------------------------- names


def test_engines_share_whatever_they_call_the_model() -> None:
    prod = engine(model={"served_model_name": "prod"})
    assert namespace(prod) == namespace(engine("/models/qwen3")) == namespace(engine())
    assert (served_name(prod.model_config), served_name(engine("a" * 200 + "/m").model_config)[-3:]) == ("prod", "a/m")


def written(folder: Path, **files: bytes) -> Path:
    folder.mkdir()
    for name, content in files.items():
        (folder / f"{name}.safetensors").write_bytes(content)
    return folder


def test_one_models_files_have_one_digest_wherever_they_lie(tmp_path: Path) -> None:
    local = written(tmp_path / "local", one=b"weights" * 100_000, two=b"more")
    link, snapshot = tmp_path / "link", tmp_path / "snapshot"
    link.symlink_to(local)
    snapshot.mkdir()
    for file in local.iterdir():  # as the hub's cache keeps them
        (snapshot / file.name).symlink_to(file)
    asked = []

    def found(name: str, version: str | None, downloads: str | None) -> Path | None:
        asked.append((name, version, downloads))
        return snapshot

    hub = engine("org/model", model={"revision": "v1"})
    hub.load_config.download_dir = "/downloads"
    by_name = revision(hub, "", None, find_snapshot=found)
    assert asked == [("org/model", "v1", "/downloads")]
    assert by_name == told(engine(local), "") == told(engine(link), "")
    assert told(engine(written(tmp_path / "other", one=b"weights" * 100_000, two=b"less")), "") != by_name


def test_formats_that_read_the_same_files_share_and_others_do_not(tmp_path: Path) -> None:
    folder = written(tmp_path / "model", model=b"weights")
    assert len({told(engine(folder, load=load), "") for load in ("auto", "hf", "safetensors", "runai_streamer")}) == 1
    apart = ("auto", "pt", "mistral", "bitsandbytes", "sharded_state")
    assert len({told(engine(folder, load=load), "") for load in apart}) == len(apart)
    sharded, chosen = (engine(folder, load="sharded_state") for _ in range(2))
    chosen.load_config.model_loader_extra_config = {"pattern": "other-{rank}-{part}.safetensors"}
    assert told(sharded, "") != told(chosen, "")
    (folder / "consolidated.safetensors").write_bytes(b"weights")
    assert told(engine(folder, load="auto"), "") == told(engine(folder, load="mistral"), "")


# --------------------------------------------------------------------------- weights that are not there


@pytest.mark.parametrize(("make", "why"), [
    (lambda folder: engine(folder), "no file in"),
    (lambda folder: engine(folder, load="runai_streamer"), "no file in"),
    (lambda folder: engine(folder, model={"model_weights": "s3://bucket/model"}), "streamed from s3://bucket/model"),
    (lambda folder: engine(folder, load="tensorizer"), "load_format tensorizer does not read them"),
    (lambda folder: engine(folder, load="of a plug-in"), "load_format of a plug-in does not"),
    (lambda folder: engine(), "org/model is neither a folder nor in the hub's cache"),
    (lambda folder: engine(folder / "config.json"), "config.json is not of a kind"),
])
def test_weights_that_nothing_tells_apart_are_refused_until_they_have_a_name(
    make: Any, why: str, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(NotSupportedError, match=f"{why}.*; name them with weights_digest"):
        told(make(tmp_path), "")
    assert told(make(tmp_path), "one") != told(make(tmp_path), "other")


def test_a_commit_of_the_hub_names_weights_that_are_not_here() -> None:
    assert told(engine(commit="a" * 40), "") == told(engine(commit="a" * 40), "") != told(engine(commit="b" * 40), "")


def test_weights_below_the_models_folder_are_looked_at(tmp_path: Path) -> None:
    for name, content in (("one", b"1"), ("two", b"2")):
        (tmp_path / name).mkdir()
        written(tmp_path / name / "transformer", model=content)
    assert told(engine(tmp_path / "one"), "") != told(engine(tmp_path / "two"), "")


def test_a_model_in_a_gguf_file_has_the_digest_of_all_its_files(tmp_path: Path) -> None:
    def file(name: str, content: bytes) -> SimpleNamespace:
        (tmp_path / name).write_bytes(content)
        return engine(tmp_path / name)

    first = told(file("model.gguf", b"weights"), "")
    assert told(file("model.gguf", b"WEIGHTS"), "") != first == told(file("renamed.gguf", b"weights"), "")
    file("cut-00002-of-00002.gguf", b"rest")
    cut = told(file("cut-00001-of-00002.gguf", b"start"), "")
    file("cut-00002-of-00002.gguf", b"REST")
    assert told(engine(tmp_path / "cut-00001-of-00002.gguf"), "") != cut


def test_random_weights_are_told_by_their_seed_alone(tmp_path: Path) -> None:
    assert told(engine(tmp_path, load="dummy"), "") == told(engine("elsewhere", load="dummy"), "")
    assert told(engine(load="dummy", model={"seed": 1}), "") != told(engine(load="dummy"), "")
    assert told(engine(load="dummy")) != told(engine())


def test_the_users_name_of_the_weights_is_also_of_drafts_that_cannot_be_looked_at(tmp_path: Path) -> None:
    def drafting(given: str, folder: Path) -> str:
        set_up = engine()
        set_up.speculative_config = SimpleNamespace(method="eagle", draft_model_config=engine(folder).model_config)
        return told(set_up, given)

    (tmp_path / "empty").mkdir()
    with pytest.raises(NotSupportedError, match="weights_digest"):
        drafting("", tmp_path / "empty")
    assert drafting("one", tmp_path / "empty") != drafting("other", tmp_path / "empty")
    one, two = (written(tmp_path / name, model=name.encode()) for name in ("one", "two"))
    assert drafting("target", one) != drafting("target", two)
