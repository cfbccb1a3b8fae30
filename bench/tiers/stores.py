"""Stores that are started on this machine for a measurement: Redis, a folder and an S3 server for objects, Mooncake."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from urllib.request import Request, urlopen

from kvdock.tiers.tier import Deadline, Tier

START_S = 30.0
OPEN_S = 30.0


class CannotStart(Exception):
    """A store cannot be started here, with the reason."""


def opened(url: str) -> Tier:
    """Opens the tier of a URL. Raises TierError, also if the package that it needs is not installed."""
    from kvdock.tiers.stores import objects, redis
    from kvdock.tiers.stores.mooncake import tier as mooncake

    scheme = url.partition(":")[0]
    if scheme in ("redis", "rediss", "unix"):
        return redis.open_tier(url, Deadline(OPEN_S), os.environ)
    if scheme == "mooncake":
        return mooncake.open_tier(url, Deadline(OPEN_S))
    return objects.open_tier(url, Deadline(OPEN_S))


def start(name: str, folder: Path, mib: int, stack: ExitStack) -> str:
    """The URL of the store `name`, which runs until the stack ends. `mib`: what it has to hold. Raises CannotStart."""
    return STARTS[name](folder, mib, stack)


def _redis(folder: Path, mib: int, stack: ExitStack) -> str:
    path = f"{folder}/redis.sock"
    server = ["redis-server", "--port", "0", "--unixsocket", path, "--save", "", "--dir", str(folder)]
    _run(server, socket.AF_UNIX, path, stack)
    return f"unix://{path}"


def _objects(folder: Path, mib: int, stack: ExitStack) -> str:
    return folder.as_uri()


def _objects_s3(folder: Path, mib: int, stack: ExitStack) -> str:
    address = ("127.0.0.1", free_port())
    _run([sys.executable, "-m", "moto.server", "-p", str(address[1])], socket.AF_INET, address, stack)
    os.environ |= {"AWS_ACCESS_KEY_ID": "me", "AWS_SECRET_ACCESS_KEY": "secret", "AWS_REGION": "us-east-1"}
    with urlopen(Request(f"http://127.0.0.1:{address[1]}/bench", method="PUT")):
        pass
    return f"s3://bench?endpoint=http://127.0.0.1:{address[1]}"


def _mooncake(folder: Path, mib: int, stack: ExitStack) -> str:
    """Starts Mooncake's master, and a client that contributes the memory."""
    port, metrics, client = free_port(), free_port(), free_port()
    address = ("127.0.0.1", port)
    _run([
        _program("mooncake_master"), "--rpc_address=127.0.0.1", f"--rpc_port={port}", "--metrics_host=127.0.0.1",
        f"--metrics_port={metrics}",
    ], socket.AF_INET, address, stack)
    _run([
        _program("mooncake_client"), "--host=127.0.0.1", f"--port={client}", "--metadata_server=P2PHANDSHAKE",
        f"--master_server_address=127.0.0.1:{port}", f"--global_segment_size={4 * mib} MB",
    ], socket.AF_INET, ("127.0.0.1", client), stack)
    return f"mooncake://127.0.0.1:{port}"


STARTS: Mapping[str, Callable[[Path, int, ExitStack], str]] = {
    "redis": _redis, "objects": _objects, "objects_s3": _objects_s3, "mooncake": _mooncake,
}


def _program(name: str) -> str:
    """The path of a program that a package has installed beside this Python."""
    return str(Path(sys.executable).parent / name)


def _run(command: list[str], family: socket.AddressFamily, address: tuple[str, int] | str, stack: ExitStack) -> None:
    """Starts a server, and returns once it listens."""
    if shutil.which(command[0]) is None:
        raise CannotStart(f"{command[0]} is not installed")
    process = stack.enter_context(_program_of(command))
    until_s = time.monotonic() + START_S
    while process.poll() is None and time.monotonic() < until_s:
        with socket.socket(family) as one:
            if one.connect_ex(address) == 0:
                return
        time.sleep(0.02)  # between two tries to connect
    raise CannotStart(f"{command[0]} does not listen on {address}; exit status {process.poll()}")


@contextmanager
def _program_of(command: list[str]) -> Iterator[subprocess.Popen[bytes]]:
    """Runs a program and ends it, with its child: some of these programs start the real one as a child."""
    process = subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True
    )
    try:
        yield process
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as sock:
        return int(sock.getsockname()[1])

