"""The access file: which access tokens exist, and what each may do.

    [[token]]
    name = "team-a"                # in the log
    sha256 = "9f86d081…"           # of the token: the token itself is not in the file
    tenant = "a"                   # whose sessions and chunks; left out: the server's own
    scopes = ["engine"]            # health, read, engine, admin
    created = 2026-11-27T09:00:00Z # for people
    expires = 2027-02-01T00:00:00Z # from then on it is refused, by the wall clock; left out: it has no end
    caps = {bytes = "8GiB", sessions = 4}    # the tenant's quota, in one of its tokens; left out: the default

A name may have several tokens while the older ones have an end date: that is how one is replaced by the next
(kvdock/api/access/edits.py). The file is private (kvdock/protocol/access.py). The keeper checks every round whether it
has changed. If the new content is wrong, the tokens stay as they were, and the log gets one line.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
import math
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import msgspec

from kvdock.api.access.peer import AUDIT, Peer
from kvdock.api.errors import AccessFileError, SettingsError
from kvdock.api.sizes import parse_bytes
from kvdock.api.toml import TomlError, parse_toml
from kvdock.protocol.access import PrivateFileError, read_private
from kvdock.protocol.admin_schemas import Quota
from kvdock.protocol.calls import INCLUDED
from kvdock.protocol.errors import ApiError
from kvdock.protocol.wire_types import OWN_TENANT, Scope, Tenant

log = logging.getLogger(AUDIT)

TokenName = Annotated[str, msgspec.Meta(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$(?!\n)")]
Digest = Annotated[str, msgspec.Meta(pattern=r"^[0-9a-f]{64}$(?!\n)")]
Scopes = Annotated[list[Scope], msgspec.Meta(min_length=1)]
Moment = Annotated[datetime, msgspec.Meta(tz=True)]


class Token(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One access token of the file."""

    name: TokenName
    sha256: Digest
    scopes: Scopes
    tenant: Tenant = OWN_TENANT
    caps: Quota | None = None
    created: Moment | None = None
    expires: Moment | None = None

    @property
    def until_s(self) -> float:
        """In Unix seconds; infinite: it has no end."""
        return math.inf if self.expires is None else self.expires.timestamp()

    def peer(self, *, is_unix: bool) -> Peer:
        scopes = frozenset[Scope]().union(*(INCLUDED[scope] for scope in self.scopes))
        return Peer(f"token {self.name}", scopes, self.tenant, is_unix)


class _Content(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    token: list[Token] = []


def digest_of(token: bytes) -> bytes:
    """The SHA-256 of a token. A token has at least 32 random bytes, so nobody can find it by guessing."""
    return hashlib.sha256(token).digest()


class _Known(NamedTuple):
    """A token of the file, and the peers that it stands for."""

    token: Token
    over_tcp: Peer
    over_unix: Peer
    until_s: float


class AccessFile:
    """The tokens of the file at `path`, '' for none. The constructor raises AccessFileError; later errors are
    logged."""

    def __init__(self, path: str, wall_s: Callable[[], float] = time.time) -> None:
        """`wall_s`: the clock by which tokens end. Where it is set back or forward, so are their ends."""
        self._path, self._wall_s = path, wall_s
        self._seen: tuple[int, ...] = ()
        self._changing: tuple[int, ...] | None = None
        """The file's signature at the last `refresh`, if it was a new one."""
        self._known: dict[bytes, _Known] = {}
        """By a token's digest."""
        self.caps: dict[str, Quota] = {}
        """The quotas that the file names, by tenant."""
        self.changed = bool(path)
        """Whether `caps` has changed. Its reader sets this to False."""
        if path:
            self._seen = _signature(path)
            self._take(_known_of(read(path)))

    def peer_of(self, authorization: bytes, connection: Peer) -> Peer:
        """The peer that the header's token stands for on this connection. Raises ApiError(unauthenticated)."""
        kind, _, token = authorization.strip().partition(b" ")
        found = self._known.get(digest_of(token.strip())) if kind.lower() == b"bearer" else None
        if found is None:
            raise ApiError("unauthenticated", "no such access token", found="another", wanted="Bearer and its token")
        if found.until_s <= self._wall_s():  # whoever has the token may know why it is refused
            raise ApiError(
                "unauthenticated", "the access token has expired", found=f"a token until {shown(found.token.expires)}",
                wanted=f"a newer one of {found.token.name}",
            )
        return found.over_unix if connection.is_unix else found.over_tcp

    def _take(self, known: dict[bytes, _Known]) -> None:
        self._known = known
        self.caps = {one.token.tenant: one.token.caps for one in known.values() if one.token.caps is not None}

    async def refresh(self) -> None:
        """Reads the file again once two calls in a row have seen the same change, because a file that has just changed
        may be half written. Reads in a thread, because a long file takes a while."""
        if not self._path or (seen := _signature(self._path)) == self._seen:
            return
        if seen != self._changing:
            self._changing = seen
            return
        await self.reread()

    async def reread(self) -> None:
        """Reads the file now, whether it has changed or not. Errors are only logged."""
        if not self._path:
            return
        self._seen = _signature(self._path)
        try:
            self._take(await asyncio.to_thread(lambda: _known_of(read(self._path))))
        except AccessFileError as error:
            log.error("%s: the %d access tokens that were read before stay valid", error, len(self._known))
        else:
            self.changed = True
            log.warning("read %d access tokens of %s", len(self._known), self._path)


def _known_of(tokens: dict[bytes, Token]) -> dict[bytes, _Known]:
    """A thousand take 3 ms."""
    return {
        digest: _Known(token, token.peer(is_unix=False), token.peer(is_unix=True), token.until_s)
        for digest, token in tokens.items()
    }


def _signature(path: str) -> tuple[int, ...]:
    """Differs when the file does; empty when there is none."""
    try:
        found = Path(path).stat()
    except OSError:
        return ()
    return found.st_dev, found.st_ino, found.st_mtime_ns, found.st_ctime_ns, found.st_size


def read(path: str) -> dict[bytes, Token]:
    """The file's tokens by the SHA-256 of each. Raises AccessFileError."""
    try:
        text = read_private(path)
    except PrivateFileError as error:
        raise AccessFileError(f"access file {error}") from error
    return {bytes.fromhex(token.sha256): token for token in parse(text, path)}


def parse(text: str, path: str) -> list[Token]:
    """The tokens of an access file's text. `path`: for errors. Raises AccessFileError."""
    try:
        tokens = msgspec.convert(_with_sizes(parse_toml(text)), _Content).token
    except SettingsError as error:
        raise AccessFileError(f"access file {path}: caps: {error}") from error
    except (TomlError, msgspec.ValidationError) as error:
        raise AccessFileError(f"access file {path}: {error}") from error
    if twice := _twice(token.tenant for token in tokens if token.caps is not None):
        raise AccessFileError(f"access file {path}: caps of tenant {twice[0]!r} found twice, wanted in one token")
    if twice := _twice(token.sha256 for token in tokens):
        raise AccessFileError(f"access file {path}: sha256 found twice: {twice[0]}, wanted once")
    if twice := _twice(token.name for token in tokens if token.expires is None):
        wanted = "once, or with `expires` in all but one"
        raise AccessFileError(f"access file {path}: name found twice: {twice[0]}, wanted {wanted}")
    tenants = dict[str, str]()
    for token in tokens:
        _require_shown(token, path)
        if (tenant := tenants.setdefault(token.name, token.tenant)) != token.tenant:
            raise AccessFileError(
                f"access file {path}: tokens of {token.name}: found tenants {tenant!r} and {token.tenant!r}, wanted one"
            )
    return tokens


def _require_shown(token: Token, path: str) -> None:
    """Raises AccessFileError unless lists and refusals can show its dates: TOML has dates that UTC has not."""
    for moment in (token.created, token.expires):
        try:
            shown(moment)
        except OverflowError as error:
            wanted = "one of the years 1 to 9999 in UTC"
            what = f"{token.name}: found the date {moment}, wanted {wanted}"
            raise AccessFileError(f"access file {path}: {what}") from error


def _with_sizes(content: dict[str, Any]) -> dict[str, Any]:
    """The content, with the bytes of quotas as numbers. Raises SettingsError."""
    tokens = content.get("token")
    for token in tokens if isinstance(tokens, list) else []:
        caps = token.get("caps") if isinstance(token, dict) else None
        if isinstance(caps, dict) and isinstance(caps.get("bytes"), str):
            caps["bytes"] = parse_bytes(caps["bytes"])
    return content


def _twice(values: Iterable[str]) -> list[str]:
    return sorted(value for value, count in Counter(values).items() if count > 1)


def shown(moment: datetime | None) -> str:
    """As the file has it: in UTC, in whole seconds."""
    return "" if moment is None else f"{moment.astimezone(UTC):%Y-%m-%dT%H:%M:%SZ}"


def lines_of(token: Token) -> str:
    """The token's lines in an access file, but for caps, which people add. The scopes come last: an entry that is cut
    short lacks them, and is refused."""
    lines = ["[[token]]", f"name = {json.dumps(token.name)}", f'sha256 = "{token.sha256}"']
    lines += [f"tenant = {json.dumps(token.tenant)}"] if token.tenant else []
    lines += [f"{key} = {shown(at)}" for key, at in (("created", token.created), ("expires", token.expires)) if at]
    return "\n".join([*lines, f"scopes = {json.dumps(list(token.scopes))}"]) + "\n"


def entry(name: str, token: str, scopes: Sequence[Scope], tenant: str = OWN_TENANT) -> str:
    """As `lines_of`, of a token without an end."""
    return lines_of(Token(name, digest_of(token.encode()).hex(), list(scopes), tenant))
