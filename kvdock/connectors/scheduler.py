"""The scheduler connector: the part of a connector that is the same in the scheduler's process of every engine.

    engine thread      lookup ─► begin_load      begin_store ─► store           hint, finished
    "kvdock-ask"       wait for an answer
    "kvdock-verify"    hash what was found
    "kvdock-store"                               reserve, carry out, hint
    "kvdock-settle"                                                             cancel

It joins lookups (kvdock/connectors/lookups.py) and stores (kvdock/connectors/stores.py), which share the states of
requests. It copies no KV; verification reads KV in shared memory. Lookups have a background thread of their own, so
that none of them waits for a copy, a hash or another call. The engine's own connector sends plans to the workers, and
reports to the engine when loads and stores have ended: kvdock/connectors/engine_connector.py,
kvdock/connectors/vllm/scheduler.py.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import msgspec

from kvdock.connectors.background import Background
from kvdock.connectors.cost import LoadChoice
from kvdock.connectors.lookups import LookupRecord, Lookups, Verification
from kvdock.connectors.requests import RequestCallbacks, Requests
from kvdock.connectors.session import Attachment, EngineSession, notify
from kvdock.connectors.stores import Stores
from kvdock.connectors.waits import Waits
from kvdock.protocol.outcomes import Outcome
from kvdock.protocol.schemas import Hint, Prefetch
from kvdock.protocol.wire_types import MAX_KEYS


@dataclass(frozen=True)
class Preference:
    """How the server is to treat a request's chunks once the request has ended. `tokens`: only the chunks of its first
    `tokens` tokens; None: all. `prefetch_after_s`: after this time, lower tiers load the chunks that the pool lacks;
    None: this is a hint, and the other fields are those of Hint. `label`: for lists of prefixes, and no hint."""

    priority: int = 0
    duration_s: float | None = None
    tokens: int | None = None
    conversation_ended: bool = False
    prefetch_after_s: float | None = None
    label: str = ""


class SchedulerConnector:
    """`readers`: how many ranks read each lease. `callbacks`: facts that only the engine knows about its requests. If
    requests wait for chunks that other engines compute (`waits.once`), lookups promise to store the chunks that they do
    not find."""

    def __init__(
        self, session: EngineSession, *, readers: int = 1, callbacks: RequestCallbacks | None = None,
        waits: Waits | None = None, choice: LoadChoice | None = None, verification: Verification | None = None,
        record: LookupRecord | None = None,
    ) -> None:
        self.session = session
        waits = waits if waits is not None else Waits()
        self._record = record if record is not None else LookupRecord()
        self._requests = Requests(session, callbacks or RequestCallbacks(), promises=waits.once is not None)
        self._settling = Background("kvdock-settle")
        self.lookups = Lookups(
            self._requests, self._settling, readers=readers, waits=waits, choice=choice or LoadChoice(),
            verification=verification or Verification(), record=self._record,
        )
        self.stores = Stores(self._requests)

    def hint(self, request_id: str, preferences: Sequence[Preference]) -> None:
        """Sends the preferences for a request's chunks to the server, after the stores that were started before. To be
        called before `finished`, which forgets the chunks."""
        known = self._requests.known_keys(request_id) if preferences else None
        if known is not None:
            self.stores.run(self.send_preferences, *known, preferences)

    def send_preferences(
        self, attachment: Attachment, keys: Sequence[bytes], preferences: Sequence[Preference]
    ) -> None:
        """Background: sends preferences for the chunks of a request. `keys`: theirs, from the first."""
        _send_preferences(self.session, attachment, keys, preferences)

    def ended(self, outcome: Outcome) -> None:
        """A request has ended: the next heartbeat reports its outcome to the server."""
        self.session.outcomes.add(outcome)

    def finished(self, request_id: str) -> None:
        """Forgets the request, which ended, was aborted or preempted."""
        self.stores.forget(request_id)
        self.lookups.finished(request_id)

    def run(self, call: Callable[..., None], *args: object) -> None:
        """Runs another call to the server in the background."""
        self._settling.run(call, *args)

    def close(self) -> None:
        """Waits for the background calls."""
        self.lookups.close()
        self.stores.close()
        self._settling.close()  # last, because the other two start calls in it
        if self._record.statistics is not None:
            self._record.statistics.log_summary()


def _send_preferences(
    session: EngineSession, attachment: Attachment, keys: Sequence[bytes], preferences: Sequence[Preference]
) -> None:
    """Background. `keys`: the keys of a request's chunks, from its first. If there are more than one call may name, a
    preference to retain, load or label is sent for the first ones, and any other for the last ones."""
    chunk_tokens = session.manifest.chunk_tokens
    for one in preferences:
        meant = keys if one.tokens is None else keys[: -(-one.tokens // chunk_tokens)]
        is_from_first = one.priority > 0 or one.prefetch_after_s is not None or bool(one.label)
        meant = meant[:MAX_KEYS] if is_from_first else meant[-MAX_KEYS:]
        if not meant:
            continue
        if one.prefetch_after_s is not None:
            notify(session, attachment, session.client.prefetch, Prefetch(
                session=attachment.session, member=attachment.member, keys=b"".join(meant),
                after_s=one.prefetch_after_s,
            ))
            continue
        body = Hint(
            session=attachment.session, member=attachment.member, keys=b"".join(meant), priority=one.priority,
            duration_s=one.duration_s, conversation_ended=one.conversation_ended, label=one.label or msgspec.UNSET,
        )
        notify(session, attachment, session.client.hint, body)
