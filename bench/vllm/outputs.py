"""Whether vLLM generates the same text with kvdock as without it.

Outputs are compared token by token. Two runs of one prompt in different batches, or with different chunks of prefill,
differ in the last bits anyway, and where two tokens are about equally likely that changes the text. So each comparison
stands beside its control, the same comparison of two runs without a connector, and reports by how much the other token
was preferred (`flip_gap_max`, in log-probability): wrong KV causes gaps far larger than the control's.
"""

from __future__ import annotations

import random
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from bench.engine_child import Child, prompt
from bench.vllm.children import TAIL, Engines, Figures, Scale, say


def compared(runs: Sequence[Any], others: Sequence[Any]) -> Figures:
    """`runs` beside `others`, answer by answer. Log-probabilities are compared while the tokens agree.

    `flip_gap_max`: at the first different token, by how much `others` preferred its own. It is a lower bound for the
    `flips_unlisted`, whose token is not among the likely ones that `others` lists."""
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
    """The number of answers that are equal in tokens and log-probabilities, bit for bit."""
    return sum(run == other for run, other in zip(runs, others, strict=True))


def happened(mode: str, wanted: Mapping[str, int]) -> bool:
    """False, and prints a line that reports it, when nothing happened that could be compared."""
    missing = [what for what, count in wanted.items() if not count]
    if missing:
        say(f"{mode}: NOTHING IS SHOWN, for there were no {', no '.join(missing)}")
    return not missing


def preemption(engines: Engines, scale: Scale, vocabulary: int) -> Figures:
    """Two requests that together need more than the `preempt_blocks` there are: one is preempted and later loaded."""
    none, kvdock = engines["none"], engines["kvdock"]
    counts: dict[str, dict[str, int]] = {"none": {}, "kvdock": {}}
    runs: dict[str, list[Any]] = {"none": [], "kvdock": [], "alone": [], "alone again": [], "damaged": []}
    for seed in range(scale.preempt_seeds):
        rng = random.Random(f"preemption/{seed}")
        # Both prompts fit, but not both whole answers.
        each = scale.preempt_blocks // 2 * scale.block
        prompts = [prompt(rng, vocabulary, rng.randrange(each - 2 * scale.block, each - 2)) for _ in range(2)]
        for kind, engine in (("none", none), ("kvdock", kvdock)):
            answer = engine.do("batch", prompts=prompts, tokens=scale.preempt_new, order=[0, 1])
            runs[kind] += answer["runs"]
            counts[kind] = {
                name: counts[kind].get(name, 0) + answer["counts"].get(name, 0)
                for name in ("preemptions", "loads", "loads_after_preemption", "loaded_tokens", "stores", "warnings")
            }
        for name in ("alone", "alone again"):
            runs[name] += none.do("alone", prompts=prompts, tokens=scale.preempt_new)["rounds"][0]["runs"]
        others = [prompt(rng, vocabulary, scale.block) + one[scale.block :] for one in prompts]
        runs["damaged"] += none.do("alone", prompts=others, tokens=scale.preempt_new)["rounds"][0]["runs"]
    changed = compared(runs["damaged"], runs["alone"])
    return {
        "happened": happened("preemption", {
            "preemptions": counts["kvdock"]["preemptions"], "stores": counts["kvdock"]["stores"],
            "loads after preemption": counts["kvdock"]["loads_after_preemption"],
            "texts that depend on the first block": changed["differ"],
        }),
        "seeds": scale.preempt_seeds, "blocks": scale.preempt_blocks, "counts": counts,
        "kvdock_beside_none": compared(runs["kvdock"], runs["none"]),
        "kvdock_beside_unpreempted": compared(runs["kvdock"], runs["alone"]),
        "control_none_beside_unpreempted": compared(runs["none"], runs["alone"]),
        "control_unpreempted_again_same_bits": same_bits(runs["alone again"], runs["alone"]),
        "control_first_block_changed": changed,
    }


def concurrent(engines: Engines, scale: Scale, vocabulary: int) -> Figures:
    """`requests` at once, with shared prefixes, in a pool that is too small for all of them."""
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
    for kind in ("none", "kvdock"):
        for turn, order in enumerate(orders):
            engines[kind].do("forget")
            done = engines[kind].do("batch", 120.0, prompts=prompts, tokens=scale.new, order=order)
            answers[kind, turn] = done
            say(f"concurrent: {kind} run {turn + 1}: {done['took_s']:.1f} s, {done['counts']}")
    engines["none"].do("forget")
    reference, hit = engines["none"].do("alone", 120.0, prompts=prompts, tokens=scale.new, times=2)["rounds"]
    none, kvdock = ([answers[kind, turn]["runs"] for turn in range(2)] for kind in ("none", "kvdock"))
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
        "control_none_2_beside_none_1": compared(none[1], none[0]),
        "kvdock_2_beside_none_1": compared(kvdock[1], none[0]),
        "kvdock_2_beside_local_hit_alone": compared(kvdock[1], hit["runs"]),
        "control_none_2_beside_local_hit_alone": compared(none[1], hit["runs"]),
        "control_cold_alone_beside_local_hit_alone": compared(reference["runs"], hit["runs"]),
        "loaded_alone": loaded_alone(engines["kvdock"], scale, vocabulary, [len(one) for one in prompts]),
    }


def loaded_alone(engine: Child, scale: Scale, vocabulary: int, lengths: Sequence[int]) -> Figures:
    """New prompts of whole chunks and a short tail, one by one: computed, then a local hit, then loaded. The last two
    differ only in where the KV came from, so every bit must be equal."""
    rng = random.Random("loaded alone")
    whole = [length // scale.chunk * scale.chunk for length in lengths]
    prompts = [prompt(rng, vocabulary, length + TAIL) for length in whole]
    local = engine.do("alone", 120.0, prompts=prompts, tokens=4, times=2)["rounds"][1]
    answer = engine.do("alone", 120.0, prompts=prompts, tokens=4, fresh=True)
    (loaded,) = answer["rounds"]
    return {
        "requests": len(prompts), "same_bits": same_bits(loaded["runs"], local["runs"]),
        "loaded_whole": sum(a == b for a, b in zip(loaded["cached"], whole, strict=True)),
        "local_whole": sum(a == b for a, b in zip(local["cached"], whole, strict=True)),
        "loads": answer["counts"].get("loads", 0),
    }
