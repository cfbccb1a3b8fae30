"""The `kvdock` program, also as `python -m kvdock`: the build installs this file as kvdock/__main__.py as well.

Ctrl-C while the commands are imported ends it as it does later: with one sentence. Who starts it may block SIGINT until
it is ready for that, as `make run` does.
"""

from __future__ import annotations

import os
import signal
import sys


def main() -> None:
    try:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGINT])
        from kvdock.cli.main import main as run
    except KeyboardInterrupt:
        signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
        sys.stderr.write("kvdock: stopped\n")
        os._exit(130)
    run()


if __name__ == "__main__":
    main()
