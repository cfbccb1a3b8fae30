"""The feeds: everything that follows the journal, as far as the settings ask for it.

Traces and ZeroMQ need packages that are extras: these are imported when the settings ask for them, not before.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvdock._core import Table
from kvdock.api.background import Background
from kvdock.api.errors import StartupError
from kvdock.api.feeds.kv import KvLog, KvStream
from kvdock.api.feeds.log import EventLog
from kvdock.api.feeds.sse import EventStream
from kvdock.api.record.journal import Journal, Subscriber
from kvdock.api.record.timings import GrantTimes
from kvdock.api.settings import Settings
from kvdock.protocol.events import Event

if TYPE_CHECKING:
    from kvdock.api.feeds.kv_zmq import KvZmq
    from kvdock.api.feeds.traces import Traces


@dataclass(frozen=True)
class Extras:
    """The feeds that need packages that are extras. None: the settings do not ask for it."""

    traces: Traces | None = None
    kv_zmq: KvZmq | None = None

    def start(self, kv_log: KvLog | None, background: Background) -> None:
        if self.traces is not None:
            self.traces.start(background)
        if self.kv_zmq is not None and kv_log is not None:
            self.kv_zmq.start(kv_log, background)

    def close(self) -> None:
        """Waits until everything is sent, but only for a moment."""
        if self.kv_zmq is not None:
            self.kv_zmq.close()
        if self.traces is not None:
            self.traces.close()


def open_extras(settings: Settings, version: str) -> Extras:
    """The extras that the settings ask for. They do nothing before `start`.

    Raises StartupError: not_installed, with a sentence that says what to install; bad_address.
    """
    traces = None
    if "traces" in settings.observers:
        with _needs("traces", "observe=traces"):
            from kvdock.api.feeds.traces import Traces
        traces = Traces(settings.traces_endpoint, version=version, instance=settings.socket_path)
    return Extras(traces, _kv_zmq(settings) if settings.kv_events_endpoint else None)


def _kv_zmq(settings: Settings) -> KvZmq:
    with _needs("zmq", "kv_events_endpoint"):
        import zmq

        from kvdock.api.feeds.kv_zmq import KvZmq
    try:
        return KvZmq(
            settings.kv_events_endpoint, settings.kv_events_replay_endpoint, settings.kv_events_topic,
            is_positional=settings.kv_events_form == "array",
        )
    except zmq.ZMQError as error:
        asked = filter(None, (settings.kv_events_endpoint, settings.kv_events_replay_endpoint))
        where = " and ".join(map(repr, asked))
        raise StartupError("bad_address", f"KV events cannot be published at {where}: {error}") from error


@contextmanager
def _needs(extra: str, asked: str) -> Iterator[None]:
    try:
        yield
    except ModuleNotFoundError as error:
        raise StartupError(
            "not_installed", f"{asked} needs what is not installed ({error.name}): pip install 'kvdock[{extra}]'"
        ) from error


class Feeds:
    """The feeds of one server. Those that the settings leave out are None."""

    def __init__(
        self, settings: Settings, table: Table, journal: Journal, wall_s: Callable[[], float], extras: Extras
    ) -> None:
        """Subscribes the feeds to the journal. `wall_s`: Unix seconds."""
        wanted = settings.observers
        events = EventStream(table.incarnation, journal.catch_up)
        self.grant_times = GrantTimes()
        self.events = events if events.name in wanted else None
        self.kv = KvLog(table.all_changes, table.ready, wall_s) if KvStream.name in wanted else None
        self.kv_stream = KvStream(self.kv) if self.kv is not None else None
        self._journal, self._extras = journal, extras
        subscribers: list[Subscriber | None] = [
            EventLog(), events, self.grant_times, extras.traces, self.kv_stream
        ]
        for one in subscribers:
            if one is not None and one.name in wanted:
                journal.subscribe(one)
        journal.open()

    def begin(self, background: Background) -> None:
        """Hands out the journal's events, and follows the table for KV events."""
        background.begin("handing out events", self._journal.run)
        if self.kv is not None:
            background.begin("following KV events", self.kv.run)

    # ---------------------------------------------------------------- figures for `/metrics`

    async def catch_up(self) -> None:
        """Hands out the events that wait, in slices, so that all figures include them."""
        await self._journal.catch_up()

    @property
    def published(self) -> Mapping[type[Event], int]:
        """Events that were handed to subscribers, by kind."""
        return self._journal.published

    @property
    def dropped(self) -> int:
        """Events that were dropped because too many waited."""
        return self._journal.dropped

    @property
    def spans(self) -> Mapping[str, int]:
        """Spans of traces, by outcome: sent, failed, dropped."""
        return self._extras.traces.spans if self._extras.traces is not None else {}

    @property
    def kv_chunks(self) -> int:
        """Chunks that routers believe to be in the pool."""
        return self.kv.chunks if self.kv is not None else 0

    @property
    def kv_snapshots(self) -> int:
        """Snapshots sent to routers that came late."""
        return self.kv.snapshots if self.kv is not None else 0
