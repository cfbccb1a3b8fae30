"""Prompts that commands are given, as token ids or as chunk keys, and the namespaces in which they are stored."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import NamedTuple

from kvdock.cli.errors import FAILED, WRONG, CommandError
from kvdock.cli.operator import first
from kvdock.cli.render import printable
from kvdock.client.client import Client
from kvdock.protocol.admin_schemas import NamespaceView
from kvdock.protocol.errors import ApiError
from kvdock.protocol.keys import HASH_FUNCTION, chunk_keys

_KEY = re.compile(r"[0-9a-f]{64}")


class Sequence(NamedTuple):
    """A prompt that was read: one of the two is None."""

    keys: list[str] | None
    tokens: list[int] | None

    def length(self, space: NamespaceView) -> int:
        """In tokens."""
        if self.tokens is not None:
            return len(self.tokens)
        return len(self.keys or ()) * space.manifest.chunk_tokens

    def keys_in(self, space: NamespaceView) -> list[str]:
        """The keys of its whole chunks. Raises ApiError(bad_argument), as the server would, where engines hash tokens
        in their own way; CommandError if it has no whole chunk."""
        if self.tokens is None:
            return self.keys or []
        if (function := space.manifest.hash_function) != HASH_FUNCTION:
            raise ApiError(
                "bad_argument", "engines of this namespace hash tokens in their own way: give --keys",
                found=function, wanted=HASH_FUNCTION,
            )
        chunk_tokens = space.manifest.chunk_tokens
        keys = chunk_keys(bytes.fromhex(space.namespace), self.tokens, chunk_tokens)
        if not keys:
            raise CommandError(
                f"wanted at least {chunk_tokens} tokens, as many as a chunk has, found {len(self.tokens)}", WRONG
            )
        return [key.hex() for key in keys]


class Prompt(NamedTuple):
    """A prompt as the options name it."""

    namespace: str
    keys: list[str]
    tokens_file: str

    @property
    def given(self) -> bool:
        return bool(self.keys or self.tokens_file)

    def read(self, command: str) -> Sequence:
        """Raises CommandError unless there is one prompt, and for a wrong key or token file."""
        if bool(self.keys) == bool(self.tokens_file):
            raise CommandError(f"{command} needs either --keys or --tokens-file", WRONG)
        if self.keys:
            return Sequence(parse_keys(self.keys), None)
        return Sequence(None, read_tokens(self.tokens_file))


def resolve(client: Client, prefix: str) -> NamespaceView:
    """The one namespace that starts with these hex digits; '' fits any. Raises CommandError unless exactly one fits."""
    spaces, _ = first(client.namespaces, lambda page: page.namespaces)
    if not spaces:
        raise CommandError("no engine is attached, and nothing is stored: the server has no namespace", FAILED)
    fitting = [space for space in spaces if space.namespace.startswith(prefix.lower())]
    if len(fitting) == 1:
        return fitting[0]
    known = ", ".join(f"{space.namespace[:12]} ({printable(space.manifest.model)})" for space in (fitting or spaces))
    if not fitting:
        raise CommandError(f"no namespace starts with {prefix!r}; the server has {known}", FAILED)
    raise CommandError(f"the server has several namespaces; choose one with --namespace: {known}", WRONG)


def read_tokens(name: str) -> list[int]:
    """Token ids from a file, or standard input for `-`: a JSON list, or separated by spaces, commas or newlines."""
    try:
        text = sys.stdin.read() if name == "-" else Path(name).read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise CommandError(f"tokens file {name}: {error}", WRONG) from error
    try:
        found = json.loads(text) if text.lstrip().startswith("[") else text.replace(",", " ").split()
        tokens = [_token(item) for item in found]
    except ValueError as error:
        raise CommandError(f"tokens file {name}: wanted token ids in 0..4294967295, found {error}", WRONG) from error
    if not tokens:
        raise CommandError(f"tokens file {name}: wanted at least one token, found none", WRONG)
    return tokens


def _token(item: object) -> int:
    if isinstance(item, bool) or not isinstance(item, int | str) or not re.fullmatch(r"\d{1,10}", str(item)):
        raise ValueError(repr(item)[:40])
    token = int(item)
    if token >= 1 << 32:
        raise ValueError(token)
    return token


def parse_keys(texts: list[str]) -> list[str]:
    keys = [key.lower() for text in texts for key in re.split(r"[\s,]+", text) if key]
    for key in keys:
        if not _KEY.fullmatch(key):
            raise CommandError(f"wanted a key of 64 hex digits, found {key[:80]!r} ({len(key)} characters)", WRONG)
    if not keys:
        raise CommandError("--keys: wanted at least one key, found none", WRONG)
    return keys
