"""The live curve of hit shares: what it predicts against what the chunk table does, in pools of each size."""

from __future__ import annotations

import random
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from itertools import pairwise

import pytest
from table_helpers import key

from bench.replay import Pool, key_of
from bench.truth.known import hit_share, lru_depths
from kvdock._core import POOL_FACTORS, Curve, CurveSums, TableError

SLOT, TOKENS, ROOM, SALT = 4096, 512, 400, 0x5EED


def new_curve(policy: str = "lru", *, share: float = 1.0, entries: int = 1 << 20, work: float = 1e9) -> Curve:
    curve = Curve(policy, ROOM * SLOT, salt=SALT, most_share=share, most_entries=entries, most_work=work)
    curve.set_space(0, TOKENS, SLOT)
    return curve


def joined(blocks: Sequence[int]) -> bytes:
    return b"".join(map(key_of, blocks))


def conversations(count: int, seed: int, begin: int = 0) -> Iterator[list[int]]:
    """Prompts in blocks. Conversations share one of a few beginnings and grow from turn to turn; some end soon."""
    choose, following, open_ones = random.Random(seed), begin + 100, list[list[int]]()
    for _ in range(count):
        if not open_ones or choose.random() < 0.3:
            start = begin + 10 * choose.randrange(4)
            open_ones.append(list(range(start, start + choose.randrange(1, 8))))
        at = min(int(choose.expovariate(0.08)), len(open_ones) - 1)
        turn = open_ones.pop(-1 - at)
        more = choose.randrange(1, 12)
        turn = [*turn, *range(following, following + more)]
        following += more
        yield turn
        if len(turn) < 60 and choose.random() < 0.75:
            open_ones.append(turn)


def replayed(prompts: Sequence[Sequence[int]], policy: str, room: int) -> list[int]:
    """Chunks that each found in the real table."""
    pool = Pool(room, policy)
    return [pool.serve(number, one, 1 + number) for number, one in enumerate(prompts)]


def fed(curve: Curve, prompts: Sequence[Sequence[int]], hits: Sequence[int]) -> Curve:
    for one, found in zip(prompts, hits, strict=True):
        curve.looked_up(0, joined(one), found)
    curve.check()
    return curve


def exact_shares(prompts: Sequence[Sequence[int]], policy: str) -> list[float]:
    chunks = sum(map(len, prompts))
    return [sum(replayed(prompts, policy, int(ROOM * factor))) / chunks for factor in POOL_FACTORS]


def ever(prompts: Sequence[Sequence[int]]) -> float:
    return 1 - len({block for one in prompts for block in one}) / sum(map(len, prompts))


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    return list(conversations(3000, seed=7))


@pytest.mark.parametrize(("policy", "mean", "most"), [
    ("lru", 1e-9, 1e-9), ("adaptive", 0.004, 0.01), ("selective", 0.008, 0.02),
])
def test_with_every_chunk_sampled_it_is_the_replay(
    prompts: list[list[int]], policy: str, mean: float, most: float
) -> None:
    """For lru exactly. adaptive ranks leaves by more than their age, and the simulation chooses several at once;
    selective declines by the call, and the simulation by the chunk. Which evicted chunks are remembered depends on the
    seed of the process's hashes, so the mean over sizes is bounded closely, and each size within what is promised."""
    exact = exact_shares(prompts, policy)
    assert exact[0] + 0.1 < exact[-1], "else the curve is flat, and nothing is compared"
    curve = fed(new_curve(policy), prompts, replayed(prompts, policy, ROOM))
    off = [abs(found - wanted) for found, wanted in zip(curve.all.found_at, exact, strict=True)]
    assert sum(off) / len(off) <= mean and max(off) <= most, off
    assert curve.all.found_ever == pytest.approx(ever(prompts), abs=1e-9)
    assert curve.all.samples * TOKENS == curve.all.asked


def found_in_lru_pool(lookups: Sequence[Sequence[int]], chunks: int) -> float:
    """By running one pool: it evicts what was unused longest; of the chunks of one lookup, the last one first."""
    pool, found = OrderedDict[int, None](), 0
    for lookup in lookups:
        hit = 0
        while hit < len(lookup) and lookup[hit] in pool:
            hit += 1
        found += hit
        for chunk in reversed(lookup):
            pool[chunk] = None
            pool.move_to_end(chunk)
        while len(pool) > chunks:
            pool.popitem(last=False)
    return found / sum(map(len, lookups))


def test_the_stack_that_bench_truth_compares_with_is_an_lru_pool_of_each_size() -> None:
    lookups = list(conversations(300, seed=5))
    depths = lru_depths(lookups)
    for chunks in (*range(1, 70), 200, 1000):
        assert hit_share(depths, chunks) == found_in_lru_pool(lookups, chunks), chunks
    assert hit_share(depths, None) == pytest.approx(ever(lookups))
    assert hit_share(depths, 1) < hit_share(depths, 69) < hit_share(depths, 1000)


def test_the_stack_finds_what_the_chunk_table_finds(prompts: list[list[int]]) -> None:
    depths = lru_depths(prompts)
    exact = [hit_share(depths, int(ROOM * factor)) for factor in POOL_FACTORS]
    assert exact == pytest.approx(exact_shares(prompts, "lru"), abs=1e-9)


@pytest.mark.parametrize("policy", ["lru", "adaptive"])
def test_a_sample_is_within_two_points_of_the_replay(prompts: list[list[int]], policy: str) -> None:
    exact = [*exact_shares(prompts, policy), ever(prompts)]
    curve = fed(new_curve(policy, share=0.5), prompts, replayed(prompts, policy, ROOM))
    found = [*curve.all.found_at, curve.all.found_ever or 0.0]
    assert found == pytest.approx(exact, abs=0.02)
    assert 0.4 < curve.all.samples * TOKENS / curve.all.asked < 0.6


def test_a_chunk_that_every_prompt_begins_with_does_not_weigh() -> None:
    """It is sampled or not. It is a tenth of all that is asked for, and never missing but once."""
    prompts = [[-7, *range(9 * number, 9 * number + 9)] for number in range(2000)]
    hits = [1 if number else 0 for number in range(2000)]
    for salt in range(8):
        curve = Curve("lru", ROOM * SLOT, salt=salt << 56 | SALT, most_share=0.125, most_entries=1 << 20, most_work=1e9)
        curve.set_space(0, TOKENS, SLOT)
        assert fed(curve, prompts, hits).all.found_at == pytest.approx([0.1] * len(POOL_FACTORS), abs=0.005)


def test_what_was_stored_and_never_asked_for_is_found_and_not_counted() -> None:
    curve = new_curve()
    curve.looked_up(0, joined(range(4)), 0)
    curve.stored(0, joined(range(8)))
    assert (curve.all.lookups, curve.all.asked, curve.all.samples) == (1, 4 * TOKENS, 4)
    curve.looked_up(0, joined(range(10)), 8)
    assert curve.all.asked == 14 * TOKENS
    assert curve.all.found_at == pytest.approx([8 / 14] * len(POOL_FACTORS))
    assert curve.all.found_ever == pytest.approx(8 / 14)
    curve.check()


MEBIBYTE = 1 << 20


def stack_distances(prompts: Sequence[Sequence[int]]) -> list[int]:
    """By the definition, in chunks: a stack with the last used on top, and the depth of each chunk that is in it."""
    stack, found = list[int](), list[int]()
    for block in (block for one in prompts for block in one):
        if block in stack:
            found.append(len(stack) - stack.index(block))
            stack.remove(block)
        stack.append(block)
    return found


def distances_of(prompts: Sequence[Sequence[int]], share: float) -> tuple[list[int], list[int], int]:
    curve = new_curve(share=share)
    curve.set_space(0, TOKENS, MEBIBYTE)
    return fed(curve, prompts, [0] * len(prompts)).distances


def test_reuse_distances_are_those_of_an_lru_stack() -> None:
    """There are more uses than places, so that these are given anew some times."""
    prompts = list(conversations(400, seed=11))
    exact = stack_distances(prompts)
    assert len(exact) > 3000 and max(exact) > 400
    bounds, counts, total = distances_of(prompts, 1.0)
    assert bounds == [MEBIBYTE * 4**step for step in range(13)] and total == sum(exact) * MEBIBYTE
    of_bucket = [sum(at < one * MEBIBYTE <= bound for one in exact) for at, bound in pairwise([0, *bounds])]
    assert counts == [*of_bucket, 0]


def test_a_sample_estimates_reuse_distances() -> None:
    prompts = list(conversations(1500, seed=11))
    _, exact, exact_total = distances_of(prompts, 1.0)
    _, counts, total = distances_of(prompts, 0.5)
    assert total / sum(counts) == pytest.approx(exact_total / sum(exact), rel=0.1)
    assert 0.35 < sum(counts) / sum(exact) < 0.65


def test_chunks_that_are_only_stored_count_as_used_and_are_no_reuse() -> None:
    curve = new_curve()
    curve.set_space(0, TOKENS, 8 * MEBIBYTE)
    curve.looked_up(0, joined([1]), 0)
    curve.stored(0, joined([1, 2, 3]))
    assert sum(curve.distances[1]) == 0
    curve.looked_up(0, joined([1]), 0)
    assert curve.distances[2] == 3 * 8 * MEBIBYTE
    curve.check()


def test_a_hole_ends_what_is_found() -> None:
    """Chunks behind a chunk that is missing are of no use to a lookup."""
    curve = new_curve()
    curve.stored(0, joined([0, 2, 3]))
    curve.looked_up(0, joined([0, 1, 2, 3]), 1)
    assert curve.all.found_at == pytest.approx([1 / 4] * len(POOL_FACTORS))


def test_it_stays_small_whatever_is_asked_for() -> None:
    """Shares fall instead, and what was counted before counts on."""
    entries = 512
    curve = new_curve("adaptive", entries=entries)
    chunks = 0
    for number in range(4000):
        chunks += 20
        curve.looked_up(0, joined(range(20 * number, 20 * number + 20)), 0)
        assert curve.entries <= entries and curve.remembered <= entries
    curve.check()
    assert curve.share < 0.25 and curve.all.asked == chunks * TOKENS
    assert curve.all.found_at == pytest.approx([0.0] * len(POOL_FACTORS), abs=0.01)
    assert curve.all.found_ever == pytest.approx(0, abs=0.01)


def test_the_share_falls_until_a_lookup_takes_little_enough() -> None:
    curve = new_curve(work=20)
    for number in range(4000):
        curve.looked_up(0, joined(range(100 * number, 100 * number + 100)), 0)
    assert 1 / 64 <= curve.share <= 1 / 16
    idle = new_curve(work=20)
    for number in range(4000):
        idle.looked_up(0, joined([number]), 0)
    assert idle.share == 1


def test_a_long_lookup_takes_few_samples_at_once() -> None:
    curve = new_curve()
    curve.looked_up(0, joined(range(4096)), 0)
    assert curve.share == 1 / 8 and 400 < curve.all.samples < 620
    curve.check()


def test_namespaces_are_counted_apart_and_share_one_pool() -> None:
    """One asks for the same prompts again and again, the other never: together they lack room."""
    curve = Curve("lru", 100 * SLOT, salt=SALT, most_share=1.0, most_entries=1 << 20, most_work=1e9)
    curve.set_space(0, TOKENS, SLOT)
    curve.set_space(1, 16, 2 * SLOT)
    for turn in range(50):
        curve.looked_up(0, joined(range(80)), 0)
        curve.looked_up(1, joined(range(1000 + 30 * turn, 1030 + 30 * turn)), 0)
    mine, other = curve.of_space(0), curve.of_space(1)
    assert (mine.lookups, mine.asked, other.asked) == (50, 50 * 80 * TOKENS, 50 * 30 * 16)
    assert mine.found_at[POOL_FACTORS.index(2)] == pytest.approx(49 / 50)
    assert mine.found_at[POOL_FACTORS.index(1)] < 0.9, "the other's chunks take twice the room"
    assert other.found_at == pytest.approx([0.0] * len(POOL_FACTORS))
    both = CurveSums()
    for one in (mine, other):
        both += one
    assert both.found_at == pytest.approx(curve.all.found_at) and both.asked == curve.all.asked
    curve.set_space(0, TOKENS, SLOT)
    assert curve.of_space(0).asked == 0 and curve.all.asked == both.asked


def test_chains_that_cross_do_no_harm() -> None:
    """Keys that no engine would send: each its own ancestor, by turns."""
    curve = new_curve("adaptive", entries=256)
    choose = random.Random(3)
    for _ in range(2000):
        prompt = choose.choices(range(2000), k=20)
        curve.looked_up(0, joined(prompt), choose.randrange(20))
        curve.stored(0, joined(prompt[::-1]))
    curve.check()


@pytest.mark.parametrize("call", [
    lambda: new_curve().looked_up(1, key("a"), 0),
    lambda: new_curve().looked_up(0, b"short", 0),
    lambda: new_curve().of_space(9),
    lambda: new_curve(share=0),
    lambda: new_curve("best"),
    lambda: new_curve().set_space(1 << 20, 1, 1),
])
def test_wrong_arguments_are_refused(call: object) -> None:
    assert callable(call)
    with pytest.raises(TableError) as error:
        call()
    assert error.value.code == "bad_argument"


def test_what_was_asked_for_long_ago_counts_for_less() -> None:
    """The same curve once nothing is found any more, with and without age: the aged one follows."""
    old = [[1, 2, 3, 4]] * 200
    new = [list(range(1000 + 4 * n, 1004 + 4 * n)) for n in range(100)]
    aged, plain = (fed(new_curve(), old, [0] + [4] * 199) for _ in range(2))
    before = aged.all.found_at
    aged.age(0.25)
    assert aged.all.found_at == pytest.approx(before) and aged.all.lookups == 50
    assert aged.of_space(0).asked == aged.all.asked == 50 * 4 * TOKENS
    for curve in (aged, plain):
        fed(curve, new, [0] * 100)
    assert plain.all.found_at[2] == pytest.approx(199 / 300)
    assert aged.all.found_at[2] == pytest.approx(199 / 4 / 150)
    assert aged.all.found_ever == pytest.approx(199 / 4 / 150)


@pytest.mark.parametrize("kept", [0.0, -1.0, 1.5, float("nan")])
def test_a_share_that_is_none_is_refused(kept: float) -> None:
    with pytest.raises(TableError) as refused:
        new_curve().age(kept)
    assert refused.value.code == "bad_argument"


# --------------------------------------------------------------------------- kept for the next server


def taken_over(kept: bytes, policy: str = "lru") -> Curve:
    return Curve(policy, ROOM * SLOT, salt=SALT, most_share=1.0, most_entries=1 << 20, most_work=1e9, kept=kept)


@pytest.mark.parametrize(
    ("policy", "share", "off"), [("lru", 1.0, 1e-12), ("lru", 0.3, 1e-12), ("adaptive", 1.0, 0.01)]
)
def test_the_next_server_goes_on_with_a_curve_that_was_kept(
    prompts: list[list[int]], policy: str, share: float, off: float
) -> None:
    """As if there had been one server; but the adaptive policy learns anew, as in the table."""
    hits = replayed(prompts, policy, ROOM)
    whole = fed(new_curve(policy, share=share), prompts, hits)
    first = fed(new_curve(policy, share=share), prompts[:1500], hits[:1500])
    second = taken_over(first.keep(), policy)
    second.check()
    assert second.keep() == taken_over(second.keep(), policy).keep()
    assert second.all.found_at == first.all.found_at and second.of_space(0).asked == first.of_space(0).asked
    fed(second, prompts[1500:], hits[1500:])
    assert second.all.found_at == pytest.approx(whole.all.found_at, abs=off)
    assert second.all.found_ever == pytest.approx(whole.all.found_ever, abs=1e-12)
    assert (second.share, second.all.lookups) == (whole.share, whole.all.lookups)


def test_a_damaged_curve_is_refused_or_can_be_used(prompts: list[list[int]]) -> None:
    kept = fed(new_curve(), prompts[:40], [0] * 40).keep()
    choose, refused = random.Random(11), 0
    damages = [kept[:length] for length in choose.sample(range(1, len(kept)), 300)] + [kept + b"x"]
    for _ in range(3000):
        flipped = bytearray(kept)
        for _ in range(choose.choice([1, 1, 8])):
            flipped[choose.randrange(len(kept))] ^= 1 << choose.randrange(8)
        damages.append(bytes(flipped))
    for number, damaged in enumerate(damages):
        try:
            curve = taken_over(damaged)
        except TableError as error:
            refused += 1
            assert error.code in ("corrupt", "bad_argument")
            continue
        assert number > 300, "one that is too short or too long is refused"
        curve.check()
        fed(curve, prompts[40:60], [0] * 20)
        assert all(0 <= share <= 1 for share in curve.all.found_at)
    assert 301 <= refused < len(damages)


def test_stores_alone_make_no_more_samples_than_it_may_have() -> None:
    """They were counted, and thinned out, at the next lookup only: one that came after many stores took 10 ms."""
    curve = new_curve(entries=1 << 12)
    for at in range(40):
        curve.stored(0, joined(range(1000 * at, 1000 * at + 1000)))
        assert curve.entries <= 1 << 12
    curve.check()
    assert 0 < curve.share < 1
