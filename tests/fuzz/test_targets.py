"""Each run gives every target its kept inputs and a few mutations of them. `python -m tests.fuzz` goes on longer."""

from __future__ import annotations

import logging
import random
import resource
from collections.abc import Iterator

import pytest

from .targets import TARGETS, corpus

pytestmark = pytest.mark.security

SEED = 20261123
MUTATIONS = 300
"""How many for each target."""
MOST_GROWTH_KIB = 64 << 10


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    """A line of the log for each refused input helps nobody."""
    logging.disable()
    yield
    logging.disable(logging.NOTSET)


def mutated(data: bytes, other: bytes, source: random.Random) -> bytes:
    """Cut, repeated, spliced with another input, or with some bytes changed."""
    at, to = sorted(source.randrange(len(data) + 1) for _ in range(2))
    match source.randrange(4):
        case 0:
            return data[:at] + data[to:]
        case 1:
            return data[:at] + data[at:to] * source.randrange(2, 40) + data[to:]
        case 2:
            return data[:at] + other[source.randrange(len(other) + 1) :]
    changed = bytearray(data)
    for _ in range(source.randrange(1, 6)):
        if changed:
            changed[source.randrange(len(changed))] = source.choice((0, 0x7F, 0x80, 0xFF, source.randrange(256)))
    return bytes(changed)


@pytest.mark.parametrize("name", TARGETS)
def test_any_bytes_lead_to_an_answer_or_a_typed_refusal_in_bounded_memory(name: str) -> None:
    target, kept, source = TARGETS[name], corpus(name), random.Random(f"{SEED} {name}")
    assert kept
    before_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for data in [b"", *kept]:
        target(data)
    for _ in range(MUTATIONS):
        data = mutated(source.choice(kept), source.choice(kept), source)
        try:
            target(data)
        except Exception as error:  # whatever it is, the input that led there is shown
            raise AssertionError(f"{name} does not take {data!r}") from error
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before_kib < MOST_GROWTH_KIB
