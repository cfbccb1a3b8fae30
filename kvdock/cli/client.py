"""How the commands call a server: its client, lists in pages, and the prompts and namespaces that options name."""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import NamedTuple, Protocol, TypeVar

import msgspec
from rich.console import Console

from kvdock.api.settings import Effective, Origin, effective
from kvdock.cli.errors import FAILED, WRONG, CommandError
from kvdock.cli.render import printable
from kvdock.client.client import Client
from kvdock.protocol import admin_schemas as a
from kvdock.protocol.access import ADDRESS_VARIABLE, SERVICE_SOCKET, TOKEN_FILE_VARIABLE, read_token, trusted_uid_in
from kvdock.protocol.errors import ApiError, ServerUnavailable
from kvdock.protocol.keys import HASH_FUNCTION, chunk_keys
from kvdock.protocol.wire_types import MAX_KEYS

T = TypeVar("T")
P = TypeVar("P", bound="Page", covariant=True)

PAGE_ITEMS = 1000
"""The largest page that the server returns."""
TIMEOUT_S = 3.0
LONG_TIMEOUT_S = 120.0
"""For calls that walk the whole table."""


def parts_of(keys: Sequence[str]) -> Iterator[list[str]]:
    """Splits the keys into lists that one call accepts."""
    for start in range(0, len(keys), MAX_KEYS):
        yield list(keys[start : start + MAX_KEYS])


def delete(client: Client, namespace: str, keys: Sequence[str]) -> a.Deleted:
    """Deletes any number of chunks; returns the sum of the answers."""
    answers = [
        client.delete(a.DeleteChunks(namespace=namespace, keys=part), timeout_s=LONG_TIMEOUT_S)
        for part in parts_of(keys)
    ]
    return a.Deleted(
        chunks=sum(one.chunks for one in answers), tier_chunks=sum(one.tier_chunks for one in answers),
        pending_tiers=sorted({tier for one in answers for tier in one.pending_tiers}),
        is_cleared=any(one.is_cleared for one in answers),
    )


def default_address() -> str:
    """The address in KVDOCK_ADDRESS, or else that of `socket_of` here. Warns of unknown variables. Raises
    SettingsError."""
    if named := os.environ.get(ADDRESS_VARIABLE):
        return named
    found = effective(os.environ, on_unknown=warn_once, only="socket_path")
    return f"unix:{socket_of(found)}"


def socket_of(found: Effective) -> str:
    """The socket that commands use. A socket that is set is used. Otherwise this user's own is, if it is there or the
    shipped service's is not. Where this user may not look for the service's, it counts as there, so the refusal says
    whose it is."""
    own = found.settings.socket_path
    is_set = found.origins.get("socket_path", Origin("default")).source != "default"
    is_own = is_set or _is_there(own, if_hidden=False) or not _is_there(SERVICE_SOCKET, if_hidden=True)
    return own if is_own else SERVICE_SOCKET


def _is_there(path: str, *, if_hidden: bool) -> bool:
    try:
        return Path(path).exists()
    except PermissionError:
        return if_hidden


@cache
def warn_once(sentence: str) -> None:
    """Prints the sentence on standard error, unless this process has done so."""
    print(f"kvdock: {printable(sentence)}", file=sys.stderr)


def open_client(address: str, timeout_s: float) -> Client:
    """A client as that of `reached`, but without its handling of errors."""
    try:
        token = read_token(os.environ.get(TOKEN_FILE_VARIABLE, ""))
        return Client(
            address or default_address(), timeout_s=timeout_s, packed=False, access_token=token, trusts_service=True,
            trusted_uid=trusted_uid_in(os.environ),
        )
    except ValueError as error:
        raise CommandError(str(error), WRONG) from error


@contextmanager
def reached(address: str) -> Iterator[Client]:
    """A client of the server at `address`, or at the one of `default_address` if it is empty. It sends the access token
    in the file that KVDOCK_ACCESS_TOKEN_FILE names; over the socket the server's user and root need none.

    Raises CommandError for a malformed address, for a token file that cannot be used, and when the server does not
    answer a call within the block.
    """
    with open_client(address, TIMEOUT_S) as client, advised():
        yield client


@contextmanager
def advised() -> Iterator[None]:
    """Adds what a person can do to the errors of calls within the block. Raises CommandError and ApiError for them."""
    try:
        yield
    except ApiError as error:
        if error.code == "unauthenticated":
            raise CommandError(f"{error}; name its file in {TOKEN_FILE_VARIABLE}", FAILED) from error
        raise
    except ServerUnavailable as error:
        raise CommandError(f"no server answers at {error}{then(remedy(error))}", FAILED) from error


def remedy(error: ServerUnavailable) -> str:
    """What a person can do, without a full stop; "": the error says it itself."""
    cause = error.__cause__
    if isinstance(cause, PermissionError):
        return "" if os.geteuid() == 0 else "it is another user's: run this as the user of the server, or as root"
    if isinstance(cause, (FileNotFoundError, ConnectionRefusedError)):
        return "start one with `kvdock serve`"
    return "`kvdock doctor` says more"


def then(sentence: str) -> str:
    return f"; {sentence}" if sentence else ""


class Page(Protocol):
    next: str | None


class Ask(Protocol[P]):
    def __call__(self, *, limit: int | None, cursor: str | None) -> P: ...


def first(ask: Ask[P], items_of: Callable[[P], list[T]], limit: int | None = None) -> tuple[list[T], str | None]:
    """The first `limit` items of a list that comes in pages (None: all), and the cursor of the next page."""
    items: list[T] = []
    cursor: str | None = None
    while True:
        page = ask(limit=PAGE_ITEMS if limit is None else min(PAGE_ITEMS, limit - len(items)), cursor=cursor)
        items += items_of(page)
        cursor = page.next
        if cursor is None or (limit is not None and len(items) >= limit):
            return items, cursor


def print_json(console: Console, value: object) -> None:
    """Prints one line of JSON, neither wrapped nor coloured."""
    console.out(msgspec.json.encode(value).decode(), highlight=False)


# ------------------------------------------------------------------ prompts and namespaces


_KEY = re.compile(r"[0-9a-f]{64}")


class ReadPrompt(NamedTuple):
    """A prompt as keys or as tokens; the other one is None."""

    keys: list[str] | None
    tokens: list[int] | None

    def length(self, space: a.NamespaceView) -> int:
        """The number of tokens."""
        if self.tokens is not None:
            return len(self.tokens)
        return len(self.keys or ()) * space.manifest.chunk_tokens

    def keys_in(self, space: a.NamespaceView) -> list[str]:
        """The keys of its whole chunks. Raises ApiError(bad_argument), as the server would, if the engines of the
        namespace hash tokens in their own way; CommandError if the prompt has no whole chunk."""
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
    """The options that name a prompt."""

    namespace: str
    keys: list[str]
    tokens_file: str

    @property
    def given(self) -> bool:
        return bool(self.keys or self.tokens_file)

    def read(self, command: str) -> ReadPrompt:
        """Raises CommandError unless exactly one of keys and token file is given, and for a wrong key or token file."""
        if bool(self.keys) == bool(self.tokens_file):
            raise CommandError(f"{command} needs either --keys or --tokens-file", WRONG)
        if self.keys:
            return ReadPrompt(parse_keys(self.keys), None)
        return ReadPrompt(None, read_tokens(self.tokens_file))


def resolve(client: Client, prefix: str) -> a.NamespaceView:
    """The only namespace whose digest starts with these hex digits; '' matches every one. Raises CommandError unless
    exactly one matches."""
    spaces, _ = first(client.namespaces, lambda page: page.namespaces)
    if not spaces:
        raise CommandError("no engine is attached, and nothing is stored: the server has no namespace", FAILED)
    fitting = [space for space in spaces if space.namespace.startswith(prefix.lower())]
    if len(fitting) == 1:
        return fitting[0]
    known = ", ".join(f"{space.namespace[:12]} ({printable(space.model)})" for space in (fitting or spaces))
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
