"""What bench.vllm_serving measures: a function a mode, each taking engines by kind, each returning figures.

Outputs are compared token by token. Two runs of one prompt in other company (other batches, other chunks of prefill)
differ in the last bits by themselves, and where two tokens are about equally likely that changes the text. So every
comparison stands beside its control, the same of two runs without a connector, and says how unlikely the token was
that won (`flip_gap_max`, in log-probability): wrong KV shows as gaps far beyond the control's.
"""

from __future__ import annotations

import random
import statistics
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from bench.vllm_children import Child, Failed, Scale

Figures = dict[str, Any]
Engines = Mapping[str, Child]
TAIL = 8
"""Tokens of a prompt that no hit may cover."""


def say(text: str) -> None:
    print(f"bench.vllm_serving: {text}", file=sys.stderr, flush=True)


def prompt(rng: random.Random, vocabulary: int, tokens: int) -> list[int]:
    return [rng.randrange(3, vocabulary) for _ in range(tokens)]


# ---------------------------------------------------------------------- comparing


def compared(runs: Sequence[Any], others: Sequence[Any]) -> Figures:
    """`runs` beside `others`, answer by answer. Log-probabilities are compared while the tokens agree.

    `flip_gap_max`: where they part, by how much `others` preferred its own token; at least, for the `flips_unlisted`
    whose token was not among the likely ones that `others` lists."""
    diverged: list[int] = []
    unlisted = 0
    gaps: list[float] = []
    diffs: list[float] = [0.0]
    for run, other in zip(runs, others, strict=True):
        for at, ((token, chance, _), (wanted, its_chance, likely)) in enumerate(zip(run, other, strict=True)):
            if token != wanted:
                diverged.append(at)
                chances: dict[int, float] = dict(likely)
                unlisted += token not in chances
                gaps.append(its_chance - chances.get(token, min(chances.values())))
                break
            diffs.append(abs(chance - its_chance))
    return {
        "requests": len(runs), "differ": len(diverged), "first_divergence": statistics.median(diverged or [0]),
        "flip_gap_max": max(gaps, default=0.0), "flips_unlisted": unlisted, "logprob_diff_max": max(diffs),
        "logprob_diff_p99": sorted(diffs)[len(diffs) * 99 // 100],
    }


def same_bits(runs: Sequence[Any], others: Sequence[Any]) -> int:
    """How many answers are equal in tokens and log-probabilities, bit for bit."""
    return sum(run == other for run, other in zip(runs, others, strict=True))


# ---------------------------------------------------------------------- outputs


def happened(mode: str, wanted: Mapping[str, int]) -> bool:
    """Whether there is anything to compare."""
    missing = [what for what, count in wanted.items() if not count]
    if missing:
        say(f"{mode}: NOTHING IS SHOWN, for there were no {', no '.join(missing)}")
    return not missing


def preemption(engines: Engines, scale: Scale, vocabulary: int) -> Figures:
    """Two requests that outgrow a pool of `preempt_blocks`: one is preempted, comes back, and is loaded."""
    off, kvdock = engines["off"], engines["kvdock"]
    counts: dict[str, dict[str, int]] = {"off": {}, "kvdock": {}}
    runs: dict[str, list[Any]] = {"off": [], "kvdock": [], "alone": [], "alone again": [], "damaged": []}
    for seed in range(scale.preempt_seeds):
        rng = random.Random(f"preemption/{seed}")
        # Both fit at first, and fill the pool; neither leaves the other room to end.
        each = scale.preempt_blocks // 2 * scale.block
        prompts = [prompt(rng, vocabulary, rng.randrange(each - 2 * scale.block, each - 2)) for _ in range(2)]
        for kind, engine in (("off", off), ("kvdock", kvdock)):
            answer = engine.do("batch", prompts=prompts, tokens=scale.preempt_new, order=[0, 1])
            runs[kind] += answer["runs"]
            counts[kind] = {
                name: counts[kind].get(name, 0) + answer["counts"].get(name, 0)
                for name in ("preemptions", "loads", "loads_after_preemption", "loaded_tokens", "stores", "warnings")
            }
        for name in ("alone", "alone again"):
            runs[name] += off.do("alone", prompts=prompts, tokens=scale.preempt_new)["rounds"][0]["runs"]
        others = [prompt(rng, vocabulary, scale.block) + one[scale.block :] for one in prompts]
        runs["damaged"] += off.do("alone", prompts=others, tokens=scale.preempt_new)["rounds"][0]["runs"]
    changed = compared(runs["damaged"], runs["alone"])
    return {
        "happened": happened("preemption", {
            "preemptions": counts["kvdock"]["preemptions"], "stores": counts["kvdock"]["stores"],
            "loads after preemption": counts["kvdock"]["loads_after_preemption"],
            "texts that depend on the first block": changed["differ"],
        }),
        "seeds": scale.preempt_seeds, "blocks": scale.preempt_blocks, "counts": counts,
        "kvdock_beside_off": compared(runs["kvdock"], runs["off"]),
        "kvdock_beside_unpreempted": compared(runs["kvdock"], runs["alone"]),
        "control_off_beside_unpreempted": compared(runs["off"], runs["alone"]),
        "control_unpreempted_again_same_bits": same_bits(runs["alone again"], runs["alone"]),
        "control_first_block_changed": changed,
    }


def concurrent(engines: Engines, scale: Scale, vocabulary: int) -> Figures:
    """`requests` at once with shared prefixes in a pool too small for them; see the names of the comparisons."""
    rng = random.Random("concurrent")
    span = scale.prefix_most - scale.prefix_least
    prefixes = [
        prompt(rng, vocabulary, scale.prefix_least + span * at // max(1, scale.prefixes - 1))
        for at in range(scale.prefixes)
    ]
    prompts = [
        prefixes[at % scale.prefixes] + prompt(rng, vocabulary, rng.randrange(scale.tail_least, scale.tail_most + 1))
        for at in range(scale.requests)
    ]
    # The order of arrival differs between the two runs of a kind, as it does in service.
    orders = [rng.sample(range(scale.requests), scale.requests) for _ in range(2)]
    answers: dict[tuple[str, int], Figures] = {}
    for kind in ("off", "kvdock"):
        for turn, order in enumerate(orders):
            engines[kind].do("forget")
            done = engines[kind].do("batch", 120.0, prompts=prompts, tokens=scale.new, order=order)
            answers[kind, turn] = done
            say(f"concurrent: {kind} run {turn + 1}: {done['took_s']:.1f} s, {done['counts']}")
    engines["off"].do("forget")
    reference, hit = engines["off"].do("alone", 120.0, prompts=prompts, tokens=scale.new, times=2)["rounds"]
    off, kvdock = ([answers[kind, turn]["runs"] for turn in range(2)] for kind in ("off", "kvdock"))
    counts = [answers["kvdock", turn]["counts"] for turn in range(2)]
    return {
        "happened": happened("concurrent", {
            "preemptions": counts[0].get("preemptions", 0), "stores": counts[0].get("stores", 0),
            "loads": counts[1].get("loads", 0),
        }),
        "requests": scale.requests,
        "runs": {
            f"{kind}_{turn + 1}": {
                "took_s": answer["took_s"], "cached_tokens": sum(answer["cached"]), **answer["counts"]
            }
            for (kind, turn), answer in answers.items()
        },
        "kvdock_2_beside_kvdock_1": compared(kvdock[1], kvdock[0]),
        "control_off_2_beside_off_1": compared(off[1], off[0]),
        "kvdock_2_beside_off_1": compared(kvdock[1], off[0]),
        "kvdock_2_beside_local_hit_alone": compared(kvdock[1], hit["runs"]),
        "control_off_2_beside_local_hit_alone": compared(off[1], hit["runs"]),
        "control_cold_alone_beside_local_hit_alone": compared(reference["runs"], hit["runs"]),
        "loaded_alone": loaded_alone(engines["kvdock"], scale, vocabulary, [len(one) for one in prompts]),
    }


def loaded_alone(kvdock: Child, scale: Scale, vocabulary: int, lengths: Sequence[int]) -> Figures:
    """New prompts of whole chunks and a short end, one by one: computed, again as a local hit, and loaded. The last two
    differ only in where the KV came from, so every bit must agree."""
    rng = random.Random("loaded alone")
    whole = [length // scale.chunk * scale.chunk for length in lengths]
    prompts = [prompt(rng, vocabulary, length + TAIL) for length in whole]
    local = kvdock.do("alone", 120.0, prompts=prompts, tokens=4, times=2)["rounds"][1]
    answer = kvdock.do("alone", 120.0, prompts=prompts, tokens=4, fresh=True)
    (loaded,) = answer["rounds"]
    return {
        "requests": len(prompts), "same_bits": same_bits(loaded["runs"], local["runs"]),
        "loaded_whole": sum(a == b for a, b in zip(loaded["cached"], whole, strict=True)),
        "local_whole": sum(a == b for a, b in zip(local["cached"], whole, strict=True)),
        "loads": answer["counts"].get("loads", 0),
    }


# ---------------------------------------------------------------------- times


def shuffled(engines: Engines, scale: Scale, vocabulary: int) -> Figures:
    """Time to first token of loads into blocks in order and into scattered ones, and of local hits; medians in ms."""
    figures: Figures = {}
    times: dict[str, list[float]] = {}
    for length in scale.lens:
        for rep in range(-1, scale.reps):
            ids = prompt(random.Random(f"shuffled/{length}/{rep}"), vocabulary, length + TAIL)
            for kind, engine in engines.items():
                if kind == "off":
                    continue
                engine.do("forget")
                engine.do("first_token", ids=ids, tokens=4)
                for how in (("in_order", "shuffled") if rep % 2 else ("shuffled", "in_order")):
                    engine.do("forget", order=how, seed=rep)
                    seen = whole(engine.do("first_token", ids=ids), length, f"{kind} {how}")
                    if rep >= 0:
                        times.setdefault(f"{kind}_{length}_{how}_ms", []).append(seen["ttft_s"] * 1e3)
                seen = whole(engine.do("first_token", ids=ids), length, f"{kind} local")
                if rep >= 0:
                    times.setdefault(f"{kind}_{length}_local_ms", []).append(seen["ttft_s"] * 1e3)
        figures |= {name: statistics.median(taken) for name, taken in times.items() if f"_{length}_" in name}
        for kind in engines:
            if kind != "off":
                at = f"{kind}_{length}"
                for how in ("in_order", "shuffled"):
                    figures[f"{at}_{how}_over_local_ms"] = figures[f"{at}_{how}_ms"] - figures[f"{at}_local_ms"]
                figures[f"{at}_shuffled_share"] = figures[f"{at}_shuffled_ms"] / figures[f"{at}_in_order_ms"]
                say(f"shuffled: {kind} {length}: " + ", ".join(
                    f"{how} {figures[f'{at}_{how}_ms']:.2f}" for how in ("in_order", "shuffled", "local")))
    return figures


def whole(seen: Figures, tokens: int, what: str) -> Figures:
    """Failed when the hit was not of `tokens`: its time would be that of something else."""
    if seen["cached"] != tokens:
        raise Failed(f"{what}: {seen['cached']} cached tokens, not {tokens}")
    return seen


def cold(engines: Engines, scale: Scale, vocabulary: int) -> Figures:
    """Time to first token of prompts that nobody has, so what storing them costs; kinds in turns, medians in ms."""
    times: dict[str, list[float]] = {kind: [] for kind in engines}
    saved: dict[str, list[float]] = {kind: [] for kind in engines}
    rng, stores = random.Random("cold"), 0
    for rep in range(-1, scale.cold_reps):
        for kind in rng.sample(sorted(engines), len(engines)):
            engines[kind].do("forget", order="in_order")
            seen = whole(engines[kind].do("first_token", ids=prompt(rng, vocabulary, scale.cold + TAIL)), 0, kind)
            if rep >= 0:
                times[kind].append(seen["ttft_s"] * 1e3)
                saved[kind].append((seen["idle_s"] - seen["ttft_s"]) * 1e3)
                stores += seen["counts"].get("stores", 0)
    figures: Figures = {"tokens": scale.cold, "kvdock_stores": stores}
    for kind, taken in times.items():
        figures |= {f"{kind}_ms": statistics.median(taken), f"{kind}_saved_after_ms": statistics.median(saved[kind])}
        if kind != "off" and "off" in times:
            pairs = zip(taken, times["off"], strict=True)
            figures[f"{kind}_over_off_ms"] = statistics.median(mine - theirs for mine, theirs in pairs)
    say("cold: " + ", ".join(f"{kind} {figures[f'{kind}_ms']:.2f} ms" for kind in times))
    return figures


def decode(engines: Engines, scale: Scale, vocabulary: int) -> Figures:
    """Tokens a second of running decodes: alone, beside requests that are loaded, beside ones that are computed and
    saved. Losses are shares of the same engine's rate alone (mean of before and after)."""
    rng = random.Random("decode")

    def decoders() -> list[list[int]]:
        """New ones each time, so that what the decodes themselves save is saved each time."""
        return [prompt(rng, vocabulary, scale.decoder_prompt) for _ in range(scale.decoders)]

    known = [prompt(rng, vocabulary, scale.feed + TAIL) for _ in range(scale.feed_prompts)]
    figures: Figures = {"requests": scale.decoders, "tokens": scale.decoded}
    for kind, engine in engines.items():
        feeds: list[tuple[str, list[list[int]], float]] = [("alone", [], 0.0)]
        if kind != "off":
            engine.do("alone", 120.0, prompts=known, tokens=4, logprobs=None)
            feeds.append(("loads", known, scale.feed_interval_s))
        news = [prompt(random.Random(f"news/{kind}/{at}"), vocabulary, scale.saved + TAIL) for at in range(200)]
        feeds += [("saves", news, scale.saved_interval_s), ("alone_after", [], 0.0)]
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
        if kind != "off" and "off" in engines:
            for name in ("alone", "saves"):
                mine, theirs = (figures[f"{one}_{name}"]["tokens_per_s"] for one in (kind, "off"))
                figures[f"{kind}_{name}_loss_beside_off"] = 1 - mine / theirs
    return figures
