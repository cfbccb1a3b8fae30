"""An engine that cannot use its server computes, and says in one sentence why and what to do: another user's server,
none, another /dev/shm, no kernels."""

from __future__ import annotations

import ctypes
import logging
import os
import subprocess
from functools import partial
from pathlib import Path

import forks
import pytest
from api_helpers import ServerProcess

from kvdock import _core
from kvdock.datapath.cuda import require_cuda
from kvdock.datapath.errors import NoCuda

NOBODY = 65534
NEW_MOUNTS = 0x20000
"""CLONE_NEWNS of Linux."""
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="another user, or another /dev/shm, is for root to make")
forks.preload("kvdock.engine.ranks")


def generate(address: str, uid: int | None, has_own_shm: bool) -> None:
    """An engine's program."""
    import encodings.idna  # noqa: F401  # another user may be unable to read it later

    from kvdock.connectors.engine_connector import ConnectorSettings
    from kvdock.connectors.session import Identity
    from kvdock.engine.config import preset
    from kvdock.engine.engine import Engine
    from kvdock.engine.kv_cache import KVCache
    from kvdock.engine.kvdock import connect

    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    if has_own_shm:
        assert ctypes.CDLL(None).unshare(NEW_MOUNTS) == 0
        subprocess.run(["mount", "--make-rprivate", "/"], check=True)
        subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64m", "none", "/dev/shm"], check=True)
    if uid is not None:
        os.setuid(uid)
    config = preset("tiny")
    kv = KVCache(config)
    connector = connect(config, kv, ConnectorSettings(address), Identity("i", "m"), chunk_tokens=64)
    engine = Engine(config, connector, kv=kv)
    done, = engine.generate([list(range(200))])
    engine.close()
    print(len(done.output_tokens), flush=True)


def sentence(address: str, *, uid: int | None = None, has_own_shm: bool = False) -> str:
    """The one line that an engine logs while it computes all of its prompt."""
    done = forks.run(partial(generate, address, uid, has_own_shm), timeout_s=120)
    assert done.returncode == 0 and done.stdout == "16\n", done
    (line,) = done.stderr.splitlines()
    assert "no kvdock server can be used yet, so every lookup is a miss" in line
    return line


def test_without_a_server(tmp_path: Path) -> None:
    assert "start one with `kvdock serve`" in sentence(f"unix:{tmp_path}/kvdock.sock")


@needs_root
def test_beside_a_server_of_another_user(server: ServerProcess) -> None:
    """Its socket lies in a folder of its user alone."""
    found = sentence(server.unix, uid=NOBODY)
    assert "Permission denied" in found and "run engine and server as one user" in found
    assert "access token" not in found, "none opens a folder of another user"


@needs_root
def test_beside_a_server_of_another_user_that_hears_it(server: ServerProcess) -> None:
    found = sentence(server.http, uid=NOBODY)
    assert "unauthenticated" in found and "name an access token" in found


@needs_root
def test_with_another_dev_shm(server: ServerProcess) -> None:
    """As in a container: a small one of its own."""
    found = sentence(server.unix, has_own_shm=True)
    assert "is not the one of this process" in found and "--ipc=host" in found


def test_without_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """On any machine: what the driver and the build say is made up here."""
    monkeypatch.setattr(_core, "cuda_unavailable", lambda: "")
    monkeypatch.setattr(_core, "cuda_devices", lambda: ["a GPU"])
    monkeypatch.setattr(_core, "cuda_kernels", list)
    with pytest.raises(NoCuda, match=r"made without nvcc .* install kvdock's wheel, or nvcc and then kvdock"):
        require_cuda(0)
