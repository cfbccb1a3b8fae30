"""The exceptions of connectors. A lost server raises none of them: lookups are then misses."""

from __future__ import annotations


class ConnectorError(Exception):
    """The base of the errors below."""


class RefusedError(ConnectorError):
    """The server answers and does not accept this engine's description of itself; the message says why."""


class LayoutMismatchError(ConnectorError):
    """The engine's KV layout does not yield the parts that the manifest promises."""


class SettingError(ConnectorError, ValueError):
    """A setting is out of range; the message names the value found and the values wanted."""


class NotSupportedError(ConnectorError, ValueError):
    """The engine is set up in a way that its connector cannot serve; the message is one sentence that says so."""


class CannotCacheError(NotSupportedError):
    """The model's state is not KV of tokens, so there is nothing to cache. The engine can serve the model without
    kvdock."""
