"""Methods of vLLM that kvdock wraps, because connectors are told of them in no other way.

Safety may rest on such a wrapper, and vLLM's next release may rename the method, or another plug-in may replace it. So
a hook proves that it is in force: it calls the method, as vLLM would, with a probe in the place of its object. A
wrapper that is called hears the probe and goes no further. What is not wrapped fails at the probe, which has nothing of
the object's. The proof is repeated when something else stands in the method's place.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from functools import wraps
from typing import Any

Heard = Callable[[Any, tuple[Any, ...], dict[str, Any], Any], None]
"""Is called after the method, also if it raised, with its object, its arguments, and what it returned (None: it raised,
or returned None)."""

Before = Callable[[Any, tuple[Any, ...], dict[str, Any]], None]
"""Is called before the method, with its object and its arguments."""

_installed: dict[tuple[type, str], Hook] = {}


class _Probe:
    """Stands in the place of the method's object."""

    def __init__(self) -> None:
        self.heard: set[Hook] = set()


class Hook:
    """Around one method of one class, for all of its objects in this process. Made by hook()."""

    def __init__(self, owner: type, method: str) -> None:
        self._owner, self._method = owner, method
        self._heard: list[Heard] = []
        self._before: list[Before] = []
        self._proved: Any = None
        """What stood in the method's place when the last proof succeeded."""

    @property
    def _name(self) -> str:
        return f"{self._owner.__name__}.{self._method}"

    def listen(self, heard: Heard) -> None:
        """Calls `heard` from now on."""
        self._heard.append(heard)

    def listen_before(self, heard: Before) -> None:
        """Calls `heard`, which must not raise, from now on before the method runs."""
        self._before.append(heard)

    def install(self) -> None:
        real = getattr(self._owner, self._method, None)
        if real is None:
            return

        @wraps(real)
        def around(this: Any, *args: Any, **more: Any) -> Any:
            if isinstance(this, _Probe):
                this.heard.add(self)
                return None
            made = None
            for tell in self._before:
                tell(this, args, more)
            try:
                made = real(this, *args, **more)
            finally:
                for heard in self._heard:
                    heard(this, args, more, made)
            return made

        setattr(self._owner, self._method, around)

    def why_not(self) -> str:
        """Why the method is not heard, in a few words; "": it is, which was proved by a call through it."""
        now = getattr(self._owner, self._method, None)
        if now is None:
            return f"this vLLM has no {self._name}"
        if now is self._proved:
            return ""
        probe = _Probe()
        with suppress(Exception):  # whatever stands there instead of the hook, it has not heard the probe
            now(probe, "kvdock's probe")
        if self not in probe.heard:
            return f"something else has taken the place of {self._name}"
        self._proved = now
        return ""


def hook(owner: type, method: str) -> Hook:
    """The hook around `owner`'s method, which is installed with the first call."""
    found = _installed.get((owner, method))
    if found is None:
        found = _installed[owner, method] = Hook(owner, method)
        found.install()
    return found
