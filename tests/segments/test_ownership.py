"""Whose memory it is: what another user put into /dev/shm or at a socket is neither used, adopted nor removed, and no
server is kept from starting."""

from __future__ import annotations

import asyncio
import os
import secrets
import signal
import socket
import stat
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import pytest
from api_helpers import MIB, ServerProcess, attach, keys

from kvdock._core import SEGMENT_HEADER_BYTES
from kvdock.api.errors import StartupError
from kvdock.api.pool.adopt import ask_to_leave
from kvdock.api.pool.lock import PoolLock, left_pools, remove_stale, server_alive
from kvdock.api.pool.pool import open_pool
from kvdock.api.server import bind_unix
from kvdock.api.settings import Settings
from kvdock.client.client import Client
from kvdock.client.http_client import AsyncHttpClient, HttpClient
from kvdock.protocol.errors import ServerUnavailable
from kvdock.shm import objects as shm
from kvdock.shm.errors import ForeignObject
from kvdock.shm.segment import map_checked

pytestmark = pytest.mark.security

STRANGER = 64_999
"""A user that no machine has."""
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can make files of another user")


def named(kind: str, pool_id: int) -> Path:
    if kind == "segment":
        return Path(f"{shm.SHM_DIR}{shm.segment_name(pool_id, 0, 1)}")
    return shm.SHM_DIR / f"kvdock-{pool_id:016x}{'.lock' if kind == 'lock' else '-table'}"


@pytest.fixture
def planted() -> Iterator[Callable[[Path, str], None]]:
    """Puts something there; it is gone after the test."""
    made: list[Path] = []

    def plant(path: Path, what: str) -> None:
        made.append(path)
        target = path.with_name(path.name.replace("kvdock", "other"))
        if what == "folder":
            path.mkdir()
            return
        if what == "pipe":
            os.mkfifo(path, 0o666)
            return
        if what == "link":
            target.write_bytes(bytes(8192))
            target.chmod(0o600)
            made.append(target)
            path.symlink_to(target)
            return
        path.write_bytes(bytes(8192))
        path.chmod(0o666 if what == "open to others" else 0o600)
        if what == "linked twice":
            os.link(path, target)
            made.append(target)
        if what == "of another user":
            os.chown(path, STRANGER, STRANGER)

    yield plant
    for path in made:
        path.rmdir() if path.is_dir() and not path.is_symlink() else path.unlink(missing_ok=True)


FOREIGN = [
    "open to others", "linked twice", "link", "folder", "pipe",
    pytest.param("of another user", marks=needs_root),
]


@pytest.mark.parametrize("what", FOREIGN)
@pytest.mark.parametrize("kind", ["lock", "table", "segment"])
def test_what_is_not_ours_alone_stops_no_start_and_stays(
    kind: str, what: str, planted: Callable[[Path, str], None]
) -> None:
    path = named(kind, secrets.randbits(64))
    planted(path, what)
    assert path.name in shm.foreign_objects()
    with ServerProcess() as server, Client(server.unix) as client:
        assert client.status().status == "ok"
        said = " objects with names of kvdock that another user owns or may open; they are left alone: "
        assert server.log_text().count(said) == 1
    assert path.is_symlink() or path.exists()


@pytest.mark.parametrize("what", FOREIGN)
def test_a_forged_lock_file_is_neither_opened_nor_adopted(what: str, planted: Callable[[Path, str], None]) -> None:
    pool_id = secrets.randbits(64)
    planted(named("lock", pool_id), what)
    for refused in (lambda: server_alive(pool_id), lambda: PoolLock.adopt(pool_id)):
        with pytest.raises(ForeignObject, match="lock"):
            refused()
    assert pool_id not in [left.pool_id for left in left_pools()]
    assert named("lock", pool_id).name not in remove_stale(spare=lambda left: left.pool_id != pool_id)


@pytest.mark.parametrize("what", ["open to others", "linked twice", pytest.param("of another user", marks=needs_root)])
def test_a_segment_that_is_not_ours_alone_is_not_mapped(what: str, planted: Callable[[Path, str], None]) -> None:
    assert SEGMENT_HEADER_BYTES <= 8192
    pool_id = secrets.randbits(64)
    planted(named("segment", pool_id), what)
    with pytest.raises(ForeignObject, match="wanted -rw-------"):
        map_checked(shm.segment_name(pool_id, 0, 1), pool_id, 0)


@needs_root
def test_a_segment_that_this_user_may_not_open_is_refused_as_foreign(planted: Callable[[Path, str], None]) -> None:
    pool_id = secrets.randbits(64)
    planted(named("segment", pool_id), "our own")
    os.seteuid(STRANGER)
    try:
        with pytest.raises(ForeignObject, match="Permission denied"):
            map_checked(shm.segment_name(pool_id, 0, 1), pool_id, 0)
    finally:
        os.seteuid(0)


@pytest.mark.parametrize("name", ["/../run/kvdock-0000000000000007-table", "/kvdock-7-table", "/other", "/", ""])
def test_a_name_that_is_not_of_a_pool_is_neither_made_nor_opened_nor_removed(name: str) -> None:
    for refused in (lambda: shm.create_region(name, 4096), lambda: shm.open_region(name), lambda: shm.unlink(name)):
        with pytest.raises(ValueError, match="wanted /kvdock-POOL-"):
            refused()


@pytest.mark.parametrize("how", ["open to others", pytest.param("of another user", marks=needs_root)])
def test_a_pool_that_others_could_open_is_not_adopted_and_another_one_is_served(how: str) -> None:
    """Its last owner may be at work in it: as in the reviewers' attack, whose pool named the victim's socket."""
    with ServerProcess() as dead:
        with Client(dead.unix) as client:
            attach(client).store(keys(2))
        dead.stop(signal.SIGKILL)
        left = [shm.SHM_DIR / name for name in dead.shared_memory()]
        for path in left:
            if how == "open to others":
                path.chmod(0o666)
            else:
                os.chown(path, STRANGER, STRANGER)
        try:
            with ServerProcess(socket_path=dead.settings["socket_path"]) as server, Client(server.unix) as client:
                assert server.pool_id != dead.pool_id
                assert client.status().chunks.ready == 0
            assert all(path.exists() for path in left)
        finally:
            for path in left:
                path.unlink()


@needs_root
def test_a_pool_grows_whatever_names_another_user_takes_for_its_next_segments() -> None:
    """Also after adoption: the pool's id is there for all to see, and so is how its segments are numbered."""
    squatted: list[Path] = []

    def squat(pool_id: int) -> None:
        for path in (Path(f"{shm.SHM_DIR}{shm.segment_name(pool_id, 1, 0)}"),
                     shm.SHM_DIR / f"kvdock-{pool_id:016x}-0001"):
            path.write_bytes(bytes(8192))
            os.chown(path, STRANGER, STRANGER)
            squatted.append(path)

    small = {"pool_bytes": 4 * MIB, "segment_bytes": MIB, "on_exit": "keep"}
    with ServerProcess(**small) as server:
        try:
            squat(server.pool_id)
            with Client(server.unix) as client:
                attach(client).store(keys(120))
                names = [one.name for one in client.segments().segments]
                assert len(names) >= 2 and not client.status().reasons
            server.stop(signal.SIGKILL)
            with ServerProcess(**{**server.settings, "on_exit": "remove"}) as second, Client(second.unix) as client:
                assert second.pool_id == server.pool_id
                assert [one.name for one in client.segments().segments] == names
                assert client.status().chunks.ready == 120
            assert all(path.exists() for path in squatted)
        finally:
            for path in squatted:
                path.unlink()


def test_a_pool_is_made_under_the_first_names_that_nobody_has_taken(tmp_path: Path) -> None:
    """Who sees a new pool's lock knows the name of its table."""
    taken = [shm.SHM_DIR / name for name in ("kvdock-00000000000000a1-table", "kvdock-00000000000000a2.lock")]
    settings = Settings.load({"pool_bytes": 4 * MIB, "socket_path": str(tmp_path / "kvdock.sock")})
    ids = iter([0xA1, 0xA2])
    try:
        for path in taken:
            path.touch(mode=0o666)
        with closing(open_pool(settings, lambda bits: next(ids, secrets.randbits(64)) if bits == 64 else 5)) as pool:
            assert pool.pool_id not in (0xA1, 0xA2)
        with pytest.raises(StartupError, match=r"somebody else was quicker .*/kvdock-00000000000000a1-table"):
            open_pool(settings, lambda bits: 0xA1 if bits == 64 else 5)
        assert all(path.exists() for path in taken)
        assert not shm.lock_path(0xA1).exists() and not (shm.SHM_DIR / "kvdock-00000000000000a2-table").exists()
    finally:
        for path in taken:
            path.unlink()


def test_the_name_of_a_segment_says_nothing_of_the_next_ones_name() -> None:
    with ServerProcess(pool_bytes=4 * MIB, segment_bytes=MIB) as server, Client(server.unix) as client:
        attach(client).store(keys(120))
        drawn = {one.name.rpartition("-")[2] for one in client.segments().segments}
        assert len(drawn) >= 2 and all(len(text) == 16 for text in drawn)


# --------------------------------------------------------------------------- sockets


SQUATTER = """
import os, socket, sys
os.setuid(int(sys.argv[2]))
with socket.socket(socket.AF_UNIX) as sock:
    sock.bind(sys.argv[1]); os.chmod(sys.argv[1], 0o777); sock.listen(); print("bound", flush=True)
    sys.stdin.read()
"""


@pytest.fixture
def squatted() -> Iterator[str]:
    """The path of a socket that another user has bound, where everybody may."""
    with tempfile.TemporaryDirectory(prefix="kvdock-test-") as folder:
        Path(folder).chmod(0o1777)
        path = f"{folder}/kvdock.sock"
        command = [sys.executable, "-c", SQUATTER, path, str(STRANGER)]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as squatter:
            assert squatter.stdout is not None and squatter.stdin is not None
            assert squatter.stdout.readline() == "bound\n"
            yield path
            squatter.stdin.close()


@needs_root
@pytest.mark.parametrize("kind", [Client, HttpClient])
def test_another_users_server_is_not_believed(squatted: str, kind: type[Client]) -> None:
    with kind(f"unix:{squatted}") as client, pytest.raises(ServerUnavailable, match=f"found user {STRANGER}, wanted"):
        client.status(timeout_s=0.5)
    with pytest.raises(StartupError, match=f"found user {STRANGER}, wanted 0: start this one as user {STRANGER}"):
        ask_to_leave(squatted, patience_s=1.0)


@needs_root
def test_another_users_server_is_not_believed_by_those_who_await_its_answers(squatted: str) -> None:
    async def ask() -> None:
        async with AsyncHttpClient(f"unix:{squatted}") as client:
            await client.status(timeout_s=0.5)

    with pytest.raises(ServerUnavailable, match=f"found user {STRANGER}, wanted"):
        asyncio.run(ask())


def test_a_socket_is_not_bound_where_others_could_replace_it() -> None:
    with tempfile.TemporaryDirectory(prefix="kvdock-test-") as folder:
        for mode in (0o777, 0o1777, 0o770):
            Path(folder).chmod(mode)
            with pytest.raises(StartupError, match="nobody but user") as refused, bind_unix(f"{folder}/kvdock.sock"):
                pytest.fail("bound")
            assert refused.value.code == "bad_address"
        Path(folder).chmod(0o755)
        with bind_unix(f"{folder}/kvdock.sock") as sock:
            assert stat.S_IMODE(Path(sock.getsockname()).stat().st_mode) == 0o600


def test_a_missing_socket_folder_is_made_for_nobody_else(tmp_path: Path) -> None:
    with bind_unix(str(tmp_path / "own" / "kvdock.sock")) as sock:
        assert isinstance(sock, socket.socket)
        assert stat.S_IMODE((tmp_path / "own").stat().st_mode) == 0o700


@needs_root
def test_a_folder_that_is_another_users_link_is_not_used(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir(mode=0o700)
    link = tmp_path / "link"
    link.symlink_to(tmp_path / "real")
    os.lchown(link, STRANGER, STRANGER)
    with pytest.raises(StartupError, match="socket folder"), bind_unix(str(link / "kvdock.sock")):
        pytest.fail("bound")


@pytest.mark.parametrize(("path", "cannot"), [
    ("file/kvdock.sock", "use the socket path"), ("a/b/kvdock.sock", "use the socket's folder"),
])
def test_a_socket_that_cannot_be_made_names_the_user_and_what_to_do(tmp_path: Path, path: str, cannot: str) -> None:
    (tmp_path / "file").touch(mode=0o600)
    wanted = f"choose another socket_path, in a folder that user {os.geteuid()} may write to"
    with pytest.raises(StartupError, match=f"^cannot {cannot} .*; {wanted}$"), bind_unix(str(tmp_path / path)):
        pytest.fail("bound")


def test_objects_and_socket_of_a_server_are_for_its_user_alone() -> None:
    with ServerProcess() as server:
        for name in server.shared_memory():
            assert shm.is_own((shm.SHM_DIR / name).stat()), name
        assert len(server.pool_memory()) == 3
        assert stat.S_IMODE(Path(server.unix.removeprefix("unix:")).stat().st_mode) == 0o600
        assert server.settings["pool_bytes"] == 16 * MIB
