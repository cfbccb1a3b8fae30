"""Identifies a model's weights by a digest of the content of its files, independent of the model's folder and name.

Invariant: weights whose files are not read are named by the user, by a commit of a hub, or as dummy weights of a seed;
all others are refused. A digest is never made of no files.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from kvdock.connectors.errors import NotSupportedError
from kvdock.connectors.weight_files import digest_of_files

SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".gguf")
READ_ALIKE = ("hf", "safetensors", "fastsafetensors", "instanttensor", "runai_streamer")
"""Load formats of engines that read the same weights from the same files, and differ in speed."""
FROM_FILES = (
    "auto", *READ_ALIKE, "mistral", "npcache", "pt", "bitsandbytes", "sharded_state", "runai_streamer_sharded", "gguf"
)
"""Load formats that read files in the model's folder. All others get the weights from elsewhere."""
SHARD = re.compile(r"^(?P<model>.+)-\d{5}-of-\d{5}\.gguf$")

FindSnapshot = Callable[[str, str | None, str | None], Path | None]
"""(name on a hub, revision, folder of downloads or None for the usual one) → the folder that holds its files."""


def hub_snapshot(name: str, revision: str | None, downloads: str | None) -> Path | None:
    """The folder to which an engine has downloaded a model of the Hugging Face hub, without a call to the hub. None:
    there is none on this machine."""
    try:
        import huggingface_hub as hub  # engines need it, kvdock does not
        from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError
    except ImportError:
        return None
    try:
        return Path(hub.snapshot_download(name, revision=revision, cache_dir=downloads, local_files_only=True))
    except (LocalEntryNotFoundError, HFValidationError):
        return None


def weights_of(
    model: Any, load: Any, given: str, find_snapshot: FindSnapshot, *, whole: bool = False
) -> dict[str, Any]:
    """The fields of the manifest that distinguish these weights from others. `model`, `load`: vLLM's ModelConfig and
    LoadConfig, or objects with those of their fields that are read here. `given`: the user's own name of the weights;
    then no file is read. `whole`: all bytes of the files are read, not samples of them. Raises NotSupportedError when
    nothing identifies the weights."""
    read_as = str(load.load_format).rpartition(".")[2].lower()
    if read_as == "dummy":
        return {"weights": given or "dummy", "seed": model.seed}
    if given:
        return {"weights": given}
    if getattr(model, "model_weights", ""):
        raise _unknown(f"they are streamed from {model.model_weights}")
    if read_as not in FROM_FILES:
        raise _unknown(f"load_format {read_as} does not read them from the model's folder")
    path = Path(model.model)
    if path.is_file():
        return {"weights": _digest(_shards_of(path), names=False, whole=whole), "read_as": "gguf"}
    folder = path if path.is_dir() else find_snapshot(model.model, model.revision, load.download_dir)
    if folder is None:
        commit = getattr(model.hf_config, "_commit_hash", None)
        if not commit:
            raise _unknown(f"{model.model} is neither a folder nor in the hub's cache on this machine")
        return {"weights": f"{model.model}@{commit}", "read_as": read_as}
    files = _files_in(folder)
    if read_as == "auto":
        read_as = "mistral" if any(file.name.startswith("consolidated") for file in files) else "hf"
    if read_as in READ_ALIKE:
        return {"weights": _digest(files, names=True, whole=whole)}
    # Some of these formats read only some of the files in the folder.
    return {"weights": _digest(files, names=True, whole=whole), "read_as": [read_as, load.model_loader_extra_config]}


def _unknown(why: str) -> NotSupportedError:
    return NotSupportedError(
        f"kvdock does not know which weights this model has: {why}; name them with weights_digest in "
        "kv_connector_extra_config."
    )


def _files_in(folder: Path) -> list[Path]:
    """The files of weights in the folder or, as in some models, below it. Raises NotSupportedError if there is none."""
    for candidates in (folder.iterdir(), folder.rglob("*")):
        found = sorted(path for path in candidates if path.suffix in SUFFIXES and path.is_file())
        if found:
            return found
    raise _unknown(f"no file in {folder} is of a kind that holds weights ({', '.join(SUFFIXES)})")


def _shards_of(path: Path) -> list[Path]:
    """`path`, and the other GGUF files of a model that was split into several. Raises NotSupportedError unless the
    suffix of `path` is one of SUFFIXES."""
    if path.suffix not in SUFFIXES:
        raise _unknown(f"{path} is not of a kind that holds weights ({', '.join(SUFFIXES)})")
    found = SHARD.match(path.name)
    if found is None:
        return [path]
    return sorted(
        other for other in path.parent.iterdir()
        if (also := SHARD.match(other.name)) is not None and also["model"] == found["model"]
    )


def _digest(files: Sequence[Path], *, names: bool, whole: bool) -> str:
    try:
        return digest_of_files([(path, path.name if names else "") for path in files], whole=whole)
    except OSError as error:
        raise _unknown(str(error)) from error


def digest_of_folder(folder: Path) -> str:
    """A digest of all files in `folder` and below, read whole: an adapter's weights and their description."""
    digest = hashlib.sha256()
    for path in sorted(path for path in folder.rglob("*") if path.is_file()):
        digest.update(f"{path.relative_to(folder)} {path.stat().st_size}\n".encode())
        with path.open("rb") as file:
            while piece := file.read(1 << 20):
                digest.update(piece)
    return digest.hexdigest()
