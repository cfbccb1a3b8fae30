"""Whole vLLM engines whose weights change while they run: KV of other weights is never loaded, and never stored as
theirs.

One engine is given new weights again and again, by each route and with each kind of reset. Beside it an engine of the
first weights is alive, another one starts when all is over, and a tier on disk keeps what both have stored. An engine
without a connector is given the same weights: it says what is right.
"""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from api_helpers import ServerProcess, eventually
from engines import ENGINE_PYTHON, HERE, Engine
from tier_server import clear_once_written, with_disk
from weight_routes import EXTENSION
from whole_engines import drawn_prompts, tokens_of
from workers import parameters_of

from kvdock.client.client import Client
from kvdock.protocol.admin_schemas import EvictChunks

pytestmark = [
    pytest.mark.vllm, pytest.mark.weights, pytest.mark.timeout(900), pytest.mark.xdist_group("vLLM's weights"),
]

FOUND = 128 + 320
"""Tokens of whole chunks in two prompts."""
ROUTES = ("reload", "function", "extension", "transfer", "model")
RESETS = ("none", "plain", "connector", "before")
STORIES = [("reload", reset) for reset in RESETS] + [
    (route, reset) for route in ROUTES[1:] for reset in ("none", "plain")
]
ABLE = {"weight_transfer_config": {"backend": "folder"}, "worker_extension_cls": EXTENSION}
SWEPT = {("function", "plain"), ("extension", "none"), ("transfer", "plain"), ("model", "none")}
"""Those that happen only with --sweeps: without them, each route is there and each reset."""
every_story = pytest.mark.parametrize(("route", "reset"), [
    pytest.param(*story, id="-".join(story), marks=[pytest.mark.sweep] if story in SWEPT else []) for story in STORIES
])

Prompts = list[list[int]]


def two(seed: int) -> Prompts:
    """Two prompts that no other seed has."""
    return drawn_prompts(seed, (150, 333))


CONTROL = two(9_000)


@dataclass
class Story:
    """What was seen of one change. `before`: prompts that were computed before it; the others were computed behind it
    alone, each for one engine or tier to ask for. `brought…`: tokens that the connector was told to load."""

    before: Prompts
    for_alive: Prompts
    for_late: Prompts
    in_tier: Prompts
    right: Any = None
    """Tokens and log-probabilities of `before`, computed with the new weights."""
    runs: Any = None
    brought: int = -1
    brought_once_flushed: int = -1
    runs_once_flushed: Any = None
    brought_to_alive: int = -1


@dataclass
class World:
    server: ServerProcess
    start: Path
    others: list[Path]
    engine: Engine
    """Its weights change."""
    bare: Engine
    """Without a connector. Its weights change alike."""
    alive: Engine
    """It keeps the first weights."""
    asked: list[tuple[str, str]]
    """The stories that tests ask about, and the first."""
    stories: dict[tuple[str, str], Story] = field(default_factory=dict)

    def story(self, route: str, reset: str) -> Story:
        if (route, reset) not in self.stories:
            self.stories[route, reset] = self._happen(route, reset, len(self.stories))
        return self.stories[route, reset]

    def all_stories(self) -> list[Story]:
        return [self.story(*story) for story in self.asked]

    def _happen(self, route: str, reset: str, number: int) -> Story:
        story = Story(*(two(10_000 + 1_000 * number + 250 * at) for at in range(4)))
        folder = str(self.others[number % 2])
        self.engine.generate(story.before)
        if reset == "before":
            assert self.engine.do("reset")["reset"]
        self.engine.do("change", route=route, folder=folder)  # at once: what was computed last is still being stored
        if reset in ("plain", "connector"):
            assert self.engine.do("reset", connector=reset == "connector")["reset"]
        first = self.engine.do("generate", prompts=story.before)
        story.brought, story.runs = first["brought"], first["runs"]
        self.engine.do("drain")  # a store whose blocks are used again before its slots are there is dropped
        self.engine.generate(story.for_alive + story.for_late + story.in_tier)
        self.engine.do("drain")
        with Client(self.server.unix) as client:
            eventually(lambda: client.status().tiers[0].queued_bytes == 0, 60.0)

        self.bare.do("change", route="reload", folder=folder)
        assert self.bare.do("reset")["reset"]
        story.right = self.bare.generate(story.before)[0]

        assert self.engine.do("reset")["reset"]
        again = self.engine.do("generate", prompts=story.before)
        story.brought_once_flushed, story.runs_once_flushed = again["brought"], again["runs"]
        assert self.alive.do("reset")["reset"]
        story.brought_to_alive = self.alive.do("generate", prompts=story.before + story.for_alive)["brought"]
        return story


def make_others(start: Path, *folders: Path) -> None:
    words = [word for number, folder in enumerate(folders) for word in (str(number + 1), str(folder))]
    subprocess.run([ENGINE_PYTHON, HERE / "weight_routes.py", str(start), *words], check=True)


@pytest.fixture(scope="module")
def others(models: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Two models like llama, each with other weights."""
    base = tmp_path_factory.mktemp("weights")
    folders = [base / "one", base / "two"]
    make_others(models["llama"], *folders)
    return folders


@pytest.fixture(scope="module")
def world(
    models: dict[str, Path], others: list[Path], tmp_path_factory: pytest.TempPathFactory,
    request: pytest.FixtureRequest,
) -> Iterator[World]:
    told = [parameters_of(item) for item in request.session.items]
    asked = {STORIES[0], *((one.get("route"), one.get("reset")) for one in told)}
    start = models["llama"]
    with ExitStack() as stack:
        server = stack.enter_context(with_disk(tmp_path_factory.mktemp("tier")))
        engine, bare, alive = (
            stack.enter_context(Engine(start, address, engine=ABLE))
            for address in (server.unix, None, server.unix)
        )
        engine.generate(CONTROL)
        engine.do("drain")
        clear_once_written(server)
        yield World(server, start, others, engine, bare, alive, [story for story in STORIES if story in asked])
        for one in (engine, bare, alive):
            assert one.close() == 0, one.log_text()


@every_story
def test_the_engine_loads_nothing_of_before_and_computes_what_is_right(world: World, route: str, reset: str) -> None:
    story = world.story(route, reset)
    assert story.brought == 0
    if reset == "none":  # vLLM's own cache has KV of the old weights: without kvdock its tokens are no others
        assert tokens_of(story.runs) != tokens_of(story.right)
    else:
        assert story.runs == story.right


@every_story
def test_what_rests_on_kv_of_before_is_not_stored_and_all_else_is(world: World, route: str, reset: str) -> None:
    story = world.story(route, reset)
    assert story.brought_once_flushed == (0 if reset == "none" else FOUND)
    assert tokens_of(story.runs_once_flushed) == tokens_of(story.right)


@every_story
def test_an_engine_of_the_first_weights_that_is_alive_loads_none_of_it(world: World, route: str, reset: str) -> None:
    story = world.story(route, reset)
    is_first = world.story(*STORIES[0]) is story  # what came before the first change is of the first weights
    assert story.brought_to_alive == (FOUND if is_first else 0)


@pytest.fixture(scope="module")
def late(world: World) -> Iterator[Engine]:
    """An engine that starts from unchanged files when all is over."""
    world.all_stories()
    with Engine(world.start, world.server.unix, engine=ABLE) as engine:
        yield engine
        assert engine.close() == 0, engine.log_text()


@every_story
def test_an_engine_that_starts_later_from_unchanged_files_loads_none_of_it(
    world: World, late: Engine, route: str, reset: str
) -> None:
    assert late.do("generate", prompts=world.story(route, reset).for_late)["brought"] == 0


def test_engines_of_the_first_weights_share_to_the_end(world: World, late: Engine) -> None:
    """The control of all others: also what lies in the tier alone."""
    found = late.do("generate", prompts=CONTROL)
    assert found["brought"] == FOUND
    assert late.do("reset")["reset"]
    mine = two(8_000)
    late.generate(mine)
    late.do("drain")
    assert world.alive.do("generate", prompts=mine)["brought"] == FOUND


@pytest.fixture(scope="module")
def tier_alone(world: World, late: Engine) -> World:
    """What the pool has goes: what is found now comes from the tier."""
    with Client(world.server.unix) as client:
        client.evict(EvictChunks(free_bytes=client.status().pool.limit_bytes))
    for engine in (world.engine, world.alive):
        assert engine.do("reset")["reset"]
    assert world.alive.do("generate", prompts=CONTROL)["brought"] == FOUND, "the control"
    return world


@every_story
def test_no_engine_loads_from_the_tier_what_other_weights_have_computed(
    tier_alone: World, route: str, reset: str
) -> None:
    prompts = tier_alone.story(route, reset).in_tier
    is_last = (route, reset) == tier_alone.asked[-1]  # these are the weights that the engine runs now
    assert tier_alone.alive.do("generate", prompts=prompts)["brought"] == 0
    assert tier_alone.engine.do("generate", prompts=prompts)["brought"] == (FOUND if is_last else 0)


# ---------------------------------------------------------------------- versions


@pytest.fixture
def pair(
    models: dict[str, Path], server: ServerProcess, request: pytest.FixtureRequest
) -> Iterator[tuple[Engine, Engine]]:
    """Two engines of equal weights, with the settings of the test's mark."""
    mark = request.node.get_closest_marker("extra")
    extra = mark.args[0] if mark is not None else {}
    with (
        Engine(models["llama"], server.unix, engine=ABLE, extra=extra) as first,
        Engine(models["llama"], server.unix, engine=ABLE, extra=extra) as second,
    ):
        yield first, second
        for one in (first, second):
            assert one.close() == 0, one.log_text()


def shared(pair: tuple[Engine, Engine], prompts: Prompts) -> int:
    """Tokens that the second engine loads of what the first one has computed."""
    first, second = pair
    for one in pair:
        assert one.do("reset")["reset"]
    runs, _ = first.generate(prompts)
    first.do("drain")
    found = second.do("generate", prompts=prompts)
    assert tokens_of(found["runs"]) == tokens_of(runs)
    return int(found["brought"])


def change(pair: tuple[Engine, Engine], folder: Path, *versions: str, route: str = "reload") -> None:
    for one, version in zip(pair, versions, strict=True):
        one.do("change", route=route, folder=str(folder), version=version)


def test_engines_that_name_equal_versions_share_again_after_each_step(
    pair: tuple[Engine, Engine], others: list[Path]
) -> None:
    assert shared(pair, two(1)) == FOUND
    for step, route in enumerate(("reload", "transfer", "extension")):
        change(pair, others[step % 2], f"step {step}", f"step {step}", route=route)
        assert shared(pair, two(10 + step)) == FOUND
        assert shared(pair, two(1)) == FOUND, "nothing of before, and then what the other one has computed"
    change(pair, others[1], "step 3", "step 4")
    first, second = pair
    runs, _ = first.generate(two(20))
    assert second.do("generate", prompts=two(20))["brought"] == 0
    assert runs


def test_a_version_that_never_changes_shares_nothing(pair: tuple[Engine, Engine], others: list[Path]) -> None:
    change(pair, others[0], "prod", "prod")
    assert shared(pair, two(1)) == FOUND
    change(pair, others[1], "prod", "prod")
    assert shared(pair, two(2)) == 0


@pytest.mark.extra({"trust_weight_versions": False})
def test_versions_that_are_not_trusted_share_nothing(pair: tuple[Engine, Engine], others: list[Path]) -> None:
    change(pair, others[0], "1", "1")
    assert shared(pair, two(1)) == 0
