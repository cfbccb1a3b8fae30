"""What is observed only if asked for, and needs packages that are extras: imported when it is switched on, not before.

Whoever asks for it without the package gets one sentence that says what to install: StartupError(not_installed).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvdock.api.errors import StartupError
from kvdock.api.feeds.kv import KvLog
from kvdock.api.record.journal import Subscriber
from kvdock.api.settings import Settings

if TYPE_CHECKING:
    from kvdock.api.feeds.kv_zmq import KvZmq
    from kvdock.api.feeds.traces import Traces


@dataclass(frozen=True)
class Extras:
    """None: nobody asked for it."""

    traces: Traces | None = None
    kv_zmq: KvZmq | None = None

    @property
    def subscribers(self) -> list[Subscriber]:
        return [self.traces] if self.traces is not None else []

    @property
    def spans(self) -> Mapping[str, int]:
        """By what became of them."""
        return self.traces.spans if self.traces is not None else {}

    def start(self, kv_log: KvLog | None) -> None:
        if self.traces is not None:
            self.traces.start()
        if self.kv_zmq is not None and kv_log is not None:
            self.kv_zmq.start(kv_log)

    def close(self) -> None:
        """Waits a moment for what is still to be sent."""
        if self.kv_zmq is not None:
            self.kv_zmq.close()
        if self.traces is not None:
            self.traces.close()


def open_extras(settings: Settings, version: str) -> Extras:
    """Those that the settings ask for. They do nothing before `start`."""
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
        raise StartupError(
            "bad_address", f"KV events cannot be published at {settings.kv_events_endpoint!r} and "
            f"{settings.kv_events_replay_endpoint!r}: {error}"
        ) from error


@contextmanager
def _needs(extra: str, asked: str) -> Iterator[None]:
    try:
        yield
    except ModuleNotFoundError as error:
        raise StartupError(
            "not_installed", f"{asked} needs what is not installed ({error.name}): pip install 'kvdock[{extra}]'"
        ) from error
