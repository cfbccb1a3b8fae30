"""The settings of every engine's connector, and the check of the names and values that an engine passes on."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import ClassVar, Self

from kvdock.connectors.cost import LoadLimits
from kvdock.connectors.errors import NotSupportedError, SettingError
from kvdock.protocol.access import NOBODY, default_address, trusted_uid_in
from kvdock.protocol.errors import without_password

MOST_WAIT_S = 1.0
"""The largest lookup_wait_s: a longer wait in an engine's scheduling loop costs more than it gains."""
MOST_TIER_WAIT_S = 600.0
MOST_SHARE = 10.0
"""The largest value of compute_once: to wait for another engine for more than ten times as long as computing takes is
taken for a mistake."""
MOST_UID = (1 << 32) - 2
PACK = ("auto", "on", "off")


@dataclass(frozen=True)
class EngineSettings(LoadLimits):
    """Settings of the connectors of all engines."""

    ABOVE_ZERO: ClassVar[tuple[str, ...]] = ("timeout_s", "copy_threads")
    RANGES: ClassVar[Mapping[str, tuple[float, float]]] = {
        "lookup_wait_s": (0.0, MOST_WAIT_S), "tier_wait_s": (0.0, MOST_TIER_WAIT_S),
        "compute_once": (0.0, MOST_SHARE), "trusted_uid": (NOBODY, MOST_UID),
    }

    address: str = ""
    """The server's address: unix:/path or http://host:port. Usually that of this user's own server
    (kvdock/protocol/access.py)."""
    access_token_file: str = ""
    """The file that holds this engine's access token. The server's own user needs none over the Unix socket."""
    trusted_uid: int = NOBODY
    """The user id of the server, where the engine runs as root and the server as another user, as in containers. An
    engine trusts its own user and root otherwise, and this user, too, with the memory that it loads."""
    timeout_s: float = 2.0
    """The longest time that a call to the server may take."""
    lookup_wait_s: float = 0.005
    """After how many seconds the answer to a lookup is late: then lookups do not wait until answers come in time again
    (kvdock/connectors/waits.py)."""
    tier_wait_s: float = 2.0
    """The longest that a request may wait for chunks that the server's lower tiers load; with load_if_cheaper, never
    longer than computing them would take. 0: it does not wait (kvdock/connectors/waits.py)."""
    compute_once: float = 0.0
    """How long a request may wait for tokens that another engine is computing, as a share of what computing them here
    would take; 0: not at all (kvdock/connectors/waits.py)."""
    load_if_cheaper: bool = True
    """A hit is computed instead of loaded where that is expected to take less time (kvdock/connectors/cost.py)."""
    copy_threads: int = 2
    """Threads that copy when KV is on the CPU."""
    pack: str = "auto"
    """Whether KV is packed in the pool: "on", "off", or "auto": where it is measured to pay. Engines that pack share
    no KV with those that do not (kvdock/connectors/packing.py)."""
    any_tensor_parallel: bool = False
    """Whether to share KV with engines of other tensor-parallel sizes, whose kernels round in another way. Engines that
    do share none with those that do not (kvdock/connectors/heads.py)."""
    weights_digest: str = ""
    """A name for the weights; empty: a digest of the model's files names them (kvdock/connectors/weights.py)."""
    read_all_weights: bool = False
    """Whether the digest of the model's files is of all their bytes, instead of samples of large tensors
    (kvdock/connectors/weights.py)."""
    trust_weight_versions: bool = True
    """Whether the version that the engine gives to weights that change while it runs identifies them: engines that
    started with equal weights share KV under equal versions. False: changed weights are private to their engine
    (kvdock/connectors/running_weights.py)."""
    chunk_statistics: bool = False
    """Whether to count how each chunk is used, and to log a summary at the end."""

    @classmethod
    def types(cls) -> dict[str, type]:
        """The type of each setting, by name."""
        return {field.name: type(field.default) for field in fields(cls)}

    @classmethod
    def of(cls, values: Mapping[str, object], where: str) -> Self:
        """`values`: each has its setting's type; `where`: the user's name for the place where they are set. Raises
        NotSupportedError for a value out of range."""
        try:
            made = cls(**values)  # type: ignore[arg-type]  # checked() has checked their types
        except SettingError as error:
            raise NotSupportedError(f"{where}: {error}.") from error
        if not made.address.startswith(("unix:", "http://")):
            raise NotSupportedError(
                f"{where}: address is {without_password(made.address)!r}, and unix:/path or http://host:port is wanted."
            )
        if made.pack not in PACK:
            raise NotSupportedError(f"{where}: pack is {made.pack!r}, and one of {', '.join(PACK)} is wanted.")
        for name, (least, most) in cls.RANGES.items():
            if not least <= (found := getattr(made, name)) <= most:
                wanted = f"{least} to {most}" if most < math.inf else f"{least} or more"
                raise NotSupportedError(f"{where}: {name} is {found}, and {wanted} is wanted.")
        for name in cls.ABOVE_ZERO:
            if not (found := getattr(made, name)) > 0:
                raise NotSupportedError(f"{where}: {name} is {found}, and more than 0 is wanted.")
        return made


def of_environment(environ: Mapping[str, str]) -> dict[str, object]:
    """The settings that commands share, from the environment. Raises NotSupportedError."""
    try:
        return {"address": default_address(environ), "trusted_uid": trusted_uid_in(environ)}
    except ValueError as error:
        raise NotSupportedError(f"{error}.") from error


def checked(given: Mapping[str, object], known: Mapping[str, type], where: str) -> dict[str, object]:
    """Returns `given`, in which each value has the type of its setting. `known`: the type of each setting; `where`: the
    user's name for the place where they are set. Raises NotSupportedError for a name that is no setting, and for a
    value of another type."""
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
