"""The protocol's model keeps its invariants in every state; without any one of its guards it does not."""

from __future__ import annotations

from typing import get_args

import pytest
from protocol_explorer import explore
from protocol_model import Guard, Model

BOUNDS = {
    "two stores and a lookup of two keys in one slot, every death and fault but a lost message": Model(
        budget=(2, 1, 1, 1, 1, 1, 1, 0, 0)
    ),
    "a store and a lookup, every fault once": Model(budget=(1, 1, 1, 1, 1, 1, 1, 1, 1), keys=1),
    "two stores of two keys in one slot, a killed server and rank": Model(budget=(2, 1, 1, 1, 0, 1, 0, 0, 1)),
    "two lookups, repeated and lost messages": Model(budget=(1, 2, 0, 0, 1, 1, 0, 1, 0), keys=1),
    "a store that replaces another, two crashes": Model(2, 2, 1, budget=(2, 0, 2, 0, 0, 0, 1, 0, 0)),
}

BROKEN: dict[Guard, tuple[str, Model]] = {
    "memory waits for its holders after a deadline": ("I3", Model(budget=(2, 0, 0, 0, 0, 0, 1, 0, 0))),
    "a release names its grant": ("I3", Model(budget=(2, 2, 0, 0, 0, 1, 0, 0, 0))),
    "done is a promise": ("I3", Model(budget=(2, 0, 0, 0, 0, 0, 1, 0, 0))),
    "adoption keeps grants": ("I3", Model(budget=(2, 0, 1, 0, 0, 0, 0, 0, 0))),
    "the dead settle": ("I3", Model(budget=(2, 0, 0, 1, 0, 0, 0, 0, 0))),
    "a new epoch after a plan": ("I3", Model(budget=(2, 2, 0, 0, 0, 0, 0, 0, 0))),
    "pins stop eviction": ("I3", Model(budget=(2, 1, 0, 0, 0, 0, 0, 0, 0))),
    "the grant's word before the answer": ("I3", Model(budget=(1, 0, 1, 0, 0, 0, 0, 0, 0))),
    "heartbeats discharge nobody": ("I6", Model(budget=(1, 0, 0, 0, 0, 0, 0, 0, 1))),
    "delete leaves held memory": ("I2", Model(budget=(1, 1, 0, 0, 0, 1, 0, 0, 0))),
    "the checksum before READY": ("I4", Model(budget=(1, 0, 0, 0, 0, 0, 0, 0, 0))),
    "a closed reservation publishes nothing": ("I5", Model(2, 2, 1, budget=(2, 0, 0, 0, 0, 0, 1, 0, 0))),
    "adoption keeps the later of two": ("I5", Model(2, 2, 1, budget=(2, 0, 1, 0, 0, 0, 0, 0, 0))),
    "a slot is freed before it is given": ("I1", Model(budget=(2, 0, 0, 0, 0, 0, 0, 0, 0))),
    "children go first": ("I8", Model(2, 3, 3, budget=(3, 0, 0, 0, 0, 0, 0, 0, 0))),
    "one writer a key": ("I5", Model(2, 2, 1, budget=(2, 0, 0, 0, 0, 0, 0, 0, 0))),
    "caps": ("I7", Model(2, 2, 2, 1, budget=(2, 0, 0, 0, 0, 0, 0, 0, 0))),
    "closed grants are asked about": ("L2", Model(budget=(1, 0, 0, 0, 0, 0, 1, 1, 0))),
    "the gone are discharged": ("L1", Model(budget=(1, 0, 0, 1, 1, 0, 0, 0, 0))),
    "cancel only what no rank got": ("I3", Model(budget=(2, 2, 0, 0, 0, 0, 0, 0, 0))),
}


LARGEST = next(iter(BOUNDS))


@pytest.mark.parametrize(
    "bounds", [pytest.param(one, marks=[pytest.mark.sweep] if one == LARGEST else []) for one in BOUNDS]
)
def test_every_state_within_the_bounds_keeps_every_invariant(bounds: str) -> None:
    found = explore(BOUNDS[bounds])
    print(f"{bounds}: {found.states} states")
    assert not found.invariant, (found.invariant, found.trace)
    assert found.states > 500, "a model that does nothing breaks nothing"


@pytest.mark.parametrize("guard", BROKEN)
def test_without_the_guard_the_named_invariant_breaks(guard: Guard) -> None:
    invariant, model = BROKEN[guard]
    broken = explore(model._replace(without=frozenset({guard})), (invariant,))
    print(f"without “{guard}”, {invariant}:", *broken.trace, sep="\n    ")
    assert broken.invariant == invariant
    assert not explore(model).invariant, "it is the guard that keeps it"


def test_every_guard_and_every_invariant_is_shown_to_matter() -> None:
    assert set(BROKEN) == set(get_args(Guard))
    assert {invariant for invariant, _ in BROKEN.values()} == {*(f"I{n}" for n in range(1, 9)), "L1", "L2"}
