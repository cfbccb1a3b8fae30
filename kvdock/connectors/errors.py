"""The exceptions of connectors. A lost server is never an error here: it is a miss."""

from __future__ import annotations


class ConnectorError(Exception):
    """The base of all errors of this folder."""


class RefusedError(ConnectorError):
    """The server answers and does not accept this engine as it describes itself; the message says why."""


class LayoutMismatchError(ConnectorError):
    """The engine's KV layout does not yield the parts that the manifest promises."""


class SettingError(ConnectorError, ValueError):
    """A setting out of its range; the message names the value found and the values wanted."""


class NotSupportedError(ConnectorError, ValueError):
    """The engine is set up in a way that its connector cannot serve; the message is one sentence that says so."""


class CannotCacheError(NotSupportedError):
    """The model keeps something else than KV of tokens. It runs as well without a cache."""
