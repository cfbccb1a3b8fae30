"""TOML as files have it: whatever the text is, it is read or refused by one kind of error."""

from __future__ import annotations

import tomllib
from typing import Any


class TomlError(ValueError):
    """The text is no TOML, or too much of it."""


def parse_toml(text: str) -> dict[str, Any]:
    """Raises TomlError."""
    try:
        return tomllib.loads(text)
    except RecursionError as error:
        raise TomlError("it is nested too deeply") from error
    except ValueError as error:  # TOMLDecodeError, and what Python says of an integer with thousands of digits
        raise TomlError(str(error)) from error
