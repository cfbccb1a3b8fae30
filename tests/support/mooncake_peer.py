"""A process that gives memory to a Mooncake Store, until it is killed: MASTER BYTES. Prints a line when it has."""

from __future__ import annotations

import sys
import threading

from mooncake.store import MooncakeDistributedStore


def main(master: str, size_bytes: str) -> None:
    store = MooncakeDistributedStore()
    code = store.setup("127.0.0.1", "P2PHANDSHAKE", int(size_bytes), 0, "tcp", "", master)
    sys.stdout.write(f"{code}\n")
    sys.stdout.flush()
    threading.Event().wait()


if __name__ == "__main__":
    main(*sys.argv[1:])
