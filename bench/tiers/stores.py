"""How fast the tiers over Redis and over object stores store and load parts, from and into shared memory.

    python -m bench.tier_stores                          redis-server, a folder and moto's S3 server, started for it
    python -m bench.tier_stores --url rediss://HOST      a store of yours; what it stores there it deletes

Prints one JSON object: GB/s by the store's name, the verb and the size of parts. Each figure is the best of three
rounds, and every byte that was loaded is compared. A server on the same machine takes cores away from the tier.
"""

from __future__ import annotations

import argparse
import json
import mmap
import os
import secrets
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from urllib.request import Request, urlopen

from kvdock.datapath.checksum import checksum
from kvdock.tiers import objects, redis
from kvdock.tiers.record import PartName, Record
from kvdock.tiers.tier import Deadline, Outcome, Tier, ToLoad, ToStore

MIB = 1 << 20
PART_MIB = (4, 32)
ROUNDS = 3
LIMIT_S = 300.0


def measured(tier: Tier, total_bytes: int, part_bytes: int) -> dict[str, float]:
    """GB/s of a store and of a load of one batch."""
    count = total_bytes // part_bytes
    source, target = (memoryview(mmap.mmap(-1, total_bytes)) for _ in range(2))
    target[:] = bytes(total_bytes)
    best = {"store": 0.0, "load": 0.0}
    for _ in range(ROUNDS):
        source[:] = os.urandom(MIB) * (total_bytes // MIB)
        stores, loads = [], []
        for at in range(0, count * part_bytes, part_bytes):
            pages = source[at : at + part_bytes]
            pages[:32] = secrets.token_bytes(32)
            name = PartName(bytes(32), bytes(pages[:32]), 0, 0)
            stores.append(ToStore(Record(name, part_bytes, checksum(pages)), pages))
            loads.append(ToLoad(name, part_bytes, target[at : at + part_bytes]))
        began = time.perf_counter()
        assert tier.store(stores, Deadline(LIMIT_S)) == [Outcome.DONE] * count
        stored = time.perf_counter()
        answers = tier.load(loads, Deadline(LIMIT_S))
        loaded = time.perf_counter()
        assert all(answer.outcome is Outcome.DONE for answer in answers)
        assert target == source, "a load gave other bytes than were stored"
        tier.delete([part.name for part in loads], Deadline(LIMIT_S))
        best["store"] = max(best["store"], total_bytes / (stored - began) / 1e9)
        best["load"] = max(best["load"], total_bytes / (loaded - stored) / 1e9)
    return best


@contextmanager
def program(*words: str) -> Iterator[None]:
    running = subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        yield
    finally:
        running.kill()
        running.wait()


def until_it_listens(family: socket.AddressFamily, address: tuple[str, int] | str) -> None:
    until = time.monotonic() + 30
    while time.monotonic() < until:
        with socket.socket(family) as one:
            if one.connect_ex(address) == 0:
                return
        time.sleep(0.02)  # between two tries to connect
    sys.exit(f"nothing listens on {address}")


def started(folder: Path, stack: ExitStack) -> dict[str, str]:
    """URLs by names, of what could be started here."""
    urls = {"objects_folder": folder.as_uri()}
    if shutil.which("redis-server"):
        path = f"{folder}/redis.sock"
        listen = ("--port", "0", "--unixsocket", path)
        stack.enter_context(program("redis-server", *listen, "--save", "", "--dir", str(folder)))
        until_it_listens(socket.AF_UNIX, path)
        urls["redis"] = f"unix://{path}"
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        port: int = one.getsockname()[1]
    stack.enter_context(program(sys.executable, "-m", "moto.server", "-p", str(port)))
    until_it_listens(socket.AF_INET, ("127.0.0.1", port))
    os.environ.update(AWS_ACCESS_KEY_ID="me", AWS_SECRET_ACCESS_KEY="secret", AWS_REGION="us-east-1")
    with urlopen(Request(f"http://127.0.0.1:{port}/bench", method="PUT")):
        pass
    urls["objects_s3"] = f"s3://bench?endpoint=http://127.0.0.1:{port}"
    return urls


def opened(url: str) -> Tier:
    if url.partition(":")[0] in ("redis", "rediss", "unix"):
        return redis.open_tier(url, Deadline(30), os.environ)
    return objects.open_tier(url, Deadline(30))


def main() -> None:
    usage, _, text = (__doc__ or "").partition("\n\n")
    parser = argparse.ArgumentParser(
        "python -m bench.tier_stores", description=usage, epilog=text,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    parser.add_argument("--url", action="append", default=[])
    parser.add_argument("--mib", type=int, default=256, help="of a batch (256)")
    arguments = parser.parse_args()
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        urls = {url: url for url in arguments.url} or started(folder, stack)
        figures = {}
        for name, url in urls.items():
            tier = opened(url)
            for mib in PART_MIB:
                for verb, rate in measured(tier, arguments.mib * MIB, mib * MIB).items():
                    figures[f"{name}_{verb}_{mib}mib_gb_s"] = round(rate, 3)
            tier.close(Deadline(30))
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
