"""What a server and its mover make, others cannot open, even if the umask would let them."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path

import pytest
from api_helpers import ServerProcess, eventually
from tier_engine import TierEngine, manifest
from tier_server import PART, SETTINGS, is_served

from kvdock.client.client import Client
from kvdock.protocol.admin_schemas import ClearCache
from kvdock.protocol.mover_schemas import MoverConfig
from kvdock.shm.objects import SHM_DIR
from kvdock.tiers.disk.index import Index
from kvdock.tiers.mover.opening import try_to_open
from kvdock.tiers.notes import Note
from kvdock.tiers.stores.objects import open_tier
from kvdock.tiers.tier import Deadline, TierError

LIMIT = 64 << 20

pytestmark = [pytest.mark.tiers, pytest.mark.timeout(120)]


def open_to_others(paths: list[Path]) -> list[str]:
    found = list[str]()
    for path in paths:
        with suppress(FileNotFoundError):  # the mover deletes what was cleared
            mode = path.lstat().st_mode
            found += [f"{stat.filemode(mode)} {path}"] if mode & 0o077 else []
    return found


def let_others_read() -> None:
    os.umask(0)


class OpenServer(ServerProcess):
    before = partial(let_others_read)


def test_nothing_that_a_server_and_its_mover_make_is_open_to_others(tmp_path: Path) -> None:
    (tmp_path / "objects").mkdir()
    server = OpenServer(**{
        **SETTINGS, "socket_path": str(tmp_path / "made" / "kvdock.sock"), "disk_path": str(tmp_path / "disk"),
        "objects_url": f"file://{tmp_path}/objects", "observe": "log,stream,metrics,curve,kv_events",
    })
    with server, Client(server.unix) as client:
        engine = TierEngine(server.unix, manifest(PART))
        is_served(server, 1)
        engine.store(engine.chain(8))
        eventually(lambda: all(one.objects == 8 for one in client.status().tiers), 60.0)
        client.clear(ClearCache())  # notes of generations, and orders to tiers
        eventually(lambda: any("-history-" in name for name in server.shared_memory()), 60.0)
        made = [
            path for folder in ("made", "disk", "objects") for path in (tmp_path / folder).rglob("*")
        ] + [tmp_path / "made", tmp_path / "disk", *(SHM_DIR / name for name in server.shared_memory())]
        engine.close()
        names, wrong = {path.name for path in made}, open_to_others(made)
    assert {"kvdock.sock", "index.db", "index.db-wal", "kvdock.lock"} <= names, names
    assert wrong == []


def opened(folder: Path) -> dict[str, str]:
    """Why the tier on disk and the store in a folder cannot be opened there; "": they can."""
    return try_to_open(MoverConfig(
        address="", instance_prefix="", disk_path=str(folder), disk_bytes=LIMIT, stores={"objects": f"file://{folder}"},
    ))


@pytest.mark.security
@pytest.mark.parametrize("mode", [0o777, 0o1777, 0o702])
def test_a_folder_that_others_may_write_to_is_not_used(tmp_path: Path, mode: int) -> None:
    """They could put chunks there, checksums and all."""
    tmp_path.chmod(mode)
    for name, why in opened(tmp_path).items():
        assert why.startswith(f"{name}: {tmp_path}: found drwx") and "that others cannot write to" in why
    assert list(tmp_path.iterdir()) == []
    tmp_path.chmod(0o2770)
    assert opened(tmp_path) == {"disk": "", "objects": ""}, "a volume of Kubernetes with the server's group"


@pytest.mark.security
@pytest.mark.skipif(os.geteuid() != 0, reason="only root can make a folder of another user")
def test_a_folder_of_another_user_is_not_used(tmp_path: Path) -> None:
    os.chown(tmp_path, 65534, -1)
    assert all(" of user 65534, wanted a folder of user 0 or root" in why for why in opened(tmp_path).values())


def make_sparse(path: Path) -> None:
    path.touch()
    os.truncate(path, 1 << 40)


@pytest.mark.security
@pytest.mark.parametrize("what", ["pipe", "folder", "link", "depth", "length"])
def test_what_is_no_file_of_orders_keeps_no_server_from_starting(tmp_path: Path, what: str) -> None:
    """It may have named anything that was cleared."""
    tmp_path.chmod(0o700)
    orders = tmp_path / "kvdock.sock.orders"
    make: dict[str, Callable[[], object]] = {
        "pipe": partial(os.mkfifo, orders), "folder": orders.mkdir, "link": partial(orders.symlink_to, "/dev/zero"),
        "depth": partial(orders.write_bytes, b"\x91" * 1_000_000), "length": partial(make_sparse, orders),
    }
    make[what]()
    with ServerProcess(
        **{**SETTINGS, "socket_path": f"{tmp_path}/kvdock.sock", "disk_path": f"{tmp_path}/disk"}
    ) as server:
        assert "cannot be read, so all that lower tiers have is cleared" in server.log_text()
        assert "Traceback" not in server.log_text()


def never_asked(note: Note | None) -> Note:
    raise AssertionError(note)


@pytest.mark.security
@pytest.mark.parametrize("name", ["index.db", "lock", "kvdock.lock"])
def test_a_link_in_the_place_of_a_file_leads_nowhere(tmp_path: Path, name: str) -> None:
    folder, victim = tmp_path / "folder", tmp_path / "victim"
    folder.mkdir(mode=0o700)
    (folder / name).symlink_to(victim)
    tiers = opened(folder)
    if name == "kvdock.lock":
        tier, deadline = open_tier(f"file://{folder}", Deadline(60.0)), Deadline(60.0)
        with pytest.raises(TierError, match="its lock cannot be opened"):
            tier.change(bytes(32), never_asked, deadline)
        tier.close(deadline)
    else:
        assert tiers["disk"].startswith(f"disk: {folder} cannot be opened: [Errno 40]")
    assert not victim.exists()


def test_an_index_that_an_earlier_version_left_open_to_others_is_closed(tmp_path: Path) -> None:
    (tmp_path / "index.db").touch(0o644)
    index, _ = Index.open(tmp_path / "index.db", 1 << 20)
    index.close()
    assert open_to_others(list(tmp_path.iterdir())) == []
