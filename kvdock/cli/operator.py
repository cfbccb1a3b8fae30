"""How the commands talk to a server: its client, whole lists from pages, and an error when no server answers."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol, TypeVar

import msgspec
from rich.console import Console

from kvdock.api.settings import effective
from kvdock.cli.errors import FAILED, WRONG, CommandError
from kvdock.client.client import Client
from kvdock.protocol import admin_schemas as a
from kvdock.protocol.access import ADDRESS_VARIABLE, TOKEN_FILE_VARIABLE, read_token
from kvdock.protocol.errors import ApiError, ServerUnavailable
from kvdock.protocol.wire_types import MAX_KEYS

T = TypeVar("T")
P = TypeVar("P", bound="Page", covariant=True)

PAGE_ITEMS = 1000
"""The most items that the server puts on a page."""
TIMEOUT_S = 3.0
LONG_TIMEOUT_S = 120.0
"""For calls that walk the whole table."""


def parts_of(keys: Sequence[str]) -> Iterator[list[str]]:
    """As many keys at a time as one call takes."""
    for start in range(0, len(keys), MAX_KEYS):
        yield list(keys[start : start + MAX_KEYS])


def delete(client: Client, namespace: str, keys: Sequence[str]) -> a.Deleted:
    """Deletes any number of chunks; returns the answers as one."""
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
    """What KVDOCK_ADDRESS names, else where `kvdock serve` listens when started with the same environment. Raises
    SettingsError."""
    return os.environ.get(ADDRESS_VARIABLE) or f"unix:{effective(os.environ).settings.socket_path}"


def open_client(address: str, timeout_s: float) -> Client:
    """As `reached`, and what the server answers is the caller's business."""
    try:
        token = read_token(os.environ.get(TOKEN_FILE_VARIABLE, ""))
        return Client(address or default_address(), timeout_s=timeout_s, packed=False, access_token=token)
    except ValueError as error:
        raise CommandError(str(error), WRONG) from error


@contextmanager
def reached(address: str) -> Iterator[Client]:
    """A client of the server at `address`, or at this user's socket when it is empty. Its access token is in the file
    that KVDOCK_ACCESS_TOKEN_FILE names; this user's own server needs none over its socket.

    Raises CommandError for a malformed address, a token file that cannot be used, and when the server does not answer a
    call within the block.
    """
    with open_client(address, TIMEOUT_S) as client:
        try:
            yield client
        except ApiError as error:
            if error.code == "unauthenticated":
                raise CommandError(f"{error}; name its file in {TOKEN_FILE_VARIABLE}", FAILED) from error
            raise
        except ServerUnavailable as error:
            raise CommandError(f"no server answers at {error}; start one with `kvdock serve`", FAILED) from error


class Page(Protocol):
    next: str | None


class Ask(Protocol[P]):
    def __call__(self, *, limit: int | None, cursor: str | None) -> P: ...


def first(ask: Ask[P], items_of: Callable[[P], list[T]], limit: int | None = None) -> tuple[list[T], str | None]:
    """The first `limit` items of a list in pages (None: all), and the cursor of the rest."""
    items: list[T] = []
    cursor: str | None = None
    while True:
        page = ask(limit=PAGE_ITEMS if limit is None else min(PAGE_ITEMS, limit - len(items)), cursor=cursor)
        items += items_of(page)
        cursor = page.next
        if cursor is None or (limit is not None and len(items) >= limit):
            return items, cursor


def print_json(console: Console, value: object) -> None:
    """One line, neither wrapped nor coloured."""
    console.out(msgspec.json.encode(value).decode(), highlight=False)
