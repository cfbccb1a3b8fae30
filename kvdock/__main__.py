"""The `kvdock` program, also as `python -m kvdock`.

Who starts it may block SIGINT until it is ready for Ctrl-C, as `make run` does.
"""

from __future__ import annotations

import signal


def main() -> None:
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])  # until the commands are imported, and can be ended
    from kvdock.cli.main import main as run

    run()


if __name__ == "__main__":
    main()
