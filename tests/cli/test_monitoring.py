"""The alert rules and the dashboard of examples/monitoring/ name metrics, labels and values that a server has, and look
at each server by itself."""

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
from references import anchors

from kvdock.client.client import Client
from kvdock.protocol.admin_schemas import DrainServer
from kvdock.protocol.errors import CODES
from kvdock.protocol.hits import COMPUTED, MEMORY, WAITED
from kvdock.protocol.outcomes import Outcome
from kvdock.protocol.reports import REMEDIES

FOLDER = ROOT / "examples/monitoring"
ALERTS: list[dict[str, Any]] = [
    rule for group in yaml.safe_load((FOLDER / "alerts.yml").read_text())["groups"] for rule in group["rules"]
]
DASHBOARD: dict[str, Any] = json.loads((FOLDER / "grafana.json").read_text())
PANELS: list[dict[str, Any]] = DASHBOARD["panels"]
VARIABLES = [one for one in DASHBOARD["templating"]["list"] if one["type"] == "query"]
EXPRESSIONS = [
    *(rule["expr"] for rule in ALERTS), *(target["expr"] for panel in PANELS for target in panel["targets"]),
    *(one["query"].removeprefix("label_values(").rpartition(",")[0] for one in VARIABLES),
]
OF_SCRAPES = {"up": {"job", "instance"}}
"""What Prometheus itself adds: metrics with their labels."""
VALUES: dict[str, set[str]] = {
    "why": set(COMPUTED), "source": {"local", MEMORY, WAITED, "disk", "computed"}, "code": {*CODES, *REMEDIES},
    "route": {"/v1/lookups"}, "job": {"kvdock"}, "instance": {"$instance"}, "tenant": {"$tenant"}, "model": {"$model"},
    "le": {"0.0"},
}
"""The values that matchers may name, by label."""


@pytest.fixture(scope="module")
def samples(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, set[str]]]:
    """The labels of each sample that a server with a lower tier exposes."""
    folder: Path = tmp_path_factory.mktemp("tier")
    with ServerProcess(disk_path=str(folder / "disk"), disk_bytes=64 * MIB) as server, Client(server.unix) as client:
        engine = attach(client)
        engine.store(keys(1))
        engine.release(engine.lookup(keys(1)).lease, 0)
        raw(server.http, "GET", "/nothing")
        engine.heartbeat(outcomes=[
            Outcome(request="r", prompt_tokens=40, loaded_tokens=16, load_us=1000, prefill_tokens_per_s=100.0)
        ])
        # A tier's totals are there once the mover has told of it, which is after the tier is known to be used.
        eventually(lambda: b"kvdock_tier_loaded_bytes_total{" in raw(server.http, "GET", "/metrics")[2], 30.0)
        found: dict[str, set[str]] = {name: set(labels) for name, labels in OF_SCRAPES.items()}
        for family in text_string_to_metric_families(raw(server.http, "GET", "/metrics")[2].decode()):
            for sample in family.samples:
                found.setdefault(sample.name, {"instance", "job"}).update(sample.labels)
        engine.close()
        yield found


@pytest.mark.parametrize("expression", EXPRESSIONS)
def test_what_is_asked_for_is_there(expression: str, samples: dict[str, set[str]]) -> None:
    named = re.findall(r"\b((?:kvdock|process)_\w+|up\b)(?:\{([^}]*)\})?", expression)
    assert named
    for name, matchers in named:
        assert name in samples, name
        for label, text in re.findall(r'(\w+)[=!]~?"([^"]*)"', matchers):
            assert label in samples[name], (name, label)
            assert set(text.split("|")) <= VALUES[label], text


def test_what_series_are_grouped_by_is_a_label_of_theirs(samples: dict[str, set[str]]) -> None:
    grouped = [
        (expression, label, name)
        for expression in EXPRESSIONS
        for labels, inner in re.findall(r"\b(?:sum|min|max|count) by \(([^)]*)\) ?\((.*?)\{", expression)
        for label in labels.split(", ") for name in re.findall(r"kvdock_\w+", inner)
    ]
    assert len(grouped) > 20
    assert [one for one in grouped if one[1] not in samples[one[2]] | {"le"}] == []


def test_a_healthy_server_hides_no_other() -> None:
    """An alert that sums over servers is silent as long as most are well, so each sum is by instance."""
    for rule in ALERTS:
        assert not re.search(r"\b(sum|min|max|avg|count)\b(?! by \(instance\b)", rule["expr"]), rule["alert"]
        has_server = rule["alert"] != "KvdockAbsent"
        assert ("$labels.instance" in rule["annotations"]["summary"]) == has_server, rule["alert"]


def test_each_panel_shows_the_chosen_servers_alone() -> None:
    for panel in PANELS:
        for target in panel["targets"]:
            matchers = re.findall(r"\b(?:kvdock|process)_\w+(\{[^}]*\})?", target["expr"])
            assert all('instance=~"$instance"' in one for one in matchers), panel["title"]


def test_the_dashboard_begins_with_what_is_wrong_and_whether_it_helps() -> None:
    first = [panel for panel in PANELS if panel["gridPos"]["y"] == 0]
    assert [panel["type"] for panel in PANELS[:7]] == ["stat"] * 6 + ["timeseries"] and PANELS[:6] == first
    named = ["kvdock_ready", "kvdock_loaded_tokens_total", "kvdock_saved_seconds", "kvdock_sessions",
             "kvdock_mismatches_total", "kvdock_tier_used"]
    assert all(name in panel["targets"][0]["expr"] for name, panel in zip(named, first, strict=True))
    saved = first[2]["fieldConfig"]["defaults"]["thresholds"]["steps"]
    assert saved == [{"color": "red", "value": None}, {"color": "green", "value": 0}], "what it costs is shown in red"


def test_each_alert_says_what_it_means_and_what_to_look_at() -> None:
    page_text = (ROOT / "docs/operate/alerts.md").read_text()
    assert len({rule["alert"] for rule in ALERTS}) == len(ALERTS) >= 15
    assert re.findall(r"^## (\w+)$", page_text, re.MULTILINE) == [rule["alert"] for rule in ALERTS]
    for rule in ALERTS:
        assert rule["labels"]["severity"] in ("info", "warning", "critical")
        assert all(rule["annotations"][name].rstrip().endswith(".") for name in ("summary", "description"))
        page, _, heading = rule["annotations"]["runbook_url"].partition("#")
        assert page == "docs/operate/alerts.md" and heading == rule["alert"].lower() and heading in anchors(page_text)


def test_a_server_that_is_drained_on_purpose_fires_no_alert() -> None:
    (rule,) = (one for one in ALERTS if one["alert"] == "KvdockGivesOutNothing")
    assert rule["expr"] == "kvdock_ready == 0 unless kvdock_drained == 1"
    with ServerProcess() as server, Client(server.unix) as client:
        def told() -> list[float]:
            families = text_string_to_metric_families(raw(server.http, "GET", "/metrics")[2].decode())
            values = {family.name: family.samples[0].value for family in families if family.samples}
            return [values["kvdock_ready"], values["kvdock_drained"]]

        assert told() == [1, 0]
        client.drain(DrainServer(is_drained=True))
        eventually(lambda: told() == [0, 1])
        client.drain(DrainServer(is_drained=False))
        eventually(lambda: told() == [1, 0])


def test_panels_do_not_overlap() -> None:
    places = [
        (x, y) for panel in PANELS for place in [panel["gridPos"]]
        for x in range(place["x"], place["x"] + place["w"]) for y in range(place["y"], place["y"] + place["h"])
    ]
    assert len(set(places)) == len(places) and {x for x, _ in places} == set(range(24))
    assert len({panel["id"] for panel in PANELS}) == len(PANELS)
