"""Commands are forked from the process that forks servers, so it must have imported the program."""

from __future__ import annotations

import forks

forks.preload("kvdock.cli.main")
