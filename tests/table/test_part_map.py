"""Where the tier on disk has its parts (csrc/base/part_map.h)."""

from __future__ import annotations

import random

import pytest

from kvdock._core import PartMap, TableError


def test_the_map_does_what_a_dict_does() -> None:
    draw, found, wanted = random.Random(1), PartMap(), dict[bytes, tuple[int, int, int, int, bool]]()
    names = [draw.randbytes(86) if at % 2 else bytes(32) + draw.randbytes(38) + bytes(16) for at in range(2000)]
    for step in range(60_000):
        name, action = draw.choice(names), draw.random()
        if action < 0.5:
            place, length = draw.randrange(1 << 26), draw.randrange(1 << 28)
            part = (place, length, draw.getrandbits(64), draw.getrandbits(60), action < 0.2)
            found.put(name, *part)
            wanted[name] = part
        elif action < 0.8:
            assert found.drop(name) == (wanted.pop(name, None) is not None)
        elif action < 0.9:
            assert found.use(name, step) == (name in wanted)
            if name in wanted:
                wanted[name] = (*wanted[name][:3], step, wanted[name][4])
        else:
            assert found.get(name) == wanted.get(name) and (name in found) == (name in wanted)
        if step % 4000 == 0:
            assert len(found) == len(wanted)
            for sequence in range(64):
                of_segment = {name: part for name, part in wanted.items() if part[0] >> 20 == sequence}
                assert dict(found.of_segment(sequence)) == of_segment
                assert found.size_of(sequence) == len(of_segment)
    for name in names:
        found.drop(name)
    assert len(found) == 0 and not any(map(found.size_of, range(64)))


def test_a_part_takes_at_most_120_bytes_of_memory() -> None:
    parts, draw = PartMap(), random.Random(2)
    for count in range(1, 100_001):
        parts.put(draw.randbytes(86)[:32] + draw.randbytes(38) + bytes(16), count, 1, 1)
        assert count < 10_000 or parts.bytes <= 120 * count
    assert len(parts) == 100_000


def test_a_name_of_another_length_is_refused() -> None:
    with pytest.raises(TableError, match="a part's name") as refused:
        PartMap().get(bytes(85))
    assert (refused.value.found, refused.value.wanted) == (85, 86)


