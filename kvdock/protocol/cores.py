"""Core dumps: none is written of a process whose memory has access tokens or the ids of sessions."""

from __future__ import annotations

import logging
import resource
from pathlib import Path
from typing import Final

NO_CORE_BYTES: Final = 1
"""The limit of a core dump. Nothing is dumped then; with a limit of 0, Linux still hands the dump to a program that
`core_pattern` names."""

log = logging.getLogger("kvdock.api")


def prevent_core_dumps() -> None:
    """For this process, and for those that it starts."""
    _, hard = resource.getrlimit(resource.RLIMIT_CORE)
    try:
        resource.setrlimit(resource.RLIMIT_CORE, (NO_CORE_BYTES, hard))
    except (OSError, ValueError):  # the system allows less, or forbids to change it: a dump has no memory then
        try:
            Path("/proc/self/coredump_filter").write_text("0", encoding="ascii")
        except OSError as error:
            log.warning("core dumps of this process may have access tokens: %s", error)
