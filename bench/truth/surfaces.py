"""What people and their tools read of the server's hits, each surface as sums by name."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any
from urllib.request import urlopen

import httpx
from prometheus_client.parser import text_string_to_metric_families

from bench.truth.engines import PATIENCE_S, ROOT
from bench.truth.known import merged
from kvdock.client.client import Client
from kvdock.protocol.hits import HitTotals
from kvdock.protocol.outcomes import OutcomeView
from kvdock.protocol.reports import Explanation, RequestView

MOST_ROWS = 1000
"""The length of a page of the list of requests."""


def parts_of(loaded: dict[str, int], computed: dict[str, int]) -> Counter[str]:
    sums = Counter({f"loaded:{source}": tokens for source, tokens in loaded.items()})
    for why, tokens in computed.items():
        sums[f"computed:{merged(why)}"] += tokens
    return sums


def of_totals(parts: Iterable[HitTotals]) -> Counter[str]:
    total: Counter[str] = Counter()
    for hits in parts:
        total.update({
            "requests": hits.requests, "prompt": hits.prompt_tokens, "local": hits.local_tokens,
            "reloaded": hits.reloaded_tokens,
        })
        total.update(parts_of(hits.loaded, hits.computed))
    return total


def of_outcomes(outcomes: Iterable[OutcomeView]) -> Counter[str]:
    total: Counter[str] = Counter()
    for one in outcomes:
        total.update({"requests": 1, "prompt": one.prompt_tokens, "reloaded": one.reloaded_tokens})
        for run in one.runs:
            label = {"local": "local", "loaded": f"loaded:{run.source}", "computed": f"computed:{merged(run.why)}"}
            total[label[run.origin]] += run.tokens
    return total


@contextmanager
def collecting() -> Iterator[str]:
    """A collector of spans, by its address."""
    program = [sys.executable, str(ROOT / "tests/support/otlp_collector.py")]
    with subprocess.Popen(program, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            yield f"http://127.0.0.1:{int(process.stdout.readline())}"
        finally:
            process.kill()


def asked(address: str, path: str) -> str:
    """The text of a GET over the server's socket."""
    with httpx.Client(transport=httpx.HTTPTransport(uds=address.removeprefix("unix:")), timeout=PATIENCE_S) as client:
        return client.get(f"http://localhost{path}").text


def scraped(address: str) -> tuple[Counter[str], Counter[str]]:
    """The totals of /metrics, and the sums of those by tenant and model."""
    totals: Counter[str] = Counter()
    models: Counter[str] = Counter()
    for family in text_string_to_metric_families(asked(address, "/metrics")):
        for sample in family.samples:
            of = models if sample.name.startswith("kvdock_model_") else totals
            labels, value = sample.labels, int(sample.value) if sample.name.endswith("_total") else 0
            if sample.name in ("kvdock_outcomes_total", "kvdock_model_requests_total"):
                of["requests"] += value
            elif sample.name == "kvdock_reloaded_tokens_total":
                totals["reloaded"] += value
            elif sample.name in ("kvdock_prompt_source_tokens_total", "kvdock_model_prompt_tokens_total"):
                of["prompt"] += value
                if labels["source"] == "local":
                    of["local"] += value
                elif labels["source"] != "computed":
                    of[f"loaded:{labels['source']}"] += value
            elif sample.name in ("kvdock_computed_reason_tokens_total", "kvdock_model_computed_tokens_total"):
                of[f"computed:{merged(labels['why'])}"] += value
    return totals, models


def streamed(address: str) -> Counter[str]:
    """The sums of the events of ended requests."""
    total: Counter[str] = Counter()
    for line in asked(address, "/v1/events?kinds=request_ended").splitlines():
        if line.startswith("data:"):
            event = json.loads(line.removeprefix("data:"))
            total.update({
                "requests": 1, "prompt": event["prompt_tokens"], "local": event["local_tokens"],
                "reloaded": event["reloaded_tokens"],
            })
            total.update(parts_of(event["loaded"], event["computed"]))
    return total


def collected(collector: str) -> Counter[str]:
    """The sums of the spans of ended requests that the collector has got."""
    total: Counter[str] = Counter()
    with urlopen(f"{collector}/spans", timeout=PATIENCE_S) as answer:
        spans: list[dict[str, Any]] = json.load(answer)
    for of in (span["attributes"] for span in spans if span["name"] == "kvdock.request"):
        total.update({
            "requests": 1, "prompt": int(of["gen_ai.usage.input_tokens"]), "local": int(of["kvdock.local_tokens"]),
            "reloaded": int(of["kvdock.reloaded_tokens"]),
        })
        total.update(parts_of(*(
            {name.removeprefix(begin): int(value) for name, value in of.items() if name.startswith(begin)}
            for begin in ("kvdock.loaded.", "kvdock.computed.")
        )))
    return total


def ended_rows(client: Client) -> dict[str, RequestView]:
    """By request, its newest row in the list of requests that has an outcome."""
    rows: dict[str, RequestView] = {}
    page = client.requests(limit=MOST_ROWS)
    while True:
        for row in page.requests:
            if row.outcome is not None:
                rows.setdefault(row.request, row)
        if page.next is None:
            return rows
        page = client.requests(limit=MOST_ROWS, cursor=page.next)


def surfaces(client: Client, address: str, collector: str) -> dict[str, Counter[str]]:
    """Each surface's sums. By model, /metrics does not count what was loaded again."""
    metrics, by_model = scraped(address)
    return {
        "status": of_totals([client.status().hits]),
        "sessions": of_totals(one.totals.hits for one in client.sessions().sessions),
        "namespaces": of_totals(one.totals.hits for one in client.namespaces().namespaces),
        "requests": of_outcomes(row.outcome for row in ended_rows(client).values() if row.outcome is not None),
        "metrics": metrics,
        "metrics by model": by_model,
        "events": streamed(address),
        **({"spans": collected(collector)} if collector else {}),
    }


def history_tokens(client: Client) -> dict[str, float]:
    """The tokens under the curves of the last minutes."""
    stats = client.stats("minutes")
    return {
        series.name.removesuffix("_tokens"): sum(value or 0.0 for value in series.values) * stats.interval_s
        for series in stats.series if series.name in ("prompt_tokens", "loaded_tokens", "computed_tokens")
    }


def errors(found: dict[str, Counter[str]], wanted: Counter[str]) -> Iterator[tuple[int, str]]:
    """(difference in tokens, surface and name)."""
    for surface, sums in found.items():
        for name in {*wanted, *sums}:
            if name != "reloaded" or surface != "metrics by model":
                yield abs(sums[name] - wanted[name]), f"{surface}: {name}: found {sums[name]}, wanted {wanted[name]}"


def says(explanation: Explanation) -> list[str]:
    """The sentences about where the prompt's tokens came from, in their order."""
    return [one.text for one in explanation.sentences if one.code in ("local", "loaded", "computed")]
