"""Settings that an engine hands to its connector as names and values, and those that every engine's connector has."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import ClassVar, Self

from kvdock.connectors.cost import LoadLimits
from kvdock.connectors.errors import NotSupportedError, SettingError

MOST_WAIT_S = 1.0
"""A longer wait in an engine's scheduling loop costs more than it gains."""
MOST_TIER_WAIT_S = 600.0


@dataclass(frozen=True)
class EngineSettings(LoadLimits):
    """Settings of the connectors of all engines."""

    ABOVE_ZERO: ClassVar[tuple[str, ...]] = ("timeout_s", "copy_threads")
    RANGES: ClassVar[Mapping[str, tuple[float, float]]] = {
        "lookup_wait_s": (0.0, MOST_WAIT_S), "tier_wait_s": (0.0, MOST_TIER_WAIT_S),
    }

    address: str = ""
    """The server's: unix:/path or http://host:port. As a rule this user's own (kvdock/protocol/access.py)."""
    access_token_file: str = ""
    """Holds this engine's access token; the server's own user needs none over the Unix socket."""
    timeout_s: float = 2.0
    """Bounds every call to the server."""
    lookup_wait_s: float = 0.005
    """How late the server's answer to a lookup may be before lookups no longer wait (kvdock/connectors/waits.py)."""
    tier_wait_s: float = 2.0
    """The longest that a request may wait for chunks that the server's lower tiers load; never longer than computing
    them would take, if load_if_cheaper. 0: not at all (kvdock/connectors/waits.py)."""
    load_if_cheaper: bool = True
    """A hit is computed instead of loaded where that is expected to take less time (kvdock/connectors/cost.py)."""
    copy_threads: int = 2
    """Threads that copy when KV is on the CPU."""
    weights_digest: str = ""
    """A name for the weights; empty: a digest of the model's files names them (kvdock/connectors/weights.py)."""
    read_all_weights: bool = False
    """That digest is of all bytes of the files, not of samples of their large tensors
    (kvdock/connectors/weight_files.py)."""
    trust_weight_versions: bool = True
    """The version that the engine names for weights that changed while it ran stands for them: engines that started
    with equal weights share under equal versions. False: such weights are private
    (kvdock/connectors/running_weights.py)."""
    chunk_statistics: bool = False
    """Counts which chunks are used again, and logs a summary at the end."""

    @classmethod
    def types(cls) -> dict[str, type]:
        """The type of each setting, by name."""
        return {field.name: type(field.default) for field in fields(cls)}

    @classmethod
    def of(cls, values: Mapping[str, object], where: str) -> Self:
        """`values`: each has its setting's type; `where`: the user's name for the place where they are set.
        NotSupportedError for a value out of range."""
        try:
            made = cls(**values)  # type: ignore[arg-type]  # checked() has seen to their types
        except SettingError as error:
            raise NotSupportedError(f"{where}: {error}.") from error
        if not made.address.startswith(("unix:", "http://")):
            raise NotSupportedError(
                f"{where}: address is {made.address!r}, and unix:/path or http://host:port is wanted."
            )
        for name, (least, most) in cls.RANGES.items():
            if not least <= (found := getattr(made, name)) <= most:
                wanted = f"{least} to {most}" if most < math.inf else f"{least} or more"
                raise NotSupportedError(f"{where}: {name} is {found}, and {wanted} is wanted.")
        for name in cls.ABOVE_ZERO:
            if not (found := getattr(made, name)) > 0:
                raise NotSupportedError(f"{where}: {name} is {found}, and more than 0 is wanted.")
        return made


def checked(given: Mapping[str, object], known: Mapping[str, type], where: str) -> dict[str, object]:
    """`given`, each value of its setting's type. `known`: the type of each setting; `where`: the user's name for the
    place where they are set. NotSupportedError for a name that is no setting, and for a value of another type."""
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
