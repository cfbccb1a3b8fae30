"""The access file: which access tokens exist, and what each may do.

    [[token]]
    name = "team-a"                # in the log
    sha256 = "9f86d081…"           # of the token: the token itself is not in the file
    tenant = "a"                   # whose sessions and chunks; left out: the server's own
    scopes = ["engine"]            # health, read, engine, admin, peer
    created = 2026-11-27T09:00:00Z # for people
    expires = 2027-02-01T00:00:00Z # from then on it is refused, by the wall clock; left out: it has no end
    caps = {bytes = "8GiB", sessions = 4}    # the tenant's quota, in one of its tokens; left out: the default

A name may have several tokens while the older ones have an end date: that is how one is replaced by the next.
The file is private (kvdock/protocol/access.py). The keeper checks every round
whether it has changed. If the new content is wrong, the tokens stay as they were, and the log gets one line.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
import math
import os
import re
import secrets
import stat
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, get_args

import msgspec

from kvdock.api.access.peer import AUDIT, Peer
from kvdock.api.errors import AccessFileError, SettingsError
from kvdock.api.sizes import parse_bytes
from kvdock.api.toml import TomlError, parse_toml
from kvdock.protocol.access import FORBIDDEN_BITS, MAX_BYTES, PrivateFileError, read_private
from kvdock.protocol.admin_schemas import Quota
from kvdock.protocol.calls import INCLUDED
from kvdock.protocol.errors import ApiError
from kvdock.protocol.refused import found_at, refused
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
    content: dict[str, Any] = {}
    try:
        content = _with_sizes(parse_toml(text))
        tokens = msgspec.convert(content, _Content).token
    except SettingsError as error:
        raise AccessFileError(f"access file {path}: caps: {error}") from error
    except TomlError as error:
        raise AccessFileError(f"access file {path} is no TOML: {error}") from error
    except msgspec.ValidationError as error:
        raise AccessFileError(f"access file {path}: {_refusal(error, content)}") from error
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


def _refusal(error: msgspec.ValidationError, content: dict[str, Any]) -> str:
    """What was wanted, and the value found, unless it may be a token that somebody took for its digest."""
    at = refused(error, {"scopes": get_args(Scope)})
    wanted = f"wanted {at.wanted}"
    if at.where:
        wanted = f"{at.where}: {wanted}"
    try:
        value = found_at(at.where, content)
    except (LookupError, TypeError):
        return wanted
    is_shown = not isinstance(value, dict) and at.name != "sha256"
    return f"{wanted}, found {str(value)[:80]!r}" if is_shown else wanted


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


# --------------------------------------------------------------------------- changes by commands

# Changes of the access file by commands: a token is added, replaced by the next one of its name, or removed.
#
# Invariants: an edit takes effect as a whole or not at all, also if its process is killed; the file keeps its owner,
# group, mode, links, comments and quotas, and the tokens that the edit does not name; two edits never lose each other's
# changes. The text of a token is returned once and is in no file.

TOKEN_BYTES = 32
AsBefore = Literal["as before"]
"""In place of an end date: the one that the replaced token has."""
_HEADER = re.compile(r"[ \t]*\[\[[ \t]*token[ \t]*\]\]")


class Entry(NamedTuple):
    """A token, and its text in the file with the comments above it."""

    token: Token
    text: str


Change = Callable[[list[Entry]], list[Entry]]


def tokens_in(path: str) -> list[Token]:
    """The tokens of the file, for whoever can read it. Raises AccessFileError."""
    try:
        return parse(Path(path).read_text(), path)
    except (OSError, UnicodeDecodeError) as error:
        raise _unusable(path, error) from error


def _unusable(path: str, error: OSError | UnicodeDecodeError) -> AccessFileError:
    """The error's own text has the path once more, or that of the file `.new`."""
    why = str(error) if isinstance(error, UnicodeDecodeError) else error.strerror
    return AccessFileError(f"access file {path}: {why} (as user {os.geteuid()})")


def add_token(
    path: str, name: str, scopes: Sequence[Scope], tenant: str = OWN_TENANT, *, created: datetime | None = None,
    expires: datetime | None = None,
) -> str:
    """Returns a new token, once the file has its entry; the file is made if it is missing. Raises AccessFileError; then
    the file is unchanged."""
    text = secrets.token_urlsafe(TOKEN_BYTES)
    token = Token(name, _digest(text), list(scopes), tenant, None, _whole(created), _whole(expires))

    def add(entries: list[Entry]) -> list[Entry]:
        if any(one.token.name == name for one in entries):
            wanted = f"another name; `kvdock token rotate {name}` replaces the token"
            raise AccessFileError(f"access file {path}: name found twice: {name}, wanted {wanted}")
        return [*entries, Entry(token, lines_of(token))]

    _edit(path, add)
    return text


def rotate_token(
    path: str, name: str, *, now: datetime, old_until: datetime | None,
    expires: datetime | AsBefore | None = "as before",
) -> tuple[str, Token]:
    """Returns a new token with the name, scopes, tenant and quota of the present one, and its entry, once the file has
    it. The present one works until `old_until`; None: it and all former ones end at once. Raises AccessFileError."""
    text = secrets.token_urlsafe(TOKEN_BYTES)
    made: list[Token] = []

    def rotate(entries: list[Entry]) -> list[Entry]:
        old = max(_named(path, entries, name), key=lambda one: one.token.until_s)
        end = _whole(old.token.expires if expires == "as before" else expires)
        if end is not None and end <= now:
            raise AccessFileError(f"access file {path}: found the end {shown(end)} of {name}, wanted a later one")
        token = msgspec.structs.replace(old.token, sha256=_digest(text), created=_whole(now), expires=end)
        made.append(token)
        changed = old.text
        for key, value in (("expires", shown(end)), ("created", shown(now)), ("sha256", f'"{token.sha256}"')):
            changed = _with_line(changed, key, value)
        after = [
            Entry(token, changed) if one is old else one for one in entries if one is old or one.token.name != name
        ]
        return after if old_until is None else [*after, *_former(entries, old, now, old_until)]

    _edit(path, rotate)
    return text, made[0]


def revoke_token(path: str, name: str) -> list[Token]:
    """Removes all tokens of the name, and returns them. Raises AccessFileError."""
    gone: list[Token] = []

    def revoke(entries: list[Entry]) -> list[Entry]:
        gone.extend(one.token for one in _named(path, entries, name))
        return [one for one in entries if one.token.name != name]

    _edit(path, revoke)
    return gone


def _named(path: str, entries: Sequence[Entry], name: str) -> list[Entry]:
    found = [one for one in entries if one.token.name == name]
    if not found:
        known = ", ".join(sorted({one.token.name for one in entries})) or "none: the file has no token"
        raise AccessFileError(f"access file {path}: found no token {name!r}, wanted one of {known}")
    return found


def _former(entries: Sequence[Entry], old: Entry, now: datetime, until: datetime) -> list[Entry]:
    """The tokens of the name that still work: the old one, at most until then, and those before it."""
    name, now_s = old.token.name, now.timestamp()
    kept = [one for one in entries if one is not old and one.token.name == name and one.token.until_s > now_s]
    if old.token.until_s <= now_s:
        return kept
    ends = until if until.timestamp() < old.token.until_s else old.token.expires
    ending = msgspec.structs.replace(old.token, caps=None, created=_whole(old.token.created), expires=_whole(ends))
    return [*kept, Entry(ending, lines_of(ending))]


def _whole(moment: datetime | None) -> datetime | None:
    """In whole seconds, as it is written."""
    return None if moment is None else moment.replace(microsecond=0)


def _digest(text: str) -> str:
    return digest_of(text.encode()).hex()


# --------------------------------------------------------------------------- entries in the file's text


def _cut(text: str) -> tuple[str, list[str]]:
    """What comes before the first entry, and the text of each, with the comments above it."""
    pieces, comments = [""], ""
    for line in text.splitlines(keepends=True):
        if _HEADER.match(line):
            pieces.append(comments + line)
        elif line.lstrip().startswith("#"):
            comments += line
            continue
        else:
            pieces[-1] += comments + line
        comments = ""
    return pieces[0], [*pieces[1:-1], pieces[-1] + comments] if pieces[1:] else []


def _with_line(text: str, key: str, value: str) -> str:
    """The entry's text with this value for the key; empty: without the key."""
    line = f"{key} = {value}\n" if value else ""
    changed, count = re.subn(rf"^[ \t]*{key}[ \t]*=.*(\n|$)", lambda _: line, text, count=1, flags=re.MULTILINE)
    if count or not value:
        return changed
    return re.sub(r"^[ \t]*\[\[.*(\n|$)", lambda found: f"{found[0].rstrip()}\n{line}", text, count=1,
                  flags=re.MULTILINE)


# --------------------------------------------------------------------------- the file on disk


def _edit(path: str, change: Change) -> None:
    """Replaces the file by one with changed entries. Raises AccessFileError; then the file is unchanged."""
    try:
        file = Path(path).resolve()
        fresh = file.with_name(f"{file.name}.new")
        fd = _claim(fresh)  # what is done to it is done by this number: somebody may put another file in its place
        try:
            found = file.stat() if file.exists() else None
            if found and not stat.S_ISREG(found.st_mode):
                raise AccessFileError(f"access file {path}: found {stat.filemode(found.st_mode)}, wanted a plain file")
            if found and found.st_mode & FORBIDDEN_BITS:
                mode, wanted = stat.filemode(found.st_mode), "one that others cannot open: chmod 600"
                raise AccessFileError(f"access file {path}: found {mode}, wanted {wanted}")
            text = _changed(file.read_text() if found else "", path, change)
            with os.fdopen(fd, "w", encoding="utf-8", closefd=False) as writing:
                writing.write(text)
            if found or os.geteuid() == 0:  # the server that could read the file still can; or the folder's user can
                owner = found or file.parent.stat()
                os.fchown(fd, owner.st_uid, owner.st_gid)
            if found:
                os.fchmod(fd, stat.S_IMODE(found.st_mode))
            os.fsync(fd)
            fresh.replace(file)
        except BaseException:
            with suppress(FileNotFoundError):
                fresh.unlink()
            raise
        finally:
            os.close(fd)
    except (OSError, UnicodeDecodeError) as error:
        raise _unusable(path, error) from error


def _claim(fresh: Path) -> int:
    """Makes the file that will replace the present one, and keeps other edits out until then. Returns its number."""
    try:
        return os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    except FileExistsError:
        raise AccessFileError(
            f"found {fresh}: another command changes the access file; remove it if none does"
        ) from None


def _changed(text: str, path: str, change: Change) -> str:
    """The whole text with the changed entries."""
    tokens = parse(text, path)
    head, texts = _cut(text)
    if len(texts) != len(tokens):
        raise AccessFileError(f"access file {path}: wanted each token below a line [[token]] of its own, to change it")
    entries = change([Entry(token, piece) for token, piece in zip(tokens, texts, strict=True)])
    pieces = [head, *(one.text for one in entries)]
    joined = "".join(
        piece if not after or not piece.strip() or piece.endswith("\n\n") else f"{piece.rstrip()}\n\n"
        for piece, after in zip(pieces, [*pieces[1:], ""], strict=True)
    )
    if len(joined.encode()) > MAX_BYTES:
        raise AccessFileError(f"access file {path}: found {len(joined.encode())} bytes, wanted at most {MAX_BYTES}")
    if parse(joined, path) != [one.token for one in entries]:
        raise AccessFileError(f"access file {path}: its lines cannot be changed by a command: edit it by hand")
    return joined
