"""The mover of one server. The server starts it with python -m kvdock.tiers.mover, sends it messages on stdin, and
reads its messages from stdout."""

from __future__ import annotations

import logging
import os
import signal
import sys

from kvdock.protocol.readable import CONSOLE, JsonFormatter
from kvdock.tiers.mover.run import Mover, Pipe


def main() -> int:
    os.umask(0o077)  # libraries make files with the umask's mode: what a tier has is for the server's user alone
    for ignored in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(ignored, signal.SIG_IGN)  # the server decides when the mover ends
    reports = os.dup(1)
    os.dup2(2, 1)  # libraries may print to stdout, which is for reports
    pipe = Pipe(sys.stdin.buffer, os.fdopen(reports, "wb"))
    config = pipe.config()
    if config is not None:
        logging.basicConfig(level=config.log_level.upper(), format=CONSOLE)
        if config.log_format == "json":
            logging.getLogger().handlers[0].setFormatter(JsonFormatter())
        logging.getLogger("kvdock.connector").setLevel(logging.WARNING)
        Mover(config, pipe).run()
    return 0


if __name__ == "__main__":
    sys.exit(main())
