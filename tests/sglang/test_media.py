"""Models that read images: texts are loaded, and images by what they show and where they stand."""

from __future__ import annotations

import base64
import struct
import zlib
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from api_helpers import ServerProcess, eventually
from engines import TP2, Engine
from whole_engines import HITS, PROMPTS, comes_back

from kvdock.client.client import Client

pytestmark = [pytest.mark.sglang, pytest.mark.timeout(400)]

IMAGES = {"media": [259], "grids": [259, 261, 260]}
"""The tokens that stand for an image in the prompts of each model."""
TEXT = [36 + at * 7 % 60 for at in range(300)]
"""Tokens that SGLang's processor of images, which makes words and tokens of them again, leaves as they are."""


def picture(red: int, side: int = 56) -> str:
    """A PNG of one colour."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    rows = (b"\0" + bytes([red, 0, 0]) * side) * side
    head = chunk(b"IHDR", struct.pack(">IIBBBBB", side, side, 8, 2, 0, 0, 0))
    png = b"\x89PNG\r\n\x1a\n" + head + chunk(b"IDAT", zlib.compress(rows)) + chunk(b"IEND", b"")
    return "data:image/png;base64," + base64.b64encode(png).decode()


BRIGHT, DARK = picture(255), picture(9)


class Reader:
    """An engine that reads images."""

    def __init__(self, kind: str, engine: Engine, client: Client) -> None:
        self.kind, self.engine, self._client = kind, engine, client

    def prompt(self, *places: int, turn: Sequence[int] = ()) -> list[int]:
        """A prompt with images at these places of the text, and the text of a later turn."""
        cuts = [0, *places, len(TEXT)]
        parts = [TEXT[start:end] for start, end in pairwise(cuts)]
        return [*parts[0], *(token for part in parts[1:] for token in (*IMAGES[self.kind], *part)), *turn]

    def shows(self, images: str | Sequence[str], *places: int, turn: Sequence[int] = (), **how: Any) -> tuple[Any, int]:
        """What it generates with nothing in its own cache, and how many tokens of the prompt were loaded."""
        self.engine.drain()
        self.engine.flush()
        (run,), (loaded,) = self.engine.generate([self.prompt(*places, turn=turn)], image_data=images, **how)
        return run, loaded

    def stores(self, ask: Callable[[], object]) -> int:
        """How many chunks `ask` stores."""
        self.engine.drain()
        before = self._client.status().counters["stored_chunks"]
        ask()
        self.engine.drain()
        return self._client.status().counters["stored_chunks"] - before


def starts(model: Path, server: ServerProcess, *, engine: Any = None, environ: Any = None) -> Engine:
    how = {"enable_multimodal": True, **(engine or {})}  # a Gemma 3 reads no images unless it is told to
    return Engine(model, server.unix, engine=how, environ=environ or {})


@pytest.fixture(params=IMAGES)
def reader(request: pytest.FixtureRequest, models: dict[str, Path], server: ServerProcess) -> Iterator[Reader]:
    with starts(models[request.param], server) as engine, Client(server.unix) as client:
        yield Reader(request.param, engine, client)


def test_images_are_loaded_by_what_they_show_and_where_they_stand(
    reader: Reader, models: dict[str, Path], server: ServerProcess
) -> None:
    reader.engine.generate(PROMPTS)
    local, cached = reader.engine.generate(PROMPTS)
    assert cached == HITS
    reader.engine.drain()
    assert comes_back(reader.engine) == (local, HITS), "texts"

    assert reader.shows(BRIGHT, 200)[1] == 0
    (bright,), cached = reader.engine.generate([reader.prompt(200)], image_data=BRIGHT)
    assert cached == [256], "SGLang's own cache has it"
    assert reader.shows(BRIGHT, 200) == (bright, 256)
    with starts(models[reader.kind], server) as engine, Client(server.unix) as client:
        assert Reader(reader.kind, engine, client).shows(BRIGHT, 200) == (bright, 256)

    assert reader.shows(DARK, 200)[1] == 192, "the text before the image"
    dark, loaded = reader.shows(DARK, 200)
    assert loaded == 256 and dark != bright, "it looks at the image"
    assert reader.shows(BRIGHT, 140)[1] == 128, "at another place"
    assert reader.shows(BRIGHT, 140)[1] == 256

    assert reader.shows(BRIGHT, 200, turn=range(36, 96))[1] == 256, "the next turn"
    assert reader.shows(BRIGHT, 200, turn=[*range(36, 96), *range(36, 96)])[1] == 320, "the one behind it"
    assert reader.shows([BRIGHT, DARK], 200, 210)[1] == 192, "with an image behind it"
    assert reader.shows([BRIGHT, DARK], 200, 210)[1] == 256
    assert reader.shows([DARK, BRIGHT], 200, 210)[1] == 192, "in another order"


def test_an_image_of_another_size_is_another_image(models: dict[str, Path], server: ServerProcess) -> None:
    """Where the model reads it in another size. Its tokens are others then, and have positions of their own."""
    with starts(models["grids"], server) as engine, Client(server.unix) as client:
        reader = Reader("grids", engine, client)
        reader.shows(BRIGHT, 100)
        assert reader.shows(BRIGHT, 100)[1] == 256
        assert reader.shows(picture(255, 84), 100)[1] == 64
        (large,), cached = engine.generate([reader.prompt(100)], image_data=picture(255, 84))
        assert cached == [256] and reader.shows(picture(255, 84), 100) == (large, 256)


def test_two_ranks_load_what_the_first_one_has_hashed(models: dict[str, Path], server: ServerProcess) -> None:
    with starts(models["grids"], server, **TP2) as engine, Client(server.unix) as client:
        reader = Reader("grids", engine, client)
        reader.shows(BRIGHT, 200)
        (bright,), cached = engine.generate([reader.prompt(200)], image_data=BRIGHT)
        assert cached == [256] and reader.shows(BRIGHT, 200) == (bright, 256)
        assert reader.shows(DARK, 200)[1] == 192
        assert reader.shows(BRIGHT, 200, mm_hashes=["ab" * 8])[1] == 192
        assert reader.shows(DARK, 200, mm_hashes=["ab" * 8])[1] == 0


def test_a_name_that_a_client_has_forged_shares_nothing(reader: Reader, server: ServerProcess) -> None:
    """A client may choose of what SGLang makes the numbers in place of an image's tokens."""
    forged: dict[str, Any] = {"mm_hashes": ["ab" * 8]}
    own: dict[str, Any] = {"mm_hashes": ["cd" * 8]}
    assert reader.shows(BRIGHT, 100, **forged)[1] == 0
    assert reader.shows(BRIGHT, 100, **forged)[1] == 256, "one image has had the name"
    assert reader.stores(lambda: reader.shows(DARK, 100, **forged)) == 0
    assert reader.shows(DARK, 100, **forged)[1] == reader.shows(BRIGHT, 100, **forged)[1] == 0, "two have had it"
    assert reader.shows(DARK, 100, **own)[1] == 64
    assert reader.shows(DARK, 100, **own)[1] == 256, "another name is trusted"
    with Client(server.unix) as client:
        eventually(lambda: "bypassed_media" in client.status().hits.computed)
