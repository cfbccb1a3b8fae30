"""Kinds of models on whole vLLM engines on the CPU: each row is a kind, each column a way in which two engines differ.

1. Nothing differs: what is loaded gives the bits of a local prefix hit of the same length.
2. Another max_model_len: they share if the model computes the same bits for both, and nothing otherwise.
3. Another served name, and another path to the same files: they share.
4. Another adapter, or another image, of the same name: they share nothing.

Tokens and log-probabilities are compared, never with a cold run: other chunks of prefill change the last bits by
themselves. "The same bits" is measured: an engine computes them with kvdock told to leave the requests alone.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from api_helpers import ServerProcess
from engines import Engine
from models import IMAGE_TOKENS

from kvdock.client.client import Client

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(400)]

LENGTHS = (65, 80, 136, 193, 333, 528)
"""One to sixteen tokens behind a whole number of chunks, of 64 tokens. There a local hit, of whole blocks of 16 or 32
tokens, ends where a load ends."""
ASKED = [[random.Random(n).randrange(5, 590) for _ in range(n)] for n in LENGTHS]
HITS = [(n - 1) // 64 * 64 for n in LENGTHS]
NOTHING = [0] * len(ASKED)
UNTOUCHED = {"load": False, "store": False}
LENGTH, OTHER_LENGTH = 1536, 2048


@dataclass(frozen=True)
class Row:
    """`groups`: KV cache groups. `engine`: what vLLM is made with; `said`: what else Engine is told. `lengths`: two
    values of max_model_len, for which the model computes the same if `lengths_share`. `how`, `same`, `other`: what
    requests have beside tokens; `same` is that under another name, `other` is another thing under its name. `renamed`:
    what the connector under another name is told. `packs`: connectors pack KV."""

    groups: int = 1
    engine: dict[str, Any] = field(default_factory=dict)
    said: dict[str, Any] = field(default_factory=dict)
    lengths: tuple[int, int] = (LENGTH, OTHER_LENGTH)
    lengths_share: bool = True
    how: dict[str, Any] = field(default_factory=dict)
    same: dict[str, Any] = field(default_factory=dict)
    other: dict[str, Any] | None = None
    renamed: dict[str, Any] = field(default_factory=lambda: {"load_async": False})
    packs: bool = False


def image(name: str, *colour: int) -> dict[str, Any]:
    return {"images": [[name, colour]] * len(ASKED)}


BF16 = {"dtype": "bfloat16"}
LORA = {"enable_lora": True, "max_lora_rank": 8, "max_loras": 1}
IMAGES = {"skip_tokenizer_init": False, "mm_hasher_algorithm": "sha256"}  # the usual one is in a package of its own
ROWS = {
    "llama": Row(),
    "qwen3": Row(),
    "gemma": Row(groups=3),
    "gptoss": Row(groups=2),
    "mla": Row(said={"keeps_prefixes": True}),
    "phi3": Row(lengths=(1025, 2048)),
    "phi3 short": Row(lengths=(1025, 1024), lengths_share=False),
    "blip2": Row(
        engine=IMAGES, how=image("photo", 255, 0, 0), same=image("picture", 255, 0, 0), other=image("photo", 0, 0, 255)
    ),
    "llama lora": Row(
        engine=LORA, how={"adapter": ["sql", 1, "one"]}, same={"adapter": ["query", 5, "copy"]},
        other={"adapter": ["sql", 1, "other"]},
    ),
    "lfm2": Row(groups=2, renamed={}),
    "llama packed": Row(engine=BF16, packs=True),
    "gemma packed": Row(groups=3, engine=BF16, packs=True),
    "mla packed": Row(engine=BF16, said={"keeps_prefixes": True}, packs=True),
}


class Kind:
    """The engines of a row, which all start at once."""

    def __init__(self, row: Row, model: Path, link: Path, adapters: Path, address: str) -> None:
        self.row, self.running, self._adapters = row, ExitStack(), adapters
        length, other_length = row.lengths
        self.first = self._engine(model, address, length)
        self.renamed = self._engine(link, address, length, row.renamed, served_model_name="prod")
        self.resized = self._engine(model, address, other_length)
        self.another = self._engine(model, address, length) if row.other is not None else None

    def _engine(
        self, model: Path, address: str, length: int, extra: dict[str, Any] | None = None, **engine: Any
    ) -> Engine:
        made = {"max_model_len": length, **self.row.engine, **engine}
        told = {"pack": "on" if self.row.packs else "off", **(extra or {})}
        return self.running.enter_context(Engine(model, address, extra=told, engine=made, **self.row.said))

    def ask(self, engine: Engine, how: dict[str, Any], **more: Any) -> tuple[list[Any], list[int]]:
        """What Engine.generate gives for ASKED."""
        has_image = "images" in how
        prompts = [prompt[IMAGE_TOKENS:] for prompt in ASKED] if has_image else ASKED
        if "adapter" in how:
            name, number, folder = how["adapter"]
            how = {"adapter": [name, number, str(self._adapters / folder)]}
        return engine.generate(prompts, **how, **more)

    def untouched(self, engine: Engine, how: dict[str, Any]) -> tuple[list[Any], list[Any]]:
        """What an engine that holds nothing makes without kvdock: cold, and from its own prefix cache, which it loses
        then."""
        cold, none = self.ask(engine, how, kvdock=UNTOUCHED)
        local, at_hand = self.ask(engine, how, kvdock=UNTOUCHED)
        assert (none, at_hand) == (NOTHING, HITS)
        engine.flush()
        return cold, local


SWEPT = {"llama", "qwen3", "gptoss", "gemma packed", "mla packed"}
"""Rows that run only with --sweeps: phi3, gemma and the packed llama load and share as they do."""


@pytest.fixture(params=[pytest.param(row, marks=[pytest.mark.sweep] if row in SWEPT else []) for row in ROWS])
def kind(
    request: pytest.FixtureRequest, models: dict[str, Path], server: ServerProcess, tmp_path: Path
) -> Iterator[Kind]:
    model = models[request.param.split()[0]]
    link = tmp_path / "link"
    link.symlink_to(model)
    made = Kind(ROWS[request.param], model, link, models["lora"], server.unix)
    with made.running:
        yield made


def test_what_engines_of_a_kind_load_of_each_other(kind: Kind, server: ServerProcess) -> None:
    row, first = kind.row, kind.first
    assert first.about["groups"] == row.groups
    assert kind.ask(first, row.how)[1] == NOTHING
    first.drain()
    local, at_hand = kind.ask(first, row.how)
    assert at_hand == HITS

    first.flush()
    assert kind.ask(first, row.how) == (local, HITS), "1: its own"
    assert kind.ask(kind.renamed, row.same or row.how) == (local, HITS), "1 and 3: another engine's, by another name"
    with Client(server.unix) as client:
        attached, spaces, pool = client.sessions().sessions, client.namespaces().namespaces, client.status().pool
    assert (pool.kv_bytes > 1.1 * pool.ready_bytes) == row.packs
    assert len({space.manifest.model for space in spaces}) == 1, "its architecture"
    assert [session.model for session in attached].count("prod") == 1
    assert [session.label.split()[2] for session in attached].count("prod") == 1

    cold, own = kind.untouched(kind.resized, row.how)
    assert (own == local) == row.lengths_share, "the control: what the length changes"
    wanted = (local, HITS) if row.lengths_share else (cold, NOTHING)
    assert kind.ask(kind.resized, row.how) == wanted, "2: another max_model_len"

    if kind.another is not None:
        cold, own = kind.untouched(kind.another, row.other)
        assert all(mine != theirs for mine, theirs in zip(own, local, strict=True)), "the control: it shows"
        assert kind.ask(kind.another, row.other) == (cold, NOTHING), "4: another of the same name"
        if "adapter" in row.how:
            assert kind.ask(kind.another, {})[1] == NOTHING, "4: nor without one"


def test_beside_recurrent_states_without_a_prefix_cache_an_engine_makes_what_it_makes_without_kvdock(
    models: dict[str, Path], server: ServerProcess
) -> None:
    """1 to 4 alike: it stores nothing, and so nobody loads."""
    off = {"log_level": "WARNING", "enable_prefix_caching": False}
    with (
        Engine(models["lfm2"], server.unix, engine=off) as beside,
        Engine(models["lfm2"], None, engine={"enable_prefix_caching": False}) as alone,
    ):
        for _ in range(2):
            assert beside.generate(ASKED) == alone.generate(ASKED)
        assert beside.log_text().count("kvdock stands aside, and vLLM runs as without it: ") == 1
        with Client(server.unix) as client:
            assert client.sessions().sessions == [] and not any(client.status().counters.values())
