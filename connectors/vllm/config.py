"""Settings of the vLLM connector, from `kv_connector_extra_config`. What is unknown is refused by name."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields

from kvdock.connectors.errors import ConnectorError, SettingError
from kvdock.connectors.limits import UNLIMITED, LoadLimits

BY_LAYER = ("eager", "piecewise", "never")


class NotSupportedError(ConnectorError, ValueError):
    """vLLM is set up in a way that the connector cannot serve; the message is one sentence that says so."""


@dataclass(frozen=True)
class Settings:
    address: str = ""
    """Of the server: unix:/path or http://host:port. Must be given."""
    timeout_s: float = 2.0
    """Of every call to the server."""
    chunk_tokens: int = 128
    """What is stored and found as one; rounded up to whole blocks."""
    load_async: bool = True
    """False: a request that loads does so in the step that runs it, and holds that step up."""
    load_by_layer: str = "never"
    """When each layer of a step waits for its own KV of a load that has not ended, instead of all of it: "eager": if
    vLLM runs without CUDA graphs; "piecewise": always, and vLLM is told to do without full graphs; "never". Where
    vLLM asks for each layer (setup.loads_by_layer)."""
    copy_threads: int = 2
    """Of copies with the CPU."""
    weights_digest: str = ""
    """Names the weights; empty: taken from the model's revision, or from its files."""
    max_load_tokens: int = UNLIMITED
    max_load_share: float = 1.0
    min_load_tokens: int = 0
    """These three: as LoadLimits has them."""
    chunk_statistics: bool = False
    """Counts which chunks are used again, and logs a summary at the end."""

    @property
    def limits(self) -> LoadLimits:
        return LoadLimits(self.max_load_tokens, self.max_load_share, self.min_load_tokens)

    @classmethod
    def load(cls, extra: Mapping[str, object]) -> Settings:
        """NotSupportedError for a name that is no setting, a value of another type, a value out of range."""
        known = {field.name: type(field.default) for field in fields(cls)}
        values: dict[str, object] = {}
        for name, value in extra.items():
            if name not in known:
                raise NotSupportedError(
                    f"kv_connector_extra_config: {name!r} is no setting of kvdock, which has {', '.join(known)}."
                )
            kind = known[name]
            if kind is float and type(value) is int:
                value = float(value)
            if type(value) is not kind:
                raise NotSupportedError(
                    f"kv_connector_extra_config: {name} is {value!r}, and {kind.__name__} is wanted."
                )
            values[name] = value
        made = cls(**values)  # type: ignore[arg-type]  # checked against the fields above
        if not made.address.startswith(("unix:", "http://")):
            raise NotSupportedError(
                f"kv_connector_extra_config: address is {made.address!r}, and unix:/path or http://host:port is wanted."
            )
        if made.load_by_layer not in BY_LAYER:
            raise NotSupportedError(
                f"kv_connector_extra_config: load_by_layer is {made.load_by_layer!r}, and one of {', '.join(BY_LAYER)} "
                "is wanted."
            )
        if made.chunk_tokens < 1 or made.copy_threads < 1 or made.timeout_s <= 0:
            raise NotSupportedError(
                "kv_connector_extra_config: chunk_tokens, copy_threads and timeout_s are wanted above zero, found "
                f"{made.chunk_tokens}, {made.copy_threads}, {made.timeout_s}."
            )
        try:
            _ = made.limits
        except SettingError as error:
            raise NotSupportedError(f"kv_connector_extra_config: {error}.") from error
        return made
