"""The access file: which access tokens exist, and what each may do.

    [[token]]
    name = "team-a"                # in the log
    sha256 = "9f86d081…"           # of the token: the token itself is not in the file
    tenant = "a"                   # whose sessions and chunks; left out: the server's own
    scopes = ["engine"]            # health, read, engine, admin
    caps = {bytes = "8GiB", sessions = 4}    # the tenant's quota, in one of its tokens; left out: the default

The file is private (kvdock/protocol/access.py). The keeper checks every round whether it has changed. If the new
content is wrong, the tokens stay as they were, and the log gets one line.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
import os
import secrets
import stat
import tomllib
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Annotated, Any

import msgspec

from kvdock.api.access.peer import AUDIT, Peer
from kvdock.api.errors import AccessFileError, SettingsError
from kvdock.api.sizes import parse_bytes
from kvdock.protocol.access import PrivateFileError, read_private
from kvdock.protocol.admin_schemas import Quota
from kvdock.protocol.calls import INCLUDED
from kvdock.protocol.errors import ApiError
from kvdock.protocol.wire_types import OWN_TENANT, Scope, Tenant

log = logging.getLogger(AUDIT)

TokenName = Annotated[str, msgspec.Meta(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$(?!\n)")]
Digest = Annotated[str, msgspec.Meta(pattern=r"^[0-9a-f]{64}$(?!\n)")]
Scopes = Annotated[list[Scope], msgspec.Meta(min_length=1)]


class Token(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One access token of the file."""

    name: TokenName
    sha256: Digest
    scopes: Scopes
    tenant: Tenant = OWN_TENANT
    caps: Quota | None = None

    def peer(self, *, is_unix: bool) -> Peer:
        scopes = frozenset[Scope]().union(*(INCLUDED[scope] for scope in self.scopes))
        return Peer(f"token {self.name}", scopes, self.tenant, is_unix)


class _Content(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    token: list[Token] = []


def digest_of(token: bytes) -> bytes:
    """The SHA-256 of a token. A token has at least 32 random bytes, so nobody can find it by guessing."""
    return hashlib.sha256(token).digest()


class AccessFile:
    """The tokens of the file at `path`, '' for none. The constructor raises AccessFileError; later errors are
    logged."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._seen: tuple[int, ...] = ()
        self._changing: tuple[int, ...] | None = None
        """The file's signature at the last `refresh`, if it was a new one."""
        self._peers: dict[bytes, tuple[Peer, Peer]] = {}
        """By a token's digest: the peers that it stands for over TCP and over the Unix socket."""
        self.caps: dict[str, Quota] = {}
        """The quotas that the file names, by tenant."""
        self.changed = bool(path)
        """Whether `caps` has changed. Its reader sets this to False."""
        if path:
            self._seen = _signature(path)
            self._take(read(path))

    def peer_of(self, authorization: bytes, connection: Peer) -> Peer:
        """The peer that the header's token stands for on this connection. Raises ApiError(unauthenticated)."""
        kind, _, token = authorization.strip().partition(b" ")
        found = self._peers.get(digest_of(token.strip())) if kind.lower() == b"bearer" else None
        if found is None:
            raise ApiError("unauthenticated", "no such access token", found="another", wanted="Bearer and its token")
        return found[connection.is_unix]

    def _take(self, tokens: dict[bytes, Token]) -> None:
        self._peers = {
            digest: (token.peer(is_unix=False), token.peer(is_unix=True)) for digest, token in tokens.items()
        }
        self.caps = {token.tenant: token.caps for token in tokens.values() if token.caps is not None}

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
            self._take(await asyncio.to_thread(read, self._path))
        except AccessFileError as error:
            log.error("%s: the %d access tokens that were read before stay valid", error, len(self._peers))
        else:
            self.changed = True
            log.warning("read %d access tokens of %s", len(self._peers), self._path)


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
        content = msgspec.convert(_with_sizes(tomllib.loads(read_private(path))), _Content)
    except SettingsError as error:
        raise AccessFileError(f"access file {path}: caps: {error}") from error
    except PrivateFileError as error:
        raise AccessFileError(f"access file {error}") from error
    except (tomllib.TOMLDecodeError, msgspec.ValidationError) as error:
        raise AccessFileError(f"access file {path}: {error}") from error
    if twice := _twice(token.tenant for token in content.token if token.caps is not None):
        raise AccessFileError(f"access file {path}: caps of tenant {twice[0]!r} found twice, wanted in one token")
    for field in ("name", "sha256"):
        if twice := _twice(getattr(token, field) for token in content.token):
            raise AccessFileError(f"access file {path}: {field} found twice: {twice[0]}, wanted once")
    return {bytes.fromhex(token.sha256): token for token in content.token}


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


TOKEN_BYTES = 32


def entry(name: str, token: str, scopes: Sequence[str], tenant: str = OWN_TENANT) -> str:
    """The token's lines in an access file. The scopes come last: an entry that is cut short lacks them, and is refused.
    """
    lines = ["[[token]]", f"name = {json.dumps(name)}", f'sha256 = "{digest_of(token.encode()).hex()}"']
    lines += [f"tenant = {json.dumps(tenant)}"] if tenant else []
    return "\n".join([*lines, f"scopes = {json.dumps(list(scopes))}"]) + "\n"


def add_token(path: str, name: str, scopes: Sequence[str], tenant: str = OWN_TENANT) -> str:
    """Returns a new token, once the file has its entry; the file is made if it is missing. Raises AccessFileError; then
    the file is unchanged."""
    token = secrets.token_urlsafe(TOKEN_BYTES)
    try:
        file = Path(path).resolve()
        found = file.stat() if file.exists() else None
        before = file.read_text() if found else ""
        text = f"{before}\n{entry(name, token, scopes, tenant)}" if before else entry(name, token, scopes, tenant)
        replacement = Path(f"{file}.{secrets.token_hex(4)}")
        replacement.touch(mode=0o600, exist_ok=False)
        try:
            replacement.write_text(text)
            if found:
                replacement.chmod(stat.S_IMODE(found.st_mode))
            read(str(replacement))
            if found:  # the server that could read the file still can
                os.chown(replacement, found.st_uid, found.st_gid)
            replacement.replace(file)
        finally:
            replacement.unlink(missing_ok=True)
    except (OSError, UnicodeDecodeError) as error:
        raise AccessFileError(f"access file {path}: {error}") from error
    return token
