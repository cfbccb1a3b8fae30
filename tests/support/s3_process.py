"""An S3 server (moto's) for tests: `python s3_process.py PORT FULL HALF LIMIT NOTES`.

While the file FULL is there it takes no data, and answers with the status that the file has, 507 if it is empty. While
HALF is there it sends one half of what it is asked for, and the other half once the file is gone. Beyond LIMIT bytes of
objects it deletes what was stored first, as a rule of a bucket would; 0: no limit. It spares notes, which servers write
again before any rule counts a day, unless NOTES is 1.
"""

from __future__ import annotations

import sys
import threading
import time
from collections import OrderedDict
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from moto.moto_server.werkzeug_app import DomainDispatcherApplication, create_backend_app
from werkzeug.serving import make_server
from werkzeug.test import Client, EnvironBuilder

BEGUN = ".begun"
"""The file beside HALF with this suffix is there once half of something was sent."""
NOTE = "/generation"
LEAST_HALVED = 4096
"""Answers with fewer bytes come whole."""


class Kept:
    """What was stored, oldest first, and how much it is."""

    def __init__(self, limit_bytes: int, *, with_notes: bool) -> None:
        self._limit_bytes, self._with_notes, self._lock = limit_bytes, with_notes, threading.Lock()
        self._sizes: OrderedDict[str, int] = OrderedDict()

    def beyond(self, path: str, size: int) -> list[str]:
        """What has to go after this was stored."""
        if path.endswith(NOTE) and not self._with_notes:
            return []
        with self._lock:
            self._sizes.pop(path, None)
            self._sizes[path] = size
            gone = []
            while self._limit_bytes and sum(self._sizes.values()) > self._limit_bytes:
                gone.append(self._sizes.popitem(last=False)[0])
            return gone


def halved(body: bytes, half: Path) -> Iterator[bytes]:
    yield body[: len(body) // 2]
    half.with_suffix(BEGUN).touch()
    while half.exists():
        time.sleep(0.01)  # the test takes it away
    yield body[len(body) // 2 :]


def main(port: int, full: Path, half: Path, limit_bytes: int, with_notes: bool) -> None:
    s3, kept = DomainDispatcherApplication(create_backend_app), Kept(limit_bytes, with_notes=with_notes)

    def limited(environ: dict[str, Any], answer: Any) -> Iterable[bytes]:
        size = int(environ.get("CONTENT_LENGTH") or 0)
        if environ["REQUEST_METHOD"] == "PUT" and full.exists():
            environ["wsgi.input"].read(size)
            answer(full.read_text() or "507 Insufficient Storage", [("Content-Type", "text/plain")])
            return [b"refused"]
        served: Iterable[bytes] = s3(environ, answer)
        if environ["REQUEST_METHOD"] == "PUT":
            for path in kept.beyond(environ["PATH_INFO"], size):
                signed = [("Authorization", str(environ["HTTP_AUTHORIZATION"]))]
                Client(s3).open(EnvironBuilder(path, method="DELETE", headers=signed))
        if environ["REQUEST_METHOD"] == "GET" and half.exists():
            body = b"".join(served)
            return halved(body, half) if len(body) >= LEAST_HALVED else [body]
        return served

    server = make_server("127.0.0.1", port, limited, threaded=True)
    print(server.server_port, flush=True)
    server.serve_forever()


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]), Path(sys.argv[3]), int(sys.argv[4]), sys.argv[5] == "1")
