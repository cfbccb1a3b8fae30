"""Two whole SGLang engines on the CPU that get one prompt together: with compute_once the second loads what the first
computes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from api_helpers import ServerProcess, eventually
from engines import PP2, TP2, Engine
from stories import with_figures
from whole_engines import HITS, OTHERS, PROMPTS, tokens_of

from kvdock.client.client import Client

pytestmark = [pytest.mark.sglang, pytest.mark.timeout(400)]

PROMPT, HIT, CHUNK = PROMPTS[2:], HITS[2], 256
"""A step computes CHUNK tokens of the prompt."""
WAITS = ("fulfilled", "withdrawn", "stalled", "expired")


@contextmanager
def slow(model: Path, address: str, share: float, folder: Path, **said: Any) -> Iterator[Engine]:
    """An engine that knows by a prompt of its own that it computes slowly."""
    folder.mkdir()
    environ = {**with_figures(folder)["environ"], **said.get("environ", {})}
    engine = {**with_figures(folder)["engine"], **said.get("engine", {})}
    with Engine(
        model, address, linker=["SlowLinker", "odd_linkers"], extra={"compute_once": share}, environ=environ,
        engine=engine,
    ) as made:
        assert made.generate(OTHERS[2:], cache_salt=folder.name)[1] == [0]
        yield made


def waits_of(engine: Engine) -> list[str]:
    found = engine.figures()
    return [how for how in WAITS for _ in range(int(found.get(f"kvdock_waits_{how}_total", 0)))]


def asks(engine: Engine, server: ServerProcess, **how: Any) -> None:
    """Sends the prompt to the engine, which has asked the server about it when this returns."""
    with Client(server.unix) as client:
        before = client.status().counters["lookups"]
        engine.tell("generate", prompts=PROMPT, **how)
        eventually(lambda: client.status().counters["lookups"] > before)


@pytest.mark.parametrize("said", [{}, TP2, PP2], ids=["one rank", "two ranks", "two stages"])
def test_the_second_engine_loads_what_the_first_computes(
    said: dict[str, Any], models: dict[str, Path], server: ServerProcess, tmp_path: Path
) -> None:
    with (
        slow(models["llama"], server.unix, 10.0, tmp_path / "first", **said) as first,
        slow(models["llama"], server.unix, 10.0, tmp_path / "second", **said) as second,
    ):
        asks(first, server)
        found = second.done(second.do("generate", prompts=PROMPT))
        computed = first.done(first.answer())
        assert (computed["cached"], found["cached"]) == ([0], [HIT])
        assert tokens_of(found["runs"]) == tokens_of(computed["runs"])
        assert (waits_of(first), waits_of(second)) == ([], ["fulfilled"])


def test_without_the_setting_both_compute(models: dict[str, Path], server: ServerProcess, tmp_path: Path) -> None:
    with (
        slow(models["llama"], server.unix, 0.0, tmp_path / "first") as first,
        slow(models["llama"], server.unix, 0.0, tmp_path / "second") as second,
    ):
        asks(first, server)
        assert second.generate(PROMPT)[1] == [0]
        assert first.done(first.answer())["cached"] == [0]
        assert waits_of(second) == []


def test_the_second_engine_computes_what_the_first_gives_up(
    models: dict[str, Path], server: ServerProcess, tmp_path: Path
) -> None:
    """The first is aborted in its second step of three."""
    with (
        slow(models["llama"], server.unix, 10.0, tmp_path / "first") as first,
        slow(models["llama"], server.unix, 10.0, tmp_path / "second") as second,
    ):
        asks(first, server, abort_s=0.45)
        assert second.generate(PROMPT)[1][0] in (0, CHUNK, HIT - 64)
        assert first.answer()["why"] != ["length"]
        assert waits_of(second) == ["withdrawn"]


