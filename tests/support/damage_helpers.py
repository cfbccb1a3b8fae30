"""A table region with everything in it, damaged at random places and adopted: run as a script, in a process of its own.

`python damage_helpers.py SEED TRIALS` prints a JSON object that counts the outcomes; a crash is its exit status.
Every trial is named by SEED and its number. Offsets are drawn from the words in use.
What is adopted is compared with what was promised. `--use` makes other trials: engines go on using the adopted table
by random calls, and it is adopted once more. tests/support/adoption_fuzz.py makes many of these.
"""

from __future__ import annotations

import json
import os
import random
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from typing import NamedTuple

from random_use import RandomUse, adopted, new_table
from table_helpers import PAGE, Client, key

from kvdock._core import Mapping, Table, TableError

POOL = 1 << 20
FACTS = [(0, PAGE, POOL)]
Chunks = dict[int, list[tuple[int, int, int, int, int, int]]]


class Region(NamedTuple):
    """A region's bytes, and by page the words that are not zero."""

    content: bytes
    used: list[list[int]]


def place(used: list[list[int]], source: random.Random) -> int:
    """A word, of a page that is chosen first: few grants and sessions count as much as many records."""
    return source.choice(source.choice(used))


def make_region() -> Region:
    """A pool with stored chunks, a lease, an open reservation, a dead member and a deleted chunk that is held."""
    fd = os.memfd_create("kvdock-damage")
    size = Table.region_bytes(512, 64)
    os.ftruncate(fd, size)
    region = Mapping(fd, size)
    table = Table(region, pool_id=1, incarnation=3, limit_bytes=POOL, max_records=512, max_grants=64,
                  session_cap=1.0, total_cap=1.0, lock_inode=7)  # fmt: skip
    table.add_segment(*FACTS[0])
    one, two = Client(table, 4096, "one"), Client(table, 12288, "two")
    chain = [key("chain", n) for n in range(6)]
    one.store(chain)
    two.store([key("other", n) for n in range(3)])
    one.lookup(chain[:4])
    one.table.delete(one.space, chain[3])
    two.reserve([key("begun")])
    table.member_dead(two.member, 5)
    content = bytes(memoryview(region))
    os.close(fd)
    return Region(content, used_words(content))


def used_words(content: bytes | memoryview, pages: Iterable[int] | None = None) -> list[list[int]]:
    """`pages`: where to look; None: everywhere."""
    every = range(0, len(content), PAGE) if pages is None else pages
    used = [page for page in every if any(content[page : page + PAGE])]
    return [[at for at in range(page, page + PAGE, 8) if any(content[at : at + 8])] for page in used]


def written_pages(fd: int) -> Iterator[int]:
    """The pages of an object in memory that were ever written: few of a region's."""
    end, size = 0, os.fstat(fd).st_size
    with suppress(OSError):  # there are no more
        while True:
            begin = os.lseek(fd, end, os.SEEK_DATA)
            end = min(os.lseek(fd, begin, os.SEEK_HOLE), size)
            yield from range(begin, end, PAGE)


def adopt(content: bytes) -> Table:
    region = region_of(content)
    Table.stored_segments(region, pool_id=1, lock_inode=7)
    table, _ = Table.adopt(region, pool_id=1, lock_inode=7, segments=FACTS, limit_bytes=POOL,
                           session_cap=1.0, total_cap=1.0)  # fmt: skip
    return table


def damaged(region: Region, source: random.Random) -> tuple[str, bytes]:
    """One kind of damage, and the bytes it leaves."""
    out = bytearray(region.content)
    kind = source.choice(["flip", "flips", "overwrite", "zeros", "copied", "cut"])
    if kind == "cut":
        return kind, bytes(out[: source.randrange(len(out))])
    damage(kind, out, region.used, source)
    return kind, bytes(out)


def damage(kind: str, out: bytearray | memoryview, used: list[list[int]], source: random.Random) -> None:
    """In place."""
    at = place(used, source) + source.randrange(8)
    if kind in ("flip", "flips"):
        for _ in range(1 if kind == "flip" else 4):
            out[at] ^= 1 << source.randrange(8)
            at = place(used, source) + source.randrange(8)
        return
    length = min(source.choice([1, 8, 64, 4096]), len(out) - at)
    other = place(used, source)
    fill = {"overwrite": source.randbytes(length), "zeros": bytes(length), "copied": bytes(out[other : other + length])}
    out[at : at + length] = fill[kind].ljust(length, b"\0")


def held(table: Table) -> list[object]:
    """What memory is promised to whom: this may not differ without a word."""
    return [(g.grant, g.kind, g.session, g.remaining, g.chunks, g.bytes) for g in table.grants() if g.remaining]


def chunks(table: Table) -> Chunks:
    """What an engine reads of the stored chain: place, length and checksum of each part."""
    sessions = {view.session for view in table.sessions() if view.namespace == 0}
    member = next(m for m in table.members() if m.scheduler and m.session in sessions)
    back = table.add_member(member.session, member.nonce, member.ranks, True, 10, member.lock_offset)
    keys = b"".join(key("chain", n) for n in range(6))
    found = table.lookup(member.session, back, key("after")[:16], 1, keys, readers=1, skip_tokens=0, now_ms=10)
    table.check_integrity()
    return dict(enumerate(found.chunks))


def trial(region: Region, number: int, seed: int, whole: tuple[list[object], Chunks]) -> str:
    kind, content = damaged(region, random.Random(f"{seed}.{number}"))
    try:
        table = adopt(content)
    except (TableError, OSError) as error:
        return f"{kind}: refused" if isinstance(error, TableError) else f"{kind}: too short to map"
    promised, stored = whole
    if held(table) != promised:
        if all(one in held(table) for one in promised):
            return f"{kind}: a promise more"  # a rank's word was lost: it is held to be still at work, which is safe
        raise AssertionError(f"trial {seed}.{number}, {kind}: promises changed: {held(table)}, were {promised}")
    got = chunks(table)
    for at, parts in got.items():
        if [part[:5] for part in parts] != [part[:5] for part in stored[at]]:
            raise AssertionError(f"trial {seed}.{number}, {kind}: chunk {at} is at {parts}, was at {stored[at]}")
    if any(parts != stored[at] for at, parts in got.items()):
        return f"{kind}: a checksum that no bytes match"
    return f"{kind}: " + ("the same" if got == stored else "chunks dropped")


# --------------------------------------------------------------------------- used after the damage


def use_trial(seed: int, number: int) -> tuple[str, int]:
    """Random calls, damage, an adoption, a thousand random calls, and a second adoption with more calls. The outcome,
    and how many calls were made."""
    source = random.Random(f"{seed}.{number}")
    region, pages = empty_region()
    use = RandomUse(new_table(region), source)
    use.calls(200)
    kind = source.choice(["flip", "flips", "overwrite", "zeros", "copied"])
    with memoryview(region) as content:
        damage(kind, content, used_words(content, pages()), source)
    try:
        Table.stored_segments(region, pool_id=1, lock_inode=7)
        table, found = adopted(region)
    except TableError:
        return f"{kind}: refused", use.made
    try:
        use.go_on_with(table, found["clock_ms"])
    except TableError as error:
        if error.code == "corrupt":
            raise
        return f"{kind}: no way back", use.made
    for _ in range(20):
        use.calls(50)
        table.check_integrity()
    table, found = adopted(region)
    table.check_integrity()
    use.go_on_with(table, found["clock_ms"])
    use.calls(100)
    table.check_integrity()
    return f"{kind}: used", use.made


def empty_region() -> tuple[Mapping, Callable[[], list[int]]]:
    """And what tells which pages were written."""
    fd = os.memfd_create("kvdock-used")
    size = Table.region_bytes(512, 64)
    os.ftruncate(fd, size)

    def pages() -> list[int]:
        try:
            return list(written_pages(fd))
        finally:
            os.close(fd)

    return Mapping(fd, size), pages


def region_of(content: bytes) -> Mapping:
    fd = os.memfd_create("kvdock-damaged")
    os.ftruncate(fd, max(len(content), 1))
    os.pwrite(fd, content, 0)
    region = Mapping(fd, max(len(content), 1))
    os.close(fd)
    return region


def main_of_use(seed: int, trials: int) -> None:
    outcomes: Counter[str] = Counter()
    calls = 0
    for number in range(trials):
        print(f"trial {seed}.{number}, {calls} calls before", file=sys.stderr, flush=True)  # the last one crashed
        outcome, made = use_trial(seed, number)
        outcomes[outcome] += 1
        calls += made
    print(json.dumps({"calls": calls, "outcomes": dict(sorted(outcomes.items()))}))


def main(seed: int, trials: int) -> None:
    region = make_region()
    table = adopt(region.content)
    whole = (held(table), chunks(table))
    outcomes = Counter(trial(region, number, seed, whole) for number in range(trials))
    print(json.dumps(dict(sorted(outcomes.items()))))


if __name__ == "__main__":
    (main_of_use if "--use" in sys.argv else main)(int(sys.argv[1]), int(sys.argv[2]))
