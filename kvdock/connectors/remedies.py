"""What a person can do about an engine that does not reach its server."""

from __future__ import annotations

import os

from kvdock.protocol.errors import ApiError, ServerUnavailable
from kvdock.shm.errors import ForeignObject
from kvdock.shm.objects import SHM_DIR

ONE_USER = "run engine and server as one user, or let access_token_file name an access token (kvdock token)"
START = "start one with `kvdock serve`, or name its address in KVDOCK_ADDRESS"
SAME_SHM = (
    f"the server answers, and its {SHM_DIR} is not the one of this process: in containers, give both the host's, as "
    "with --ipc=host"
)


def remedy(error: BaseException) -> str:
    """A sentence without a full stop; "": none is known."""
    if isinstance(error, ApiError):
        return ONE_USER if error.code in ("unauthenticated", "forbidden") else ""
    if isinstance(error, ServerUnavailable):
        return _of_connection(error.__cause__)
    if isinstance(error, ForeignObject):
        return ONE_USER
    if isinstance(error, FileNotFoundError) and str(error.filename).startswith(f"{SHM_DIR}/"):
        return SAME_SHM
    return ""


def _of_connection(cause: BaseException | None) -> str:
    if isinstance(cause, PermissionError):
        return "" if os.geteuid() == 0 else ONE_USER  # what root can do, require_trusted_server has said
    return START if isinstance(cause, (FileNotFoundError, ConnectionRefusedError)) else ""
