"""New access tokens: an entry of the access file holds the token's digest, its owner keeps the token."""

from __future__ import annotations

import json
import os
import secrets
import stat
from collections.abc import Sequence
from pathlib import Path

from kvdock.api.access.access_file import digest_of, read
from kvdock.api.errors import AccessFileError
from kvdock.protocol.wire_types import OWN_TENANT

TOKEN_BYTES = 32


def entry(name: str, token: str, scopes: Sequence[str], tenant: str = OWN_TENANT) -> str:
    """The token's lines in an access file. The scopes come last: an entry that is cut short lacks them, and is refused.
    """
    lines = ["[[token]]", f"name = {json.dumps(name)}", f'sha256 = "{digest_of(token.encode()).hex()}"']
    lines += [f"tenant = {json.dumps(tenant)}"] if tenant else []
    return "\n".join([*lines, f"scopes = {json.dumps(list(scopes))}"]) + "\n"


def add_token(path: str, name: str, scopes: Sequence[str], tenant: str = OWN_TENANT) -> str:
    """A new token, once the file has its entry; the file is made if it is missing. AccessFileError: it is as it was."""
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
