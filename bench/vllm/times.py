"""How long vLLM takes: to the first token, and for tokens beside what a connector loads and stores."""

from __future__ import annotations

import random
import statistics
from collections import defaultdict
from typing import Any

from bench.engine_child import Child, Failed, prompt
from bench.vllm.children import OURS, TAIL, Engines, Figures, Scale, say
from bench.vllm.outputs import loaded_alone
from bench.vllm.published import Published

STORED_S = 10.0
"""Chunks that are not stored within this time are taken for dropped."""


def first_token(engine: Child, ids: list[int], chunks: int) -> dict[str, Any]:
    """The job's answer. `chunks`: how many chunks it stores; if any, "stored_after_s" is the time from the first token
    until all of them were stored."""
    watch = Published(engine.address, chunks) if chunks else None
    seen = engine.do("first_token", ids=ids, tokens=4)
    if watch is None:
        return seen
    at_s = watch.at_s(STORED_S)
    if at_s is None:
        raise Failed(f"{engine.kind}: {chunks} chunks were not stored {STORED_S} s after they were computed")
    return seen | {"stored_after_s": at_s - seen["first_at_s"]}


def loads(engines: Engines, scale: Scale, vocabulary: int) -> Figures:
    """Time to first token by engine and length, medians in ms: `cold` (nobody has the prompt), `local` (it is on the
    GPU), `load` and `load_shuffled` (it is in host memory, and goes into blocks in order or scattered). Beside them
    `…_stored_after` of kvdock's: from the first token of a new prompt until others can hit all of it."""
    source = random.Random("loads")
    taken: dict[str, list[float]] = defaultdict(list)
    figures: Figures = {}
    for length in scale.lens:
        for rep in range(-1, scale.reps):  # the first compiles kernels and does not count
            ids = prompt(random.Random(f"loads/{length}/{rep}"), vocabulary, length + TAIL)
            for kind in source.sample(sorted(engines), len(engines)):
                engine = engines[kind]
                ways = [("cold", 0, "in_order"), ("local", length, "")]
                if kind != "none":
                    both = [("load", length, "in_order"), ("load_shuffled", length, "shuffled")]
                    ways += both if rep % 2 else reversed(both)
                for way, cached, order in ways:
                    if order:
                        engine.do("forget", order=order, seed=rep)
                    chunks = length // scale.chunk if kind in OURS and way == "cold" else 0
                    seen = first_token(engine, ids, chunks)
                    if seen["cached"] != cached:  # another case would be timed
                        raise Failed(f"{kind} {way}: {seen['cached']} cached tokens, not {cached}")
                    if rep >= 0:
                        taken[f"{kind}_{length}_{way}_ms"].append(seen["ttft_s"] * 1e3)
                        if chunks:
                            taken[f"{kind}_{length}_stored_after_ms"].append(seen["stored_after_s"] * 1e3)
        for kind, engine in engines.items():
            at = f"{kind}_{length}"
            figures |= {name: statistics.median(ms) for name, ms in taken.items() if name.startswith(f"{at}_")}
            if kind != "none":
                for way in ("load", "load_shuffled"):
                    figures[f"{at}_{way}_over_local_ms"] = figures[f"{at}_{way}_ms"] - figures[f"{at}_local_ms"]
                if "none" in engines:
                    pairs = zip(taken[f"{at}_cold_ms"], taken[f"none_{length}_cold_ms"], strict=True)
                    figures[f"{at}_cold_over_none_ms"] = statistics.median(mine - theirs for mine, theirs in pairs)
                figures[f"{at}_outputs"] = loaded_alone(engine, scale, vocabulary, [length])
            shown = {name: f"{ms:.1f}" for name, ms in figures.items() if name.startswith(f"{at}_") and "_ms" in name}
            say(f"loads: {shown}")
    return figures


def samples(engines: Engines, scale: Scale, vocabulary: int) -> Figures:
    """One request for several samples of a prompt that is in host memory and not on the GPU, by engine; without a
    connector it is computed. Medians: `blocks_peak` blocks were held at a time, `loads` loads brought `loaded_tokens`;
    `ttft_first_ms` and `ttft_last_ms`, until the first sample has its first token and until all have; `took_ms`, until
    all have ended."""
    source = random.Random("samples")
    taken: dict[str, list[float]] = defaultdict(list)
    for rep in range(-1, scale.reps):  # the first compiles kernels and does not count
        ids = prompt(random.Random(f"samples/{rep}"), vocabulary, scale.sampled + TAIL)
        for kind in source.sample(sorted(engines), len(engines)):
            engine = engines[kind]
            first_token(engine, ids, scale.sampled // scale.chunk if kind in OURS else 0)
            engine.do("forget", order="in_order", seed=rep)
            seen = engine.do("samples", ids=ids, count=scale.samples, tokens=scale.sampled_new)
            if len(seen["ttft_s"]) != scale.samples:
                raise Failed(f"{kind}: {len(seen['ttft_s'])} of {scale.samples} samples have a token")
            found = {
                "blocks_peak": seen["blocks_peak"], "ttft_first_ms": seen["ttft_s"][0] * 1e3,
                "ttft_last_ms": seen["ttft_s"][-1] * 1e3, "took_ms": seen["took_s"] * 1e3,
                "loads": seen["counts"].get("loads", 0), "loaded_tokens": seen["counts"].get("loaded_tokens", 0),
            }
            for name, value in found.items():
                if rep >= 0:
                    taken[f"{kind}_{name}"].append(value)
    figures: Figures = {
        "samples": scale.samples, "prompt_tokens": scale.sampled + TAIL,
        "blocks_of_the_prompt": -(-(scale.sampled + TAIL) // scale.block),
    }
    figures |= {name: statistics.median(values) for name, values in taken.items()}
    say(f"samples: {figures}")
    return figures


def decode(engines: Engines, scale: Scale, vocabulary: int) -> Figures:
    """Tokens a second of running requests: alone, beside requests that are loaded, beside ones that are computed and
    stored. Losses are shares of the same engine's rate alone (mean of before and after)."""
    rng = random.Random("decode")

    def decoders() -> list[list[int]]:
        """New prompts each time, so that the chunks that they store are new, too."""
        return [prompt(rng, vocabulary, scale.decoder_prompt) for _ in range(scale.decoders)]

    known = [prompt(rng, vocabulary, scale.feed + TAIL) for _ in range(scale.feed_prompts)]
    figures: Figures = {"requests": scale.decoders, "tokens": scale.decoded}
    for kind, engine in engines.items():
        feeds: list[tuple[str, list[list[int]], float]] = [("alone", [], 0.0)]
        if kind != "none":
            engine.do("alone", 120.0, prompts=known, tokens=4, logprobs=None)
            feeds.append(("loads", known, scale.feed_interval_s))
        news = [prompt(random.Random(f"news/{kind}/{at}"), vocabulary, scale.stored + TAIL) for at in range(200)]
        feeds += [("stores", news, scale.stored_interval_s), ("alone_after", [], 0.0)]
        engine.do("decode", prompts=decoders(), tokens=8)
        for name, feed, interval_s in feeds:
            engine.do("forget")
            seen = engine.do("decode", prompts=decoders(), tokens=scale.decoded, feed=feed, interval_s=interval_s)
            figures[f"{kind}_{name}"] = seen
            say(f"decode: {kind} {name}: {seen['tokens_per_s']:.1f} tokens/s, gaps p50 {seen['gap_ms_p50']:.2f} p99 "
                f"{seen['gap_ms_p99']:.2f} ms, {seen['fed']} fed with {seen['fed_cached']} cached, {seen['counts']}")
        alone = (figures[f"{kind}_alone"]["tokens_per_s"] + figures[f"{kind}_alone_after"]["tokens_per_s"]) / 2
        for name, *_ in feeds[1:]:
            figures[f"{kind}_{name}_loss"] = 1 - figures[f"{kind}_{name}"]["tokens_per_s"] / alone
    return figures
