"""The URLs of tiers: reads the parameters that a tier knows, and refuses all others."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final, NamedTuple
from urllib.parse import SplitResult, parse_qsl, unquote, urlsplit

from kvdock.protocol.errors import without_password
from kvdock.tiers.tier import TierUrlError

_SIZE: Final = re.compile(r"(\d+)(|KiB|MiB|GiB|TiB)", re.ASCII)
_PRICE: Final = re.compile(r"\d{1,6}(\.\d{1,6})?", re.ASCII)
_UNITS: Final = {"": 0, "KiB": 10, "MiB": 20, "GiB": 30, "TiB": 40}


class TierUrl(NamedTuple):
    parts: SplitResult
    options: dict[str, Any]

    @property
    def user(self) -> str | None:
        return None if self.parts.username is None else unquote(self.parts.username)


def read_url(url: str, schemes: tuple[str, ...], options: Mapping[str, Callable[[str], Any]]) -> TierUrl:
    """Returns the URL's parts and its parameters. `options`: by parameter, the function that reads its value; it raises
    ValueError with what is wanted. Raises TierUrlError."""
    try:
        parts = urlsplit(url)
    except ValueError:  # its text may have a part of the URL, and so of a password
        raise TierUrlError("found a URL that cannot be read, wanted SCHEME://HOST:PORT") from None
    if parts.scheme not in schemes:
        raise TierUrlError(f"found a URL of scheme {parts.scheme!r}, wanted one of {', '.join(schemes)}")
    if parts.password is not None:
        raise TierUrlError(
            f"{parts.scheme}: found a password in the URL, wanted it in a file or an environment variable, "
            "because all users of the machine can read command lines"
        )
    if parts.fragment:
        raise TierUrlError(f"{parts.scheme}: found #{without_password(parts.fragment)} in the URL, wanted no fragment")
    values: dict[str, Any] = {}
    for name, text in parse_qsl(parts.query, keep_blank_values=True):
        if name not in options:
            raise TierUrlError(
                f"{parts.scheme}: found parameter {without_password(name)!r}, wanted one of "
                f"{', '.join(sorted(options))}"
            )
        if name in values:
            raise TierUrlError(f"{parts.scheme}: found parameter {name!r} twice, wanted it once")
        try:
            values[name] = options[name](text)
        except ValueError as error:
            raise TierUrlError(f"{parts.scheme}: found {name}={text!r}, wanted {error}") from None
    return TierUrl(parts, values)


def yes_or_no(text: str) -> bool:
    if text not in ("yes", "no"):
        raise ValueError("yes or no")
    return text == "yes"


def whole(least: int, most: int) -> Callable[[str], int]:
    """A function that reads whole numbers from `least` to `most`."""

    def read(text: str) -> int:
        if not text.isdecimal() or not least <= int(text) <= most:
            raise ValueError(f"a whole number from {least} to {most}")
        return int(text)

    return read


def some_bytes(text: str) -> int:
    match = _SIZE.fullmatch(text)
    if match is None:
        raise ValueError("a size in bytes, or like 512MiB or 8GiB")
    return int(match[1]) << _UNITS[match[2]]


def price(text: str) -> float:
    if _PRICE.fullmatch(text) is None:
        raise ValueError("dollars for a million requests, such as 5 or 0.4")
    return float(text)


def some_text(text: str) -> str:
    if not text:
        raise ValueError("some text")
    return text


def existing_file(text: str) -> Path:
    if not Path(text).is_file():
        raise ValueError("the path of a file that is there")
    return Path(text)
