"""Identifies a model's weights by a digest of the content of its files, independent of the model's folder and name.

Invariant: weights whose files are not read are named by the user, by a commit of a hub, or as dummy weights of a seed;
all others are refused. A digest is never made of no files.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
import struct
import zipfile
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import wait
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from kvdock.connectors.errors import NotSupportedError
from kvdock.datapath.threads import Pool

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


# --------------------------------------------------------------------------- digests of files

# Digests of files of weights, over samples of their tensors or over all bytes, without torch and without pickle.
#
# A file is cut where its tensors begin and end, as its own header says. Tensors below WHOLE_BYTES (biases, norms,
# scales) are read whole, and so are bytes of no tensor (headers, paddings). A larger tensor is cut into stretches of
# equal length, and one piece of each stretch is read. The piece lies at a different place in each stretch, so that the
# pieces do not all fall on the same columns.
#
# Rule: a file whose header cannot be understood (another kind, a damaged one) is read whole. So no digest covers less
# than is described here, and none costs more than to read the file once.

log = logging.getLogger("kvdock.weights")

WHOLE_BYTES = 1 << 20
"""A tensor that is smaller is read whole."""
PIECE_BYTES = 4096
STRETCH_BYTES = 1 << 18
"""A larger tensor has one piece in each stretch of about this length: a 64th of it is read."""
MOST_PIECES = 1 << 17
"""The most pieces of a model's large tensors: where there would be more, stretches are longer (half a GiB is read
then).
"""
LEAST_PIECES = 16
"""The fewest pieces of a large tensor."""
READ_BYTES = 1 << 20
THREADS = 8
"""How many threads read at the same time: a disk serves many small reads at once faster than one by one."""
SLICES = 8
"""How many tasks there are for each thread, because tensors differ in length."""
MOST_HEADER_BYTES = 1 << 30
"""A header that claims to be longer is not valid."""
STORAGE = re.compile(r"(^|/)data/\d+$")
GOLDEN = 0.6180339887498949
"""The fractional parts of its multiples are spread evenly over 0 … 1, however many are taken."""


class NoLayout(Exception):
    """The header of a file does not show where its tensors lie."""


@dataclass(frozen=True)
class Run:
    """Bytes [start, end) of a file. `is_tensor`: they are one tensor, so it is enough to read pieces of them."""

    start: int
    end: int
    is_tensor: bool

    @property
    def is_large(self) -> bool:
        return self.is_tensor and self.end - self.start >= WHOLE_BYTES


def digest_of_files(files: Sequence[tuple[Path, str]], *, whole: bool) -> str:
    """Hexadecimal SHA-256 over the files in this order, each with the name that is given with it, and its size.
    `whole`: all bytes are read. Raises OSError where a file cannot be read, or changes meanwhile."""
    opened = [_Opened(path, whole=whole) for path, _ in files]
    large = [run.end - run.start for one in opened for run in one.runs if run.is_large]
    stretch = max(STRETCH_BYTES, -(-sum(large) // MOST_PIECES))
    digest = hashlib.sha256(b"whole\n" if whole else b"samples\n")
    with Pool(THREADS, "kvdock-weights") as pool:
        for one, (_, name) in zip(opened, files, strict=True):
            digest.update(f"{name} {one.size}\n".encode())
            for part in one.digests(pool, stretch):
                digest.update(part)
    return digest.hexdigest()


class _Opened:
    """A file, cut into runs. It is open only while it is read: a model may have hundreds."""

    def __init__(self, path: Path, *, whole: bool) -> None:
        self._path = path
        with path.open("rb") as file:
            self._seen = _state(file)
            self.size = self._seen[0]
            self.runs = (Run(0, self.size, is_tensor=False),) if whole else self._cut(file)

    def _cut(self, file: BinaryIO) -> tuple[Run, ...]:
        try:
            return tuple(_runs(layout_of(file, self.size), self.size))
        except NoLayout as why:
            level = logging.INFO if self.size > READ_BYTES else logging.DEBUG
            log.log(level, "reads all %d bytes of %s for the digest of the weights: %s", self.size, self._path, why)
            return (Run(0, self.size, is_tensor=False),)

    def digests(self, pool: Pool, stretch: int) -> Iterator[bytes]:
        """The digests of the file's runs, in their order."""
        with self._path.open("rb", buffering=0) as file:
            if hasattr(os, "posix_fadvise") and any(run.is_large for run in self.runs):
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_RANDOM)  # else each piece costs 128 KiB of reading
            parts = list(_parts(self.runs))
            step = max(1, -(-len(parts) // (THREADS * SLICES)))
            read = [
                pool.submit(_digests, file.fileno(), parts[at : at + step], stretch)
                for at in range(0, len(parts), step)
            ]
            wait(read)  # the file is open until the last thread has left it, also where one of them fails
            yield from (one.result() for one in read)
            if _state(file) != self._seen:
                raise OSError(f"{self._path} has changed while it was read")


def _state(file: BinaryIO) -> tuple[int, int, int, int]:
    found = os.fstat(file.fileno())
    return found.st_size, found.st_mtime_ns, found.st_ino, found.st_dev


def _parts(runs: Sequence[Run]) -> Iterator[Run]:
    """`runs` as they are hashed: long ones that are read whole are cut, so that several threads read them."""
    longest = 64 * READ_BYTES
    for run in runs:
        if run.is_large:
            yield run
        else:
            for start in range(run.start, run.end, longest):
                yield Run(start, min(start + longest, run.end), is_tensor=False)


def _digests(descriptor: int, runs: Sequence[Run], stretch: int) -> bytes:
    return b"".join(_digest_of_run(descriptor, run, stretch) for run in runs)


def _digest_of_run(descriptor: int, run: Run, stretch: int) -> bytes:
    digest = hashlib.sha256()
    for start, size in _pieces(run, stretch):
        found = os.pread(descriptor, size, start)
        while len(found) < size:
            more = os.pread(descriptor, size - len(found), start + len(found))
            if not more:
                raise OSError(f"ends at byte {start + len(found)} while it is read, and {run.end} are wanted")
            found += more
        digest.update(found)
    return digest.digest()


def _pieces(run: Run, stretch: int) -> Iterator[tuple[int, int]]:
    """(first byte, bytes) of each piece that is read. The first and the last piece are the ends of the run."""
    size = run.end - run.start
    if not run.is_large:
        for start in range(run.start, run.end, READ_BYTES):
            yield start, min(READ_BYTES, run.end - start)
        return
    count = max(LEAST_PIECES, -(-size // stretch))
    for at in range(count):
        first, last = size * at // count, size * (at + 1) // count - PIECE_BYTES
        share = 0.0 if at == 0 else 1.0 if at == count - 1 else at * GOLDEN % 1.0
        yield run.start + first + int((last - first) * share), PIECE_BYTES


def _runs(tensors: Sequence[tuple[int, int]], size: int) -> Iterator[Run]:
    """The whole file, cut at the tensors; neighbours that are read whole are one run. Raises NoLayout where tensors
    overlap or lie outside the file."""
    whole_since, at = 0, 0
    for start, end in sorted(tensors):
        if not at <= start <= end <= size:
            raise NoLayout(f"a tensor at bytes {start} to {end} overlaps another one or is not in the file")
        at = end
        if end - start >= WHOLE_BYTES:
            if start > whole_since:
                yield Run(whole_since, start, is_tensor=False)
            yield Run(start, end, is_tensor=True)
            whole_since = end
    if size > whole_since:
        yield Run(whole_since, size, is_tensor=False)


# --------------------------------------------------------------------------- where the tensors of a file are


def layout_of(file: BinaryIO, size: int) -> list[tuple[int, int]]:
    """(first byte, byte behind the last) of each tensor of a file of safetensors, GGUF or torch (zip). The content of
    the file decides which it is, not its name. Raises NoLayout for anything else."""
    file.seek(0)
    start = file.read(8)
    if start[:4] == b"GGUF":
        return _GGUF(file, size).tensors()
    if start[:4] == b"PK\x03\x04":
        return _of_zip(file, size)
    return _of_safetensors(file, start, size)


def _of_safetensors(file: BinaryIO, start: bytes, size: int) -> list[tuple[int, int]]:
    """https://huggingface.co/docs/safetensors: 8 bytes with the header's length, the header in JSON, the tensors."""
    length = int.from_bytes(start, "little")
    if len(start) < 8 or not 2 <= length <= min(size - 8, MOST_HEADER_BYTES):
        raise NoLayout("it is none of safetensors, GGUF and a zip of torch's")
    try:
        header = json.loads(file.read(length))
        offsets = [one["data_offsets"] for name, one in header.items() if name != "__metadata__"]
        tensors = sorted((8 + length + int(first), 8 + length + int(end)) for first, end in offsets)
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise NoLayout(f"its header cannot be read as safetensors: {type(error).__name__}") from error
    at = 8 + length
    for first, end in tensors:  # safetensors has no gaps between tensors
        if first != at or end < first:
            raise NoLayout(f"its header has a tensor at byte {first}, and {at} is where the one before ends")
        at = end
    if at != size:
        raise NoLayout(f"its tensors end at byte {at}, and the file at {size}")
    return tensors


def _of_zip(file: BinaryIO, size: int) -> list[tuple[int, int]]:
    """torch.save's files: a zip with an entry for each tensor's storage, NAME/data/NUMBER, which is not compressed."""
    try:
        with zipfile.ZipFile(file) as archive:
            entries = archive.infolist()
    except (zipfile.BadZipFile, ValueError, struct.error, NotImplementedError) as error:
        raise NoLayout(f"its list of entries cannot be read: {error}") from error
    tensors = []
    for entry in entries:
        if STORAGE.search(entry.filename) is None:
            continue
        if entry.compress_type != zipfile.ZIP_STORED or entry.compress_size != entry.file_size:
            raise NoLayout(f"its entry {entry.filename} is compressed")
        file.seek(entry.header_offset)
        local = file.read(30)  # has the lengths of the entry's name and padding, which may differ from the list's
        if len(local) < 30 or local[:4] != b"PK\x03\x04":
            raise NoLayout(f"its entry {entry.filename} is not where its list says")
        start = entry.header_offset + 30 + sum(struct.unpack_from("<HH", local, 26))
        tensors.append((start, start + entry.file_size))
    return tensors


class _GGUF:
    """https://github.com/ggml-org/ggml/blob/master/docs/gguf.md, versions 2 and 3, little-endian."""

    SIZES = (1, 1, 2, 2, 4, 4, 4, 1, 0, 0, 8, 8, 8)
    """Bytes of a value, by the number of its type; 0: the length varies."""
    STRING, ARRAY = 8, 9
    MOST_DIMENSIONS = 8

    def __init__(self, file: BinaryIO, size: int) -> None:
        self._file, self._size, self._alignment = file, size, 32

    def tensors(self) -> list[tuple[int, int]]:
        try:
            return self._tensors()
        except (struct.error, UnicodeDecodeError, IndexError, RecursionError) as error:
            raise NoLayout(f"its header cannot be read as GGUF: {type(error).__name__}") from error

    def _tensors(self) -> list[tuple[int, int]]:
        self._file.seek(4)
        version, tensors, pairs = self._take("<IQQ")
        if version not in (2, 3):
            raise NoLayout(f"it is GGUF of version {version}, and 2 or 3 is wanted")
        for _ in range(pairs):
            key = self._name()
            (kind,) = self._take("<I")
            if key == b"general.alignment" and kind == 4:
                (self._alignment,) = self._take("<I")
            else:
                self._skip(kind)
        starts: list[int] = []
        for _ in range(tensors):
            self._name()
            (dimensions,) = self._take("<I")
            if dimensions > self.MOST_DIMENSIONS:
                raise NoLayout(f"its header has a tensor of {dimensions} dimensions")
            self._take(f"<{dimensions}QI")
            starts += self._take("<Q")
        if self._alignment < 1:
            raise NoLayout(f"its alignment is {self._alignment}")
        data = -(-self._file.tell() // self._alignment) * self._alignment
        if starts and (min(starts) != 0 or data > self._size or len(set(starts)) < len(starts)):
            raise NoLayout("its tensors do not begin behind its header, each at a place of its own")
        ends = [*sorted(starts)[1:], self._size - data]  # the padding behind a tensor counts as its bytes
        return [(data + start, data + end) for start, end in zip(sorted(starts), ends, strict=True)]

    def _take(self, form: str) -> tuple[int, ...]:
        return struct.unpack(form, self._file.read(struct.calcsize(form)))

    def _string(self) -> bytes:
        (length,) = self._take("<Q")
        if length > self._left():
            raise NoLayout(f"its header has a string of {length} bytes")
        return self._file.read(length)

    def _name(self) -> bytes:
        name = self._string()
        if not name:
            raise NoLayout("its header has a value or a tensor without a name")
        return name

    def _left(self) -> int:
        return self._size - self._file.tell()

    def _skip(self, kind: int) -> None:
        if kind == self.STRING:
            self._string()
            return
        if kind != self.ARRAY:
            self._file.seek(self.SIZES[kind], os.SEEK_CUR)
            return
        of, count = self._take("<IQ")
        if count > self._left():
            raise NoLayout(f"its header has an array of {count} values")
        if of in (self.STRING, self.ARRAY):
            for _ in range(count):
                self._skip(of)
        else:
            self._file.seek(self.SIZES[of] * count, os.SEEK_CUR)
