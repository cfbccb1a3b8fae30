"""The alert rules and the dashboard of examples/monitoring/ name metrics, labels and values that a server has."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml  # type: ignore[import-untyped]  # it ships no types
from api_helpers import MIB, ServerProcess, attach, eventually, keys, raw
from paths import ROOT
from prometheus_client.parser import text_string_to_metric_families

from kvdock.client.client import Client
from kvdock.protocol.errors import CODES
from kvdock.protocol.reports import BREAKS

FOLDER = ROOT / "examples/monitoring"
ALERTS: list[dict[str, Any]] = [
    rule for group in yaml.safe_load((FOLDER / "alerts.yml").read_text())["groups"] for rule in group["rules"]
]
DASHBOARD: dict[str, Any] = json.loads((FOLDER / "grafana.json").read_text())
EXPRESSIONS = [rule["expr"] for rule in ALERTS] + [
    target["expr"] for panel in DASHBOARD["panels"] for target in panel["targets"]
]


@pytest.fixture(scope="module")
def samples(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, set[str]]]:
    """The labels of each sample that a server with a lower tier exposes."""
    folder: Path = tmp_path_factory.mktemp("tier")
    with ServerProcess(disk_path=str(folder / "disk"), disk_bytes=64 * MIB) as server, Client(server.unix) as client:
        engine = attach(client)
        engine.store(keys(1))
        engine.release(engine.lookup(keys(1)).lease, 0)
        raw(server.http, "GET", "/nothing")
        # A tier's totals are there once the mover has told of it, which is after the tier is known to be used.
        eventually(lambda: b"kvdock_tier_loaded_bytes_total{" in raw(server.http, "GET", "/metrics")[2], 30.0)
        found: dict[str, set[str]] = {}
        for family in text_string_to_metric_families(raw(server.http, "GET", "/metrics")[2].decode()):
            for sample in family.samples:
                found.setdefault(sample.name, {"instance"}).update(sample.labels)
        engine.close()
        yield found


@pytest.mark.parametrize("expression", EXPRESSIONS)
def test_what_is_asked_for_is_there(expression: str, samples: dict[str, set[str]]) -> None:
    named = re.findall(r"\b((?:kvdock|process)_\w+)(?:\{([^}]*)\})?", expression)
    assert named
    for name, matchers in named:
        assert name in samples, name
        for label, text in re.findall(r'(\w+)[=!]~?"([^"]*)"', matchers):
            assert label in samples[name], (name, label)
            known = {"outcome": [*BREAKS, "found"], "code": list(CODES), "route": ["/v1/lookups"]}.get(label)
            assert known is None or set(text.split("|")) <= set(known), text


def test_each_alert_says_what_it_means_and_what_to_look_at() -> None:
    assert len({rule["alert"] for rule in ALERTS}) == len(ALERTS) >= 8
    for rule in ALERTS:
        assert rule["labels"]["severity"] in ("info", "warning", "critical")
        assert all(rule["annotations"][name].rstrip().endswith(".") for name in ("summary", "description"))


def test_panels_do_not_overlap() -> None:
    places = [(panel["gridPos"]["x"], panel["gridPos"]["y"]) for panel in DASHBOARD["panels"]]
    assert len(set(places)) == len(places) and len({panel["id"] for panel in DASHBOARD["panels"]}) == len(places)
