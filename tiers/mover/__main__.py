"""The mover of one server, which starts it: python -m kvdock.tiers.mover, with its settings on stdin."""

from __future__ import annotations

import logging
import signal
import sys
import threading

import msgspec

from kvdock.protocol.tier_schemas import MoverConfig
from kvdock.tiers.mover.run import Mover


def main() -> int:
    for ignored in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(ignored, signal.SIG_IGN)  # the server decides when it ends
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    logging.getLogger("kvdock.connector").setLevel(logging.WARNING)
    line = sys.stdin.buffer.readline()
    if not line:
        return 0
    config = msgspec.json.decode(line, type=MoverConfig)
    ended = threading.Event()

    def watch() -> None:
        sys.stdin.buffer.read()
        ended.set()

    threading.Thread(target=watch, name="kvdock-stdin", daemon=True).start()
    Mover(config, ended).run()
    return 0


if __name__ == "__main__":
    sys.exit(main())
