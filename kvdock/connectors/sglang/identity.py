"""The facts on which the KV of all requests depends: the model and its settings, in the manifest and its revision.

Adapters, salts and a caller's extra key are in SGLang's own hashes of pages, from which keys are made. An adapter that
is named on SGLang's command line has a hash of its name and path there, which does not cover its files: so their digest
is in the revision. An adapter that is loaded later has a name that no other engine gives.
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
"""The longest name that is shown to people, in characters."""
HASHES = "sglang sha256 pages"
"""SGLang chains its hashes of pages from the tokens, an adapter and salts alone: every process makes the same ones."""


def revision(
    args: Any, model: Any, settings: Mapping[str, str], *, weights_digest: str,
    find_snapshot: FindSnapshot = hub_snapshot, read_all: bool = False,
) -> str:
    """Digest of weights and of all that can change KV. NotSupportedError where it cannot be known. `args`, `model`:
    SGLang's ServerArgs and ModelConfig; `settings`: those that are set, as dependences.py has them; `read_all`: the
    digest of the weights is of all bytes of their files."""
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
    and its weights. `weights_digest`, where it is given, names these too."""
    path = getattr(args, "speculative_draft_model_path", None)
    if path in (None, args.model_path):
        return {}
    about = SimpleNamespace(**{
        **vars(target), "model": path, "revision": args.speculative_draft_model_revision,
        "hf_config": None,  # the target's has the target's commit
    })
    own = args.speculative_draft_load_format or args.load_format
    load = SimpleNamespace(**{**vars(load), "load_format": own})
    weights = weights_of(about, load, weights_digest, find_snapshot, whole=read_all)
    return {"algorithm": args.speculative_algorithm, **weights}


def adapters_of(given: Any, find_snapshot: FindSnapshot) -> list[list[str]]:
    """The name, path and digest of the files of each adapter that SGLang was started with: the hash by which requests
    name it is made of the first two."""
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
    """Alike on every rank. Its token order names SGLang, so no other engine shares its bytes: that the order of
    elements is the same is not enough, for its kernels round otherwise."""
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
    """The order of elements, the layers and the bytes of a page's planes, group by group."""
    return "|".join(
        f"{group.layout.token_order}[{','.join(str(layer) for layer in sorted(group.planes))}]"
        f"{sorted({(run, count) for _, _, run, count, _ in group.layout.planes})}"
        for group in groups
    )
