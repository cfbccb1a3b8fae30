"""A small OpenTelemetry collector, in a process of its own: it takes spans over OTLP/HTTP on a loopback port.

    python otlp_collector.py        # prints its port, then answers until it is ended

`POST /v1/traces` decodes with the official messages of OTLP, and refuses what they do not know. `GET /spans` tells what
has come, as JSON. `POST /fail` has it refuse what comes from then on, `POST /hang` leave it unanswered.
"""

from __future__ import annotations

import gzip
import json
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, ClassVar
from urllib.request import Request, urlopen

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)


def _value(value: Any) -> Any:
    return getattr(value, value.WhichOneof("value"))


def decoded(body: bytes) -> list[dict[str, Any]]:
    request = ExportTraceServiceRequest()
    request.ParseFromString(body)
    return [
        {
            "name": span.name, "trace_id": span.trace_id.hex(), "span_id": span.span_id.hex(),
            "parent_id": span.parent_span_id.hex(), "kind": span.kind, "start_ns": span.start_time_unix_nano,
            "end_ns": span.end_time_unix_nano, "status": span.status.code,
            "attributes": {one.key: _value(one.value) for one in span.attributes},
            "resource": {one.key: _value(one.value) for one in of_resource.resource.attributes},
        }
        for of_resource in request.resource_spans for of_scope in of_resource.scope_spans for span in of_scope.spans
    ]


class Handler(BaseHTTPRequestHandler):
    spans: ClassVar[list[dict[str, Any]]] = []
    mode = ""

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["content-length"] or 0))
        if self.path in ("/fail", "/hang"):
            type(self).mode = self.path
            self._answer(200, b"")
            return
        if self.mode == "/hang":
            threading.Event().wait(60.0)
        if self.path != "/v1/traces" or self.headers["content-type"] != "application/x-protobuf" or self.mode:
            self._answer(400, b"")
            return
        self.spans.extend(decoded(gzip.decompress(body) if self.headers["content-encoding"] == "gzip" else body))
        self._answer(200, ExportTraceServiceResponse().SerializeToString())

    def do_GET(self) -> None:
        self._answer(200, json.dumps(self.spans).encode())

    def _answer(self, status: int, body: bytes) -> None:
        self.send_response(status)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """Quiet."""


class Collector:
    """`with Collector() as collector`: the process, seen from a test."""

    def __init__(self) -> None:
        self._process = subprocess.Popen([sys.executable, __file__], stdout=subprocess.PIPE, text=True)
        assert self._process.stdout is not None
        self.endpoint = f"http://127.0.0.1:{int(self._process.stdout.readline())}"

    def spans(self) -> list[dict[str, Any]]:
        with urlopen(f"{self.endpoint}/spans", timeout=10.0) as answer:
            found: list[dict[str, Any]] = json.load(answer)
        return found

    def now(self, what: str) -> None:
        """"fail" or "hang"."""
        urlopen(Request(f"{self.endpoint}/{what}", method="POST"), timeout=10.0).close()

    def __enter__(self) -> Collector:
        return self

    def __exit__(self, *exc: object) -> None:
        self._process.kill()
        self._process.communicate()


if __name__ == "__main__":
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    print(server.server_port, flush=True)
    server.serve_forever()
