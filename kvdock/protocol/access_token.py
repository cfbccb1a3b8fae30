"""Access tokens as clients hold them: one in a file (kvdock/api/access/access_file.py says which there are)."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Final

from kvdock.protocol.private_file import PrivateFileError, read_private

TOKEN_FILE_VARIABLE: Final = "KVDOCK_ACCESS_TOKEN_FILE"
"""Names the file for commands."""
_TOKEN: Final = re.compile(r"[\x21-\x7e]{16,256}")


def read_token(path: str | Path) -> str:
    """The only line of the file; '' of no file. Raises PrivateFileError."""
    if not path:
        return ""
    token = read_private(path).strip()
    if not _TOKEN.fullmatch(token):
        raise PrivateFileError(f"{path}: found {len(token)} characters, wanted one access token of 16 to 256")
    return token


def authorization(token: str) -> dict[str, str]:
    """The header of calls with that token; none for ''."""
    return {"authorization": f"Bearer {token}"} if token else {}
