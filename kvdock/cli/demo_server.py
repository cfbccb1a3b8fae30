"""The demo's server: a `kvdock serve` that ends when its standard input is closed.

    python -m kvdock.cli.demo_server --port 7410 …

The demo holds the other end of that pipe, so the server ends with the demo, even if the demo is killed.
"""

from __future__ import annotations

import os
import signal
import sys
import threading

from kvdock.cli.main import main


def _end_with_input() -> None:
    while os.read(sys.stdin.fileno(), 4096):  # not sys.stdin.read: it would hold a lock that the exit needs
        pass
    os.kill(os.getpid(), signal.SIGTERM)


if __name__ == "__main__":
    threading.Thread(target=_end_with_input, daemon=True).start()
    sys.argv.insert(1, "serve")
    main()
