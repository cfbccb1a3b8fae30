"""The digest of files of weights: what of them is read, and which changes it finds."""

from __future__ import annotations

import io
import json
import struct
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from kvdock.connectors import weights
from kvdock.connectors.weights import (
    LEAST_PIECES,
    MOST_PIECES,
    PIECE_BYTES,
    STRETCH_BYTES,
    WHOLE_BYTES,
    NoLayout,
    digest_of_files,
    layout_of,
)

LARGE = 3 << 20
"""Bytes of the matrix in the files below."""
SMALL = (1 << 20) - 64
"""The longest of which docs/operate/vllm_sharing.md says that all of it is read."""
SIZES = {"norm": 64, "matrix": LARGE, "bias": SMALL}


def safetensors(sizes: dict[str, int] = SIZES) -> bytes:
    header, end = {}, 0
    for name, size in sizes.items():
        header[name] = {"dtype": "U8", "shape": [size], "data_offsets": [end, end + size]}
        end += size
    text = json.dumps({"__metadata__": {"format": "pt"}, **header}).encode()
    return len(text).to_bytes(8, "little") + text + bytes(end)


def gguf(sizes: dict[str, int] = SIZES, *, alignment: int = 64) -> bytes:
    """With a value of each kind in its header, as far as kinds are read otherwise."""

    def text(value: str) -> bytes:
        return struct.pack("<Q", len(value)) + value.encode()

    pairs = [
        text("general.alignment") + struct.pack("<II", 4, alignment),
        text("general.name") + struct.pack("<I", 8) + text("tiny"),
        text("a.float") + struct.pack("<If", 6, 1.0),
        text("tokens") + struct.pack("<IIQ", 9, 8, 2) + text("a") + text("bc"),
        text("scores") + struct.pack("<IIQ3f", 9, 6, 3, 0, 1, 2),
        text("nested") + struct.pack("<IIQIQ2B", 9, 9, 1, 7, 2, 0, 1),
    ]
    infos, data = [], b""
    for name, size in sizes.items():
        infos.append(text(name) + struct.pack("<IQIQ", 1, size, 24, len(data)))
        data += bytes(-(-size // alignment) * alignment)
    header = b"GGUF" + struct.pack("<IQQ", 3, len(infos), len(pairs)) + b"".join(pairs + infos)
    return header + bytes(-len(header) % alignment) + data


def torch_zip(sizes: dict[str, int] = SIZES) -> bytes:
    made = io.BytesIO()
    torch.save({name: torch.zeros(size, dtype=torch.uint8) for name, size in sizes.items()}, made)
    return made.getvalue()


KINDS: dict[str, Callable[[], bytes]] = {"safetensors": safetensors, "gguf": gguf, "zip": torch_zip}


def layout(content: bytes) -> list[tuple[int, int]]:
    return sorted(layout_of(io.BytesIO(content), len(content)))


def digest(folder: Path, content: bytes, *, whole: bool = False) -> str:
    path = folder / "file"
    path.write_bytes(content)
    return digest_of_files([(path, "model")], whole=whole)


def changed(content: bytes, start: int, count: int = 1) -> bytes:
    return content[:start] + bytes(255 - byte for byte in content[start : start + count]) + content[start + count :]


@pytest.mark.parametrize("kind", KINDS)
def test_a_header_says_where_tensors_lie(kind: str) -> None:
    content = KINDS[kind]()
    found = layout(content)
    assert [end - start for start, end in found if end > start] == pytest.approx(list(SIZES.values()), abs=64)
    matrix = bytes(content[slice(*max(found, key=lambda one: one[1] - one[0]))])
    assert not any(matrix), "it is zeros, and what lies around it is not"


@pytest.mark.parametrize("kind", KINDS)
def test_a_change_of_one_byte_of_a_small_tensor_or_of_a_header_is_found(kind: str, tmp_path: Path) -> None:
    content = KINDS[kind]()
    first, matrix, last = (one for one in layout(content) if one[1] > one[0])
    usual = digest(tmp_path, content)
    assert digest(tmp_path, content) == usual
    places = {*range(*first, 7), *range(*last, 1 << 16), last[1] - 1, matrix[0], matrix[1] - 1}
    places |= {12, first[0] - 1, len(content) - 1}  # of the header, and what lies around tensors
    assert len({digest(tmp_path, changed(content, place)) for place in places} - {usual}) == len(places)


def test_a_change_of_half_a_mebibyte_is_found_wherever_it_is(tmp_path: Path) -> None:
    content = safetensors({"matrix": 16 << 20})
    start, end = layout(content)[0]
    usual, path = digest(tmp_path, content), tmp_path / "file"
    for first in range(start, end - (1 << 19), (1 << 17) + 1):
        with path.open("r+b") as file:
            file.seek(first)
            file.write(bytes([255]) * (1 << 19))
            file.flush()
            assert digest_of_files([(path, "model")], whole=False) != usual, first - start
            file.seek(first)
            file.write(bytes(1 << 19))
    assert digest_of_files([(path, "model")], whole=False) == usual


def test_a_change_of_a_few_columns_of_all_rows_is_found(tmp_path: Path) -> None:
    """Pieces that are all at the same columns would miss a head that was trained."""
    content = bytearray(safetensors({"matrix": 32 << 20}))
    start = layout(bytes(content))[0][0]
    usual, row = digest(tmp_path, bytes(content)), 32 << 10
    for column in range(0, row, row // 8):  # an eighth of each row
        other = bytearray(content)
        for line in range(start, start + (32 << 20), row):
            other[line + column : line + column + row // 8] = b"\xff" * (row // 8)
        assert digest(tmp_path, bytes(other)) != usual, column


def test_one_byte_of_a_large_tensor_may_be_missed_and_a_full_digest_finds_it(tmp_path: Path) -> None:
    content = safetensors()
    start, end = max(layout(content), key=lambda one: one[1] - one[0])
    usual, whole = digest(tmp_path, content), digest(tmp_path, content, whole=True)
    assert whole != usual
    places = range(start, end, (1 << 19) + 4099)
    missed = [place for place in places if digest(tmp_path, changed(content, place)) == usual]
    assert missed, "it is a sample"
    assert all(digest(tmp_path, changed(content, place), whole=True) != whole for place in missed)


@pytest.mark.parametrize(("make", "why"), [
    (lambda: b"weights" * 400_000, "none of safetensors, GGUF and a zip"),
    (lambda: (1 << 40).to_bytes(8, "little") + safetensors()[8:], "none of safetensors"),
    (lambda: safetensors()[:-1], "tensors end at byte"),
    (lambda: safetensors() + b"more", "tensors end at byte"),
    (lambda: safetensors().replace(b"data_offsets", b"data_offset_", 1), "cannot be read as safetensors: KeyError"),
    (lambda: safetensors().replace(b'{"__meta', b'["__meta', 1), "cannot be read as safetensors"),
    (lambda: safetensors().replace(b"[0, 64]", b"[0, 63]"), "has a tensor at byte"),
    (lambda: b"GGUF" + struct.pack("<I", 9) + gguf()[8:], "GGUF of version 9"),
    (lambda: gguf()[:100] + bytes(3 << 20), "a tensor without a name"),
    (lambda: gguf()[:100], "cannot be read as GGUF: error"),
    (lambda: gguf().replace(b"tokens" + struct.pack("<II", 9, 8), b"tokens" + struct.pack("<II", 99, 8)), "IndexError"),
    (lambda: torch_zip()[:-40], "list of entries cannot be read"),
])  # fmt: skip
def test_a_file_whose_header_cannot_be_understood_is_read_whole(
    make: Callable[[], bytes], why: str, tmp_path: Path
) -> None:
    content = make()
    with pytest.raises(NoLayout, match=why):
        layout(content)
    usual = digest(tmp_path, content)
    places = range(0, len(content), len(content) // 24)
    # The change is none of those that would make a header of it.
    assert all(digest(tmp_path, changed(content, place)) != usual for place in places if place > 4096)


def test_a_zip_whose_tensors_are_compressed_is_read_whole() -> None:
    import zipfile

    made = io.BytesIO()
    with zipfile.ZipFile(made, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("archive/data/0", bytes(LARGE))
    with pytest.raises(NoLayout, match="its entry archive/data/0 is compressed"):
        layout(made.getvalue())


def test_names_sizes_and_order_of_files_count(tmp_path: Path) -> None:
    one, two = tmp_path / "one", tmp_path / "two"
    one.write_bytes(b"1")
    two.write_bytes(b"2")
    digests = {
        digest_of_files(files, whole=False) for files in (
            [(one, "a"), (two, "b")], [(two, "a"), (one, "b")], [(one, "b"), (two, "a")], [(one, "a")], [(one, "")],
        )
    }
    assert len(digests) == 5


def test_a_file_that_changes_while_it_is_read_is_no_answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "file"
    path.write_bytes(safetensors())
    real = weights._digests

    def digests(*arguments: object) -> bytes:
        with path.open("ab") as file:
            file.write(b"more")
        return real(*arguments)  # type: ignore[arg-type]  # whatever it takes

    monkeypatch.setattr(weights, "_digests", digests)
    with pytest.raises(OSError, match="has changed while it was read"):
        digest_of_files([(path, "")], whole=False)


@pytest.mark.parametrize("tensor_bytes", [WHOLE_BYTES, 4 << 20, 1 << 30, 16 << 30])
def test_what_is_read_of_a_large_tensor_is_bounded_and_spread(tensor_bytes: int) -> None:
    run = weights.Run(1000, 1000 + tensor_bytes, is_tensor=True)
    for stretch in (STRETCH_BYTES, (700 << 30) // MOST_PIECES):
        pieces = list(weights._pieces(run, stretch))
        assert len(pieces) == max(LEAST_PIECES, -(-tensor_bytes // stretch))
        assert {size for _, size in pieces} == {PIECE_BYTES}
        assert pieces[0][0] == run.start and sum(pieces[-1]) == run.end
        length = tensor_bytes / len(pieces)
        for number, (at, size) in enumerate(pieces):
            assert number * length - 1 <= at - run.start and at + size - run.start <= (number + 1) * length + 1
