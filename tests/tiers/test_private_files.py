"""What a server and its mover make, others cannot open, even if the umask would let them."""

from __future__ import annotations

import os
import stat
from contextlib import suppress
from functools import partial
from pathlib import Path

import pytest
from api_helpers import ServerProcess, eventually
from tier_engine import TierEngine, manifest
from tier_server import PART, SETTINGS, is_served

from kvdock.client.client import Client
from kvdock.protocol.admin_schemas import ClearCache
from kvdock.shm.objects import SHM_DIR
from kvdock.tiers.disk.index import Index

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


def test_an_index_that_an_earlier_version_left_open_to_others_is_closed(tmp_path: Path) -> None:
    (tmp_path / "index.db").touch(0o644)
    index, _, _ = Index.open(tmp_path / "index.db", 1 << 20)
    index.close()
    assert open_to_others(list(tmp_path.iterdir())) == []
