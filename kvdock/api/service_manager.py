"""Tells the service manager how the server is, in systemd's protocol: datagrams to the socket that NOTIFY_SOCKET names.

`Type=notify` in a unit means that the service counts as started only once it says so. Without a service manager nothing
is sent.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Mapping
from contextlib import suppress
from typing import Final

WATCHDOG_SHARE: Final = 3
"""A watchdog gets this many messages within its time."""


class ServiceManager:
    """Every method may be called at any time: a message that cannot be sent is lost, which the manager will notice."""

    def __init__(self, environ: Mapping[str, str]) -> None:
        name = environ.get("NOTIFY_SOCKET", "")
        self._address = f"\0{name[1:]}" if name.startswith("@") else name
        is_watched = environ.get("WATCHDOG_PID", "") in ("", str(os.getpid()))
        watchdog_us = environ.get("WATCHDOG_USEC", "")
        self._watch_s = int(watchdog_us) / 1e6 / WATCHDOG_SHARE if is_watched and watchdog_us.isdigit() else 0.0
        self._watched_s = 0.0

    def ready(self, status: str) -> None:
        """The server answers, or has read its settings again. `status`: one line for people."""
        self._send(f"READY=1\nSTATUS={status.splitlines()[0]}")

    def reloading(self) -> None:
        self._send(f"RELOADING=1\nMONOTONIC_USEC={time.clock_gettime_ns(time.CLOCK_MONOTONIC) // 1000}")

    def stopping(self, status: str) -> None:
        self._send(f"STOPPING=1\nSTATUS={status}")

    def alive(self) -> None:
        """Call it often from the event loop: it sends as often as the watchdog wants."""
        now_s = time.monotonic()
        if self._watch_s and now_s - self._watched_s >= self._watch_s:
            self._watched_s = now_s
            self._send("WATCHDOG=1")

    def _send(self, message: str) -> None:
        if not self._address:
            return
        with suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK) as sock:
            sock.sendto(message.encode(), self._address)
