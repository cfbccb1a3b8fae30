"""What the fuzzer feeds: any bytes, which must lead to an answer or a typed refusal and nothing else.

A target is a function of bytes. It lets no refusal out (ApiError, AnswerError), so whatever leaves it is a defect.
"""

from __future__ import annotations

import asyncio
import hashlib
import socket
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final

import msgspec
from uvicorn.server import ServerState

from kvdock._core import decoding_within
from kvdock.api import convert
from kvdock.api.access.access_file import AccessFile
from kvdock.api.access.peer import NOBODY
from kvdock.api.http.connection import Connection, connection_class
from kvdock.api.http.engine_calls import ENGINE_CALLS
from kvdock.api.http.guard import host_name
from kvdock.api.http.limits import ConnectionLimits
from kvdock.api.record.counters import Counters
from kvdock.api.record.timings import Meter, Timings
from kvdock.api.server import uvicorn_config
from kvdock.api.tokens import LONG_BODY_BYTES, cut_tokens
from kvdock.client.transport import MAX_ANSWER_BYTES, AnswerError, _parse_head
from kvdock.protocol import admin_schemas
from kvdock.protocol.errors import ApiError
from kvdock.protocol.forms import JSON, PACKED, Codec, form_of_answer, form_of_body
from kvdock.protocol.schemas import Lookup
from kvdock.protocol.wire_types import Body

CORPUS: Final = Path(__file__).parent / "corpus"
TOKEN: Final = b"fuzzed-" + b"0" * 32

_BODIES = [found.body for found in ENGINE_CALLS if found.body is not None]
_BODIES += [
    kind for kind in vars(admin_schemas).values()
    if isinstance(kind, type) and issubclass(kind, Body) and kind is not Body
]
_CODECS: list[Codec[Any]] = [Codec(body) for body in _BODIES]
_LOOKUPS = Codec(Lookup)


def bodies(data: bytes) -> None:
    """The first byte chooses the kind of body and its form. What is decoded says the same when it is sent again."""
    if not data:
        return
    codec, form = _CODECS[(data[0] >> 1) % len(_CODECS)], PACKED if data[0] & 1 else JSON
    try:
        body = codec.decode(data[1:], form)
    except ApiError:
        return
    assert codec.decode(form.encode(body), form) == body
    try:
        if getattr(body, "keys", None) is not None:
            assert len(convert.key_bytes(body.keys)) % 32 == 0
        if hasattr(body, "parts"):
            assert len(convert.committed_parts(body.parts)) == len(body.parts)
    except ApiError:
        return


def tokens(data: bytes) -> None:
    """A body whose tokens were cut out means what it means whole."""
    raw = data + b" " * LONG_BODY_BYTES
    try:
        rest, found = _LOOP.run_until_complete(cut_tokens(raw))
        body = _LOOKUPS.decode(rest, JSON)
        if found is not None:
            body.tokens = found.tolist()
    except ApiError:
        body = None
    try:
        whole = _LOOKUPS.decode(raw, JSON)
    except ApiError:
        whole = None
    assert body is None or whole is None or body == whole
    if body is None and whole is not None:
        raise AssertionError("refused when cut, and not when whole")


def packed_tokens(data: bytes) -> None:
    """What a body may cost to decode is never less than the values that it has."""
    for decode, packed in ((msgspec.msgpack.decode, True), (msgspec.json.decode, False)):
        for limit in (0, 3, 30):
            if decoding_within(data, limit, packed=packed):
                with suppress(msgspec.DecodeError, UnicodeDecodeError, RecursionError, ValueError):
                    assert _values(decode(data)) <= limit


def _values(decoded: Any) -> int:
    """How many values there are. The keys of maps do not count: a decoder merges equal ones."""
    if isinstance(decoded, dict):
        return 1 + sum(map(_values, decoded.values()))
    return 1 + (sum(map(_values, decoded)) if isinstance(decoded, list | tuple) else 0)


def headers(data: bytes) -> None:
    """A caller's headers: who it is, what it sends, what it accepts, which host it means."""
    text = data.decode("latin-1")
    host_name(text)
    form_of_answer(text, JSON)
    with suppress(ApiError):
        form_of_body(text)
    try:
        peer = _ACCESS.peer_of(data, NOBODY)
    except ApiError:
        return
    kind, _, sent = data.strip().partition(b" ")
    assert peer.name == "token fuzzed" and kind.lower() == b"bearer" and sent.strip() == TOKEN


def answer_head(data: bytes) -> None:
    """What a server may answer to our client."""
    try:
        status, length, _ = _parse_head(data)
    except AnswerError:
        return
    assert 200 <= status < 600 and 0 <= length <= MAX_ANSWER_BYTES


def connection(data: bytes) -> None:
    """Raw bytes of a client. The first says in how large pieces they arrive, and over which kind of socket."""
    if data:
        _HARNESS.talk(data[1:], piece_bytes=1 + (data[0] & 0x7F), unix=data[0] >= 0x80)


TARGETS: Final[dict[str, Callable[[bytes], None]]] = {
    target.__name__: target for target in (bodies, tokens, packed_tokens, headers, answer_head, connection)
}


def corpus(target: str) -> list[bytes]:
    """The inputs that are kept: in hex, with an empty line between two."""
    return [bytes.fromhex(text) for text in (CORPUS / f"{target}.hex").read_text().split("\n\n")]


# --------------------------------------------------------------------------- what targets run on


_LOOP = asyncio.new_event_loop()


def _access() -> AccessFile:
    with TemporaryDirectory() as folder:
        path = Path(folder) / "access.toml"
        path.touch(mode=0o600)
        digest = hashlib.sha256(TOKEN).hexdigest()
        path.write_text(f'[[token]]\nname = "fuzzed"\nsha256 = "{digest}"\nscopes = ["read"]\n')
        return AccessFile(str(path))


_ACCESS = _access()


class _Recorder(asyncio.Transport):
    """The other end of a connection: keeps what is written, and whether it is closed."""

    def __init__(self, sock: socket.socket) -> None:
        super().__init__()
        self.sock, self.closing, self.written = sock, False, b""

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return self.sock if name == "socket" else default

    def write(self, data: bytes | bytearray | memoryview) -> None:
        self.written += bytes(data)

    def close(self) -> None:
        self.closing = True

    def abort(self) -> None:
        self.closing = True

    def is_closing(self) -> bool:
        return self.closing

    def pause_reading(self) -> None:
        """The peer is a fuzzer: it stops for nobody."""

    def resume_reading(self) -> None:
        """Nor does it go on."""

    def get_write_buffer_size(self) -> int:
        return 0


async def _echo(scope: Any, receive: Any, send: Any) -> None:
    """Reads the whole body, as endpoints do, and answers with its length."""
    length, more = 0, True
    while more:
        message = await receive()
        if message["type"] == "http.disconnect":
            return
        length, more = length + len(message.get("body", b"")), message.get("more_body", False)
    said = str(length).encode()
    sizes = [(b"content-length", str(len(said)).encode())]
    await send({"type": "http.response.start", "status": 200, "headers": sizes})
    await send({"type": "http.response.body", "body": said})


class _Harness:
    """Real connections without a network, one after the other."""

    TURNS = 3

    def __init__(self) -> None:
        self._loop = _LOOP
        self._failed: list[dict[str, Any]] = []
        self._loop.set_exception_handler(lambda _, context: self._failed.append(context))
        self._limits = ConnectionLimits(tcp_connections=1, unix_connections=1)
        meter = Meter(Counters(), Timings(time.time), time.perf_counter_ns, {}, lambda event: None)
        self._class = connection_class(self._limits, meter)
        self._config = uvicorn_config(_echo, self._class)
        self._config.load()
        self._sockets = [*socket.socketpair(), socket.socket()]
        self._state = ServerState()

    def talk(self, data: bytes, *, piece_bytes: int, unix: bool) -> None:
        transport = _Recorder(self._sockets[0 if unix else -1])
        made = self._class(self._config, self._state, {}, self._loop)
        made.connection_made(transport)
        self._loop.run_until_complete(self._receive(made, transport, data, piece_bytes))
        made.connection_lost(None)
        while self._state.tasks:
            self._loop.run_until_complete(self._turns())
        assert self._failed == [] and not self._state.connections
        for line in transport.written.split(b"HTTP/1.1 ")[1:]:
            assert (line[:3].isdigit() and line[:1] in b"124") or line.startswith(b"503"), line

    async def _receive(self, made: Connection, transport: _Recorder, data: bytes, piece_bytes: int) -> None:
        for start in range(0, len(data), piece_bytes):
            if transport.closing:
                break
            made.data_received(data[start : start + piece_bytes])
            self._within_limits(made)
            await self._turns()

    async def _turns(self) -> None:
        for _ in range(self.TURNS):
            await asyncio.sleep(0)

    def _within_limits(self, made: Connection) -> None:
        limits = self._limits
        assert len(made.pipeline) <= limits.pipelined
        kept = made.headers or []
        assert len(kept) <= limits.headers
        assert sum(len(name) + len(value) for name, value in kept) <= limits.header_bytes
        assert len(getattr(made, "url", b"")) <= limits.url_bytes


_HARNESS = _Harness()


