"""How long the digest of a model's weights takes when an engine starts, and which changes of one tensor it finds.

    python -m bench.identity --json --gib 8 --path /var/tmp

One file of safetensors with the tensors of Llama 3 8B, as many of its layers as fit in `--gib`, of random bytes. It is
read by samples and as a whole, from the disk (`cold`: the page cache is dropped before) and from memory (`warm`); each
figure is the quickest of `--rounds`. `found`: the share of `--changes` random changes of that many contiguous bytes of
a large tensor that the samples find.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from kvdock.connectors import weights
from kvdock.connectors.weights import digest_of_files

LAYER = {
    "q": (4096, 4096), "k": (1024, 4096), "v": (1024, 4096), "o": (4096, 4096), "gate": (14336, 4096),
    "up": (14336, 4096), "down": (4096, 14336), "norm1": (4096,), "norm2": (4096,),
}
EMBEDDING = (128256, 4096)
CHANGED_BYTES = (4096, 1 << 16, 1 << 18, 1 << 20, 1 << 22)
BLOCK_BYTES = 64 << 20


def shapes(total_bytes: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    """The names and shapes of the tensors: the embedding, and at least one layer."""
    yield "embedding", EMBEDDING
    layer_bytes = sum(_bytes(shape) for shape in LAYER.values())
    for number in range(max(1, (total_bytes - _bytes(EMBEDDING)) // layer_bytes)):
        for name, shape in LAYER.items():
            yield f"layers.{number}.{name}", shape


def _bytes(shape: tuple[int, ...]) -> int:
    count = 2  # bfloat16
    for length in shape:
        count *= length
    return count


def write(path: Path, total_bytes: int) -> int:
    """Writes the file; returns how many bytes it has."""
    header, end = {}, 0
    for name, shape in shapes(total_bytes):
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [end, end + _bytes(shape)]}
        end += _bytes(shape)
    text, block = json.dumps(header).encode(), os.urandom(BLOCK_BYTES)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for start in range(0, end, BLOCK_BYTES):
            file.write(block[: end - start])
        file.flush()
        os.fsync(file.fileno())
    return path.stat().st_size


def seconds(path: Path, *, whole: bool, cold: bool) -> float:
    if cold:
        with path.open("rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    start_s = time.perf_counter()
    digest_of_files([(path, path.name)], whole=whole)
    return time.perf_counter() - start_s


def found_share(changed_bytes: int, changes: int, draw: random.Random) -> float:
    """The share of random changes of `changed_bytes` bytes, anywhere in a matrix of an MLP, that samples find."""
    size = _bytes(LAYER["gate"])
    run = weights.Run(0, size, is_tensor=True)
    read = list(weights._pieces(run, weights.STRETCH_BYTES))
    found = 0
    for _ in range(changes):
        start = draw.randrange(size - changed_bytes)
        found += any(at < start + changed_bytes and start < at + piece for at, piece in read)
    return found / changes


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="the figures as JSON")
    parser.add_argument("--gib", type=float, default=8.0, help="how large the file is, about")
    parser.add_argument("--path", type=Path, default=Path(tempfile.gettempdir()), help="the folder that it is made in")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--changes", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=1)
    chosen = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=chosen.path) as folder:
        path = Path(folder) / "model.safetensors"
        figures: dict[str, float] = {"file_bytes": write(path, int(chosen.gib * (1 << 30)))}
        for whole in (False, True):
            for cold in (True, False):
                name = f"{'whole' if whole else 'samples'}_{'cold' if cold else 'warm'}_s"
                figures[name] = round(min(seconds(path, whole=whole, cold=cold) for _ in range(chosen.rounds)), 3)
    draw = random.Random(chosen.seed)
    for size in CHANGED_BYTES:
        figures[f"found_{size}"] = found_share(size, chosen.changes, draw)
    if chosen.json:
        print(json.dumps(figures, indent=2))
    else:
        for name, figure in figures.items():
            print(f"{name:20} {figure}")


if __name__ == "__main__":
    main()
