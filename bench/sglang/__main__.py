"""SGLang with kvdock, beside SGLang's own host cache (hicache), on one machine.

    python -m bench.sglang               loads, decode
    python -m bench.sglang MODE …        some of the three

    loads   time to first token: of a new prompt, of a local hit, and from host memory once it has left the device
    decode  tokens a second, and gaps between tokens, of running requests alone, beside loads and beside stores
    turns   hit rates, times to first token and throughput of conversations of several turns, with one engine and two,
            and of plain SGLang, too: the engines are started nine times, which takes ten minutes or so on a GPU

Prints one JSON object. Each engine is a process of its own and they take turns; in the first two modes both run at the
same time and need some 30 GiB of GPU memory each. KV that has left the device was evicted by other prompts, in all
engines. Without a GPU, `--device cpu --model FOLDER` with a tiny model shows that it works, without hicache.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import fields, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from bench.engine_child import CPU_SLOWER, LLAMA_8B, Child, Failed, prompt, wait_until_pinned
from bench.sglang.sizes import (
    CPU_SCALE,
    FIRST_S,
    KINDS,
    PLAIN,
    POOL_BYTES,
    TAIL,
    Figures,
    Scale,
    described,
    say,
)
from bench.sglang.turns import Conversing
from kvdock import _core


class Pair:
    """Two engines that take turns, each with prompts of its own draw that no other has."""

    def __init__(self, engines: Mapping[str, Child], scale: Scale, vocabulary: int) -> None:
        self.engines, self.scale, self._vocabulary = engines, scale, vocabulary
        self._draw = random.Random("bench.sglang")

    def prompt(self, tokens: int) -> list[int]:
        return prompt(self._draw, self._vocabulary, tokens)

    def drive_out(self, engine: Child) -> None:
        """Fills the device with other prompts, so that KV from before is evicted. They are short: the time of a prompt
        grows with its square."""
        for _ in range(self.scale.device_tokens // self.scale.feed + 1):
            engine.do("first_token", FIRST_S, ids=self.prompt(self.scale.feed + TAIL))
        self.settle()

    def settle(self) -> None:
        """Waits until the KV that was computed last is in host memory: HiCache does not report when it is."""
        time.sleep(self.scale.settle_s)

    def first_token_ms(self, engine: Child, ids: list[int], cached: int, way: str) -> float:
        seen = engine.do("first_token", FIRST_S, ids=ids, tokens=2)
        if seen["cached"] != cached:  # another case would be timed
            raise Failed(f"{engine.kind} {way}: {seen['cached']} cached tokens, not {cached} ({seen['from']})")
        return float(seen["ttft_s"] * 1e3)

    # ------------------------------------------------------------------ modes

    def loads(self) -> Figures:
        """Medians in ms, by engine and length: `cold` (no cache has the prompt), `local` (it is on the device), `load`
        (it is in host memory alone). `same`: whether the output after a load equals that of a local hit, bit for
        bit."""
        taken: dict[str, list[float]] = defaultdict(list)
        for rep in range(-1, self.scale.reps):  # the first compiles kernels and does not count
            for kind in self._draw.sample(sorted(self.engines), len(self.engines)):
                engine, known = self.engines[kind], {length: self.prompt(length + TAIL) for length in self.scale.lens}
                seen: dict[str, float] = {}
                for length, ids in known.items():
                    seen[f"{length}_cold_ms"] = self.first_token_ms(engine, ids, 0, "cold")
                    self.settle()
                    seen[f"{length}_local_ms"] = self.first_token_ms(engine, ids, length, "local")
                self.drive_out(engine)
                for length, ids in known.items():
                    seen[f"{length}_load_ms"] = self.first_token_ms(engine, ids, length, "load")
                say(f"loads: {rep} {kind} {({name: round(ms, 1) for name, ms in seen.items()})}")
                if rep >= 0:
                    for name, ms in seen.items():
                        taken[f"{kind}_{name}"].append(ms)
        figures: Figures = {name: statistics.median(ms) for name, ms in taken.items()}
        for kind, engine in self.engines.items():
            for length in self.scale.lens:
                at = f"{kind}_{length}"
                figures[f"{at}_load_over_local_ms"] = figures[f"{at}_load_ms"] - figures[f"{at}_local_ms"]
            figures[f"{kind}_same"] = self._is_same(engine)
        return figures

    def _is_same(self, engine: Child) -> bool:
        ids, new = self.prompt(self.scale.checked + TAIL), self.scale.checked_new
        engine.do("run", ids=ids, tokens=new)
        self.settle()
        local = engine.do("run", ids=ids, tokens=new)
        self.drive_out(engine)
        loaded = engine.do("run", ids=ids, tokens=new)
        if (local["cached"], loaded["cached"]) != (self.scale.checked, self.scale.checked):
            found = f"{local['cached']} and {loaded['cached']}"
            raise Failed(f"{engine.kind}: {found} cached tokens, not {self.scale.checked}")
        return bool(local["run"] == loaded["run"])

    def decode(self) -> Figures:
        """Losses are shares of the same engine's tokens a second alone (mean of before and after)."""
        scale, figures = self.scale, Figures(requests=self.scale.decoders, tokens=self.scale.decoded)
        for kind, engine in self.engines.items():
            known = [self.prompt(scale.feed + TAIL) for _ in range(scale.feed_prompts)]
            for ids in known:
                engine.do("first_token", ids=ids)
            self.settle()
            news = [self.prompt(scale.stored + TAIL) for _ in range(200)]
            feeds: list[tuple[str, list[list[int]], float]] = [
                ("alone", [], 0.0), ("loads", known, scale.feed_interval_s), ("stores", news, scale.stored_interval_s),
                ("alone_after", [], 0.0),
            ]
            engine.do("decode", prompts=[self.prompt(scale.decoder_prompt) for _ in range(scale.decoders)], tokens=8)
            for name, feed, interval_s in feeds:
                decoders = [self.prompt(scale.decoder_prompt) for _ in range(scale.decoders)]
                seen = engine.do(
                    "decode", prompts=decoders, tokens=scale.decoded, feed=feed, interval_s=interval_s,
                    is_new=feed is news, most_fed=scale.most_fed,
                )
                figures[f"{kind}_{name}"] = seen
                say(f"decode: {kind} {name}: {seen}")
            alone = (figures[f"{kind}_alone"]["tokens_per_s"] + figures[f"{kind}_alone_after"]["tokens_per_s"]) / 2
            for name in ("loads", "stores"):
                figures[f"{kind}_{name}_loss"] = 1 - figures[f"{kind}_{name}"]["tokens_per_s"] / alone
        return figures


MODES: dict[str, Callable[[Pair], Figures]] = {"loads": Pair.loads, "decode": Pair.decode}
TURNS = "turns"


def parsed(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m bench.sglang", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("modes", nargs="*", metavar="MODE")
    parser.add_argument("--address", help="of a kvdock server that serves nobody else; without it one is started")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--model", type=Path, help="folder of a model; needed with --device cpu")
    parser.add_argument("--attention", default="triton", help="SGLang's attention backend on a GPU")
    parser.add_argument("--graphs", action=argparse.BooleanOptionalAction, default=True,
                        help="CUDA graphs, as SGLang has them by default; --no-graphs: eager mode")
    parser.add_argument("--kinds", nargs="+", choices=(*KINDS, PLAIN), default=[*KINDS, PLAIN],
                        help=f"{PLAIN}: without a cache in host memory, for {TURNS} alone")
    parser.add_argument("--json", action="store_true", help="does nothing: JSON is what is printed")
    parser.add_argument("--connector", type=json.loads, default={}, help="more settings of kvdock's linker, as JSON")
    parser.add_argument("--logs", type=Path, default=Path("out"), help="folder for the engines' logs")
    parser.add_argument("--scale", type=json.loads, default={}, metavar="JSON",
                        help='other sizes than the usual ones, as {"lens": [2048], "reps": 3}: Scale in sizes.py')
    chosen = parser.parse_args(arguments)
    if unknown := set(chosen.modes) - {*MODES, TURNS}:
        parser.error(f"found {', '.join(sorted(unknown))}, wanted some of {', '.join(MODES)}, {TURNS}")
    if unknown := set(chosen.scale) - {field.name for field in fields(Scale)}:
        parser.error(f"--scale: found {', '.join(sorted(unknown))}, wanted fields of Scale")
    return chosen


def obstacle(device: str, model: Path | None) -> str:
    """Why nothing can be measured here; "" if it can."""
    if find_spec("sglang") is None:
        return f"SGLang is not installed for {sys.executable}"
    if device == "cuda" and (why := _core.cuda_unavailable()):
        return f"no GPU: {why}; --device cpu --model FOLDER shows that it works without one"
    if device == "cpu" and model is None:
        return "--device cpu wants --model FOLDER with a tiny model"
    return ""


def rounded(value: Any) -> Any:
    if isinstance(value, float):
        return float(f"{value:.5g}")
    return {name: rounded(one) for name, one in value.items()} if isinstance(value, dict) else value


@contextmanager
def opened_pair(
    chosen: argparse.Namespace, scale: Scale, address: str, kinds: Sequence[str]
) -> Iterator[dict[str, Child]]:
    """One engine of each kind, at the same time."""
    engines: dict[str, Child] = {}
    slower = 1 if chosen.device == "cuda" else CPU_SLOWER
    with ExitStack() as stack:
        for kind in kinds:
            said = described(kind, chosen, scale, address, f"bench-{time.time_ns()}")
            log_at = chosen.logs / f"sglang-{kind}.log"
            engines[kind] = Child("bench.sglang.engine", said, address=address, log_at=log_at, slower=slower)
            stack.callback(engines[kind].close)
        for engine in engines.values():
            engine.started()
            say(f"{engine.facts}")
        if chosen.device == "cuda" and "kvdock" in engines:
            wait_until_pinned(address)
        yield engines


def main(arguments: list[str]) -> int:
    chosen = parsed(arguments)
    if why := obstacle(chosen.device, chosen.model):
        print(f"bench.sglang: {why}", file=sys.stderr)
        return 2
    scale = replace(Scale() if chosen.device == "cuda" else CPU_SCALE, **chosen.scale)
    config = json.loads((chosen.model / "config.json").read_text()) if chosen.model else LLAMA_8B
    kinds = [kind for kind in chosen.kinds if chosen.device == "cuda" or kind != "hicache"]
    chosen.logs.mkdir(parents=True, exist_ok=True)
    figures: Figures = {"arguments": arguments}
    with ExitStack() as stack:
        address = chosen.address
        if address is None:
            from bench.serving import ServerProcess  # imports the server, which an engine's Python may lack

            server = ServerProcess("serve", pool_bytes=POOL_BYTES[chosen.device], growth="ahead")
            address = stack.enter_context(server).unix
        try:
            if pair_modes := [mode for mode in chosen.modes or MODES if mode in MODES]:
                with opened_pair(chosen, scale, address, [kind for kind in kinds if kind != PLAIN]) as engines:
                    figures["engines"] = {kind: engine.facts for kind, engine in engines.items()}
                    pair = Pair(engines, scale, config["vocab_size"])
                    for mode in pair_modes:
                        figures[mode] = rounded(MODES[mode](pair))
            if TURNS in chosen.modes:
                figures[TURNS] = rounded(Conversing(chosen, scale, address, config["vocab_size"]).measured(kinds))
        except Failed as error:  # figures that were measured before are still printed
            say(str(error))
            figures["error"] = str(error)
    print(json.dumps(figures))
    return int("error" in figures)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
