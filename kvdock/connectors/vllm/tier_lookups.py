"""Lookups of vLLM's own offload, chunk by chunk, for secondary_tier.py.

vLLM asks for one key at a time, and must not wait. So the keys that it asks for in a step are sent together when the
step ends, in a thread of their own, and until the answer is there the result is RETRY. What an answer has found is
leased until a load has it, or until vLLM does not want it.

A group of full attention needs all chunks from the first on: it is looked up like any prompt. Other groups need only
the last chunks before the end of a hit: these are looked up, and if they are not all there, every chunk of the group
that is stored is leased, because vLLM can do with an earlier end.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from queue import Empty, SimpleQueue
from typing import NamedTuple, TypeVar

from vllm.v1.kv_offload.base import OffloadKey, get_offload_group_idx

from kvdock.connectors.background import Background
from kvdock.connectors.session import Attachment, EngineSession, notify
from kvdock.protocol.errors import ApiError, ServerUnavailable
from kvdock.protocol.schemas import Hold, Lookup, Part
from kvdock.protocol.wire_types import MAX_KEYS, MAX_NAME, MAX_STORE_KEYS

ASK_AGAIN_S = 0.02
"""How often a request that waits for the server's lower tiers asks."""
CallFailed = (ServerUnavailable, ApiError)
T = TypeVar("T")


@dataclass(eq=False)
class Lease:
    """`is_read`: vLLM was told of a hit in it."""

    attachment: Attachment
    id: str
    is_read: bool = False


class Found(NamedTuple):
    """A chunk that is leased, the number `at` of its question."""

    lease: Lease
    at: int
    parts: tuple[Part, ...]


@dataclass(eq=False)
class Story:
    """What people read of a request: of its first group that was asked for, between which tokens of the prompt, how
    many chunks were found and loaded. `epoch`: that of the first question."""

    group: int = -1
    start: int = 0
    end: int = 0
    epoch: int = 0
    found: int = 0
    loaded: int = 0

    def asked(self, group: int, end: int, chunk_tokens: int) -> None:
        """A chunk of `group` is asked for, whose last token comes before `end`."""
        if self.group < 0:
            self.group, self.start = group, end - chunk_tokens
        if self.group == group:
            self.end = max(self.end, end)


@dataclass(eq=False)
class Request:
    """`epoch`: that of the weights when the request came. `known`: by key, what was found; None: a miss. `unasked`:
    keys of this step; `asked`: keys whose question is on its way."""

    name: str
    epoch: int
    known: dict[OffloadKey, Found | None] = field(default_factory=dict, init=False)
    unasked: list[OffloadKey] = field(default_factory=list, init=False)
    asked: set[OffloadKey] = field(default_factory=set, init=False)
    leases: list[Lease] = field(default_factory=list, init=False)
    story: Story = field(default_factory=Story, init=False)
    questions: int = field(default=0, init=False)
    is_over: bool = field(default=False, init=False)


def forget(request: Request, lease: Lease) -> None:
    """The lease is loaded from or given up: its chunks are looked up again if they are wanted once more."""
    request.leases.remove(lease)
    request.known = {key: found for key, found in request.known.items() if found is None or found.lease is not lease}


@dataclass(eq=False)
class Question:
    """Keys of one KV group of a request, in order, and kvdock's `wire` keys for them. `window`: how many of the last
    ones a hit needs; None: all, from the first on. `until_s`: how long it may wait for lower tiers. `lease`: what
    the last answer has found, which the next one may add to."""

    request: Request
    attachment: Attachment
    name: str
    epoch: int
    keys: Sequence[OffloadKey]
    wire: Sequence[bytes]
    window: int | None
    until_s: float
    again_s: float = 0.0
    lease: Lease | None = None

    @property
    def first(self) -> int:
        """The first key that is looked up with those behind it; a window's other keys come later, if at all."""
        return 0 if self.window is None else max(0, len(self.keys) - self.window)


@dataclass(eq=False)
class Answer:
    """`waits`: lower tiers are loading more, so the question is to be sent again. `first`: of the keys before it
    nothing is known."""

    question: Question
    found: dict[OffloadKey, Found] = field(default_factory=dict)
    lease: Lease | None = None
    waits: bool = False
    first: int = 0


class Lookups:
    """Asks the server, in a thread of its own. All methods but those marked "Background" are the scheduler's."""

    def __init__(self, session: EngineSession, tier_wait_s: float, windows: Mapping[int, int | None]) -> None:
        self._session, self._tier_wait_s, self._windows = session, tier_wait_s, windows
        self._asking = Background("kvdock-ask")
        self._answers: SimpleQueue[Answer] = SimpleQueue()
        self._waiting: list[Question] = []
        self._held: set[str] = set()
        self._epoch = 0

    def keeps_lease(self, lease: str) -> bool:
        """See SessionObserver. Background."""
        return lease in self._held

    def take(self) -> None:
        """From here on, what was answered by now is known."""
        for answer in drained(self._answers):
            question, request = answer.question, answer.question.request
            if answer.lease is not None:
                if request.is_over:
                    self.give_up(answer.lease)
                elif answer.lease not in request.leases:
                    request.leases.append(answer.lease)
            if request.is_over:
                continue
            if answer.waits:
                self._waiting.append(question)
                continue
            if question.epoch == request.story.epoch:
                request.story.found = len(answer.found)
            request.asked.difference_update(question.keys)
            request.known.update({key: answer.found.get(key) for key in question.keys[answer.first :]})

    def ask(self, request: Request, attachment: Attachment, key_of: Callable[[OffloadKey], bytes]) -> None:
        """Asks for the request's new keys, and starts again what waits for lower tiers."""
        by_group: dict[int, list[OffloadKey]] = {}
        for key in request.unasked:
            by_group.setdefault(get_offload_group_idx(key), []).append(key)
        request.unasked = []
        for group, keys in by_group.items():
            window = self._windows.get(group)
            most = MAX_KEYS if window is None else MAX_STORE_KEYS
            kept = keys[:most] if window is None else keys[-most:]
            request.known.update(dict.fromkeys(set(keys) - set(kept)))
            request.asked -= set(keys) - set(kept)
            # People know a request by the name of its first question. The others have names of their own, because one
            # that is sent again must have the last epoch of its name.
            name = request.name[:MAX_NAME] if not request.questions else f"{request.name[:200]}/{request.questions}"
            request.questions, self._epoch = request.questions + 1, self._epoch + 1
            request.story.epoch = request.story.epoch or self._epoch
            until_s, wire = time.monotonic() + self._tier_wait_s, [key_of(key) for key in kept]
            question = Question(request, attachment, name, self._epoch, kept, wire, window, until_s)
            self._asking.run(self._ask, question)

    def ask_again(self) -> None:
        """Sends the questions again that wait for lower tiers."""
        now_s = time.monotonic()
        waiting, self._waiting = [one for one in self._waiting if not one.request.is_over], []
        for question in waiting:
            if question.again_s <= now_s:
                self._asking.run(self._ask, question)
            else:
                self._waiting.append(question)

    def _ask(self, question: Question) -> None:
        """Background. Whatever fails, there is an answer: what it has not found is a miss."""
        answer = Answer(question)
        try:
            if self._session.attachment is question.attachment and not question.request.is_over:
                self._look_up(answer)
                is_whole = len(answer.found) == len(question.keys) - question.first
                if is_whole:
                    answer.first = question.first
                elif question.window is not None and not answer.waits:
                    self._hold(answer)
        except CallFailed as error:
            self._session.lost(question.attachment, error)
        finally:
            self._answers.put(answer)

    def _look_up(self, answer: Answer) -> None:
        question, attachment = answer.question, answer.question.attachment
        left_s = max(0.0, question.until_s - time.monotonic())
        found = self._session.client.lookup(Lookup(
            session=attachment.session, member=attachment.member, request=question.name, epoch=question.epoch,
            keys=b"".join(question.wire[question.first :]), wait_s=left_s,
        ))
        self._leased(answer, found.lease, found.chunks, question.first)
        answer.waits = found.pending is not None and left_s > 0
        question.again_s = time.monotonic() + ASK_AGAIN_S

    def _hold(self, answer: Answer) -> None:
        """Not all of the window is there. vLLM can do with an earlier one, so all chunks that are stored are leased."""
        question, attachment, last = answer.question, answer.question.attachment, answer.lease
        found = self._session.client.hold(Hold(
            session=attachment.session, member=attachment.member, request=f"{question.name[:200]}~{question.epoch}",
            keys=b"".join(question.wire),
        ))
        answer.found, answer.lease = {}, None
        self._leased(answer, found.lease, found.chunks, 0)
        if last is not None:
            self._cancel(last)

    def _leased(self, answer: Answer, lease: str | None, chunks: Sequence[Sequence[Part]], first: int) -> None:
        if lease is None:
            return
        self._held.add(lease)
        last = answer.question.lease
        answer.lease = last if last is not None and last.id == lease else Lease(answer.question.attachment, lease)
        answer.question.lease = answer.lease
        answer.found = {
            answer.question.keys[first + index]: Found(answer.lease, index, tuple(parts))
            for index, parts in enumerate(chunks) if parts
        }

    def ended(self, lease: Lease) -> None:
        """A load has the lease from here on."""
        self._held.discard(lease.id)

    def give_up(self, lease: Lease) -> None:
        """No load has got the lease, and none will."""
        self._asking.run(self._cancel, lease)

    def _cancel(self, lease: Lease) -> None:
        """Background."""
        at = lease.attachment
        self._held.discard(lease.id)
        notify(self._session, at, self._session.client.cancel, lease.id, at.session, at.member)

    def over(self, request: Request) -> None:
        """vLLM asks for the request no more."""
        request.is_over = True
        for lease in request.leases:
            self.give_up(lease)
        waits = [one for one in self._waiting if one.request is request]
        for question in waits:
            at = question.attachment
            self._asking.run(notify, self._session, at, self._session.client.withdraw, at.session, [question.name])

    def close(self) -> None:
        """Waits for the questions on their way, and gives up what they have found."""
        self._asking.close()
        self._asking = Background("kvdock-ask")
        self.take()
        self._asking.close()


def drained(queue: SimpleQueue[T]) -> Iterator[T]:
    with suppress(Empty):
        while True:
            yield queue.get_nowait()
