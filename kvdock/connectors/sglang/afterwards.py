"""What waits until SGLang has sent the tokens of a batch: notes of loads that have ended, and offers of their pages.

SGLang processes a batch's result in one call: it asks for the verdict on the batch's loads, puts their pages into its
tree, which offers them to the linker, and sends the tokens last. Whatever the linker does by then delays the first
tokens of these requests, and so does a thread of kvdock's that it wakes, because that thread takes the interpreter
lock. After the call, SGLang's thread has time: the next step has been launched.

SGLang's scheduler thread calls everything.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial


class Afterwards:
    """Calls run in the order in which they were passed."""

    def __init__(self) -> None:
        self._is_held = False
        self._waiting = deque[Callable[[], object]]()

    def run(self, call: Callable[..., object], *arguments: object) -> None:
        """Runs `call` once SGLang has processed a result; at once if it processes none."""
        if self._is_held:
            self._waiting.append(partial(call, *arguments))
        else:
            call(*arguments)

    @contextmanager
    def held(self) -> Iterator[None]:
        """SGLang processes a result."""
        self._is_held = True
        try:
            yield
        finally:
            self._is_held = False
            self._run_waiting()

    def _run_waiting(self) -> None:
        """A call that fails keeps no other from running."""
        try:
            while self._waiting:
                self._waiting.popleft()()
        finally:
            if self._waiting:
                self._run_waiting()
