"""A model that reads images: requests that are text alone are served, and those with an image are computed."""

from __future__ import annotations

import base64
import struct
import zlib
from pathlib import Path

import pytest
from api_helpers import ServerProcess, eventually
from engines import Engine
from whole_engines import HITS, PROMPTS, comes_back, tokens_of

from kvdock.client.client import Client

pytestmark = [pytest.mark.sglang, pytest.mark.timeout(400)]


def picture(red: int, side: int = 28) -> str:
    """A PNG of one colour."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    rows = (b"\0" + bytes([red, 0, 0]) * side) * side
    head = chunk(b"IHDR", struct.pack(">IIBBBBB", side, side, 8, 2, 0, 0, 0))
    png = b"\x89PNG\r\n\x1a\n" + head + chunk(b"IDAT", zlib.compress(rows)) + chunk(b"IEND", b"")
    return "data:image/png;base64," + base64.b64encode(png).decode()


def test_texts_are_loaded_and_images_are_computed(models: dict[str, Path], server: ServerProcess) -> None:
    reads = {"enable_multimodal": True}  # a Gemma 3 reads none unless it is told to
    with Engine(models["media"], server.unix, engine=reads) as engine, Client(server.unix) as client:
        engine.generate(PROMPTS)
        local, cached = engine.generate(PROMPTS)
        assert cached == HITS
        engine.drain()
        assert comes_back(engine) == (local, HITS)

        before = client.status().counters
        prompt = [[40 + at % 50 for at in range(200)] + [259] + [60 + at % 20 for at in range(100)]]
        bright, _ = engine.generate(prompt, image_data=picture(255))
        dark, _ = engine.generate(prompt, image_data=picture(9))
        assert bright != dark, "it looks at the image"
        assert engine.generate(prompt, image_data=picture(9))[1] == [256], "SGLang's own cache has it"
        engine.drain()
        engine.flush()
        again, cached = engine.generate(prompt, image_data=picture(9))
        assert (tokens_of(again), cached) == (tokens_of(dark), [0])
        after = client.status().counters
        assert (after["lookups"], after["stored_chunks"]) == (before["lookups"], before["stored_chunks"])
        eventually(lambda: "bypassed_media" in client.status().hits.computed)
