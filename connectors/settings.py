"""Settings that an engine hands to its connector as names and values."""

from __future__ import annotations

from collections.abc import Mapping

from kvdock.connectors.errors import NotSupportedError


def checked(given: Mapping[str, object], known: Mapping[str, type], where: str) -> dict[str, object]:
    """`given`, each value of its setting's type. `known`: the type of each setting; `where`: what the user calls the
    place. NotSupportedError for a name that is no setting, and for a value of another type."""
    values: dict[str, object] = {}
    for name, value in given.items():
        if name not in known:
            raise NotSupportedError(f"{where}: {name!r} is no setting of kvdock, which has {', '.join(known)}.")
        kind = known[name]
        if kind is float and type(value) is int:
            value = float(value)
        if type(value) is not kind:
            raise NotSupportedError(f"{where}: {name} is {value!r}, and {kind.__name__} is wanted.")
        values[name] = value
    return values
