"""What kvdock does for a vLLM that serves, beside vLLM's own CPU offload and beside no connector, on one machine.

    kvdock serve --socket-path /tmp/k.sock --port 0 --pool-bytes 28GiB --growth ahead &
    python -m bench.vllm_serving --address unix:/tmp/k.sock --out serving.json

One JSON object on stdout; each figure beside its peer from the same run. Modes (seconds on an H200, about; engines of a
group start side by side, in some 15 s, some 35 s when they are the machine's first):

    preemption  10  two requests in a pool of 10 blocks: preempted, loaded, same text        off, kvdock
    concurrent  50  50 requests with shared prefixes in a small pool: outputs, logits        off, kvdock
    shuffled    35  time to first token of loads into scattered blocks                       native, kvdock
    cold        10  what storing costs a prompt that nobody has                              all
    decode      90  tokens a second of running decodes beside loads and beside saves         all

The last three share three engines of Llama 3 8B's shape (some 26 GiB of GPU memory each) that take turns. To see it
work without a GPU, on vLLM's CPU engine (but for `native`): `--device cpu --model FOLDER`, with a tiny model.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from bench import vllm_modes as modes
from bench.vllm_children import CPU_SCALE, Child, Failed, Scale, Setting, described, engines

Mode = Callable[[dict[str, Child], Scale, int], dict[str, Any]]
MODES: dict[str, Mode] = {
    "preemption": modes.preemption, "concurrent": modes.concurrent, "shuffled": modes.shuffled, "cold": modes.cold,
    "decode": modes.decode,
}
GROUPS = {"preemption": ("preemption",), "concurrent": ("concurrent",), "timed": ("shuffled", "cold", "decode")}
"""Modes that share their engines."""
KINDS = ("off", "native", "kvdock")


def wanted_engines(setting: Setting, group: str, kinds: list[str]) -> list[dict[str, Any]]:
    """What the engines of a group are told."""
    scale = setting.scale
    common: dict[str, Any]
    if group == "preemption":
        common = {
            "layers": scale.preempt_layers, "dtype": scale.check_dtype, "backend": scale.check_backend,
            "chunk": scale.block, "enable_prefix_caching": False, "num_gpu_blocks_override": scale.preempt_blocks + 1,
            "max_model_len": scale.preempt_blocks * scale.block, "max_num_seqs": 4,
        }
    elif group == "concurrent":
        longest = scale.prefix_most + scale.tail_most + scale.new
        common = {
            "layers": scale.request_layers, "dtype": scale.check_dtype, "backend": scale.check_backend,
            "chunk": scale.chunk, "num_gpu_blocks_override": scale.request_blocks + 1,
            "max_model_len": -(-longest // scale.block + 1) * scale.block, "max_num_seqs": scale.requests,
        }
    else:
        longest = max(*scale.lens, scale.feed, scale.cold, scale.decoded + scale.decoder_prompt) + 64
        common = {
            "layers": scale.layers, "dtype": scale.dtype, "backend": scale.backend, "chunk": scale.chunk,
            "max_model_len": longest, "max_num_seqs": 32,
        }
    if setting.on_gpu:
        common["kv_cache_memory_bytes"] = (scale.gpu_gib if group == "timed" else 4) << 30
    elif group == "timed":  # room for all but one of the prompts that are loaded in turns
        common["num_gpu_blocks_override"] = (scale.feed_prompts - 1) * scale.feed // scale.block
    return [described(setting, kind, **common) for kind in (kinds if group == "timed" else ("off", "kvdock"))]


class Report:
    """Kept in a file as it grows."""

    def __init__(self, out: Path | None, figures: dict[str, Any]) -> None:
        self._out, self.figures = out, figures

    def add(self, name: str, figures: dict[str, Any]) -> None:
        self.figures[name] = rounded(figures)
        if self._out is not None:
            self._out.write_text(json.dumps(self.figures, indent=1) + "\n")


def rounded(value: Any) -> Any:
    if isinstance(value, float):
        return float(f"{value:.5g}")
    if isinstance(value, dict):
        return {name: rounded(one) for name, one in value.items()}
    return value


def run(setting: Setting, only: list[str], kinds: list[str], report: Report, until: float) -> None:
    for group, members in GROUPS.items():
        chosen = [name for name in members if name in only]
        if not chosen:
            continue
        began = time.monotonic()
        try:
            if began > until:
                raise Failed("no time was left for it")
            with engines(setting, group, wanted_engines(setting, group, kinds)) as children:
                modes.say(f"{group}: engines are there after {time.monotonic() - began:.1f} s")
                report.add(f"engines_{group}", {kind: child.facts for kind, child in children.items()})
                while chosen:
                    began = time.monotonic()
                    if began > until:
                        raise Failed("no time was left for it")
                    report.add(chosen[0], MODES[chosen[0]](children, setting.scale, setting.vocabulary))
                    modes.say(f"{chosen.pop(0)}: {time.monotonic() - began:.1f} s")
        except Failed as error:  # the other groups may do better
            modes.say(f"{group}: {error}")
            for name in chosen:
                report.add(name, {"error": str(error)})


def parsed(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m bench.vllm_serving", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--address", required=True, help="of a kvdock server that serves nobody else")
    parser.add_argument("--only", default=",".join(MODES), help="modes, comma-separated")
    parser.add_argument("--kinds", default="", help="engines to be timed, comma-separated; all that the device allows")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--model", type=Path, help="folder of a model; needed on a CPU")
    parser.add_argument("--runner", choices=("v1", "v2"), default="v2", help="vLLM's model runner")
    parser.add_argument("--poll-s", type=float, default=0.001, help="between idle steps, as vLLM; 0: none")
    parser.add_argument("--connector", type=json.loads, default={}, help="more settings of kvdock's, as JSON")
    parser.add_argument("--limit-s", type=float, default=480.0, help="no mode begins later")
    parser.add_argument("--out", type=Path, help="the JSON object, also after each mode")
    parser.add_argument("--logs", type=Path, default=Path(), help="folder for the engines' logs")
    for field in fields(Scale):
        default = getattr(Scale, field.name)
        plural = {"nargs": "+", "type": int} if isinstance(default, tuple) else {"type": type(default)}
        parser.add_argument(f"--{field.name.replace('_', '-')}", help=f"{default} on a GPU", **plural)
    return parser.parse_args(arguments)


def main(arguments: list[str]) -> int:
    chosen = parsed(arguments)
    said = {field.name: getattr(chosen, field.name) for field in fields(Scale)}
    said = {name: tuple(one) if isinstance(one, list) else one for name, one in said.items() if one is not None}
    setting = Setting(
        scale=replace(Scale() if chosen.device == "cuda" else CPU_SCALE, **said), device=chosen.device,
        address=chosen.address, runner=chosen.runner, poll_s=chosen.poll_s, logs=chosen.logs, model=chosen.model,
        namespace=f"bench-{time.time_ns()}", connector=chosen.connector,
    )
    kinds = chosen.kinds.split(",") if chosen.kinds else [kind for kind in KINDS if setting.on_gpu or kind != "native"]
    kinds.sort(key=(*KINDS, *kinds).index)
    only = chosen.only.split(",")
    if chosen.device == "cpu" and not chosen.model:
        raise SystemExit("on a CPU --model is wanted: vLLM packs dummy weights before they can be made random")
    if unknown := (set(kinds) - set(KINDS)) | (set(only) - set(MODES)):
        raise SystemExit(f"unknown: {', '.join(sorted(unknown))}; kinds are {KINDS}, modes {tuple(MODES)}")
    chosen.logs.mkdir(parents=True, exist_ok=True)
    report = Report(chosen.out, {"arguments": arguments})
    run(setting, only, kinds, report, time.monotonic() + chosen.limit_s)
    print(json.dumps(report.figures))
    return int(any("error" in report.figures[name] for name in only))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
