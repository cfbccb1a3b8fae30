"""pytest plugin: with KVDOCK_NO_SKIPS=1 a skipped test fails, with the reason it gave.

Continuous integration sets it: there, a missing browser or a missing right is a fault of the machine, not
a reason to pass. Only tests marked `gpu` may still skip. The variable is taken out of the environment,
because servers that tests start refuse KVDOCK_ names that are no settings.
"""

from __future__ import annotations

import os
from collections.abc import Generator
from typing import Any

import pytest

NO_SKIPS = os.environ.pop("KVDOCK_NO_SKIPS", "") == "1"
STRICT = pytest.StashKey[bool]()


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    """A worker of pytest-xdist inherits the environment without the variable."""
    node.workerinput["no_skips"] = NO_SKIPS


def pytest_configure(config: pytest.Config) -> None:
    config.stash[STRICT] = getattr(config, "workerinput", {}).get("no_skips", NO_SKIPS)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    expected_failure = hasattr(report, "wasxfail")
    if item.config.stash[STRICT] and report.skipped and not expected_failure and item.get_closest_marker("gpu") is None:
        _fail(report)
    return report


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(
    collector: pytest.Collector,
) -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    """A whole module that skips itself has no markers to excuse it."""
    report = yield
    if collector.config.stash[STRICT] and report.skipped:
        _fail(report)
    return report


def _fail(report: pytest.TestReport | pytest.CollectReport) -> None:
    reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
    report.outcome = "failed"
    report.longrepr = f"not allowed to skip here (KVDOCK_NO_SKIPS=1): {reason}"
