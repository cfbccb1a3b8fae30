"""The facts on which the KV of all requests depends: the model and its settings, in the manifest and its revision.

Adapters, salts and a caller's extra key are part of SGLang's own hashes of pages, from which keys are made. An adapter
of SGLang's command line enters them as a hash of its name and path, which does not cover its files, so the revision
contains the digest of its files. An adapter that is loaded later has an id that no other engine uses.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from kvdock.connectors.dependences import described
from kvdock.connectors.errors import NotSupportedError
from kvdock.connectors.sglang.pools import KVGroup
from kvdock.connectors.weights import FindSnapshot, digest_of_folder, hub_snapshot, weights_of
from kvdock.protocol.schemas import Manifest

MOST_LETTERS = 128
"""The most characters of the model's name in the manifest."""
HASHES = "sglang sha256 pages"
"""SGLang computes its hashes of pages from the tokens, the adapter and salts alone, so they are the same in every
process."""


def revision(
    args: Any, model: Any, settings: Mapping[str, str], *, weights_digest: str,
    find_snapshot: FindSnapshot = hub_snapshot, read_all: bool = False,
) -> str:
    """The digest of the weights and of everything else on which KV depends. Raises NotSupportedError when the weights
    or an adapter cannot be identified. `args`, `model`: SGLang's ServerArgs and ModelConfig; `settings`: the settings
    and variables that dependences.py finds; `read_all`: whether the digest of the weights covers all bytes of their
    files.
    """
    load = SimpleNamespace(
        load_format=args.load_format, download_dir=args.download_dir,
        model_loader_extra_config=getattr(args, "model_loader_extra_config", ""),
    )
    about = SimpleNamespace(
        model=args.model_path, revision=args.revision, hf_config=model.hf_config, seed=args.random_seed,
        model_weights="",
    )
    fields = {
        "hf_config": described(json.loads(model.hf_config.to_json_string(use_diff=False))),
        "dtype": str(model.dtype), "quantization": str(model.quantization),
        "settings": dict(settings), "adapters": adapters_of(args.lora_paths, find_snapshot),
        "draft": draft_of(args, about, load, weights_digest, find_snapshot, read_all=read_all),
        **weights_of(about, load, weights_digest, find_snapshot, whole=read_all),
    }
    return hashlib.sha256(json.dumps(fields, sort_keys=True, default=str).encode()).hexdigest()


def draft_of(
    args: Any, target: Any, load: Any, weights_digest: str, find_snapshot: FindSnapshot, *, read_all: bool = False
) -> dict[str, Any]:
    """The facts on which the KV of a draft model depends, if the model is no part of the target: how drafts are made,
    and its weights. `weights_digest`, if it is given, names the draft's weights, too."""
    path = getattr(args, "speculative_draft_model_path", None)
    if path in (None, args.model_path):
        return {}
    about = SimpleNamespace(**{
        **vars(target), "model": path, "revision": args.speculative_draft_model_revision,
        "hf_config": None,  # the target's configuration has the target's commit
    })
    own = args.speculative_draft_load_format or args.load_format
    load = SimpleNamespace(**{**vars(load), "load_format": own})
    weights = weights_of(about, load, weights_digest, find_snapshot, whole=read_all)
    return {"algorithm": args.speculative_algorithm, **weights}


def adapters_of(given: Any, find_snapshot: FindSnapshot) -> list[list[str]]:
    """The name, path and digest of the files of each adapter that SGLang was started with: SGLang's page hashes contain
    a hash of name and path."""
    found = []
    for one in given.items() if isinstance(given, Mapping) else given or ():
        name, path = _named(one)
        folder = Path(path) if Path(path).is_dir() else find_snapshot(path, None, None)
        if folder is None:
            raise NotSupportedError(
                f"kvdock cannot tell the adapter {name!r} from others: {path} is neither a folder nor in the hub's "
                "cache on this machine."
            )
        found.append([name, path, digest_of_folder(folder)])
    return sorted(found)


def _named(adapter: Any) -> tuple[str, str]:
    """Name and path of an adapter, in each form that SGLang accepts: NAME=PATH, PATH, a mapping or a LoRARef."""
    if isinstance(adapter, str):
        name, _, path = adapter.rpartition("=")
        return name or path, path
    if isinstance(adapter, tuple):
        adapter = {"lora_name": adapter[0], "lora_path": getattr(adapter[1], "lora_path", adapter[1])}
    if isinstance(adapter, Mapping):
        return str(adapter["lora_name"]), str(adapter["lora_path"])
    return str(adapter.lora_name), str(adapter.lora_path)


def manifest_of(
    model: Any, version: str, groups: Sequence[KVGroup], *, revision: str, page_tokens: int, ranks: int, kv_dtype: str,
) -> Manifest:
    """The manifest, which is equal on all ranks. Its token order names SGLang, so that no other engine shares its KV:
    even if the order of elements is the same, SGLang's kernels round differently."""
    latent = all(group.is_latent for group in groups)
    return Manifest(
        model=str((model.hf_config.architectures or ["unknown"])[0])[:MOST_LETTERS],
        revision=revision,
        kv_dtype=kv_dtype.removeprefix("torch."),
        layers=sum(len(group.planes) for group in groups),
        kv_heads=model.get_total_num_kv_heads(),
        head_size=max(1, int(model.head_dim)),
        token_order=f"sglang {'.'.join(version.split('.')[:2])} {signature(groups)}",
        chunk_tokens=page_tokens,
        block_tokens=page_tokens,
        tensor_parallel=1 if latent else ranks,
        writers=1 if latent else ranks,
        hash_function=HASHES,
        groups=tuple(group.described for group in groups),
    )


def signature(groups: Sequence[KVGroup]) -> str:
    """For each group, the order of elements, the layers, and the run lengths and counts of its planes."""
    return "|".join(
        f"{group.layout.token_order}[{','.join(str(layer) for layer in sorted(group.planes))}]"
        f"{sorted({(run, count) for _, _, run, count, _ in group.layout.planes})}"
        for group in groups
    )
