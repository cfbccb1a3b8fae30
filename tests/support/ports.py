"""Ports for servers that must be told theirs."""

from __future__ import annotations

import socket

_held: list[socket.socket] = []


def held_port() -> int:
    """A port of the loopback that the system gives to nobody else until this process ends. A server that sets
    SO_REUSEADDR can listen there, also again: what holds the port is a socket that does not listen."""
    holder = socket.socket()
    holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    holder.bind(("127.0.0.1", 0))
    _held.append(holder)
    port: int = holder.getsockname()[1]
    return port
