"""vLLM with kvdock, beside vLLM's own CPU offload (native) and without a connector (none), on one machine; and with
kvdock whose pool keeps KV packed (packed).

    python -m bench.vllm                 loads, decode, samples
    python -m bench.vllm serving         preemption, concurrent
    python -m bench.vllm MODE …          some of the five

    loads       time to first token: of a new prompt, from host memory (blocks in order and shuffled), of a local hit;
                and how long after it a new prompt can be hit by others. Twice: with CUDA graphs, and eager;
                loads_beside has each figure of the one beside its peers
    decode      tokens a second of running requests beside loads and beside stores
    samples     one request for 16 samples of a prompt of 8k tokens that is in host memory: blocks that are held,
                tokens that are loaded, times to the first token
    preemption  two requests in a pool of 10 blocks: one is preempted and loaded, and the text is the same
    concurrent  50 requests with shared prefixes in a small pool: texts and log-probabilities

Engines have CUDA graphs and compilation, as vLLM has them; --eager leaves both out. Prints one JSON object. Each engine
is a process of its own and they take turns; the first three modes want some 26 GiB of GPU memory for each of the
engines that --kinds names, less with `--scale '{"gpu_gib": 5}'`. Without a GPU all is eager, and `--device cpu --model
FOLDER` with a tiny model shows that it works.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import fields, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from bench.engine_child import Child, Failed
from bench.vllm import outputs, times
from bench.vllm.children import CPU_SCALE, KINDS, Scale, Setting, described, engines, say
from kvdock import _core

Mode = Callable[[dict[str, Child], Scale, int], dict[str, Any]]
MODES: dict[str, Mode] = {
    "loads": times.loads, "decode": times.decode, "samples": times.samples, "preemption": outputs.preemption,
    "concurrent": outputs.concurrent,
}
GROUPS = {"timed": ("loads", "decode", "samples"), "preemption": ("preemption",), "concurrent": ("concurrent",)}
"""The modes of each group share their engines."""
COMMANDS = {"serving": ("preemption", "concurrent")}
POOL_BYTES = {"cuda": 28 << 30, "cpu": 1 << 30}


def wanted_engines(setting: Setting, group: str) -> list[dict[str, Any]]:
    """The description of each engine that a group needs."""
    scale, blocks = setting.scale, 0
    common: dict[str, Any]
    if group == "preemption":
        blocks = scale.preempt_blocks
        common = {
            "layers": scale.preempt_layers, "dtype": scale.check_dtype, "chunk": scale.block,
            "enable_prefix_caching": False, "max_model_len": blocks * scale.block, "max_num_seqs": 4,
        }
    elif group == "concurrent":
        blocks = scale.request_blocks
        longest = scale.prefix_most + scale.tail_most + scale.new
        common = {
            "layers": scale.request_layers, "dtype": scale.check_dtype, "chunk": scale.chunk,
            "max_model_len": -(-longest // scale.block + 1) * scale.block, "max_num_seqs": scale.requests,
        }
    else:
        longest = max(*scale.lens, scale.feed, scale.decoded + scale.decoder_prompt) + 64
        common = {
            "layers": scale.layers, "dtype": scale.dtype, "chunk": scale.chunk, "max_model_len": longest,
            "max_num_seqs": 32,
        }
        if not setting.on_gpu:  # not enough for all the prompts that decode feeds, so that each is loaded anew
            blocks = (scale.feed_prompts - 1) * scale.feed // scale.block - 1
    if setting.on_gpu:
        common["kv_cache_memory_bytes"] = (scale.gpu_gib if group == "timed" else 4) << 30
    if blocks:
        common["num_gpu_blocks_override"] = blocks + 1
    timed = [kind for kind in setting.kinds if kind != "native" or setting.on_gpu]
    kinds = timed if group == "timed" else ["none", "kvdock"]
    return [described(setting, kind, **common) for kind in kinds]


def rounded(value: Any) -> Any:
    if isinstance(value, float):
        return float(f"{value:.5g}")
    if isinstance(value, dict):
        return {name: rounded(one) for name, one in value.items()}
    return value


def run(setting: Setting, chosen: Sequence[str], until: float) -> dict[str, Any]:
    """Figures by mode; {"error": …} where a mode failed."""
    figures: dict[str, Any] = {}
    for group, members in GROUPS.items():
        left = [mode for mode in members if mode in chosen]
        if not left:
            continue
        try:
            name = f"{group}-eager" if setting.eager else group
            with engines(setting, name, wanted_engines(setting, group)) as children:
                figures[f"engines_{group}"] = {kind: child.facts for kind, child in children.items()}
                while left:
                    if (began := time.monotonic()) > until:
                        raise Failed("no time was left for it")
                    figures[left[0]] = rounded(MODES[left[0]](children, setting.scale, setting.vocabulary))
                    say(f"{left.pop(0)}: {time.monotonic() - began:.1f} s")
        except Failed as error:  # the other groups may still be measured
            say(f"{group}: {error}")
            figures |= {mode: {"error": str(error)} for mode in left}
    return figures


def beside(figures: dict[str, dict[str, Any]]) -> dict[str, dict[str, float]]:
    """The times of the loads mode by what was measured, then by way and kind: {"8192_load_ms": {"kvdock_graphs":
    …}}."""
    found: dict[str, dict[str, float]] = {}
    for way, measured in figures.items():
        for name, value in measured.items():
            kind, _, what = name.partition("_")
            if kind in KINDS and name.endswith("_ms"):
                found.setdefault(what, {})[f"{kind}_{way}"] = value
    return found


def parsed(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m bench.vllm", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("modes", nargs="*", metavar="MODE")
    parser.add_argument("--address", help="of a kvdock server that serves nobody else; without it one is started")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--model", type=Path, help="folder of a model; needed with --device cpu")
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=("none", "native", "kvdock"),
                        help="of engines that are timed")
    parser.add_argument("--runner", choices=("v1", "v2"), default="v2", help="vLLM's model runner")
    parser.add_argument("--eager", action="store_true", help="without CUDA graphs and compilation")
    parser.add_argument("--poll-s", type=float, default=0.001, help="sleep between idle steps, as vLLM does; 0: none")
    parser.add_argument("--connector", type=json.loads, default={}, help="more settings of kvdock's, as JSON")
    parser.add_argument("--limit-s", type=float, default=900.0, help="no mode begins later")
    parser.add_argument("--logs", type=Path, default=Path("out"), help="folder for the engines' logs")
    parser.add_argument("--scale", type=json.loads, default={}, metavar="JSON",
                        help='other sizes than the usual ones, as {"lens": [2048], "reps": 3}: bench/vllm/children.py')
    chosen = parser.parse_args(arguments)
    if unknown := set(chosen.modes) - {*MODES, *COMMANDS}:
        parser.error(f"found {', '.join(sorted(unknown))}, wanted some of {', '.join((*MODES, *COMMANDS))}")
    if unknown := set(chosen.scale) - {field.name for field in fields(Scale)}:
        parser.error(f"--scale: found {', '.join(sorted(unknown))}, wanted fields of Scale")
    return chosen


def obstacle(device: str, model: Path | None) -> str:
    """Why nothing can be measured here; "" if it can."""
    if find_spec("vllm") is None:
        return f"vLLM is not installed for {sys.executable}"
    if device == "cuda" and (why := _core.cuda_unavailable()):
        return f"no GPU: {why}; --device cpu --model FOLDER shows that it works without one"
    if device == "cpu" and model is None:
        return "--device cpu wants --model FOLDER: vLLM packs dummy weights before they can be made random"
    return ""


def main(arguments: list[str]) -> int:
    chosen = parsed(arguments)
    if why := obstacle(chosen.device, chosen.model):
        print(f"bench.vllm: {why}", file=sys.stderr)
        return 2
    modes = [mode for name in chosen.modes or GROUPS["timed"] for mode in COMMANDS.get(name, (name,))]
    chosen.logs.mkdir(parents=True, exist_ok=True)
    until, eager = time.monotonic() + chosen.limit_s, chosen.eager or chosen.device == "cpu"
    try:
        figures = {"arguments": arguments, **measured(chosen, modes, until, eager=eager)}
        if "loads" in modes and not eager:  # once more
            again = measured(chosen, ["loads"], until, eager=True)
            figures |= {"engines_timed_eager": again.get("engines_timed"), "loads_eager": again["loads"]}
            figures["loads_beside"] = beside({"graphs": figures["loads"], "eager": again["loads"]})
            modes = [*modes, "loads_eager"]
    except RuntimeError as error:
        print(f"bench.vllm: {error}; --address names one that runs already", file=sys.stderr)
        return 2
    print(json.dumps(figures))
    return int(any("error" in figures[mode] for mode in modes))


def measured(chosen: argparse.Namespace, modes: Sequence[str], until: float, *, eager: bool) -> dict[str, Any]:
    """The figures of run(), at a server that holds nothing, or at the one that --address names. RuntimeError when none
    starts."""
    with ExitStack() as stack:
        address = chosen.address
        if address is None:
            from bench.serving import ServerProcess  # imports the server, which an engine's Python may lack

            server = ServerProcess("serve", pool_bytes=POOL_BYTES[chosen.device], growth="ahead")
            address = stack.enter_context(server).unix
        return run(Setting(
            scale=replace(Scale() if chosen.device == "cuda" else CPU_SCALE, **chosen.scale), device=chosen.device,
            address=address, runner=chosen.runner, poll_s=chosen.poll_s, logs=chosen.logs, model=chosen.model,
            namespace=f"bench-{time.time_ns()}", connector=chosen.connector, eager=eager,
            kinds=chosen.kinds,
        ), modes, until)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
