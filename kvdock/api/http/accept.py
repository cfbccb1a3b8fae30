"""Which of several media types a request accepts best, by its `Accept` header (RFC 9110)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple


class _Range(NamedTuple):
    kind: str
    subtype: str
    parameters: dict[str, str]
    weight: float


def preferred(accept: str, offered: Sequence[str]) -> str:
    """One of `offered`: the one of the highest weight; among equals the one that is named more exactly, then the first.
    The first also if none is accepted. A range does not match a type that has one of its parameters with another
    value; one that is malformed matches none."""
    ranges = list(_ranges(accept))
    return max(offered, key=lambda media_type: _rank(media_type, ranges))


def _rank(media_type: str, ranges: Sequence[_Range]) -> tuple[float, int]:
    """(the weight of the most exact range that matches, how exact it is); (0, 0): it is not accepted."""
    offered = _range(media_type)
    assert offered is not None
    found = [(_exactness(one, offered), one.weight) for one in ranges]
    exactness, weight = max(found, default=(0, 0.0))
    return (weight, exactness) if weight else (0.0, 0)


def _exactness(one: _Range, offered: _Range) -> int:
    """0: it does not match."""
    if any(offered.parameters.get(name, value) != value for name, value in one.parameters.items()):
        return 0
    match one.kind, one.subtype:
        case "*", "*":
            return 1
        case offered.kind, "*":
            return 2
        case offered.kind, offered.subtype:
            return 3 + len(one.parameters)
    return 0


def _ranges(accept: str) -> Iterator[_Range]:
    for item in accept.split(","):
        if (found := _range(item)) is not None:
            yield found


def _range(text: str) -> _Range | None:
    named, *parameters = (part.strip() for part in text.lower().split(";"))
    kind, slash, subtype = named.partition("/")
    values = {name.strip(): value.strip().strip('"') for name, _, value in (one.partition("=") for one in parameters)}
    try:
        weight = float(values.pop("q", "1"))
    except ValueError:
        return None
    if not (slash and kind and subtype and 0 <= weight <= 1):
        return None
    return _Range(kind, subtype, values, weight)
