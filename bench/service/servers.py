"""The caches that an engine is measured with: none, vLLM's own offload, kvdock, and the peers that are installed.

Each kind gives the connector's setting; LMCache and PegaFlow have a server of their own, as kvdock has.
"""

from __future__ import annotations

import importlib.machinery
import os
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

OURS = ("kvdock", "kvdock_packed", "kvdock_disk", "kvdock_packed_disk", "kvdock_packed_hinted")
"""packed: its pool keeps KV packed; disk: with a tier on disk; hinted: requests tell that their session ends."""
KINDS = ("off", "native", *OURS, "lmcache", "pegaflow")
PACKAGE = {"lmcache": "lmcache", "pegaflow": "pegaflow"}
START_S = 90.0


def installed(kind: str, path: str) -> bool:
    """Whether `kind` can run here; `path`: a folder of its own for its packages, or ""."""
    return kind not in PACKAGE or folder_of(kind, path) is not None


def folder_of(kind: str, path: str) -> Path | None:
    """The folder of the kind's package; None if it is not installed."""
    found = importlib.machinery.PathFinder.find_spec(PACKAGE[kind], [*filter(None, [path]), *sys.path])
    return Path(found.origin).parent if found is not None and found.origin else None


def environment(path: str) -> dict[str, str]:
    """The environment of a process that searches `path` for packages before the folders of this process."""
    folders = [*filter(None, [path]), str(Path(__file__).parents[2]), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {**os.environ, "PYTHONPATH": ":".join(folders), "LMCACHE_TRACK_USAGE": "false"}


@contextmanager
def connector(
    kind: str, *, host_bytes: int, engines: int, path: str, kvdock: Mapping[str, Any], server: Mapping[str, Any],
    address: str | None, namespace: str,
) -> Iterator[dict[str, Any] | None]:
    """The connector's setting while its server runs. `host_bytes`: for all engines together, in one pool where they can
    share one. `kvdock`: more settings of our connector; `server`: of our server, unless one runs at `address`.
    RuntimeError: a server did not start."""
    common: dict[str, Any] = {"kv_role": "kv_both"}
    if kind == "off":
        yield None
    elif kind == "native":
        share = {"cpu_bytes_to_use": host_bytes // engines}
        yield common | {"kv_connector": "OffloadingConnector", "kv_connector_extra_config": share}
    elif kind in OURS:
        with nullcontext(address) if address else our_server(host_bytes, server) as found:
            yield common | {
                "kv_connector": "KvdockConnector", "kv_connector_module_path": "kvdock.connectors.vllm",
                "kv_load_failure_policy": "recompute",
                "kv_connector_extra_config": {
                    "address": found, "weights_digest": namespace, "pack": "on" if "packed" in kind else "off", **kvdock
                },
            }
    elif kind == "lmcache":
        port, health = free_port(), free_port()
        gib = str(host_bytes >> 30)
        command = [
            sys.executable, "-c", "from lmcache.cli.main import main; main()", "server", "--host", "localhost",
            "--port", str(port), "--http-port", str(health), "--chunk-size", "256", "--eviction-policy", "LRU",
            "--l1-size-gb", gib, "--l1-init-size-gb", gib,
        ]
        with running(command, f"http://127.0.0.1:{health}/healthcheck", environment(path)):
            extra = {"lmcache.mp.host": "tcp://localhost", "lmcache.mp.port": port}
            yield common | {"kv_connector": "LMCacheMPConnector", "kv_connector_extra_config": extra}
    else:
        # The ports are those of this server alone, and its connector finds it by them.
        folder = folder_of(kind, path)
        assert folder is not None, "what is not installed is left out"
        command = [str(folder / "pegaflow-server-py"), "--pool-size", f"{host_bytes >> 30}gb", "--devices", "0"]
        with running(command, "http://127.0.0.1:9091/health", environment(path)):
            yield common | {"kv_connector": "PegaKVConnector", "kv_connector_module_path": "pegaflow.connector"}


@contextmanager
def on_disk(folder: Path, gib: float) -> Iterator[dict[str, Any]]:
    """Settings of our server for a tier in `folder`, which is empty at first and removed afterwards."""
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="kvdock-bench-", dir=folder.resolve()) as at:
        yield {"disk_path": at, "disk_bytes": int(gib * (1 << 30))}


@contextmanager
def our_server(pool_bytes: int, settings: Mapping[str, Any]) -> Iterator[str]:
    from bench.serving import ServerProcess  # imports the server, which an engine's Python may lack

    with ServerProcess("serve", pool_bytes=pool_bytes, growth="ahead", **settings) as process:
        yield process.unix


@contextmanager
def running(command: list[str], health: str, env: Mapping[str, str]) -> Iterator[None]:
    """A server's process, from its first healthy answer on."""
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=env)
    try:
        until_s = time.monotonic() + START_S
        while not answers(health):
            if process.poll() is not None or time.monotonic() > until_s:
                raise RuntimeError(f"{command[0]} did not start, wanted an answer at {health}")
            time.sleep(0.05)  # between two checks whether the server answers
        yield
    finally:
        process.terminate()
        try:
            process.wait(10.0)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=1.0) as answer:
            return bool(answer.status == 200)
    except OSError:
        return False


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as sock:
        return int(sock.getsockname()[1])
