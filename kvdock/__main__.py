"""The `kvdock` program, also as `python -m kvdock`.

The parent process may block SIGINT until the program is ready for Ctrl-C, as `make run` does. SIGHUP, which has a
server read its settings again, waits until the server can.
"""

from __future__ import annotations

import signal


def main() -> None:
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT, signal.SIGHUP])  # until commands handle them
    from kvdock.cli.main import main as run

    run()


if __name__ == "__main__":
    main()
