"""Changes of the access file by commands: a token is added, replaced by the next one of its name, or removed.

Invariants: an edit takes effect as a whole or not at all, also if its process is killed; the file keeps its owner,
group, mode, links, comments and quotas, and the tokens that the edit does not name; two edits never lose each other's
changes. The text of a token is returned once and is in no file.
"""

from __future__ import annotations

import os
import re
import secrets
import stat
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from typing import Literal, NamedTuple

import msgspec

from kvdock.api.access.access_file import Token, digest_of, lines_of, parse, shown
from kvdock.api.errors import AccessFileError
from kvdock.protocol.access import FORBIDDEN_BITS, MAX_BYTES
from kvdock.protocol.wire_types import OWN_TENANT, Scope

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
        raise AccessFileError(f"access file {path}: {error}") from error


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


# ------------------------------------------------------------------ the text


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


# ------------------------------------------------------------------ the file


def _edit(path: str, change: Change) -> None:
    """Replaces the file by one with changed entries. Raises AccessFileError; then the file is unchanged."""
    try:
        file = Path(path).resolve()
        fresh = file.with_name(f"{file.name}.new")
        _claim(fresh)
        try:
            found = file.stat() if file.exists() else None
            if found and found.st_mode & FORBIDDEN_BITS:
                mode, wanted = stat.filemode(found.st_mode), "one that others cannot open: chmod 600"
                raise AccessFileError(f"access file {path}: found {mode}, wanted {wanted}")
            text = _changed(file.read_text() if found else "", path, change)
            with fresh.open("w") as writing:
                writing.write(text)
                writing.flush()
                os.fsync(writing.fileno())
            if found:  # the server that could read the file still can
                fresh.chmod(stat.S_IMODE(found.st_mode))
                os.chown(fresh, found.st_uid, found.st_gid)
            fresh.replace(file)
        except BaseException:
            with suppress(FileNotFoundError):
                fresh.unlink()
            raise
    except (OSError, UnicodeDecodeError) as error:
        raise AccessFileError(f"access file {path}: {error}") from error


def _claim(fresh: Path) -> None:
    """Makes the file that will replace the present one, and keeps other edits out until then."""
    try:
        fresh.touch(mode=0o600, exist_ok=False)
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
