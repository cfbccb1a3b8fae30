"""`kvdock explain`, `kvdock lookup` and `kvdock events`: why a request missed, how much of a prompt is stored, and what
happens in the server. A lookup of these commands has no session, so it takes no lease."""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Iterator
from http import HTTPStatus
from typing import Any, NamedTuple

import msgspec
import typer
from rich.console import Console
from rich.text import Text

from kvdock.api.feeds.log import SENTENCES
from kvdock.cli.client import Prompt, advised, default_address, print_json, reached, resolve
from kvdock.cli.errors import WRONG, CommandError
from kvdock.cli.help import Moment
from kvdock.cli.render import counted, printable, say
from kvdock.client.events import StreamedEvent, read_events
from kvdock.client.transport import Address
from kvdock.protocol.access import TOKEN_FILE_VARIABLE, read_token, trusted_uid_in
from kvdock.protocol.errors import ApiError, ServerUnavailable
from kvdock.protocol.events import KINDS, Event, Evicted
from kvdock.protocol.schemas import Lookup

RETRY_S = 1.0
"""How long to wait before the next attempt to reach a lost server."""


def show_explanation(server: str, *, request: str, session: str, as_json: bool, console: Console) -> None:
    """`session`: the engine's session; empty: that of the latest request with this id. Raises CommandError,
    ApiError."""
    with reached(server) as client:
        found = client.explain(request, session=session)
    if as_json:
        print_json(console, found)
        return
    if found.request != request:
        say(console, Text(f"request {printable(found.request)}", style="bold"))
    for sentence in found.sentences:
        say(console, printable(sentence.text))
    if found.advice:
        say(console, "", *(Text(f"→ {printable(advice)}", style="italic") for advice in found.advice.values()))


class WantedEvents(NamedTuple):
    """The options of `kvdock events`."""

    kinds: str = ""
    """Separated by commas; empty: all."""
    since: Moment | None = None
    limit: int | None = None
    """How many of the events that the server has kept: the last ones. None: all."""


def show_events(server: str, wanted: WantedEvents, *, follow: bool, as_json: bool) -> None:
    """Prints one line for each event. Raises CommandError, ApiError."""
    try:
        trusted_uid = trusted_uid_in(os.environ)
        address = Address.parse(server or default_address(), trusts_service=True, trusted_uid=trusted_uid)
    except ValueError as error:
        raise CommandError(str(error), WRONG) from error
    with advised():
        for one in _events(address, read_token(os.environ.get(TOKEN_FILE_VARIABLE, "")), wanted, follow=follow):
            typer.echo(msgspec.json.encode(one.event).decode() if as_json else line_of(one.event))


def _events(address: Address, token: str, wanted: WantedEvents, *, follow: bool) -> Iterator[StreamedEvent]:
    """First those that the server has kept and that are wanted; with `follow` then new ones. When the server is lost,
    prints that to standard error, and goes on when that server or the next one answers."""
    last_id, is_lost, kinds = "", False, wanted.kinds
    since_s = wanted.since.at(time.time()) if wanted.since else 0.0
    kept: deque[StreamedEvent] = deque(maxlen=wanted.limit)
    for one in read_events(address, token, kinds=kinds):
        last_id = one.id
        if one.event["at"] >= since_s:
            kept.append(one)
    yield from kept
    while follow:
        try:
            for one in _after(address, token, kinds, last_id, may_be_new=is_lost):
                last_id, is_lost = one.id, False
                yield one
            why = f"{address.text}: it has ended"
        except (ServerUnavailable, ApiError) as error:
            if isinstance(error, ApiError) and error.status != HTTPStatus.SERVICE_UNAVAILABLE:
                raise
            why = str(error)
        if not is_lost:
            typer.echo(f"kvdock: the server is lost ({printable(why)}), trying again every {RETRY_S:g} s", err=True)
        is_lost = True
        time.sleep(RETRY_S)  # also after a stream that has ended: while a server drains, each stream ends at once


def _after(address: Address, token: str, kinds: str, last_id: str, *, may_be_new: bool) -> Iterator[StreamedEvent]:
    """The events after `last_id`. If it is empty no event was printed so far, so those that a new server has kept come
    first."""
    if may_be_new and not last_id:
        for one in read_events(address, token, kinds=kinds):
            last_id = one.id
            yield one
    yield from read_events(address, token, kinds=kinds, follow=True, last_id=last_id)


def line_of(event: dict[str, Any]) -> str:
    """The sentence that the log has for the event, or else its fields."""
    when = time.strftime("%H:%M:%S", time.localtime(event["at"]))
    return f"{when} {event['kind']:<14} {printable(_sentence(event))}"


def _sentence(event: dict[str, Any]) -> str:
    kind = KINDS.get(event["kind"])
    if kind is Evicted and not event["by_operator"]:  # the log tells only of the first ones, as of a beginning
        return f"{counted(event['chunks'], 'chunk')} evicted for room: {event['total']:,} since the start"
    if kind in SENTENCES:
        made, sentence = msgspec.convert(event, kind), SENTENCES[kind]
        return sentence.template_of(made) % sentence.values(made)
    shown = {name: value for name, value in event.items() if name not in ("kind", *Event.__struct_fields__)}
    return " ".join(f"{name}={_plain(value)}" for name, value in shown.items() if value not in (None, ""))


def _plain(value: Any) -> Any:
    return f"{value:.6g}" if isinstance(value, float) else value


class Found(msgspec.Struct):
    """What `--json` prints."""

    namespace: str
    model: str
    chunk_tokens: int
    asked_tokens: int
    hit_tokens: int


def show_lookup(server: str, prompt: Prompt, *, as_json: bool, console: Console) -> None:
    """Raises CommandError for a wrong key, token file or namespace, and when no server answers, and ApiError."""
    wanted = prompt.read("lookup")
    with reached(server) as client:
        space = resolve(client, prompt.namespace)
        answer = client.lookup(Lookup(namespace=space.namespace, keys=wanted.keys, tokens=wanted.tokens))
    chunk_tokens, asked = space.manifest.chunk_tokens, wanted.length(space)
    found = Found(space.namespace, space.model, chunk_tokens, asked, answer.hit_tokens)
    if as_json:
        print_json(console, found)
        return
    share = 100 * found.hit_tokens / asked if asked else 0
    say(console, f"{found.hit_tokens:,} of {asked:,} tokens are stored ({share:.0f} %), in chunks of {chunk_tokens}, "
                 f"for {printable(found.model)} (namespace {space.namespace[:8]})")
