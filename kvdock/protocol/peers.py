"""Who is at the other end of a Unix socket, as the kernel says."""

from __future__ import annotations

import os
import socket
import struct
from typing import Final, NamedTuple

_CREDENTIALS: Final = struct.Struct("=iII")  # pid, uid, gid


class Credentials(NamedTuple):
    """A process that connected or, seen from the other end, one that listens."""

    pid: int
    uid: int


def credentials_of(connected: socket.socket) -> Credentials:
    """OSError if the kernel does not say."""
    raw = connected.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    pid, uid, _ = _CREDENTIALS.unpack(raw)
    return Credentials(pid, uid)


def require_trusted_server(connected: socket.socket, path: str) -> Credentials:
    """PermissionError unless the process that listens at `path` is this user's, or root's: anybody may have bound a
    socket there, and what it answers decides which memory is written and loaded."""
    found = credentials_of(connected)
    if found.uid not in (os.geteuid(), 0):
        raise PermissionError(f"the server at {path}: found user {found.uid}, wanted {os.geteuid()} or root")
    return found
