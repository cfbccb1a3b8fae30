"""Reads the events of a server, one by one, from the stream of `GET /v1/events`."""

from __future__ import annotations

import http.client
from collections.abc import Iterator
from typing import Any, NamedTuple
from urllib.parse import urlencode

import msgspec

from kvdock.client.transport import Address
from kvdock.protocol.access import authorization
from kvdock.protocol.calls import EVENTS
from kvdock.protocol.errors import ApiError, ServerUnavailable
from kvdock.protocol.forms import decoder_of
from kvdock.protocol.reports import Problem

SILENCE_S = 60.0
"""The server sends something every 15 s, if only a comment."""


class StreamedEvent(NamedTuple):
    """An event as the server streams it."""

    id: str
    """Pass it as `last_id` to continue after this event."""
    event: dict[str, Any]
    """Its fields are those of docs/operate/events.md."""


def read_events(
    address: Address, access_token: str = "", *, kinds: str = "", follow: bool = False, last_id: str = ""
) -> Iterator[StreamedEvent]:
    """The events that the server has kept, or those after `last_id`; with `follow`, then also new ones, until the
    server drains. `kinds`: kinds of events, separated by commas; '' for all. Raises ApiError, and ServerUnavailable
    when the server cannot be reached or the connection is lost."""
    query = {"kinds": kinds} if kinds else {}
    if follow:
        query["follow"] = "true"
    headers = {**authorization(access_token), **({"Last-Event-ID": last_id} if last_id else {})}
    connection = http.client.HTTPConnection(address.authority)
    try:
        connection.sock = address.connect(SILENCE_S)
        connection.request("GET", f"{EVENTS.path}?{urlencode(query)}" if query else EVENTS.path, headers=headers)
        answer = connection.getresponse()
        if answer.status != http.client.OK:
            raise ApiError.from_problem(decoder_of(Problem, packed=False).decode(answer.read()))
        yield from _events(answer)
    except (OSError, http.client.HTTPException, msgspec.DecodeError) as error:  # DecodeError: no kvdock server
        raise ServerUnavailable(f"{address.text}: {error}") from error
    finally:
        connection.close()


def _events(answer: http.client.HTTPResponse) -> Iterator[StreamedEvent]:
    fields: dict[str, str] = {}
    for raw in iter(answer.readline, b""):
        line = raw.decode(errors="replace").rstrip("\n")  # if the server dies, the last line is cut, and is ignored
        if line and line[0] != ":":
            name, _, value = line.partition(": ")
            fields[name] = value
        elif not line and "data" in fields:
            yield StreamedEvent(fields["id"], msgspec.json.decode(fields["data"]))
            fields = {}
