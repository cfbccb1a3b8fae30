"""Which SGLang engines share their KV, and what is refused."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import MISSING, field, fields as dataclass_fields, make_dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kvdock.connectors.errors import NotSupportedError
from kvdock.connectors.heads import CannotShareSizes
from kvdock.connectors.sglang.identity import HASHES, manifest_of, revision, settings_set, variables_set
from kvdock.connectors.sglang.loads import waits
from kvdock.connectors.sglang.pools import divided, groups_of, part_layouts, refuse_groups_of_stages
from kvdock.connectors.sglang.setup import Settings, refuse_what_is_not_supported
from kvdock.protocol.keys import namespace_digest

PAGE = 64
ENVIRON = {"KVDOCK_ADDRESS": "unix:/s"}


class HFConfig:
    architectures = ("LlamaForCausalLM",)

    def to_json_string(self, use_diff: bool) -> str:
        return json.dumps({"hidden_size": 64, "transformers_version": "5"})


def model(**more: Any) -> SimpleNamespace:
    """As much of SGLang's ModelConfig as is asked for."""
    return SimpleNamespace(**{
        "hf_config": HFConfig(), "dtype": torch.float32, "quantization": None, "head_dim": 16, "is_multimodal": False,
        "get_total_num_kv_heads": lambda: 2, **more,
    })


def args(folder: Path, **more: Any) -> SimpleNamespace:
    """As much of its ServerArgs."""
    return SimpleNamespace(**{
        "model_path": str(folder), "load_format": "auto", "download_dir": None, "revision": None, "random_seed": 0,
        "lora_paths": None, "speculative_algorithm": None, "speculative_draft_model_path": None,
        "speculative_draft_model_revision": None, "speculative_draft_load_format": None, **more,
    })


def params(**more: Any) -> SimpleNamespace:
    return SimpleNamespace(**{
        "page_size": PAGE, "pp_size": 1, "attn_cp_size": 1, "sidecar_draft_device_pools": (),
        "mtp_draft_device_pools": (), "mtp_draft_mamba_pools": (), **more,
    })


class MHATokenToKVPool:
    """SGLang's pool, as its buffers are."""

    def __init__(self, layers: int = 2, heads: int = 2, pages: int = 4) -> None:
        self.k_buffer, self.v_buffer = (
            [torch.zeros(pages * PAGE, heads, 16) for _ in range(layers)] for _ in range(2)
        )
        self.k_scale_buffer: Any = None


class SWAKVPool:
    def __init__(self) -> None:
        self.full_kv_pool, self.swa_kv_pool = MHATokenToKVPool(1), MHATokenToKVPool(2)
        self.layers_mapping = {0: (0, True), 1: (0, False), 2: (1, True)}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "model.safetensors").write_bytes(b"weights")
    return tmp_path


def told(folder: Path, settings: dict[str, str] | None = None, **more: Any) -> str:
    return revision(args(folder, **more), model(), settings or {}, weights_digest="", find_snapshot=lambda *_: None)


def test_whatever_somebody_has_set_is_named_but_for_what_changes_no_byte() -> None:
    known = make_dataclass("Args", [
        ("port", int, field(default=30000)), ("fp8_gemm_runner_backend", str, field(default="auto")),
        ("of_next_year", bool, field(default=False)), ("numbers", list, field(default_factory=list)),
        ("is_on", bool, field(default=True)), ("unset", object, field(default=None)),
    ])
    fields = [
        SimpleNamespace(
            name=one.name, default=one.default,
            default_factory=None if one.default_factory is MISSING else one.default_factory,
        )
        for one in dataclass_fields(known)
    ]
    assert settings_set(known(), fields) == {}
    assert settings_set(known(port=1), fields) == {}
    assert settings_set(known(fp8_gemm_runner_backend="x", of_next_year=True), fields) == {
        "fp8_gemm_runner_backend": "x", "of_next_year": "True",
    }
    assert settings_set(known(is_on=False, unset=False), fields) == {"is_on": "False"}


def test_variables_that_say_where_things_lie_are_not_named() -> None:
    found = variables_set({
        "SGLANG_RUN_ID": "7", "SGLANG_TORCH_PROFILER_DIR": "/tmp", "SGLANG_KVDOCK": "1", "HOME": "/", "PATH": "/bin",
        "SGLANG_LOG_MS": "1", "SGLANG_PORT": "1", "SGLANG_WARMUP_TIMEOUT": "9", "SGLANG_EMPTY": "",
        "SGLANG_OF_NEXT_YEAR": "1", "SGL_ENABLE_JIT_DEEPGEMM": "0",
    })
    assert found == {"SGLANG_OF_NEXT_YEAR": "1", "SGL_ENABLE_JIT_DEEPGEMM": "0"}


@pytest.mark.parametrize("name", [
    "SGLANG_OPT_USE_INKLING_FUSED_ATTN_PROLOGUE", "SGLANG_OPT_USE_INKLING_FUSED_LOG_TAU",
    "SGLANG_OPT_USE_MINIMAX_FP8_Q_EPILOGUE", "SGLANG_OPT_SM120_DIRECT_SWA_KV", "SGLANG_DEBUG_REVERT_PR",
    "SGLANG_OPT_CUDA_GRAPH_FILL_FAST_PATH", "SGLANG_FP8_PAGED_MQA_LOGITS_TORCH", "SGLANG_MOE_CONFIG_DIR",
    "SGLANG_OF_NEXT_YEAR_WITH_SUPPORT", "SGLANG_LOG_SOFTMAX_FUSED", "SGLANG_TRACE_OF_A_MATRIX",
])
def test_switches_of_kernels_are_named_whatever_words_are_in_their_names(name: str) -> None:
    assert variables_set({name: "1"}) == {name: "1"}


def test_other_weights_settings_and_adapters_share_nothing(
    folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    usual = told(folder)
    assert told(folder) == usual
    assert told(folder, {"of_next_year": "True"}) != usual
    adapter = tmp_path_factory.mktemp("adapter")
    (adapter / "adapter_model.safetensors").write_bytes(b"a")
    lora = [SimpleNamespace(lora_name="a", lora_path=str(adapter))]
    with_adapter = told(folder, lora_paths=lora)
    assert with_adapter != usual
    path = str(adapter)
    for same in ([f"a={path}"], {"a": path}, {"a": lora[0]}, [{"lora_name": "a", "lora_path": path}]):
        assert told(folder, lora_paths=same) == with_adapter, "as SGLang's flags and its engine's arguments have it"
    assert told(folder, lora_paths=[path]) not in (usual, with_adapter), "its path is its name then"
    (adapter / "adapter_model.safetensors").write_bytes(b"b")
    assert told(folder, lora_paths=lora) != with_adapter, "its name and path say nothing of its files"
    assert told(folder, speculative_algorithm="NGRAM") == usual, "it keeps no KV"
    drafted = told(folder, speculative_draft_model_path=path)
    assert drafted != usual and told(folder, speculative_draft_model_path=str(folder)) == usual
    assert told(folder, speculative_draft_model_path=path, speculative_algorithm="EAGLE3") != drafted
    with pytest.raises(NotSupportedError, match="org/draft is neither a folder nor in the hub's cache"):
        told(folder, speculative_draft_model_path="org/draft")
    (adapter / "adapter_model.safetensors").write_bytes(b"another draft")
    assert told(folder, speculative_draft_model_path=path) != drafted
    (folder / "model.safetensors").write_bytes(b"others.")
    assert told(folder) != usual
    with pytest.raises(NotSupportedError, match="cannot tell the adapter 'a' from others"):
        told(folder, lora_paths=[SimpleNamespace(lora_name="a", lora_path="org/nowhere")])


def test_a_manifest_names_engine_layers_and_split(folder: Path) -> None:
    def manifest(
        pool: Any, window: int | None = None, version: str = "0.5.23", shards: int = 1, stages: int = 1,
        drafts: Sequence[Any] = (),
    ) -> bytes:
        groups = groups_of(pool, PAGE, window, drafts)
        made = manifest_of(
            model(), version, groups, revision="r", page_tokens=PAGE, shards=shards, stages=stages,
            kv_dtype="torch.float32",
        )
        assert made.hash_function == HASHES and made.token_order.startswith("sglang 0.")
        assert (made.chunk_tokens, made.block_tokens, made.writers) == (PAGE, PAGE, shards * stages)
        assert made.layers == stages * sum(len(group.planes) for group in groups)
        import msgspec

        return namespace_digest(msgspec.to_builtins(made))

    usual = manifest(MHATokenToKVPool())
    assert manifest(MHATokenToKVPool(), version="0.5.99") == usual
    others = [
        manifest(MHATokenToKVPool(3)), manifest(MHATokenToKVPool(heads=1)), manifest(MHATokenToKVPool(), shards=2),
        manifest(MHATokenToKVPool(), stages=2), manifest(MHATokenToKVPool(), shards=2, stages=2),
        manifest(MHATokenToKVPool(), version="0.6.0"), manifest(SWAKVPool(), 128), manifest(SWAKVPool(), 256),
        manifest(MHATokenToKVPool(), drafts=[MHATokenToKVPool(1)]),
        manifest(MHATokenToKVPool(), drafts=[MHATokenToKVPool(1, heads=1)]),
    ]
    assert len({usual, *others}) == 11


def test_a_manifest_is_the_same_for_all_tensor_parallel_sizes_that_share() -> None:
    """The model has four heads."""
    def shared(ranks: int) -> Any:
        groups = groups_of(MHATokenToKVPool(heads=4 // ranks), PAGE, None)
        parts = divided(groups, 4, ranks, "cpu")
        of_parts = [layout.part_bytes(1) for layout in part_layouts(groups, parts)]
        assert of_parts == [2 * 2 * PAGE * 16 * 4] * (4 // ranks)
        return manifest_of(
            model(), "0.5.23", groups, revision="r", page_tokens=PAGE, shards=ranks, stages=1,
            kv_dtype="torch.float32", parts=parts,
        )

    one, two, four = (shared(ranks) for ranks in (1, 2, 4))
    assert one == two == four and (one.any_tensor_parallel, one.writers) == (True, 4)


@pytest.mark.parametrize(("pool", "heads", "ranks", "device", "why"), [
    (MHATokenToKVPool(heads=1), 2, 4, "cpu", "on a CPU SGLang adds empty heads for 4 ranks"),
    (MHATokenToKVPool(heads=2), 4, 1, "cpu", "a rank has 2 heads, and 4 are wanted"),
    (MHATokenToKVPool(heads=2), 6, 3, "cuda", "the tensor-parallel size is 3, and a divisor of 2 is wanted"),
])
def test_ranks_whose_kv_cannot_be_divided_say_why(pool: Any, heads: int, ranks: int, device: str, why: str) -> None:
    with pytest.raises(CannotShareSizes, match=why):
        divided(groups_of(pool, PAGE, None), heads, ranks, device)
    assert divided(groups_of(MHATokenToKVPool(heads=1), PAGE, None), 2, 4, "cuda:0").parts == 2


def test_a_window_is_a_group_with_its_layers(folder: Path) -> None:
    full, window = groups_of(SWAKVPool(), PAGE, 128)
    assert (dict(full.planes), dict(window.planes)) == ({1: 1}, {0: 1, 2: 3})
    assert (full.window_tokens, window.window_tokens) == (None, 128)
    assert window.layout.part_bytes(1) == 2 * full.layout.part_bytes(1) == 2 * 2 * PAGE * 2 * 16 * 4
    assert full.pages_of(torch.tensor([*range(128, 192), *range(64)])) == [2, 0]


class DSATokenToKVPool:
    """SGLang's pool of sparse attention: the second layer uses the first one's choice."""

    def __init__(self, pages: int = 4, index_kpool: int = 1, chooses: Sequence[bool] = (True, False, True)) -> None:
        self.kv_buffer = [torch.zeros(4 * PAGE, 1, 80) for _ in chooses]
        self.index_kpool = index_kpool
        self.index_k_with_scale_buffer = [
            torch.zeros(pages if one else 0, 132 * PAGE, dtype=torch.uint8) for one in chooses
        ]


def test_the_keys_of_an_indexer_are_a_group_with_the_latents_pages() -> None:
    latents, keys = groups_of(DSATokenToKVPool(), PAGE, None)
    assert (dict(latents.planes), dict(keys.planes)) == ({0: 0, 1: 1, 2: 2}, {0: 0, 2: 1})
    assert latents.is_latent and keys.is_latent and keys.transfer == latents.transfer == "kv"
    assert keys.layout.part_bytes(1) == 2 * 132 * PAGE
    assert len(groups_of(DSATokenToKVPool(chooses=[False]), PAGE, None)) == 1
    with pytest.raises(NotSupportedError, match="an indexer with one key for 4 tokens under SGLang"):
        groups_of(DSATokenToKVPool(index_kpool=4), PAGE, None)
    with pytest.raises(NotSupportedError, match="5 pages of an indexer's KV, and as many as the target's 4"):
        groups_of(DSATokenToKVPool(pages=5), PAGE, None)
    with pytest.raises(NotSupportedError, match="pipelines with one KV group under SGLang, and found 2"):
        refuse_groups_of_stages(groups_of(DSATokenToKVPool(), PAGE, None))


class MHATokenToKOnlyPool:
    def __init__(self, layers: int) -> None:
        self.k_buffer = [torch.zeros(4 * PAGE, 1, 32) for _ in range(layers)]


class MiniMaxSparseKVPool:
    """SGLang's pool of chosen blocks, on a stage that begins with layer 4: the first layer has no indexer, the second
    one's has keys alone."""

    def __init__(self) -> None:
        self.start_layer, self.main_pool = 4, MHATokenToKVPool(4)
        self.index_kv_pool: Any = MHATokenToKVPool(2, heads=1)
        self.index_k_pool: Any = MHATokenToKOnlyPool(1)
        self.index_kv_layer_id_mapping, self.index_k_layer_id_mapping = {6: 0, 7: 1}, {5: 0}


def test_an_indexer_of_blocks_is_a_group_for_its_keys_and_values_and_one_for_its_keys() -> None:
    groups = groups_of(MiniMaxSparseKVPool(), PAGE, None)
    planes = [dict(group.planes) for group in groups]
    assert planes == [{0: 1, 1: 3, 2: 5, 3: 7}, {2: 1, 3: 3}, {1: 0}]
    assert {group.transfer for group in groups} == {"kv"} and not any(group.is_latent for group in groups)
    assert [group.layout.part_bytes(1) // (PAGE * 4) for group in groups] == [4 * 2 * 2 * 16, 2 * 2 * 16, 32]
    without = MiniMaxSparseKVPool()
    without.index_kv_pool = None
    assert len(groups_of(without, PAGE, None)) == 2


def test_a_draft_is_a_group_with_the_targets_pages() -> None:
    full, draft = groups_of(MHATokenToKVPool(2), PAGE, None, [MHATokenToKVPool(1, heads=4)])
    assert (dict(full.planes), dict(draft.planes)) == ({0: 1, 1: 3}, {0: 1})
    assert (full.is_draft, draft.is_draft, draft.transfer) == (False, True, full.transfer)
    assert draft.layout.part_bytes(1) == full.layout.part_bytes(1), "half as many layers, twice as many heads"
    with pytest.raises(NotSupportedError, match="finds 5 pages of a draft's KV, and as many as the target's 4"):
        groups_of(MHATokenToKVPool(2), PAGE, None, [MHATokenToKVPool(1, pages=5)])


class MambaPool:
    """SGLang's pool of states: two layers of it, of 5 slots."""

    def __init__(self, **more: Any) -> None:
        self._slot_siblings: tuple[Any, ...] = ()
        self.mamba_cache = SimpleNamespace(**{
            "temporal": torch.zeros(2, 5, 2, 16, 16), "conv": [torch.zeros(2, 5, 32, 3, dtype=torch.bfloat16)],
            "replayssm_d": None, **more,
        })


class HybridLinearKVPool:
    def __init__(self) -> None:
        self.full_kv_pool, self.full_attention_layer_id_mapping = MHATokenToKVPool(1), {1: 0}


def requests_of(pool: Any, **more: Any) -> SimpleNamespace:
    return SimpleNamespace(mamba_pool=pool, mamba_map={0: 0, 2: 1}, **more)


def test_each_tensor_of_a_recurrent_state_is_a_group_that_a_hit_wants_the_last_slot_of() -> None:
    full, temporal, conv = groups_of(HybridLinearKVPool(), PAGE, None, (), requests_of(MambaPool()))
    assert (dict(full.planes), dict(temporal.planes), dict(conv.planes)) == ({1: 1}, {0: 0, 2: 1}, {0: 0, 2: 1})
    assert [group.transfer for group in (full, temporal, conv)] == ["kv", "mamba", "mamba"]
    assert [group.layout.part_bytes(1) for group in (temporal, conv)] == [2 * 2 * 16 * 16 * 4, 2 * 32 * 3 * 2]
    assert temporal.described.window_tokens == 1 and temporal.layout.num_blocks == 5
    assert temporal.pages_of(torch.tensor([3])) == [3], "a slot is a block"
    without = groups_of(HybridLinearKVPool(), PAGE, None, (), requests_of(MambaPool(temporal=torch.zeros(2, 5, 0))))
    assert len(without) == 2, "short convolutions have no temporal state"


@pytest.mark.parametrize(("requests", "said"), [
    (requests_of(MambaPool(replayssm_d=torch.zeros(1))), "conv, temporal, replayssm_d, and a MambaPool with conv and"),
    (requests_of(MambaPool(), mamba_ckpt_pool=1), "a MambaPool with conv, temporal, mamba_ckpt_pool, and"),
    (requests_of(MambaPool(), ngram_pool=SimpleNamespace(enabled=True)), "conv, temporal, ngram_pool, and"),
    (requests_of(MambaPool(conv=[torch.zeros(2, 5, 3)])), "recurrent states: .* 16"),
    (requests_of(MambaPool(temporal=torch.zeros(2, 5, 16, 4).mT)), "whose bytes are not in order within a slot"),
])
def test_recurrent_states_that_are_not_known_are_refused(requests: Any, said: str) -> None:
    with pytest.raises(NotSupportedError, match=said):
        groups_of(HybridLinearKVPool(), PAGE, None, (), requests)


def test_who_waits_for_a_layer_waits_for_all_that_it_may_read() -> None:
    """Attention's layers up to it; all of a draft, which is computed behind the target; states before them all."""
    full, temporal, conv = groups_of(HybridLinearKVPool(), PAGE, None, (), requests_of(MambaPool()))
    assert waits(full, 3) == {"1": 1, "2": 1}
    assert waits(temporal, 3) == waits(conv, 3) == {"-1": 1}, "before the forward pass"
    _, draft = groups_of(MHATokenToKVPool(3), PAGE, None, [MHATokenToKVPool(2)])
    assert waits(draft, 3) == {"0": 3, "1": 3, "2": 3}


def test_pools_that_are_not_known_are_refused() -> None:
    class MHATokenToKVPoolFP4(MHATokenToKVPool):
        """Another layout under a name that is much the same."""

    scaled = MHATokenToKVPool()
    scaled.k_scale_buffer = []
    for pool in (MHATokenToKVPoolFP4(), scaled):
        with pytest.raises(NotSupportedError, match="does not know what SGLang keeps in"):
            groups_of(pool, PAGE, None)
    only = SWAKVPool()
    only.layers_mapping = {0: (0, True)}
    with pytest.raises(NotSupportedError, match="all layers have a sliding window"):
        groups_of(only, PAGE, 128)


@pytest.mark.parametrize(("of", "said"), [
    ({"params": {"page_size": 16}}, "--page-size is 16, and 64, 128 or 256 is wanted"),
    ({"params": {"pp_size": 3}}, "serves pipelines of up to 2 stages under SGLang: --pp-size is 3"),
    ({"params": {"pp_size": 2}, "components": ["FULL", "SWA"]}, "with one kind of KV under SGLang, and found SWA"),
    (
        {"params": {"pp_size": 2}, "components": ["FULL"], "args": {"speculative_algorithm": "EAGLE"}},
        "pipeline parallelism beside --speculative-algorithm EAGLE under SGLang",
    ),
    ({"params": {"attn_cp_size": 2}}, "does not serve context parallelism"),
    (
        {"params": {"pp_size": 2}, "components": ["FULL"], "args": {"nnodes": 2}},
        "does not serve pipelines over several nodes",
    ),
    (
        {"params": {"pp_size": 2}, "components": ["FULL"], "args": {"disaggregation_mode": "prefill"}},
        "pipeline parallelism beside --disaggregation-mode prefill under SGLang",
    ),
    ({"args": {"speculative_algorithm": "NEWEST"}}, "know where the drafts of --speculative-algorithm NEWEST have"),
    ({"model": {"is_multimodal": True, "is_encoder_decoder": True}}, "does not serve encoders of images or sound"),
    ({"args": {"enable_memory_saver": True}}, "does not serve --enable-memory-saver under SGLang: it takes KV"),
    ({"args": {"disaggregation_mode": "decode"}}, "does not serve --disaggregation-mode decode under"),
    ({"args": {"enable_pd_role_switch": True}}, "does not serve --enable-pd-role-switch under"),
    ({"args": {"enable_return_routed_experts": True}}, "--enable-return-routed-experts under SGLang: SGLang keeps the"),
    ({"args": {"enable_return_indexer_topk": True}}, "--enable-return-indexer-topk under SGLang: SGLang keeps an"),
    ({"components": ["FULL", "SWA", "MAMBA"]}, "serve recurrent states .* beside sliding windows under SGLang"),
    ({"params": {"mtp_draft_mamba_pools": (1,)}}, "drafts with recurrent states of their own under SGLang: found 1"),
])
def test_what_is_not_served_is_refused_with_one_sentence(of: dict[str, Any], said: str, folder: Path) -> None:
    def refuse(**of: Any) -> None:
        refuse_what_is_not_supported(
            args(folder, **of.get("args", {})), params(**of.get("params", {})), model(**of.get("model", {})),
            of.get("components", ["FULL", "SWA"]),
        )

    refuse(args={"disaggregation_mode": "prefill"})
    refuse(components=["FULL", "MAMBA"], args={"speculative_algorithm": "NGRAM"})
    refuse(args={"speculative_algorithm": "NGRAM", "disaggregation_mode": "null"})
    refuse(args={"speculative_algorithm": "EAGLE"}, params={"mtp_draft_device_pools": (MHATokenToKVPool(),)})
    with pytest.raises(NotSupportedError, match=said) as refused:
        refuse(**of)
    assert str(refused.value).startswith("kvdock ") and str(refused.value).count(". ") == 0


@pytest.mark.parametrize(("extra", "said"), [
    ({"adress": "unix:/s"}, "'adress' is no setting of kvdock, which has"),
    ({"address": "localhost:1"}, "address is 'localhost:1'"),
    ({"timeout_s": "2"}, "timeout_s is '2', and float is wanted"),
    ({"timeout_s": 0}, "timeout_s is 0.0, and more than 0 is wanted"),
    ({"tier_wait_s": 601.0}, "tier_wait_s is 601.0, and 0.0 to 600.0 is wanted"),
    ({"verify_wait_s": -1.0}, "verify_wait_s is -1.0, and 0.0 to 600.0 is wanted"),
    ({"trust_s": -1.0}, "trust_s is -1.0, and 0.0 or more is wanted"),
    ({"min_load_tokens": -1}, "min_load_tokens: found -1"),
])
def test_wrong_settings_are_refused(extra: dict[str, object], said: str) -> None:
    assert Settings.load({"timeout_s": 3}, ENVIRON) == Settings(address="unix:/s", timeout_s=3.0)
    with pytest.raises(NotSupportedError, match=said):
        Settings.load(extra, ENVIRON)
