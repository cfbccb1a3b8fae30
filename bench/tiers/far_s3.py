"""An S3 server at some distance: it keeps objects in memory, takes a while for each request, and counts them.

    python -m bench.tiers.far_s3 [ADDRESS [PORT]]

It says on stdout at which port of the address, loopback by default, it listens. Each line on stdin is the latency in ms
from then on; it answers with a line of JSON: by verb, how many requests have come so far, how many bytes went out, and
how many objects it has. It checks no signature. What it can: PUT with conditions, GET of ranges and with conditions,
HEAD, DELETE of one or of many objects, and LIST with a prefix and a delimiter.
"""

from __future__ import annotations

import asyncio
import json
import re
import sys
from collections import Counter
from collections.abc import Mapping
from email.utils import formatdate
from hashlib import md5
from types import MappingProxyType
from typing import NamedTuple
from urllib.parse import parse_qs, unquote, urlsplit
from xml.sax.saxutils import escape

PAGE = 1000
XML = {"Content-Type": "application/xml"}


class Object(NamedTuple):
    data: bytes
    e_tag: str
    modified: str


class Request(NamedTuple):
    verb: str
    path: str
    query: dict[str, list[str]]
    headers: dict[str, str]
    body: bytes


class Answer(NamedTuple):
    status: int
    body: bytes = b""
    headers: Mapping[str, str] = MappingProxyType({})


class FarS3:
    def __init__(self) -> None:
        self.latency_s = 0.0
        self.counts: Counter[str] = Counter()
        self._objects: dict[str, Object] = {}

    def told(self) -> str:
        return json.dumps({**self.counts, "objects": len(self._objects)})

    async def connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while True:
                request = await read_request(reader)
                await asyncio.sleep(self.latency_s)
                answer = self.answer(request)
                self.counts[request.verb] += 1
                self.counts["bytes"] += len(answer.body)
                headers = {"Content-Length": str(len(answer.body)), **answer.headers}
                fields = [f"{name}: {value}" for name, value in headers.items()]
                lines = [f"HTTP/1.1 {answer.status} .", *fields, "", ""]
                writer.write("\r\n".join(lines).encode() + (b"" if request.verb == "HEAD" else answer.body))
                await writer.drain()
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()

    def answer(self, request: Request) -> Answer:
        if request.verb == "PUT":
            return self._put(request)
        if request.verb == "POST":
            bucket = request.path.rstrip("/")
            keys = re.findall(rb"<Key>.*?</Key>", request.body)
            for key in keys:
                self._objects.pop(f"{bucket}/{key[5:-6].decode()}", None)
            deleted = b"".join(b"<Deleted>" + key + b"</Deleted>" for key in keys)
            return Answer(200, b"<DeleteResult>" + deleted + b"</DeleteResult>", XML)
        if request.verb == "DELETE":
            self._objects.pop(request.path, None)
            return Answer(204)
        return self._list(request) if "list-type" in request.query else self._get(request)

    def _put(self, request: Request) -> Answer:
        there = self._objects.get(request.path)
        if "if-none-match" in request.headers and there is not None:
            return Answer(412, b"<Error><Code>PreconditionFailed</Code></Error>", XML)
        wanted = request.headers.get("if-match")
        if wanted is not None and (there is None or there.e_tag != wanted):
            return Answer(412, b"<Error><Code>PreconditionFailed</Code></Error>", XML)
        e_tag = f'"{md5(request.body, usedforsecurity=False).hexdigest()}"'
        self._objects[request.path] = Object(request.body, e_tag, formatdate(usegmt=True))
        return Answer(200, headers={"ETag": e_tag})

    def _get(self, request: Request) -> Answer:
        found = self._objects.get(request.path)
        if found is None:
            return Answer(404, b"<Error><Code>NoSuchKey</Code></Error>", XML)
        headers = {"ETag": found.e_tag, "Last-Modified": found.modified, "Content-Length": str(len(found.data))}
        if request.headers.get("if-none-match") == found.e_tag:
            return Answer(304, headers={**headers, "Content-Length": "0"})
        if "range" not in request.headers:
            return Answer(200, found.data, headers)
        first, _, last = request.headers["range"].removeprefix("bytes=").partition("-")
        body = found.data[int(first) : int(last) + 1]
        of = f"bytes {first}-{int(first) + len(body) - 1}/{len(found.data)}"
        return Answer(206, body, {**headers, "Content-Length": str(len(body)), "Content-Range": of})

    def _list(self, request: Request) -> Answer:
        prefix, delimiter = (request.query.get(name, [""])[0] for name in ("prefix", "delimiter"))
        after = request.query.get("continuation-token", [""])[0]
        bucket, names = request.path.strip("/"), list[str]()
        folders: dict[str, None] = {}
        for path in sorted(self._objects):
            name = path.removeprefix(f"/{bucket}/")
            if not name.startswith(prefix) or name <= after:
                continue
            rest = name[len(prefix) :]
            if delimiter and delimiter in rest:
                folders[prefix + rest.partition(delimiter)[0] + delimiter] = None
            else:
                names.append(name)
        page = names[:PAGE]
        entries = [(name, self._objects[f"/{bucket}/{name}"]) for name in page]
        more = f"<NextContinuationToken>{escape(page[-1])}</NextContinuationToken>" if len(names) > PAGE else ""
        listed = "".join(
            f"<Contents><Key>{escape(name)}</Key><LastModified>2026-01-01T00:00:00.000Z</LastModified>"
            f"<ETag>{escape(one.e_tag)}</ETag><Size>{len(one.data)}</Size></Contents>" for name, one in entries
        ) + "".join(f"<CommonPrefixes><Prefix>{escape(name)}</Prefix></CommonPrefixes>" for name in folders)
        is_cut = "true" if more else "false"
        body = (
            f"<ListBucketResult><Name>{bucket}</Name><Prefix>{escape(prefix)}</Prefix><MaxKeys>{PAGE}</MaxKeys>"
            f"<KeyCount>{len(page)}</KeyCount><IsTruncated>{is_cut}</IsTruncated>{more}{listed}</ListBucketResult>"
        )
        return Answer(200, body.encode(), XML)


async def read_request(reader: asyncio.StreamReader) -> Request:
    """Raises IncompleteReadError at the end of the connection."""
    first, *lines = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
    verb, target, _ = first.split(" ", 2)
    headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines if line)}
    body = await reader.readexactly(int(headers.get("content-length", 0)))
    url = urlsplit(target)
    return Request(verb, unquote(url.path), parse_qs(url.query, keep_blank_values=True), headers, body)


async def main(host: str = "127.0.0.1", port: str = "0") -> None:
    far = FarS3()
    server = await asyncio.start_server(far.connected, host, int(port))
    lines = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(lines), sys.stdin)
    print(server.sockets[0].getsockname()[1], flush=True)
    while line := await lines.readline():
        far.latency_s = float(line) / 1e3
        print(far.told(), flush=True)


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
