"""The `kvdock` program, also as `python -m kvdock`.

The parent process may block SIGINT until the program is ready for Ctrl-C, as `make run` does.
"""

from __future__ import annotations

import signal


def main() -> None:
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])  # until the commands are imported and handle it
    from kvdock.cli.main import main as run

    run()


if __name__ == "__main__":
    main()
