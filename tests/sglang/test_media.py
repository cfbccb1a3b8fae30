"""A model that reads images: texts are loaded, and images by what they show and where they stand."""

from __future__ import annotations

import base64
import struct
import zlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from api_helpers import ServerProcess, eventually
from engines import Engine
from whole_engines import HITS, PROMPTS, comes_back, tokens_of

from kvdock.client.client import Client

pytestmark = [pytest.mark.sglang, pytest.mark.timeout(400)]
READS = {"enable_multimodal": True}
"""A Gemma 3 reads no images unless it is told to."""
IMAGE = 259
"""Stands for an image in a prompt."""


def picture(red: int, side: int = 28) -> str:
    """A PNG of one colour."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    rows = (b"\0" + bytes([red, 0, 0]) * side) * side
    head = chunk(b"IHDR", struct.pack(">IIBBBBB", side, side, 8, 2, 0, 0, 0))
    png = b"\x89PNG\r\n\x1a\n" + head + chunk(b"IDAT", zlib.compress(rows)) + chunk(b"IEND", b"")
    return "data:image/png;base64," + base64.b64encode(png).decode()


def prompt_of(image_at: int, *, turn: Sequence[int] = ()) -> list[int]:
    """A prompt of 300 tokens beside an image, and those of a later turn."""
    text = [40 + at * 7 % 190 for at in range(300)]
    return [*text[:image_at], IMAGE, *text[image_at:], *turn]


@pytest.fixture
def engine(models: dict[str, Path], server: ServerProcess) -> Iterator[Engine]:
    with Engine(models["media"], server.unix, engine=READS) as made:
        yield made


@pytest.fixture
def stored(server: ServerProcess) -> Iterator[Callable[[], int]]:
    """How many chunks have been stored."""
    with Client(server.unix) as client:
        before = client.status().counters["stored_chunks"]
        yield lambda: client.status().counters["stored_chunks"] - before


def shows(engine: Engine, image: str | Sequence[str], prompt: Sequence[int], **how: Any) -> tuple[Any, int]:
    """What it generates with nothing in its own cache, and how many tokens were loaded."""
    engine.drain()
    engine.flush()
    (run,), (cached,) = engine.generate([prompt], image_data=image, **how)
    return run, cached


def test_texts_are_loaded_and_so_are_images(
    models: dict[str, Path], server: ServerProcess, engine: Engine
) -> None:
    engine.generate(PROMPTS)
    local, cached = engine.generate(PROMPTS)
    assert cached == HITS
    engine.drain()
    assert comes_back(engine) == (local, HITS)

    prompt = prompt_of(200)
    bright, nothing = shows(engine, picture(255), prompt)
    assert nothing == 0
    again, cached = engine.generate([prompt], image_data=picture(255))
    assert cached == [256], "SGLang's own cache has it"
    assert shows(engine, picture(255), prompt) == (again[0], 256)
    with Engine(models["media"], server.unix, engine=READS) as other:
        assert shows(other, picture(255), prompt) == (again[0], 256)

    dark, cached_before_it = shows(engine, picture(9), prompt)
    assert cached_before_it == 192, "the text before the image"
    assert tokens_of([dark]) != tokens_of([bright]), "it looks at the image"
    assert shows(engine, picture(9), prompt)[1] == 256
    assert shows(engine, picture(255), prompt_of(140))[1] == 128, "at another place"
    assert shows(engine, picture(255), prompt_of(140))[1] == 256

    two = [*prompt[:250], IMAGE, *prompt[250:]]
    pair, cached_of_first = shows(engine, [picture(255), picture(9)], two)
    assert cached_of_first in (192, 256)
    assert shows(engine, [picture(255), picture(9)], two)[1] == 256
    assert shows(engine, [picture(9), picture(255)], two)[1] == 256

    turn = [*tokens_of([again[0]])[0], *range(50, 150)]
    longer = prompt_of(200, turn=turn)
    assert shows(engine, picture(255), longer)[1] == 256, "the turn before"
    assert shows(engine, picture(255), longer)[1] == 384
