"""What is observed only if asked for, and needs packages that are extras: imported when it is switched on, not before.

Whoever asks for it without the package gets one sentence that says what to install: StartupError(not_installed).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvdock.api.errors import StartupError
from kvdock.api.events.bus import Subscriber
from kvdock.api.settings import Settings

if TYPE_CHECKING:
    from kvdock.api.events.traces import Traces


@dataclass(frozen=True)
class Extras:
    """None: nobody asked for it."""

    traces: Traces | None = None

    @property
    def subscribers(self) -> list[Subscriber]:
        return [self.traces] if self.traces is not None else []

    @property
    def spans(self) -> Mapping[str, int]:
        """By what became of them."""
        return self.traces.spans if self.traces is not None else {}

    def start(self) -> None:
        if self.traces is not None:
            self.traces.start()

    def close(self) -> None:
        """Waits a moment for what is still to be sent."""
        if self.traces is not None:
            self.traces.close()


def open_extras(settings: Settings, version: str) -> Extras:
    """Those that the settings ask for. They do nothing before `start`."""
    traces = None
    if "traces" in settings.observers:
        with _needs("traces", "observe=traces"):
            from kvdock.api.events.traces import Traces
        traces = Traces(settings.traces_endpoint, version=version, instance=settings.socket_path)
    return Extras(traces)


@contextmanager
def _needs(extra: str, asked: str) -> Iterator[None]:
    try:
        yield
    except ModuleNotFoundError as error:
        raise StartupError(
            "not_installed", f"{asked} needs what is not installed ({error.name}): pip install 'kvdock[{extra}]'"
        ) from error
