"""A real engine process to be killed in the middle of a store.

    python engine_crash_helper.py ADDRESS SALT LENGTH

It computes one prompt and stores it with a copier that moves the first half of the parts' bytes into their
slots, says so on standard output, and then waits to be killed: no commit ever follows.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Sequence

from connector_helpers import engine_over, kvdock_of
from engine_helpers import prompt, sampling

from kvdock.datapath.copy import Copier, CopyHandle, PartCopy


class HalfwayCopier:
    """Gathers half of what it is asked for, reports, and never comes back."""

    def __init__(self, inner: Copier) -> None:
        self.inner = inner

    def gather(self, parts: Sequence[PartCopy], *, after: int | None = None) -> CopyHandle:
        self.inner.gather(parts[: (len(parts) + 1) // 2]).result()
        print(f"halfway {len(parts)}", flush=True)
        threading.Event().wait()
        raise AssertionError("it waits for ever")

    def scatter(self, parts: Sequence[PartCopy], *, after: int | None = None) -> CopyHandle:
        return self.inner.scatter(parts, after=after)

    def close(self) -> None:
        self.inner.close()


def main(address: str, salt: str, length: int) -> None:
    engine = engine_over(address, label="to be killed", salt=salt)
    worker = kvdock_of(engine).worker
    worker._storers = [HalfwayCopier(copier) for copier in worker._storers]
    engine.generate([prompt(1, length)], sampling(1))
    engine.drain(60.0)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]))
