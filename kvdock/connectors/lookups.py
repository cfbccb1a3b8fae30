"""Lookups: whether the server has more of a request's prompt than the engine, and whether the engine loads it.

    engine thread      lookup: ask ─► wait ─► decide ─► lease ──────────► begin_load: the ranks get the lease
    "kvdock-ask"                │      ▲
                                └─► wait for the answer, and keep it ───┐
    "kvdock-verify"                                                     └─► hash what was found

The engine looks a request up again in each step until the result is a Hit or a Miss. `Lookups.lookup` goes through
these steps:

- ask: the first lookup sends a question to the server, and a background thread waits for the answer. Another question
  is sent when more is asked for, and when more may have been stored since the last answer. The background thread sends
  a question if others come before it, or no connection is open;
- wait: for the answer as long as the engine's patience allows, and for what other engines store and lower tiers load as
  long as that takes less than computing (kvdock/connectors/waits.py);
- decide: a hit that takes longer to load than to compute is a miss (kvdock/connectors/cost.py);
- lease: a hit keeps the lease that came with its answer, and a miss gives it up.

Local tokens, those that the engine's own prefix cache has, are whole blocks in every group (multiples of the manifest's
block_tokens). Any other number ends inside a block that can be neither skipped nor written, so the lookup is a miss.

Invariants: a lookup that found too little to load keeps no lease; chunks that failed to load are not looked up again
for their request until the request is forgotten. The epochs of questions only rise while this process runs: once a
lease was handed to ranks, or a request was forgotten, the next question has a higher epoch, so a late release of the
old lease cannot end the new lease.

Threads: methods marked "Background" run in a background thread. Calls about one request come one at a time; those
for loads that failed may come from any thread. `Requests.lock` guards the states of the requests, and is never held
during a call to the server.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

from msgspec import UNSET

from kvdock.connectors.background import Background
from kvdock.connectors.chunk_statistics import ChunkStatistics
from kvdock.connectors.cost import UNLIMITED, LoadChoice
from kvdock.connectors.engine_client import BegunLookup, EngineClient
from kvdock.connectors.interface import GroupBlocks, Hit, LookupResult, Miss, Pending
from kvdock.connectors.plans import Chunks, LoadPlan, Pieces, column_of
from kvdock.connectors.requests import MISS, Requests, RequestState
from kvdock.connectors.session import Attachment, notify
from kvdock.connectors.verify import Verifier
from kvdock.connectors.waits import ASK_S, NOTHING, Expected, Patience, SentQuestion, Waits
from kvdock.protocol.errors import ApiError, ServerUnavailable
from kvdock.protocol.schemas import Lookup, LookupAnswer

FRESH_S = 0.05
"""A question is sent again if it is older than this and did not find everything, because other engines may have stored
since."""


@dataclass(frozen=True)
class Question:
    """A lookup to be sent to the server."""

    request_id: str
    attachment: Attachment
    keys: tuple[bytes, ...]
    body: Lookup
    renews: str | None = None
    """The lease that the request already has, if the same question was answered before."""
    replaces: str | None = None
    """A lease of an earlier question with more keys, to be cancelled first."""

    @property
    def asked(self) -> tuple[int, int]:
        """(number of keys, local tokens), see LookupState."""
        return len(self.keys), self.body.skip_prefix_tokens


class Known(NamedTuple):
    """The present result of a lookup. `found`: Pending until the question is answered. `expected`: the chunks that may
    still come, by the newest answer."""

    found: LookupResult
    expected: Expected = NOTHING


@dataclass(frozen=True)
class Verification:
    """`verifier`: decides whether the chunks that an answer leases may be promised. `is_eager`: an answer is verified
    as soon as it arrives, unless more chunks may come, so that the next lookup can promise it; otherwise when
    `is_verified` is called."""

    verifier: Verifier = field(default_factory=Verifier)
    is_eager: bool = False


@dataclass(frozen=True)
class LookupRecord:
    """Where lookups are counted. `answered`: called in the background with the seconds from each question to its
    answer. `declined`: called for each request whose hit is not loaded, with the reason and the tokens of the hit."""

    answered: Callable[[float], None] = lambda seconds: None
    declined: Callable[[str, str, int], None] = lambda request_id, why, tokens: None
    statistics: ChunkStatistics | None = None


class Lookups:
    """`settling`: runs calls to the server for which nothing waits. `readers`: how many ranks read each lease."""

    def __init__(
        self, requests: Requests, settling: Background, *, readers: int, waits: Waits, choice: LoadChoice,
        verification: Verification, record: LookupRecord,
    ) -> None:
        self.waits, self.late = waits, 0
        """`late`: how many lookups were a miss because the server was late."""
        self._requests, self._session, self._readers = requests, requests.session, readers
        self._chunk_tokens = requests.session.manifest.chunk_tokens
        self._choice, self._verification, self._record = choice, verification, record
        self._asking, self._verifying, self._settling = Background("kvdock-ask"), Background("kvdock-verify"), settling
        self._sent: dict[str, SentQuestion] = {}
        """By request, the last question."""
        self._checks: dict[str, Future[None]] = {}
        """By request, its verification in progress."""
        self._awaited: Future[None] | None = None
        """The last question or verification that was started."""

    def lookup(self, request_id: str, tokens: Sequence[int], local_tokens: int) -> LookupResult:
        """See Connector.lookup in interface.py. A request whose hit was declined is not looked up again until it is
        forgotten."""
        if self._choice.is_declined(request_id):
            return Miss()
        if self._waits_for_load(request_id, tokens, local_tokens):
            return Pending()

        # Ask. For a request that waits for more, the question is sent again every ASK_S, and each answer is read once.
        if self.waits.is_waiting(request_id) and not self._has_news(request_id):
            return Pending()
        wanted = self._choice.limits.shortened(tokens, local_tokens)
        found, expected = self._ask_and_wait(request_id, wanted, local_tokens)

        # Wait: for an answer that has not come in time, or for more chunks that the answer expects.
        if isinstance(found, Pending):
            return Miss() if self._is_late(request_id) else found
        sent = self._sent.get(request_id)
        asked_s = sent.asked_s if sent is not None else self.waits.clock()
        if self.waits.for_more(request_id, expected, _hit_tokens(found), local_tokens, asked_s):
            return Pending()

        # Decide.
        least = max(1, self._choice.limits.min_load_tokens)
        if isinstance(found, Hit) and (why := self._choice.why_not(request_id, found.tokens - local_tokens)):
            if sent is None or sent.answered.done():  # else the answer to a repeated question may find more
                self._choice.decline(request_id)
                self._record.declined(request_id, why, found.tokens)
            found, least = Miss(), UNLIMITED

        # Lease. A hit keeps its lease. A miss gives it up: for example, the engine has computed the found chunks
        # meanwhile.
        if isinstance(found, Miss):
            self._give_up_lease(request_id, local_tokens, min_load_tokens=least)
        if self._record.statistics is not None:
            self._record.statistics.looked_up(request_id, tokens, max(local_tokens, _hit_tokens(found)))
        return found

    def expect(self, request_id: str, tokens: Sequence[int]) -> None:
        """Sends the question of a lookup before the engine calls lookup(), with any number of local tokens."""
        question = self._known_or_question(request_id, self._choice.limits.shortened(tokens, 0), 0)
        if isinstance(question, Question):
            self._send(question)

    def epoch_of(self, request_id: str) -> int:
        """The epoch of the request's last question; 0: none was sent, or its load has started."""
        sent = self._sent.get(request_id)
        return sent.epoch if sent is not None else 0

    def step(self, is_idle: bool) -> None:
        """The engine has planned a step; `is_idle`: one that computes nothing."""
        if self.waits.patience is not None:
            self.waits.patience.step(is_idle)
        if self.waits.loads is not None:
            self.waits.loads.step()

    # ------------------------------------------------------------------ waits for loads of other requests

    def still_waits(self, request_id: str, local_tokens: int) -> bool:
        """Whether a lookup of the request would be Pending, because the load that it waits for is in progress."""
        return self.waits.loads is not None and self.waits.loads.still_waits(request_id, local_tokens)

    def _waits_for_load(self, request_id: str, tokens: Sequence[int], local_tokens: int) -> bool:
        """Whether the request waits for another request's load. Its own question may not have been answered yet."""
        loads = self.waits.loads
        if loads is None:
            return False
        least = max(1, self._choice.limits.min_load_tokens)
        if loads.waits(request_id, partial(self._keys_of, request_id, tokens), local_tokens, least):
            return True
        if loads.takes_back(request_id):
            self._drop_question(request_id)
        return False

    def _keys_of(self, request_id: str, tokens: Sequence[int]) -> Sequence[bytes]:
        """The keys of the whole chunks of `tokens` that are looked up; () while the server is lost."""
        with self._requests.lock:
            request = self._requests.known(request_id, tokens)
            return request.keys_of(len(tokens) // self._chunk_tokens) if request is not None else ()

    # ------------------------------------------------------------------ ask

    def _has_news(self, request_id: str) -> bool:
        """Whether a request that waits for more has an unread answer, or no question to repeat. Sends its question
        again every ASK_S."""
        sent, patience = self._sent.get(request_id), self.waits.patience
        if sent is None:
            return True
        if not sent.answered.done():
            return False
        if not sent.was_read:
            return True
        if self.waits.clock() - sent.asked_s < ASK_S:
            return False
        again = self._question_again(request_id)
        if again is None:
            return True
        sent = self._send(again)
        return patience is not None and patience.spend(sent.answered)  # the next step may be far away

    def _ask_and_wait(self, request_id: str, tokens: Sequence[int], local_tokens: int) -> Known:
        """What is known once the answer has come or the engine's patience for this step is over."""
        known, patience = self._ask(request_id, tokens, local_tokens), self.waits.patience
        if patience is None:
            return known
        self._renew_old_answer(request_id, local_tokens, patience)
        for _ in range(2):  # a question that was sent early may differ: then this one is sent after its answer
            sent = self._sent.get(request_id)
            if sent is None or not patience.wait(sent):
                break
            known = self._ask(request_id, tokens, local_tokens)
            if not isinstance(known.found, Pending):
                break
        check = self._checks.pop(request_id, None) if isinstance(known.found, Hit) else None
        if check is not None and patience.spend(check):  # only one step waits, because hashing may take many steps
            known = self._ask(request_id, tokens, local_tokens)
        return known

    def _ask(self, request_id: str, tokens: Sequence[int], local_tokens: int) -> Known:
        """What is known by now. Sends the question if it was not sent yet."""
        sent = self._sent.get(request_id)
        was_answered = sent is not None and sent.answered.done()
        known = self._known_or_question(request_id, tokens, local_tokens)
        if sent is not None:
            sent.was_read = was_answered
        if isinstance(known, Question):
            self._send(known)
            return Known(Pending())
        return known

    def _renew_old_answer(self, request_id: str, local_tokens: int, patience: Patience) -> None:
        """Asks again if the answer is old and did not find everything."""
        sent = self._sent.get(request_id)
        if sent is None or not sent.answered.done() or patience.is_open:
            return
        if self.waits.clock() - sent.asked_s > FRESH_S:
            again = self._question_again(request_id, local_tokens)
            if again is not None:
                self._send(again)

    def _is_late(self, request_id: str) -> bool:
        """Whether the request goes on without its answer. A server that is late (the breaker is open) must not delay
        requests that may have nothing to load; otherwise the answer is read in the next step."""
        sent, patience = self._sent.get(request_id), self.waits.patience
        if patience is None or not patience.is_open or sent is None:
            return False
        self.late += not sent.was_late
        sent.was_late = True
        return True

    def wait_for_answer(self, timeout_s: float) -> None:
        """Waits up to `timeout_s` for the last question to be answered and its answer to be verified."""
        end_s, awaited = self.waits.clock() + timeout_s, None
        while awaited is not self._awaited:  # the verification of an answer may have started
            awaited = self._awaited
            if awaited is not None:
                wait([awaited], max(0.0, end_s - self.waits.clock()))

    # ------------------------------------------------------------------ questions and answers

    def _known_or_question(self, request_id: str, tokens: Sequence[int], local_tokens: int) -> Known | Question:
        """What is known, or a Question that the caller must send; then the next calls return Pending until it was
        answered."""
        if local_tokens % self._session.manifest.block_tokens:
            return Known(Miss())
        with self._requests.lock:
            request = self._requests.known(request_id, tokens)
            if request is None:
                return Known(Miss())
            lookup, keys = request.lookup, request.keys_of(len(tokens) // self._chunk_tokens)
            if len(keys) * self._chunk_tokens <= local_tokens:
                return Known(Miss(), lookup.expected)
            replaces = None
            if lookup.asked is not None and (len(keys) != lookup.asked[0] or local_tokens < lookup.asked[1]):
                if lookup.answer is None:
                    return Known(Pending())
                if len(keys) < lookup.asked[0]:  # a lease of more keys cannot be renewed
                    replaces, lookup.epoch = lookup.lease, 0
                lookup.forget_answer()  # the number of chunks has changed, or fewer tokens are local: ask again
            lookup.take_newer()
            if lookup.answer is not None:
                hit_tokens = lookup.answer.hit_tokens
                return Known(Hit(hit_tokens) if hit_tokens > local_tokens else Miss(), lookup.expected)
            if lookup.asked is not None:
                return Known(Pending())
            lookup.asked = (len(keys), local_tokens)
            lookup.epoch = lookup.epoch or self._requests.next_epoch()
            question = self._question(request_id, request, keys, local_tokens, replaces=replaces)
        self._requests.callbacks.observer.known(request_id, keys)
        return question

    def _question_again(self, request_id: str, local_tokens: int | None = None) -> Question | None:
        """The same question, to be sent again because more may have been stored since its answer; the next lookup reads
        the new answer. None when the question was not answered, everything was found, or the answer is being verified.
        `local_tokens` None: those of the last question."""
        with self._requests.lock:
            request = self._requests.get(request_id)
            if request is None:
                return None
            lookup = request.lookup
            if lookup.answer is None or lookup.asked is None or lookup.epoch == 0:
                return None
            count, local_tokens = lookup.asked[0], lookup.asked[1] if local_tokens is None else local_tokens
            if lookup.answer.hit_tokens == count * self._chunk_tokens or lookup.verifying is lookup.answer:
                return None
            lookup.asked = count, local_tokens
            return self._question(
                request_id, request, request.chain.keys[:count], local_tokens, renews=lookup.lease
            )

    def _question(
        self, request_id: str, request: RequestState, keys: Sequence[bytes], local_tokens: int, *,
        renews: str | None = None, replaces: str | None = None,
    ) -> Question:
        """Makes a question. The caller holds the lock of the requests."""
        callbacks = self._requests.callbacks
        promises = self._requests.promises and callbacks.is_stored(request_id)
        terms = self.waits.terms(len(keys) * self._chunk_tokens - local_tokens)
        body = Lookup(
            session=request.attachment.session,
            member=request.attachment.member,
            request=request_id,
            epoch=request.lookup.epoch,
            keys=b"".join(keys),
            readers=self._readers,
            skip_prefix_tokens=local_tokens,
            computes=promises,
            wait_s=terms.wait_s,
            tokens_per_s=terms.tokens_per_s,
            traceparent=callbacks.traceparent_of(request_id) or UNSET,
            beginnings=request.beginnings or UNSET,
        )
        request.store.promised = len(keys) if promises else 0
        return Question(request_id, request.attachment, tuple(keys), body, renews, replaces)

    def _send(self, question: Question) -> SentQuestion:
        asked_s, found = self.waits.clock(), self._requests.callbacks.observer.asking(question.attachment)
        answered = self._asking.run(self._call, question, asked_s, found, self._begin(question))
        sent = self._sent[question.request_id] = SentQuestion(answered, asked_s, question.body.epoch)
        self._awaited = answered
        return sent

    def _begin(self, question: Question) -> BegunLookup | None:
        """Sends the question from the engine's thread, which may keep the interpreter lock for milliseconds: the other
        thread could not send it before. Not while that thread has other questions, which come first."""
        client, is_lost = self._session.client, self._session.attachment is not question.attachment
        if is_lost or question.replaces is not None or not self._asking.is_idle():
            return None
        return client.begin_lookup(question.body) if isinstance(client, EngineClient) else None

    def _call(
        self, question: Question, asked_s: float, found: Callable[[Sequence[bytes]], None], begun: BegunLookup | None
    ) -> None:
        """Background: sends the question, unless it has `begun`, and keeps its answer."""
        started_s = self.waits.clock()
        try:
            unwanted = self._fetch(question, found, begun)
        finally:
            ended_s, patience = self.waits.clock(), self.waits.patience
            if patience is not None and self._session.attachment is question.attachment:
                patience.answered(ended_s - started_s)
            self._record.answered(ended_s - asked_s)
        self._cancel(unwanted)
        if self._verification.is_eager and not self._may_find_more(question.request_id):
            self._verify(question.request_id)

    def _fetch(
        self, question: Question, found: Callable[[Sequence[bytes]], None], begun: BegunLookup | None
    ) -> tuple[Attachment, str] | None:
        """Background: calls the server. Whatever fails, an answer is kept: a refusal or a lost server is a miss.
        Returns a lease that no request wants any more, if there is one."""
        attachment = question.attachment
        if question.replaces is not None:
            self.cancel(attachment, question.replaces)
        answer = MISS
        try:
            if self._session.attachment is attachment:  # else the server is lost, and each call would time out
                answer = begun.answer() if begun is not None else self._session.client.lookup(question.body)
                answer.chunks = Chunks.of(answer.chunks)
                found(question.keys[: answer.hit_tokens // self._chunk_tokens])
            elif begun is not None:
                begun.drop()
        except (ServerUnavailable, ApiError) as error:
            self._session.lost(attachment, error)
        finally:
            unwanted = self._keep(question, answer)
        self._requests.withdraw_promise(attachment, question.request_id, None)  # if the request has ended by now
        return unwanted

    def _keep(self, question: Question, answer: LookupAnswer) -> tuple[Attachment, str] | None:
        with self._requests.lock:
            request = self._requests.get(question.request_id)
            if request is not None and request.attachment is question.attachment:
                lookup = request.lookup
                if lookup.epoch == question.body.epoch:
                    if lookup.asked != question.asked:
                        return None  # another question was sent since in the same epoch: the lease is its lease
                    if lookup.answer is None or lookup.answer.lease is None:
                        lookup.answer = answer
                    elif answer.lease is not None:  # else the repeated question failed, and the earlier answer stays
                        lookup.newer = answer
                    return None
        if answer.lease in (None, question.renews):
            return None
        assert answer.lease is not None
        return question.attachment, answer.lease  # the request was forgotten meanwhile

    def _may_find_more(self, request_id: str) -> bool:
        with self._requests.lock:
            request = self._requests.get(request_id)
            return request is not None and self.waits.are_for(request.lookup.expected)

    # ------------------------------------------------------------------ verification

    def is_verified(self, request_id: str) -> bool:
        """Whether the request's Hit may be promised to an engine that cannot cope with a failed load. False: the chunks
        are being verified in the background, or were found to be damaged; then the next lookup is a Miss."""
        self._verify(request_id)
        with self._requests.lock:
            request = self._requests.leased(request_id)
            return request is not None and request.lookup.verified is request.lookup.answer

    def is_verifying(self, request_id: str) -> bool:
        """Whether the chunks that the request's lookup found are being verified now: they must not be loaded
        meanwhile."""
        with self._requests.lock:
            request = self._requests.leased(request_id)
            if request is None or request.lookup.verified is request.lookup.answer:
                return False
            return request.lookup.verifying is request.lookup.answer

    def _verify(self, request_id: str) -> None:
        """Starts the verification of the request's answer, once for each answer. If all parts of the answer are
        trusted, it is verified here and now: another thread would first wait for the interpreter lock."""
        with self._requests.lock:
            request = self._requests.leased(request_id)
            if request is None or request.lookup.verifying is request.lookup.answer:
                return
            request.lookup.take_newer()
            answer = request.lookup.verifying = request.lookup.answer
            assert answer is not None, "a lease without an answer"
            if self._verification.verifier.trusts(request.attachment, answer):
                request.lookup.verified = answer
                return
        self._awaited = self._checks[request_id] = self._verifying.run(self._verify_now, request_id)

    def _verify_now(self, request_id: str) -> None:
        """Background: verifies the request's answer. If that fails, the answer becomes a miss."""
        with self._requests.lock:
            request = self._requests.leased(request_id)
            answer = request.lookup.answer if request is not None else None
        if request is None or answer is None or answer.lease is None or request.lookup.verified is answer:
            return
        verified = False
        try:
            verified = self._verification.verifier.verify(request_id, request.attachment, answer)
        finally:  # also after an exception: a request whose answer is never verified would wait for ever
            with self._requests.lock:
                lookup = request.lookup
                is_known = self._requests.get(request_id) is request and lookup.answer is answer
                if is_known and verified:
                    lookup.verified = answer
                elif is_known:
                    lookup.answer, lookup.newer, lookup.epoch = MISS, None, 0  # a cancelled lease ends its epoch
            if is_known and not verified:
                self.cancel(request.attachment, answer.lease)

    # ------------------------------------------------------------------ loads

    def begin_load(
        self, request_id: str, block_ids: GroupBlocks, local_tokens: int, hit_tokens: int, *, is_shared: bool = False
    ) -> tuple[Attachment, LoadPlan] | None:
        """Makes the plan of a load: from here on the ranks hold the lease. None when the request has no lease any more,
        or one that does not cover this load. The caller releases the attachment. `is_shared`: the engine's own cache
        has the loaded tokens from now on."""
        self._forget_question(request_id)
        started = self._hand_out(request_id, block_ids, local_tokens, hit_tokens)
        if started is None:
            return None
        if self._record.statistics is not None:
            self._record.statistics.load_begun(request_id, local_tokens, hit_tokens)
        if self.waits.loads is not None and not is_shared:
            known = self._requests.known_keys(request_id)
            self.waits.loads.started(request_id, known[1] if known is not None else (), local_tokens, hit_tokens)
        return started

    def _hand_out(
        self, request_id: str, block_ids: GroupBlocks, local_tokens: int, hit_tokens: int
    ) -> tuple[Attachment, LoadPlan] | None:
        with self._requests.lock:
            request = self._requests.leased(request_id)
            if request is None:
                return None
            answer = request.lookup.answer
            assert answer is not None and answer.lease is not None
            if local_tokens % self._session.manifest.block_tokens or hit_tokens % self._chunk_tokens:
                return None
            if answer.first_chunk * self._chunk_tokens > local_tokens:
                return None  # asked when more tokens were local: the chunks in between are not leased
            pieces = self._load_pieces(answer, block_ids, local_tokens, hit_tokens)
            if not pieces.arrays.complete():
                return None  # not the length of the answer: its windows need parts that are not leased
            if not request.attachment.acquire():
                return None
            request.lookup.forget()
            request.lookup.handed_out = answer.lease
            request.store.loaded(hit_tokens // self._chunk_tokens)
            plan = LoadPlan(request_id, answer.lease, local_tokens, hit_tokens, self._chunk_tokens, pieces)
            return request.attachment, plan

    def _load_pieces(
        self, answer: LookupAnswer, block_ids: GroupBlocks, local_tokens: int, hit_tokens: int
    ) -> Pieces:
        """A piece for each chunk and group that has a block to load."""
        sizes = self._session.manifest.block_sizes
        return Pieces(Chunks.of(answer.chunks).arrays.pieces(
            answer.first_chunk, hit_tokens // self._chunk_tokens, [column_of(blocks) for blocks in block_ids],
            [self._chunk_tokens // size for size in sizes], [local_tokens // size for size in sizes],
        ))

    def bytes_of(self, plan: LoadPlan) -> int:
        """How many bytes all ranks together copy for the plan."""
        groups = self._session.manifest.groups
        counts = plan.arrays.counts(len(groups))
        return self._readers * sum(count * group.part_bytes for count, group in zip(counts, groups, strict=True))

    def load_ended(self, request_id: str, valid_tokens: int | None = None, *, is_shared: bool = False) -> None:
        """Called in the engine's thread: a load has ended. The tokens up to `valid_tokens` are valid; None: all of
        them. `is_shared`: the engine's own cache has the tokens before the next lookup; otherwise from drop_lookup
        on."""
        if self.waits.loads is not None:
            self.waits.loads.ended(request_id, valid_tokens)
            if is_shared:
                self.waits.loads.shared(request_id)

    def load_took(self, tokens: int, seconds: float) -> None:
        """A load of `tokens` has ended. It took `seconds`, counted from the moment when it could start; of a copy of
        several loads, its share of them."""
        self._choice.loaded(tokens, seconds)

    def load_failed(self, request_id: str, valid_tokens: int) -> None:
        """Some rank has loaded the tokens up to `valid_tokens` only: the chunks that failed are not looked up again,
        and are offered once they have been computed again. May be called for each rank, from any thread."""
        with self._requests.lock:
            request = self._requests.get(request_id)
            if request is not None:
                request.limit(valid_tokens // self._chunk_tokens)
        if self._record.statistics is not None:
            self._record.statistics.load_failed(request_id, valid_tokens)

    # ------------------------------------------------------------------ ends

    def drop_lookup(self, request_id: str) -> None:
        """The engine runs the request: drops the answer to its lookup, also one that comes later. The engine's own
        cache now has the tokens that the request has loaded, if any."""
        self._drop_question(request_id)
        if self.waits.loads is not None:
            self.waits.loads.admitted(request_id)

    def finished(self, request_id: str) -> None:
        """Forgets the request, which ended, was aborted or preempted, and cancels a lease that was never handed out."""
        self._choice.forget(request_id)
        self._forget_question(request_id)
        attachment = self._session.attachment
        if self.waits.forget(request_id) and attachment is not None:  # tiers may be loading for it
            self._settling.run(
                notify, self._session, attachment, self._session.client.withdraw, attachment.session, [request_id]
            )
        if self._record.statistics is not None:
            self._record.statistics.finished(request_id)
        with self._requests.lock:
            request = self._requests.pop(request_id, None)
            lease = request.lookup.lease if request is not None else None
        if request is not None and lease is not None:
            self._cancel((request.attachment, lease))

    def _drop_question(self, request_id: str) -> None:
        self._forget_question(request_id)
        with self._requests.lock:
            request = self._requests.get(request_id)
            if request is None or request.lookup.asked is None:
                return
            lease = request.lookup.lease
            request.lookup.forget()
        if lease is not None:
            self._cancel((request.attachment, lease))

    def _forget_question(self, request_id: str) -> None:
        self._sent.pop(request_id, None)
        self._checks.pop(request_id, None)

    def _give_up_lease(self, request_id: str, local_tokens: int, *, min_load_tokens: int) -> None:
        """Cancels the lease if the lookup found fewer than `min_load_tokens` tokens beyond the engine's local
        tokens."""
        with self._requests.lock:
            request = self._requests.leased(request_id)
            if request is None:
                return
            lookup = request.lookup
            assert lookup.answer is not None and lookup.asked is not None, "an answer without a question"
            if lookup.answer.hit_tokens - local_tokens >= min_load_tokens:
                return
            lease = lookup.answer.lease
            lookup.asked, lookup.answer, lookup.newer = (lookup.asked[0], local_tokens), MISS, None
            lookup.epoch = 0  # a cancelled lease ends its epoch
        if lease is not None:
            self._cancel((request.attachment, lease))

    def _cancel(self, unused: tuple[Attachment, str] | None) -> None:
        if unused is not None:
            self._settling.run(self.cancel, *unused)

    def cancel(self, attachment: Attachment, lease: str) -> None:
        """Background: cancels a lease that no rank has."""
        notify(
            self._session, attachment, self._session.client.cancel, lease, attachment.session, attachment.member
        )

    def keeps_lease(self, lease: str) -> bool:
        """Answers the server's question whether an old lease is still needed. It is while the request waits, and once
        more after the plan was sent, so that the ranks have time to start."""
        with self._requests.lock:
            for request in self._requests.values():
                if request.lookup.lease == lease:
                    return True
                if request.lookup.handed_out == lease:
                    request.lookup.handed_out = None
                    return True
        return False

    def close(self) -> None:
        """Waits for the background calls."""
        for background in (self._asking, self._verifying):  # answers start verifications
            background.close()


def _hit_tokens(found: LookupResult) -> int:
    return found.tokens if isinstance(found, Hit) else 0
