"""Where a server is, and who may use it: its address, access tokens in files that nobody else can read, and the user at
the other end of a Unix socket."""

from __future__ import annotations

import os
import re
import socket
import stat
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Final, NamedTuple

from kvdock.protocol.errors import KvdockError

ADDRESS_VARIABLE: Final = "KVDOCK_ADDRESS"
"""The environment variable that names the server for commands and connectors: unix:/path or http://host:port."""
SOCKET_VARIABLE: Final = "KVDOCK_SOCKET_PATH"
"""The server's own setting, which commands and connectors follow."""
TRUSTED_UID_VARIABLE: Final = "KVDOCK_TRUSTED_UID"
"""The user id whose server root's engines and commands trust, too."""
NOBODY: Final = -1
"""Where a user id is wanted: nobody's."""
SERVICE_SOCKET: Final = "/run/kvdock/kvdock.sock"
"""Where the shipped systemd unit, image and DaemonSet put the socket."""
CONNECTOR_PREFIX: Final = "KVDOCK_VLLM_"
"""The prefix of the variables of the vLLM connector's settings; no setting of the server begins with it."""


def default_socket_path(environ: Mapping[str, str], run_user: Path = Path("/run/user")) -> str:
    """The default socket of one user's server and engines: in the folder that the system made for the user, whether the
    environment names it or not, else in one under /tmp, which the server makes."""
    for folder in (environ.get("XDG_RUNTIME_DIR", ""), run_user / str(os.getuid())):
        if folder and Path(folder).is_dir():
            return str(Path(folder) / "kvdock.sock")
    return f"/tmp/kvdock-{os.getuid()}/kvdock.sock"


def default_address(environ: Mapping[str, str]) -> str:
    """The address of the server that the environment names, else of this user's, at its default socket."""
    socket_path = environ.get(SOCKET_VARIABLE) or default_socket_path(environ)
    return environ.get(ADDRESS_VARIABLE) or f"unix:{socket_path}"


def trusted_uid_in(environ: Mapping[str, str]) -> int:
    """The user id that the environment names; NOBODY if it names none. Raises ValueError."""
    text = environ.get(TRUSTED_UID_VARIABLE, "")
    if text and not (text.isascii() and text.isdigit()):
        raise ValueError(f"{TRUSTED_UID_VARIABLE}: found {text!r}, wanted a user id, as a number")
    return int(text) if text else NOBODY


# --------------------------------------------------------------------------- access tokens

MAX_BYTES: Final = 1 << 20
FORBIDDEN_BITS: Final = 0o037
"""The permission bits that a private file must not have. The group may read it: in containers, where files belong to
root, that is how a server reads them."""


class PrivateFileError(KvdockError, ValueError):
    """The file cannot be read, or others may read or write it; the message names the file."""


def read_private(path: str | Path) -> str:
    """Returns the text of a regular file that belongs to this user or to root, and that others can neither read nor
    write, nor put another one in its place: an older one of root, with tokens that were revoked. Raises
    PrivateFileError."""
    try:
        _require_closed_folders(path)
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        try:
            _require_private(path, os.fstat(fd))
            with os.fdopen(fd, encoding="utf-8", closefd=False) as file:
                return file.read()
        finally:
            os.close(fd)
    except PermissionError as error:
        uid = os.geteuid()
        advice = f"give it to that user (chown {uid}), or let a group of that user read it (chmod 640)"
        raise PrivateFileError(f"{path}: user {uid} may not read it: {advice}") from error
    except OSError as error:
        raise PrivateFileError(f"{path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise PrivateFileError(f"{path}: {error}") from error


def _require_private(path: str | Path, found: os.stat_result) -> None:
    if not stat.S_ISREG(found.st_mode) or found.st_uid not in (os.geteuid(), 0):
        raise PrivateFileError(f"{path}: found {_shown(found)}, wanted a file of user {os.geteuid()} or root")
    if found.st_mode & FORBIDDEN_BITS:
        raise PrivateFileError(f"{path}: found {_shown(found)}, wanted one that others cannot open: chmod 600")
    if found.st_size > MAX_BYTES:
        raise PrivateFileError(f"{path}: found {found.st_size} bytes, wanted at most {MAX_BYTES}")


def _require_closed_folders(path: str | Path) -> None:
    for folder in {Path(path).absolute().parent, Path(path).resolve().parent}:
        found = folder.stat()
        if found.st_mode & stat.S_IWOTH and not found.st_mode & stat.S_ISVTX:
            wanted = "a folder that others cannot write to"
            raise PrivateFileError(f"{path}: found {_shown(found)} at {folder}, wanted {wanted}")


def _shown(found: os.stat_result) -> str:
    return f"{stat.filemode(found.st_mode)} of user {found.st_uid}"


TOKEN_FILE_VARIABLE: Final = "KVDOCK_ACCESS_TOKEN_FILE"
"""The environment variable that names the file of the access token for commands."""
_TOKEN: Final = re.compile(r"[\x21-\x7e]{16,256}")


def read_token(path: str | Path) -> str:
    """Returns the token in the file, its only line; '' if `path` is empty. Raises PrivateFileError."""
    if not path:
        return ""
    token = read_private(path).strip()
    if not _TOKEN.fullmatch(token):
        raise PrivateFileError(f"{path}: found {len(token)} characters, wanted one access token of 16 to 256")
    return token


def authorization(token: str) -> dict[str, str]:
    """The HTTP header that carries the token; no header for ''."""
    return {"authorization": f"Bearer {token}"} if token else {}


class Identity(NamedTuple):
    """As whom, and by which way, a caller uses sessions of its tenant."""

    token: str | None
    """The name of its token. None: it may use every session of its tenant, as the server's own user may."""
    is_unix: bool


# --------------------------------------------------------------------------- the other end of a socket

_CREDENTIALS: Final = struct.Struct("=iII")  # pid, uid, gid


class Credentials(NamedTuple):
    """A process that connected or, seen from the other end, one that listens."""

    pid: int
    uid: int


def credentials_of(connected: socket.socket) -> Credentials:
    """The credentials of the process at the other end. Raises OSError if the kernel does not report them."""
    raw = connected.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    pid, uid, _ = _CREDENTIALS.unpack(raw)
    return Credentials(pid, uid)


def require_trusted_server(
    connected: socket.socket, path: str, *, trusts_service: bool = False, trusted_uid: int = NOBODY
) -> Credentials:
    """Raises PermissionError unless the process that listens at `path` is this user's, or root's: anybody may have
    bound a socket there, and its answers decide which memory is written and loaded.

    `trusted_uid`: a user whose server is accepted, too. `trusts_service`: root also accepts the server of a user for
    whom root has made the socket's folder. Only commands may ask for this: they map no memory.
    """
    found = credentials_of(connected)
    if found.uid in (os.geteuid(), 0, trusted_uid):
        return found
    if trusts_service and os.geteuid() == 0 and _is_made_for(found.uid, Path(path).parent.resolve()):
        return found
    remedy = f"; if that is kvdock's user, set {TRUSTED_UID_VARIABLE}={found.uid}" if os.geteuid() == 0 else ""
    raise PermissionError(f"the server at {path}: found user {found.uid}, wanted {os.geteuid()} or root{remedy}")


def _is_made_for(uid: int, folder: Path) -> bool:
    """Whether only root can have given the folder to this user, so that nobody else can bind a socket in it.

    A folder in /tmp is not: whoever came first has made it.
    """
    found = folder.stat()
    if found.st_uid not in (uid, 0) or found.st_mode & 0o022:
        return False
    child = found
    for parent in folder.parents:
        found = parent.stat()
        is_shared = found.st_mode & 0o022 and not (found.st_mode & stat.S_ISVTX and child.st_uid == 0)
        if found.st_uid != 0 or is_shared:
            return False
        child = found
    return True
