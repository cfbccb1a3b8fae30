"""Binds the two listening sockets. A live server's address is refused; a dead server's is taken over."""

from __future__ import annotations

import errno
import logging
import os
import socket
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from kvdock.api.errors import StartupError
from kvdock.api.settings import is_loopback

log = logging.getLogger("kvdock.api")


@contextmanager
def bind_tcp(host: str, port: int) -> Iterator[socket.socket]:
    """A bound socket, not yet listening; port 0: the system chooses. Warns beyond loopback: the port has no TLS, and
    access tokens cross it. Raises StartupError: address_in_use, bad_address."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
    except socket.gaierror as error:
        raise StartupError("bad_address", f"host {host!r}: {error.strerror}") from error
    with socket.socket(family, kind, protocol) as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            sock.bind(address)
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                raise StartupError("address_in_use", f"port {port} on {host} is in use: choose another") from error
            raise StartupError("bad_address", f"cannot listen on {host}:{port}: {error.strerror}") from error
        if not is_loopback(host):
            log.warning(
                "the port on %s speaks plain HTTP: whoever can read the network there reads access tokens and answers; "
                "keep it on loopback, behind a proxy with TLS (docs/operate/security.md)", host,
            )
        yield sock


@contextmanager
def bind_unix(path: str) -> Iterator[socket.socket]:
    """A bound socket whose file has mode 0600; the file is removed at the end if it is still the same one.

    Raises StartupError: socket_in_use if a live server answers there, bad_address if the file is something else, or if
    others could put something else in its place."""
    _require_own_folder(Path(path).absolute().parent)
    _remove_stale(path)
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
        umask = os.umask(0o177)  # nobody else may connect, not even between bind and a chmod
        try:
            sock.bind(path)
            sock.listen()  # at once: a socket that refuses connections would look stale to another server
        except OSError as error:
            raise StartupError("bad_address", f"cannot make the socket {path}: {error.strerror}") from error
        finally:
            os.umask(umask)
        inode = _inode(path)
        try:
            yield sock
        finally:
            if _inode(path) == inode:
                Path(path).unlink()


def _require_own_folder(folder: Path) -> None:
    """Makes a missing folder, which only this user can open."""
    try:
        with suppress(FileExistsError):
            folder.mkdir(mode=0o700)
        found, link = folder.stat(), folder.lstat()
    except OSError as error:
        raise StartupError("bad_address", f"socket folder {folder}: {error.strerror}") from error
    if not {found.st_uid, link.st_uid} <= {os.geteuid(), 0} or found.st_mode & 0o022:
        raise StartupError(
            "bad_address",
            f"socket folder {folder}: found {stat.filemode(found.st_mode)} of user {found.st_uid}, wanted one that "
            f"nobody but user {os.geteuid()} or root can write to: choose another socket_path",
        )


def _remove_stale(path: str) -> None:
    try:
        mode = Path(path).lstat().st_mode
    except FileNotFoundError:
        return
    except OSError as error:
        raise StartupError("bad_address", f"socket path {path}: {error.strerror}") from error
    if not stat.S_ISSOCK(mode):
        raise StartupError("bad_address", f"{path} exists and is no socket: choose another socket_path")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(1.0)
        try:
            probe.connect(path)
        except (ConnectionRefusedError, FileNotFoundError):
            pass  # nobody listens: its server is dead
        except OSError as error:
            raise StartupError("socket_in_use", f"socket {path}: {error}") from error
        else:
            raise StartupError("socket_in_use", f"another server answers at {path}: choose another socket_path")
    try:
        Path(path).unlink(missing_ok=True)
    except OSError as error:
        raise StartupError("bad_address", f"cannot replace the stale socket {path}: {error.strerror}") from error


def _inode(path: str) -> int | None:
    try:
        return Path(path).stat().st_ino
    except FileNotFoundError:
        return None
