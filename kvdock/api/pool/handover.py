"""Asks the server at a socket to end and leave its pool: `kvdock serve --takeover`, a rolling upgrade.

The kernel names the process that listens at the socket. It gets the signal HAND_OVER, finishes its reservations and
leaves its pool. A server that does not know the signal is killed by it, which leaves the pool too. The new server then
adopts the pool (kvdock/api/pool/adopt.py).
"""

from __future__ import annotations

import os
import select
import signal
import socket
from typing import Final

from kvdock.api.errors import StartupError
from kvdock.protocol.access import require_trusted_server

HAND_OVER: Final = signal.SIGUSR2
CONNECT_S: Final = 1.0


def ask_to_leave(socket_path: str, *, patience_s: float) -> int:
    """Returns once the server that listened there has ended: its process id; 0 if none listened.

    Raises StartupError(socket_in_use): it belongs to another user or pid namespace, or did not end within `patience_s`.
    """
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as asking:
        asking.settimeout(CONNECT_S)
        try:
            asking.connect(socket_path)
        except (FileNotFoundError, ConnectionRefusedError):
            return 0
        except OSError as error:
            raise StartupError("socket_in_use", f"socket {socket_path}: {error}") from error
        try:
            pid = require_trusted_server(asking, socket_path).pid
        except PermissionError as error:
            raise StartupError("socket_in_use", str(error)) from error
        try:
            process = os.pidfd_open(pid)
        except OSError as error:
            raise StartupError(
                "socket_in_use", f"the server at {socket_path} cannot be asked to leave: process {pid}: {error}"
            ) from error
        try:
            _end(process, pid, asking, patience_s)
        finally:
            os.close(process)
    return pid


def _end(process: int, pid: int, connection: socket.socket, patience_s: float) -> None:
    connection.setblocking(False)
    try:
        # While our connection is open its server lives, so the descriptor names that server and no later process.
        if connection.recv(1) == b"":
            return
    except BlockingIOError:
        pass
    try:
        signal.pidfd_send_signal(process, HAND_OVER)
    except ProcessLookupError:
        return
    except PermissionError as error:
        raise StartupError("socket_in_use", f"process {pid} is another user's: it cannot be asked to leave") from error
    if not select.select([process], [], [], patience_s)[0]:
        raise StartupError("socket_in_use", f"process {pid} has not ended within {patience_s:g} s of being asked to")
