"""A trace's sessions through vLLM in service: kvdock, compared with other ways to keep KV in host memory.

    python -m bench.service --json --trace FILE [--kinds off native kvdock] [--modes one two_random two_affinity]
    python -m bench.service --json --modes together together4 [--gpus 4]

Modes: one engine; two engines, each request sent to either at random; two engines, each session sent to one. Kinds: off
(no connector), native (vLLM's own offload), kvdock, kvdock_packed (its pool keeps KV packed), kvdock_disk and
kvdock_packed_disk (with a tier on disk, where --disk-path says in which folder), kvdock_packed_hinted (the last request
of a session says that it is the last), and lmcache and pegaflow where they are installed. All get the same host memory;
where two engines cannot share it, each gets half. Each engine has a closed loop of requests. For what a tier is worth,
with prompts whose KV is four times the pool, each session coming again when all others have:

    python -m bench.service --json --trace FILE --kinds kvdock kvdock_disk --modes one --sessions 60 --most 300
        --by-turns --host-share 0.25 --disk-path FOLDER

together, together4: two engines, and four, all of which get the same prompt of `--longest` tokens at the same moment,
in rounds with fresh prompts, of which the first is not counted. Kinds: kvdock and kvdock_once, with the connector's
setting compute_once. Figures: all_first_tokens_ms (until the last engine has its first token, the mean of the rounds),
all_first_tokens_max_ms (of the worst round), and computed_share (of the prompt tokens of all engines: all compute
everything at 1, one of them does at 1 / engines).

Prints one JSON object, for each mode and kind (mode_kind_…): took_s, ttft_mean_ms, ttft_p50_ms, ttft_p99_ms (time to
first token), cached_share (of prompt tokens), decode_gap_p50_ms and decode_gap_p99_ms (between tokens of running
requests), and for each mode disk_ttft_ratio and disk_ttft_p50_ratio: means and medians of kvdock_disk, as shares of
kvdock's. Of kvdock_disk also tier_loaded_gb, tier_stored_gb, tier_load_gb_s and tier_load_latency_ms (what loads are
expected to take), and tier_declined (requests that did not wait, because computing was expected to be quicker). Kinds
take turns, in an order that the seed sets. Without a GPU, `--device cpu --model FOLDER` shows that it works.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from bench import trace
from bench.engine_child import LLAMA_8B, wait_until_pinned
from bench.service import servers
from bench.vllm.__main__ import obstacle
from kvdock.client.client import Client

MODES = ("one", "two_random", "two_affinity")
TOGETHER = {"together": 2, "together4": 4}
"""Modes without a trace, and how many engines they have."""
ROUND_S = 0.5
"""Seconds between two rounds."""
GIB = 1 << 30


class Failed(RuntimeError):
    """An engine ended before it had served."""


class EngineProcess:
    def __init__(self, said: dict[str, Any], folder: Path, name: str, path: str) -> None:
        self.connector = said["connector"]
        at = folder / f"{name}.json"
        at.write_text(json.dumps(said))
        self._log_at = folder / f"{name}.log"
        self._log = self._log_at.open("w")
        self._process = subprocess.Popen(
            [sys.executable, "-m", "bench.service.engine", str(at)], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            stderr=self._log, text=True, env=servers.environment(path),
        )

    def answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            last = self._log_at.read_text(errors="replace").splitlines()[-8:]
            raise Failed(f"an engine ended; its log ends: {' | '.join(last)}")
        found: dict[str, Any] = json.loads(line)
        return found

    def go(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write("go\n")
        self._process.stdin.flush()

    def close(self) -> None:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.close()
        try:
            self._process.wait(30.0)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process.stdout.close()
        self._log.close()


def shares(mode: str, requests: Sequence[trace.Request], seed: int) -> list[list[int]]:
    """For each engine, the indices of its requests."""
    if mode == "one":
        return [list(range(len(requests)))]
    parts: list[list[int]] = [[], []]
    for at, request in enumerate(requests):
        routed_by = request.session if mode == "two_affinity" else request.number
        parts[random.Random(f"{seed}/{routed_by}").randrange(2)].append(at)
    return parts


def figures_of(found: Sequence[dict[str, Any]]) -> dict[str, float]:
    """Figures over the answers of all engines."""
    ttft_ms = sorted(1e3 * s for one in found for s in one["ttft_s"])
    gaps_ms = sorted(1e3 * s for one in found for s in one["gaps_s"])
    tokens = sum(sum(one["tokens"]) for one in found)
    return {
        "took_s": max(one["took_s"] for one in found),
        "ttft_mean_ms": statistics.mean(ttft_ms),
        "ttft_p50_ms": statistics.median(ttft_ms),
        "ttft_p99_ms": ttft_ms[len(ttft_ms) * 99 // 100],
        "cached_share": sum(sum(one["cached"]) for one in found) / tokens,
        "decode_gap_p50_ms": statistics.median(gaps_ms) if gaps_ms else 0.0,
        "decode_gap_p99_ms": gaps_ms[len(gaps_ms) * 99 // 100] if gaps_ms else 0.0,
        "prompt_tokens": tokens,
    }


def engine_options(chosen: argparse.Namespace, engines: int) -> dict[str, Any]:
    longest = chosen.longest * chosen.block_tokens // trace.BLOCK_TOKENS
    common = {
        "max_model_len": longest + 512, "max_num_seqs": 16, "enable_prefix_caching": True,
        "enforce_eager": chosen.eager or chosen.device == "cpu",
    }
    if chosen.device == "cpu":
        return common | {
            "dtype": "float32", "block_size": 32, "max_num_batched_tokens": 256,
            "num_gpu_blocks_override": 2 * ((longest + 512) // 32 + 2) // engines,
        }
    return common | {
        "dtype": "bfloat16", "attention_backend": "FLASH_ATTN", "max_num_batched_tokens": 8192,
        "gpu_memory_utilization": 0.1, "kv_cache_memory_bytes": int(chosen.gpu_gib * GIB) // engines,
    }


@contextmanager
def engines_of(
    chosen: argparse.Namespace, kind: str, mode: str, work: Sequence[dict[str, Any]], folder: Path,
    settings: dict[str, Any],
) -> Iterator[list[EngineProcess]]:
    """Engines of a kind that are ready, one for each `work`: its requests, concurrency, rounds. `settings`: of kvdock's
    connector."""
    path = chosen.paths.get(kind, "")
    with ExitStack() as stack:
        server, address = chosen.server, chosen.address
        if "disk" in kind:
            address = chosen.disk_address
            if chosen.disk_path is not None:
                server = server | stack.enter_context(servers.on_disk(chosen.disk_path, chosen.disk_gib))
        connector = stack.enter_context(servers.connector(
            kind, host_bytes=int(chosen.host_gib * GIB), engines=len(work), path=path, kvdock=settings,
            server=server, address=address, namespace=f"bench-{mode}-{time.time_ns()}",
        ))
        engines = []
        for at, part in enumerate(work):
            environment = {"VLLM_USE_V2_MODEL_RUNNER": "1"} if chosen.device == "cuda" else {}
            if chosen.gpus > 1:
                environment["CUDA_VISIBLE_DEVICES"] = str(at % chosen.gpus)
            said = {
                "connector": connector, "engine": engine_options(chosen, len(work)), "environment": environment,
                "model": str(chosen.model) if chosen.model else LLAMA_8B | chosen.shape, **part,
            }
            engines.append(EngineProcess(said, folder, f"{mode}-{kind}-{at}", path))
            stack.callback(engines[-1].close)
        for engine in engines:
            engine.answer()
        if kind.startswith("kvdock") and chosen.device == "cuda":
            assert connector is not None
            wait_until_pinned(connector["kv_connector_extra_config"]["address"])
        time.sleep(chosen.settle_s)  # other engines page-lock their memory meanwhile
        yield engines


def serve_together(
    chosen: argparse.Namespace, mode: str, once: bool, folder: Path, vocabulary: int
) -> dict[str, float]:
    """All engines get the same prompts, each of them at the same moment."""
    count, length = TOGETHER[mode], chosen.longest * chosen.block_tokens // trace.BLOCK_TOKENS
    requests = [
        ([draw.randrange(5, vocabulary) for _ in range(length)], 4, False)
        for draw in (random.Random(f"{chosen.seed}/{number}") for number in range(chosen.rounds + 1))
    ]
    settings = chosen.connector | {"compute_once": chosen.compute_once if once else 0.0}
    work = [{"requests": requests, "concurrency": 1, "rounds": True}] * count
    rounds = []
    with engines_of(chosen, "kvdock", f"{mode}-{once}", work, folder, settings) as engines:
        for _ in requests:
            for engine in engines:
                engine.go()
            rounds.append([engine.answer() for engine in engines])
            time.sleep(ROUND_S)  # so that the chunks stored last are published
    (folder / f"{mode}-{once}.answers.json").write_text(json.dumps(rounds))
    counted = rounds[1:]
    last_ms = [1e3 * max(answer["ttft_s"][0] for answer in answers) for answers in counted]
    cached = sum(answer["cached"][0] for answers in counted for answer in answers)
    return {
        "all_first_tokens_ms": statistics.mean(last_ms), "all_first_tokens_max_ms": max(last_ms),
        "computed_share": 1 - cached / (len(counted) * count * length),
    }


def serve(
    chosen: argparse.Namespace, kind: str, mode: str, requests: Sequence[trace.Request], prompts: list[list[int]],
    folder: Path,
) -> dict[str, float]:
    """Serves one kind in one mode; returns its figures."""
    parts = shares(mode, requests, chosen.seed)
    last = {one.session: n for n, one in enumerate(requests)} if "hinted" in kind else {}
    work = [{
        "requests": [
            (prompts[n], max(4, min(requests[n].new_tokens, chosen.new)), last.get(requests[n].session) == n)
            for n in part
        ],
        "concurrency": max(1, chosen.concurrency // len(parts)),
    } for part in parts]
    with engines_of(chosen, kind, mode, work, folder, chosen.connector) as engines:
        for engine in engines:
            engine.go()
        answers = [engine.answer() for engine in engines]
        tier = tier_figures(engines[0].connector) if "disk" in kind else {}
    for at, answer in enumerate(answers):
        (folder / f"{mode}-{kind}-{at}.answer.json").write_text(json.dumps(answer))
    return figures_of(answers) | tier


def tier_figures(connector: Mapping[str, Any]) -> dict[str, float]:
    """The figures that the server reports of its tier."""
    with Client(connector["kv_connector_extra_config"]["address"]) as client:
        status = client.status()
    [tier], mover = status.tiers, status.mover
    assert mover is not None, "there is a tier"
    return {
        "tier_loaded_gb": tier.counters["loaded_bytes"] / 1e9, "tier_stored_gb": tier.counters["stored_bytes"] / 1e9,
        "tier_load_gb_s": tier.load_bytes_per_s / 1e9, "tier_load_latency_ms": tier.load_latency_s * 1e3,
        "tier_declined": mover.declined,
    }


def parsed(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m bench.service", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", action="store_true", help="one JSON object on stdout")
    parser.add_argument("--trace", type=Path, help="JSON lines, as bench/trace.py reads them")
    parser.add_argument("--kinds", nargs="+", choices=servers.KINDS)
    parser.add_argument("--modes", nargs="+", choices=(*MODES, *TOGETHER), default=list(MODES))
    parser.add_argument("--seed", type=int, default=1, help="of sessions, tokens, routing and turns")
    parser.add_argument("--sessions", type=int, default=30)
    parser.add_argument("--most", type=int, default=164, help="requests")
    parser.add_argument("--requests", type=int, nargs=2, default=(3, 30), metavar=("LEAST", "MOST"),
                        help="that a session has, for it to be chosen")
    parser.add_argument("--longest", type=int, default=32768, help="tokens of the longest prompt of the trace")
    parser.add_argument("--new", type=int, default=32, help="the most tokens that a request generates")
    parser.add_argument("--concurrency", type=int, default=6, help="requests at a time, of all engines together")
    parser.add_argument("--gpu-gib", type=float, default=12.0, help="KV memory on the GPU, of all engines together")
    parser.add_argument("--host-gib", type=float, default=28.0, help="KV memory of the host, of all engines together")
    parser.add_argument("--host-share", type=float,
                        help="instead of --host-gib: of the KV that all different prompts of the trace have together")
    parser.add_argument("--by-turns", action="store_true",
                        help="the first request of every session, then the second of every, and so on")
    parser.add_argument("--disk-path", type=Path, metavar="FOLDER", help="for the tier of kind kvdock_disk")
    parser.add_argument("--disk-gib", type=float, default=100.0, help="how much it may take")
    parser.add_argument("--disk-address", help="of a kvdock server with a tier on disk; without it one is started")
    parser.add_argument("--shape", type=json.loads, default={}, metavar="JSON",
                        help="what its configuration has otherwise than Llama 3 8B's")
    parser.add_argument("--eager", action="store_true", help="without CUDA graphs and compilation")
    parser.add_argument("--settle-s", type=float, default=4.0, help="from the start of engines to the first request")
    parser.add_argument("--gpus", type=int, default=1, help="engines are spread over so many")
    parser.add_argument("--rounds", type=int, default=5, help="that are counted, of together and together4")
    parser.add_argument("--compute-once", type=float, default=1.5, help="the connector's setting of kind kvdock_once")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--model", type=Path, help="folder of a model; needed with --device cpu")
    parser.add_argument("--block-tokens", type=int, default=trace.BLOCK_TOKENS,
                        help="tokens made of each 512 of the trace: fewer for a smoke test")
    parser.add_argument("--path", action="append", default=[], metavar="KIND=FOLDER",
                        help="where the packages of a kind are, if not where this Python's are")
    parser.add_argument("--address", help="of a kvdock server that serves nobody else; without it one is started")
    parser.add_argument("--connector", type=json.loads, default={}, help="more settings of kvdock's connector, as JSON")
    parser.add_argument("--server", type=json.loads, default={}, help="more settings of kvdock's server, as JSON")
    parser.add_argument("--logs", type=Path,
                        help="folder for what engines logged and answered; without it that is not kept")
    chosen = parser.parse_args(arguments)
    chosen.paths = dict(one.split("=", 1) for one in chosen.path)
    if unknown := set(chosen.paths) - set(servers.KINDS):
        parser.error(f"--path: found {', '.join(sorted(unknown))}, wanted some of {', '.join(servers.KINDS)}")
    has_disk = chosen.disk_path or chosen.disk_address
    if chosen.kinds is None:
        chosen.kinds = [kind for kind in servers.KINDS if has_disk or "disk" not in kind]
    elif (disks := [kind for kind in chosen.kinds if "disk" in kind]) and not has_disk:
        parser.error(f"--kinds: found {', '.join(disks)}, wanted --disk-path with it")
    if chosen.trace is None and not TOGETHER.keys() >= set(chosen.modes):
        parser.error(f"--trace: found none, wanted one for modes other than {', '.join(TOGETHER)}")
    return chosen


def kv_bytes(requests: Sequence[trace.Request], config: dict[str, Any], chosen: argparse.Namespace) -> int:
    """The bytes of KV of all different prompts together, in whole blocks of the trace."""
    heads = config["num_attention_heads"]
    elements = config.get("head_dim", config["hidden_size"] // heads) * config.get("num_key_value_heads", heads)
    token_bytes: int = 2 * config["num_hidden_layers"] * elements * (4 if chosen.device == "cpu" else 2)
    tokens: int = len({block for one in requests for block in one.whole_blocks}) * chosen.block_tokens
    return tokens * token_bytes


def disk_ratios(figures: Mapping[str, float], mode: str) -> dict[str, float]:
    """The time to the first token with the tier on disk, as shares of that without; empty unless both kinds were
    served."""
    with_disk, without = f"{mode}_kvdock_disk", f"{mode}_kvdock"
    return {
        f"{mode}_disk_{name}": round(figures[f"{with_disk}_{key}"] / figures[f"{without}_{key}"], 3)
        for name, key in (("ttft_ratio", "ttft_mean_ms"), ("ttft_p50_ratio", "ttft_p50_ms"))
        if f"{with_disk}_{key}" in figures and f"{without}_{key}" in figures
    }


def main(arguments: list[str]) -> int:
    chosen = parsed(arguments)
    if why := obstacle(chosen.device, chosen.model):
        print(f"bench.service: {why}", file=sys.stderr)
        return 2
    requests = [] if chosen.trace is None else trace.sampled_sessions(
        trace.read(chosen.trace), count=chosen.sessions, seed=chosen.seed, most=chosen.most,
        longest_tokens=chosen.longest, lengths=range(chosen.requests[0], chosen.requests[1] + 1),
    )
    requests = trace.by_turns(requests) if chosen.by_turns else requests
    config = json.loads((chosen.model / "config.json").read_text()) if chosen.model else LLAMA_8B | chosen.shape
    prompts = trace.prompts(
        requests, seed=chosen.seed, vocabulary=config["vocab_size"], block_tokens=chosen.block_tokens
    )
    figures: dict[str, Any] = {"seed": chosen.seed, "requests": len(requests)}
    if chosen.host_share is not None:
        chosen.host_gib = kv_bytes(requests, config, chosen) * chosen.host_share / GIB
    kinds = [kind for kind in chosen.kinds if servers.installed(kind, chosen.paths.get(kind, ""))]
    if chosen.device == "cpu":
        kinds = [kind for kind in kinds if kind == "off" or kind in servers.OURS]  # the others copy from GPUs alone
    turns = random.Random(chosen.seed)
    failed = False
    with ExitStack() as stack:
        folder = chosen.logs or Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="kvdock-bench-")))
        folder.mkdir(parents=True, exist_ok=True)
        for mode in chosen.modes:
            of_mode = ["kvdock", "kvdock_once"] if mode in TOGETHER else kinds
            for kind in turns.sample(of_mode, len(of_mode)):
                try:
                    if mode in TOGETHER:
                        found = serve_together(chosen, mode, kind == "kvdock_once", folder, config["vocab_size"])
                    else:
                        found = serve(chosen, kind, mode, requests, prompts, folder)
                except RuntimeError as error:  # the other kinds may still be measured
                    print(f"bench.service: {mode} {kind}: {error}", file=sys.stderr, flush=True)
                    failed = True
                    continue
                figures |= {f"{mode}_{kind}_{name}": float(f"{value:.5g}") for name, value in found.items()}
                print(f"bench.service: {mode} {kind}: {found}", file=sys.stderr, flush=True)
            figures |= disk_ratios(figures, mode)
    print(json.dumps(figures))
    return int(failed)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
