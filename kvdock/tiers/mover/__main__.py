"""The mover of one server, which starts it: python -m kvdock.tiers.mover. Frames come on stdin, and go to stdout."""

from __future__ import annotations

import logging
import os
import signal
import sys

from kvdock.protocol.log_format import CONSOLE, JsonFormatter
from kvdock.tiers.mover.line import Line
from kvdock.tiers.mover.run import Mover


def main() -> int:
    for ignored in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(ignored, signal.SIG_IGN)  # the server decides when it ends
    words = os.dup(1)
    os.dup2(2, 1)  # libraries may print to stdout, which is for words
    line = Line(sys.stdin.buffer, os.fdopen(words, "wb"))
    config = line.config()
    if config is not None:
        logging.basicConfig(level=config.log_level.upper(), format=CONSOLE)
        if config.log_format == "json":
            logging.getLogger().handlers[0].setFormatter(JsonFormatter())
        logging.getLogger("kvdock.connector").setLevel(logging.WARNING)
        Mover(config, line).run()
    return 0


if __name__ == "__main__":
    sys.exit(main())
