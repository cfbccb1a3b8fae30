"""A web server before the S3 server of the tests. It tells requests with a signed URL, which Python sends itself, from
those of obstore, and can answer the former in its own way."""

from __future__ import annotations

import http.client
import ssl
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from objects_subject import AUTHORIZATION, BUCKET

ENDS_HERE = frozenset({"connection", "content-length", "date", "server", "transfer-encoding"})
"""Headers that say something of one connection alone."""
SIGNED, OBSTORE = "signed URL", "obstore"


class Front(ThreadingHTTPServer):
    """`to_port`: that of the S3 server. `answer`: what is done with GETs of signed URLs; None: as with all others.
    `context`: for TLS. `seen`: from whom each GET of a record was. `connections`: those that carried signed URLs."""

    daemon_threads = True

    def __init__(self, to_port: int, context: ssl.SSLContext | None) -> None:
        super().__init__(("127.0.0.1", 0), Request)
        self.address = f"http://127.0.0.1:{self.server_port}"
        if context is not None:
            self.socket = context.wrap_socket(self.socket, server_side=True, do_handshake_on_connect=False)
            self.address = f"https://localhost:{self.server_port}"
        self.to_port, self.seen, self.connections = to_port, list[str](), set[Any]()
        self.answer: Callable[[Request], None] | None = None

    @property
    def url(self) -> str:
        return f"s3://{BUCKET}/a/prefix?endpoint={self.address}"

    def handle_error(self, *_: Any) -> None:
        """Clients that go in the midst of an answer are no errors."""


class Request(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Front

    def log_message(self, *_: Any) -> None:
        """Into no log."""

    def do_GET(self) -> None:
        is_signed = "X-Amz-Signature" in self.path
        if "/kvdock/" in self.path and "list-type" not in self.path:
            self.server.seen.append(SIGNED if is_signed else OBSTORE)
        if is_signed:
            self.server.connections.add(self.client_address)
        if is_signed and self.server.answer is not None:
            self.server.answer(self)
        else:
            self.pass_on()

    def pass_on(self) -> None:
        status, headers, body = self.of_store()
        self.say(status, headers, body)

    def say(self, status: int, headers: dict[str, str], body: bytes, *, missing: int = 0) -> None:
        """`missing`: how many more bytes the answer promises than it has."""
        self.send_response(status)
        for name, value in headers.items():
            if name.lower() not in ENDS_HERE:
                self.send_header(name, value)
        if self.command == "HEAD" and "Content-Length" in headers:
            self.send_header("Content-Length", headers["Content-Length"])
        else:
            self.send_header("Content-Length", str(len(body) + missing))
        self.end_headers()
        self.wfile.write(body)

    def of_store(self, **changed: str) -> tuple[int, dict[str, str], bytes]:
        """What the S3 server answers. `changed`: other headers than those of the request; "": none."""
        headers = {name: value for name, value in self.headers.items() if name.lower() not in ("host", "connection")}
        headers = {name: value for name, value in (headers | changed).items() if value}
        if "X-Amz-Signature" not in self.path:  # one without credentials, too
            headers["Authorization"] = AUTHORIZATION
        sent = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        store = http.client.HTTPConnection("127.0.0.1", self.server.to_port, timeout=60)
        try:
            store.request(self.command, self.path, sent or None, headers)
            answer = store.getresponse()
            return answer.status, dict(answer.getheaders()), answer.read()
        finally:
            store.close()

    do_PUT = do_HEAD = do_DELETE = do_POST = pass_on


@contextmanager
def front(to_port: int, context: ssl.SSLContext | None = None) -> Iterator[Front]:
    one = Front(to_port, context)
    thread = threading.Thread(target=one.serve_forever, args=(0.01,))
    thread.start()
    try:
        yield one
    finally:
        one.shutdown()
        thread.join()
        one.server_close()
