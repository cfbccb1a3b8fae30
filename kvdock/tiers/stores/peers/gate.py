"""Lets only known addresses reach the listening sockets of a library in this process.

Mooncake's Transfer Engine listens on all addresses, and lets everybody who connects read the memory that is registered
with it. So the kernel drops the packets of all other hosts: it runs a filter on each listening socket, which the
connections that come from it inherit.
"""

from __future__ import annotations

import ctypes
import os
import socket
import struct
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from ipaddress import IPv4Address, IPv6Address, ip_address
from pathlib import Path
from typing import Final

ADMITTED_S: Final = 600.0
"""How long an address that was admitted may make new connections."""
MOST_ADMITTED: Final = 128
"""An address takes up to nine instructions, and the kernel limits their memory (net.core.optmem_max)."""
_SO_ATTACH_FILTER: Final = 26
_NETWORK: Final = 0xFFF00000
"""The offset of the packet's IP header (the kernel's SKF_NET_OFF)."""
_BYTE, _WORD, _SHIFT, _JUMP, _IF_EQUAL, _RETURN = 0x30, 0x20, 0x74, 0x05, 0x15, 0x06
_ALL: Final = 0xFFFFFFFF
Address = IPv4Address | IPv6Address
Instruction = tuple[int, int, int, int]


class Gate:
    """`listening`: the sockets; the gate closes them when it closes, which leaves the library's own open. It begins
    with nobody admitted. Raises OSError if the kernel takes no filter. Thread-safe."""

    def __init__(self, listening: Sequence[socket.socket], clock: Callable[[], float]) -> None:
        self._listening, self._clock, self._lock = list(listening), clock, threading.Lock()
        self._ports = {one.getsockname()[1] for one in listening}
        self._until_s: OrderedDict[Address, float] = OrderedDict()
        self._attach()

    def admit(self, text: str) -> None:
        """The host at this address may connect for ADMITTED_S. Raises ValueError: it is no address; OSError: the kernel
        does not take the filter, and nobody is admitted who was not before."""
        address, now_s = ip_address(text), self._clock()
        with self._lock:
            is_new = self._until_s.get(address, 0.0) <= now_s
            self._until_s[address] = now_s + ADMITTED_S
            self._until_s.move_to_end(address)
            while len(self._until_s) > MOST_ADMITTED or next(iter(self._until_s.values())) <= now_s:
                self._until_s.popitem(last=False)
            if is_new:
                try:
                    self._attach()
                except OSError:
                    del self._until_s[address]
                    raise

    def end_strangers(self) -> None:
        """Ends the connections of hosts that are not admitted: they came before the filter."""
        with self._lock:
            admitted = set(self._until_s)
        for connected in own_sockets(is_listening=False):
            with connected:
                try:
                    port, other = connected.getsockname()[1], connected.getpeername()[0]
                    if port in self._ports and _plain(other) not in admitted:
                        connected.shutdown(socket.SHUT_RDWR)
                except OSError:  # it is not connected, or not any more
                    continue

    def close(self) -> None:
        for one in self._listening:
            one.close()

    def _attach(self) -> None:
        code = b"".join(struct.pack("HBBI", *one) for one in _program(list(self._until_s)))
        memory = ctypes.create_string_buffer(code, len(code))
        filter_ = struct.pack("HL", len(code) // 8, ctypes.addressof(memory))
        for one in self._listening:
            one.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, filter_)


def own_sockets(*, is_listening: bool) -> Iterator[socket.socket]:
    """Duplicates of the sockets over TCP that this process listens on, or of the others. The caller closes them."""
    for name in [one.name for one in Path("/proc/self/fd").iterdir()]:
        try:
            found = socket.socket(fileno=os.dup(int(name)))
        except OSError:  # no socket, or closed meanwhile
            continue
        is_tcp = found.family in (socket.AF_INET, socket.AF_INET6) and found.type == socket.SOCK_STREAM
        if is_tcp and bool(found.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)) == is_listening:
            yield found
        else:
            found.close()


def _plain(text: str) -> Address:
    """The address, of version 4 where a socket of version 6 shows it so."""
    address = ip_address(text.partition("%")[0])
    return (address.ipv4_mapped or address) if isinstance(address, IPv6Address) else address


def _program(admitted: Sequence[Address]) -> list[Instruction]:
    """The filter in the kernel's classic instructions: (code, jump if true, jump if false, operand)."""
    four: list[Instruction] = [(_WORD, 0, 0, _NETWORK + 12)]
    six: list[Instruction] = []
    for address in admitted:
        if isinstance(address, IPv4Address):
            four += [(_IF_EQUAL, 0, 1, int(address)), (_RETURN, 0, 0, _ALL)]
            continue
        for at, word in enumerate(struct.unpack("!4I", address.packed)):
            six += [(_WORD, 0, 0, _NETWORK + 8 + 4 * at), (_IF_EQUAL, 0, 7 - 2 * at, word)]
        six.append((_RETURN, 0, 0, _ALL))
    four.append((_RETURN, 0, 0, 0))
    six.append((_RETURN, 0, 0, 0))
    version: list[Instruction] = [
        (_BYTE, 0, 0, _NETWORK), (_SHIFT, 0, 0, 4), (_IF_EQUAL, 1, 0, 4), (_JUMP, 0, 0, len(four)),
    ]
    return version + four + six
