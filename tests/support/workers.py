"""pytest plugin: a run of all tests is shared by several workers, longest first; a run of some of them is one process.

A module's tests stay together, so that what they share is made once, but where a conftest says otherwise. Tests marked
`alone`, which measure the machine or look at all of it, come last, and no other test runs beside one of them.

Of a test marked `sweep(axis)`, each combination of its other parameters runs with one value of the parameter `axis`;
these take turns, so that each comes up. A test marked `sweep` without an axis does not run; a value of a parameter may
be marked so too. `--sweeps` runs all, and so does a run of tests that are named with `::`. A test that asks for the
fixture `sweeps` does less where it is False.
"""

from __future__ import annotations

import fcntl
import gc
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Generator
from pathlib import Path
from typing import Final

import pytest
from paths import SUPPORT

WORKERS: Final = 6
"""Three for each of CI's cores: tests of servers wait for most of their time."""
ENGINE_WORKERS: Final = 2
"""For tests inside vLLM and SGLang, which compute: with three, a run of all of vLLM's took half as long again."""
LONGEST: Final = (
    "tests/tiers/test_clears.py", "tests/page/test_views.py", "tests/tiers/test_peers.py", "tests/tiers/test_herds.py",
    "tests/cli/test_demo.py", "tests/page/test_hostile_pages.py", "tests/page/test_states.py",
    "tests/page/test_page.py", "tests/tiers/test_watching.py", "tests/page/test_reach.py", "tests/api/test_floods.py",
    "tests/api/test_faults.py", "tests/cli/test_end.py", "tests/cli/test_top.py", "tests/cli/test_cli.py",
    "tests/tiers/test_mover.py", "tests/tiers/test_prefetches.py", "tests/api/test_fuzz.py",
    "tests/engine/test_same_tokens_matrix.py", "tests/engine/test_connector.py", "tests/page/test_admin_page.py",
    "tests/engine/test_tp.py", "tests/api/test_takeover.py", "tests/tiers/test_conformance.py",
    "tests/tiers/test_frozen_midway.py", "tests/page/test_live.py", "tests/engine/test_same_tokens.py",
    "tests/engine/test_trained.py", "tests/tiers/test_shared_stores.py", "tests/page/test_million.py",
    "tests/tiers/test_kills.py", "tests/kill/test_matrix.py", "tests/house/test_supply_chain.py",
    "tests/engine/test_same_tokens_tp.py", "tests/engine/test_packed.py", "tests/curve/test_curve.py",
    "tests/tiers/test_packed_parts.py", "tests/cli/test_asks.py", "tests/api/test_explain.py", "tests/api/test_flat.py",
    "tests/engine/test_traces.py", "tests/engine/test_scheduling.py",
)
"""Modules, by how long they take (--durations=0 says so): one that came last would have a worker to itself. The kill
matrix is late because its extension is compiled meanwhile."""
BUILDER: Final = pytest.StashKey[subprocess.Popen[bytes]]()
LOCKS: Final = pytest.StashKey[tuple[Path, Path]]()


@pytest.hookimpl(tryfirst=True)
def pytest_xdist_auto_num_workers(config: pytest.Config) -> int:
    """To start workers takes longer than most parts of the tests do."""
    if not _wants_all(config):
        return 0
    return WORKERS if "tests/kill" in config.getini("testpaths") else ENGINE_WORKERS


def _wants_all(config: pytest.Config) -> bool:
    is_all = config.args_source is pytest.Config.ArgsSource.TESTPATHS
    return is_all and not (config.option.keyword or config.option.markexpr or config.option.lf)


def pytest_configure(config: pytest.Config) -> None:
    worker = getattr(config, "workerinput", {})
    run = worker.get("testrunuid")
    if run is not None:
        # Each begins elsewhere: what one has compiled, the others find compiled.
        first = len(config.args) * int(worker["workerid"].removeprefix("gw")) // worker["workercount"]
        config.args[:] = config.args[first:] + config.args[:first]
        folder = Path(tempfile.gettempdir())
        config.stash[LOCKS] = folder / f"kvdock-turn-{run}", folder / f"kvdock-tests-{run}"


def pytest_sessionstart(session: pytest.Session) -> None:
    """The extension of the kill tests compiles while others wait; their build() waits for it or says what failed."""
    config = session.config
    if config.option.numprocesses and _wants_all(config) and "tests/kill" in config.getini("testpaths"):
        config.stash[BUILDER] = subprocess.Popen(
            ["nice", sys.executable, SUPPORT / "kill_build.py"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
            start_new_session=True,
        )


def pytest_unconfigure(config: pytest.Config) -> None:
    for path in config.stash.get(LOCKS, ()):
        path.unlink(missing_ok=True)
    builder = config.stash.get(BUILDER, None)
    if builder is not None:
        if builder.poll() is None:
            os.killpg(builder.pid, signal.SIGTERM)
        builder.wait()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--sweeps", action="store_true", help="also run what `sweep` leaves out")


@pytest.fixture(scope="session")
def sweeps(pytestconfig: pytest.Config) -> bool:
    """Whether tests may take minutes."""
    return bool(pytestconfig.option.sweeps)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Before pytest-xdist's, which reads the marks."""
    if not (config.option.sweeps or any("::" in one for one in config.args)):
        _leave_out_sweeps(config, items)
    if LOCKS in config.stash:
        items.sort(key=lambda item: (_turn(item), item.path))  # the same for all workers
        for item in items:
            if item.get_closest_marker("alone"):
                item.add_marker(pytest.mark.xdist_group("alone"))
            elif item.get_closest_marker("xdist_group") is None:
                item.add_marker(pytest.mark.xdist_group(item.nodeid.partition("::")[0]))


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """What is imported stays: the garbage collector would walk all of it again and again, now and in each test."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


def pytest_collection_finish(session: pytest.Session) -> None:
    """Raises RuntimeError if pytest-xdist did not see the groups: it says nothing, and scatters modules' tests."""
    if LOCKS in session.config.stash:
        scattered = [item.nodeid for item in session.items if "@" not in item.nodeid]
        if scattered:
            raise RuntimeError(f"{len(scattered)} tests have no group for pytest-xdist, {scattered[0]} among them")


def _leave_out_sweeps(config: pytest.Config, items: list[pytest.Item]) -> None:
    """All but the combinations whose turn it is, of tests that are marked `sweep`."""
    marked = {item: mark for item in items if (mark := item.get_closest_marker("sweep"))}
    swept = {item: mark.args[0] for item, mark in marked.items() if mark.args}
    values: dict[tuple[str, str], list[object]] = {}
    """By function and parameter, in the order in which they come."""
    for item in swept:
        for name, value in parameters_of(item).items():
            known = values.setdefault((_function(item), name), [])
            if value not in known:
                known.append(value)

    def has_its_turn(item: pytest.Item, axis: str) -> bool:
        place = {name: values[_function(item), name].index(value) for name, value in parameters_of(item).items()}
        own = place.pop(axis)
        return sum(place.values()) % len(values[_function(item), axis]) == own

    left_out = {item for item in marked if item not in swept or not has_its_turn(item, swept[item])}
    config.hook.pytest_deselected(items=list(left_out))
    items[:] = [item for item in items if item not in left_out]


def _function(item: pytest.Item) -> str:
    return item.nodeid.partition("[")[0]


def parameters_of(item: pytest.Item) -> dict[str, object]:
    """The values with which a test runs, by the parameter's name."""
    spec = getattr(item, "callspec", None)
    return {} if spec is None else dict(spec.params)


def _turn(item: pytest.Item) -> int:
    if item.get_closest_marker("alone"):
        return len(LONGEST) + 1
    module = item.nodeid.partition("::")[0]
    return LONGEST.index(module) if module in LONGEST else len(LONGEST)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    """Waits outside of the test's own time limit. The locks are of this process alone and end with it; flock's would
    stay with what a worker that crashed has forked."""
    if LOCKS not in item.config.stash:
        return (yield)
    turn, tests = item.config.stash[LOCKS]
    with tests.open("a+") as lock:
        with turn.open("a+") as first:
            fcntl.lockf(first, fcntl.LOCK_EX)  # or others' tests would follow each other past the one that waits
            fcntl.lockf(lock, fcntl.LOCK_EX if item.get_closest_marker("alone") else fcntl.LOCK_SH)
        return (yield)
