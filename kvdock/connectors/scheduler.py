"""The scheduler connector: tokens to keys, keys to leases, answers to plans. What is stored is offers.py's part.

It asks the server and remembers what was answered; it never touches a byte. It starts no thread: a lookup that
the server has to answer is returned as a Fetch, which the driver (kvdock/connectors/driver.py) sends in the background.

Local tokens are whole blocks in every group (multiples of the manifest's block_tokens): others end inside a block that
can be neither skipped nor written, so they are a miss.

A load that fell short is not offered again: until the request is forgotten, what is looked up ends before it.

Lookup epochs only rise while this process runs: once a lease was handed to ranks, or a request
forgotten, the next lookup names a higher one, so a late release of the old lease cannot touch the new.

Thread safety: every method may be called from any thread; `_lock` guards all that is known of requests. Calls that ask
the server (marked "Background") hold it only before and after.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from msgspec import UNSET

from kvdock.connectors.interface import GroupBlocks, Hit, LookupResult, Miss, Pending
from kvdock.connectors.offers import StoreOffers
from kvdock.connectors.plans import LoadPiece, LoadPlan
from kvdock.connectors.requests import MISS, ChainOf, ChunkObserver, Fetch, Requests, RequestState, chain_of_tokens
from kvdock.connectors.session import Attachment, EngineSession, tell
from kvdock.connectors.verify import Verifier
from kvdock.connectors.waits import NO_WAIT, WaitTerms
from kvdock.protocol.errors import ApiError, ServerUnavailable
from kvdock.protocol.schemas import BeingStored, Lookup, LookupAnswer, PendingTokens


class SchedulerConnector:
    """`readers`: how many ranks read each lease. `computes`: lookups promise to store what they do not find, of the
    requests that `is_stored` says are stored. `terms`: for how many tokens that the engine lacks, how long a request
    may wait for lower tiers. `traceparent_of`: the trace context that the engine got with a request; empty: none."""

    def __init__(
        self, session: EngineSession, *, readers: int = 1, verifier: Verifier | None = None,
        chain_of: ChainOf = chain_of_tokens, observer: ChunkObserver | None = None, computes: bool = False,
        is_stored: Callable[[str], bool] = lambda request_id: True,
        terms: Callable[[int], WaitTerms] = lambda missing_tokens: NO_WAIT,
        traceparent_of: Callable[[str], str] = lambda request_id: "",
    ) -> None:
        self.session, self.readers, self._computes, self._is_stored = session, readers, computes, is_stored
        self._terms, self._traceparent_of = terms, traceparent_of
        self._verifier = verifier if verifier is not None else Verifier()
        self._observer = observer if observer is not None else ChunkObserver()
        self._requests = Requests(session, chain_of)
        self._lock, self._epoch = self._requests.lock, 0
        self.stores = StoreOffers(self._requests, self._observer, traceparent_of, computes=computes)

    @property
    def chunk_tokens(self) -> int:
        return self.session.manifest.chunk_tokens

    def bytes_of(self, plan: LoadPlan) -> int:
        """What the ranks copy for it, all together."""
        return self.readers * sum(self.session.manifest.groups[piece.group].part_bytes for piece in plan.pieces)

    # ------------------------------------------------------------------ looking up

    def lookup(self, request_id: str, tokens: Sequence[int], local_tokens: int) -> LookupResult | Fetch:
        """As interface.py has it; a Fetch is to be sent first, and the next call is Pending until it was answered."""
        if local_tokens % self.session.manifest.block_tokens:
            return Miss()
        with self._lock:
            request = self._requests.known(request_id, tokens)
            if request is None:
                return Miss()
            keys = request.chain.keys[: min(len(tokens) // self.chunk_tokens, request.ceiling)]
            if len(keys) * self.chunk_tokens <= local_tokens:
                return Miss()
            replaces = None
            if request.asked is not None and (len(keys) != request.asked[0] or local_tokens < request.asked[1]):
                if request.answer is None:
                    return Pending()
                if len(keys) < request.asked[0]:  # a lease of more keys cannot be renewed
                    replaces, request.epoch = request.lease, 0
                request.forget_answer()  # grown since, or less is at hand: ask again
            request.take_newer()
            if request.answer is not None:
                hit_tokens = request.answer.hit_tokens
                return Hit(hit_tokens) if hit_tokens > local_tokens else Miss()
            if request.asked is not None:
                return Pending()
            request.asked = (len(keys), local_tokens)
            if request.epoch == 0:
                self._epoch += 1
                request.epoch = self._epoch
            fetch = self._fetch(request_id, request, keys, local_tokens, replaces=replaces)
        self._observer.known(request_id, keys)
        return fetch

    def asks_again(self, request_id: str, local_tokens: int | None = None) -> Fetch | None:
        """The question once more, for more may have been stored since its answer: to be sent, and the lookup after its
        answer has that one. None when nothing was answered, all was found, or what was found is verified already.
        `local_tokens` None: as many as the last time."""
        with self._lock:
            request = self._requests.get(request_id)
            if request is None or request.answer is None or request.asked is None or request.epoch == 0:
                return None
            count, local_tokens = request.asked[0], request.asked[1] if local_tokens is None else local_tokens
            if request.answer.hit_tokens == count * self.chunk_tokens or request.verifying is request.answer:
                return None
            request.asked = count, local_tokens
            keys = request.chain.keys[:count]
            return self._fetch(request_id, request, keys, local_tokens, renews=request.lease)

    def _fetch(
        self, request_id: str, request: RequestState, keys: Sequence[bytes], local_tokens: int, *,
        renews: str | None = None, replaces: str | None = None,
    ) -> Fetch:
        """Under `_lock`."""
        computes = self._computes and self._is_stored(request_id)
        terms = self._terms(len(keys) * self.chunk_tokens - local_tokens)
        body = Lookup(
            session=request.attachment.session,
            member=request.attachment.member,
            request=request_id,
            epoch=request.epoch,
            keys=b"".join(keys),
            readers=self.readers,
            skip_prefix_tokens=local_tokens,
            computes=computes,
            wait_s=terms.wait_s,
            tokens_per_s=terms.tokens_per_s,
            traceparent=self._traceparent_of(request_id) or UNSET,
        )
        request.promised = len(keys) if computes else 0
        return Fetch(request_id, request.attachment, tuple(keys), body, renews, replaces)

    def fetch(self, fetch: Fetch) -> tuple[Attachment, str] | None:
        """Background: sends a lookup and files an answer, whatever fails. A refusal or a lost server is a miss. Returns
        a lease that nobody wants any more, to be cancelled in the background."""
        if fetch.replaces is not None:
            self.cancel(fetch.attachment, fetch.replaces)
        answer, found = MISS, self._observer.asking(fetch.attachment)
        try:
            if self.session.attachment is fetch.attachment:  # else nobody is there: no timeout for each question
                answer = self.session.client.lookup(fetch.body)
                found(fetch.keys[: answer.hit_tokens // self.chunk_tokens])
        except (ServerUnavailable, ApiError) as error:
            self.session.lost(fetch.attachment, error)
        finally:
            unwanted = self._file(fetch, answer)
        self.stores.withdraw(fetch.attachment, fetch.request_id, None)  # if it ended while we asked, or before
        return unwanted

    def _file(self, fetch: Fetch, answer: LookupAnswer) -> tuple[Attachment, str] | None:
        with self._lock:
            request = self._requests.get(fetch.request_id)
            if request is not None and request.epoch == fetch.body.epoch and request.attachment is fetch.attachment:
                if request.asked != fetch.asked:
                    return None  # asked otherwise since, in the same epoch: the lease is that of the other question
                if request.answer is None or request.answer.lease is None:
                    request.answer = answer
                elif answer.lease is not None:  # else it failed, and what is leased stays
                    request.newer = answer
                return None
        if answer.lease in (None, fetch.renews):
            return None
        assert answer.lease is not None
        return fetch.attachment, answer.lease  # forgotten while we asked

    def being_stored(self, request_id: str) -> BeingStored | None:
        """As RequestState has it."""
        with self._lock:
            request = self._requests.get(request_id)
            return request.being_stored if request is not None else None

    def pending(self, request_id: str) -> PendingTokens | None:
        """As RequestState has it."""
        with self._lock:
            request = self._requests.get(request_id)
            return request.pending if request is not None else None

    def is_verified(self, request_id: str) -> bool:
        """Whether the request's lookup found something, all of which may be promised."""
        with self._lock:
            request = self._leased(request_id)
            return request is not None and request.verified is request.answer

    def is_verifying(self, request_id: str) -> bool:
        with self._lock:
            request = self._leased(request_id)
            if request is None or request.verified is request.answer:
                return False
            return request.verifying is request.answer

    def starts_verifying(self, request_id: str) -> bool:
        """Whether verify() is to be called for the answer to the request's lookup: True once for each answer."""
        with self._lock:
            request = self._leased(request_id)
            if request is None or request.verifying is request.answer:
                return False
            request.take_newer()
            request.verifying = request.answer
            return True

    def verify(self, request_id: str) -> None:
        """Background. What cannot be verified is a miss from then on."""
        with self._lock:
            request = self._requests.get(request_id)
            answer = request.answer if request is not None else None
        if request is None or answer is None or answer.lease is None or request.verified is answer:
            return
        verified = False
        try:
            verified = self._verifier.verify(request_id, request.attachment, answer)
        finally:  # also when it raised: a request whose answer is never verified would wait for ever
            with self._lock:
                is_known = self._requests.get(request_id) is request and request.answer is answer
                if is_known and verified:
                    request.verified = answer
                elif is_known:
                    request.answer, request.newer, request.epoch = MISS, None, 0  # a cancelled lease ends its epoch
            if is_known and not verified:
                self.cancel(request.attachment, answer.lease)

    def begin_load(
        self, request_id: str, block_ids: GroupBlocks, local_tokens: int, hit_tokens: int
    ) -> tuple[Attachment, LoadPlan] | None:
        """Hands the lease out: from here on the ranks hold it. None when it is not there any more, or not for this."""
        with self._lock:
            request = self._requests.get(request_id)
            if request is None or request.answer is None or request.answer.lease is None:
                return None
            answer = request.answer
            assert answer.lease is not None
            if local_tokens % self.session.manifest.block_tokens or hit_tokens % self.chunk_tokens:
                return None
            if answer.first_chunk * self.chunk_tokens > local_tokens:
                return None  # asked when more was at hand: what lies between is not leased
            pieces = tuple(self._load_pieces(answer, block_ids, local_tokens, hit_tokens))
            if not all(piece.parts for piece in pieces):
                return None  # another length than was answered: its windows want chunks that are not leased
            if not request.attachment.acquire():
                return None
            request.forget_lookup()
            request.handed_out = answer.lease
            request.offered = max(request.offered, hit_tokens // self.chunk_tokens)
            request.reserved = max(request.reserved, hit_tokens // self.chunk_tokens)
            plan = LoadPlan(request_id, answer.lease, local_tokens, hit_tokens, self.chunk_tokens, pieces)
            return request.attachment, plan

    def _load_pieces(
        self, answer: LookupAnswer, block_ids: GroupBlocks, local_tokens: int, hit_tokens: int
    ) -> Iterator[LoadPiece]:
        """A piece for each chunk and group of which the engine wants a block."""
        for at, parts in enumerate(answer.chunks):
            chunk = answer.first_chunk + at
            if chunk * self.chunk_tokens >= hit_tokens:
                return
            for group, (size, column) in enumerate(zip(self.session.manifest.block_sizes, block_ids, strict=True)):
                per_chunk = self.chunk_tokens // size
                first = chunk * per_chunk
                blocks = column[first : first + per_chunk]
                wanted = [b for b in blocks[max(0, local_tokens // size - first) :] if b is not None]
                if wanted:  # what is not wanted comes first: shared, or left behind by a window
                    skip = per_chunk - len(wanted)
                    of_group = tuple(part for part in parts if part.group == group)
                    yield LoadPiece(chunk, group, of_group, (*[0] * skip, *wanted), skip)

    def load_failed(self, request_id: str, valid_tokens: int) -> None:
        """What failed is not asked for again, and is offered once it is recomputed."""
        with self._lock:
            request = self._requests.get(request_id)
            if request is not None:
                request.is_valid_to(valid_tokens // self.chunk_tokens)  # ranks tell one by one

    def keys_of(self, request_id: str, tokens: Sequence[int]) -> Sequence[bytes]:
        """Those of the whole chunks of `tokens` that are asked for; () while the server is lost."""
        with self._lock:
            request = self._requests.known(request_id, tokens)
            if request is None:
                return ()
            return request.chain.keys[: min(len(tokens) // self.chunk_tokens, request.ceiling)]

    def known_keys(self, request_id: str) -> tuple[Attachment, tuple[bytes, ...]] | None:
        """Those of the request's chunks, from its first; None when nobody looked for it or stored it."""
        with self._lock:
            request = self._requests.get(request_id)
            return (request.attachment, tuple(request.chain.keys)) if request is not None else None

    # ------------------------------------------------------------------ forgetting

    def give_up_lease(
        self, request_id: str, local_tokens: int, *, min_load_tokens: int = 1
    ) -> tuple[Attachment, str] | None:
        """The lease of a lookup that found fewer than `min_load_tokens` beyond what the engine has by now: to be
        cancelled in the background."""
        with self._lock:
            request = self._requests.get(request_id)
            if request is None or request.answer is None or request.answer.lease is None:
                return None
            lease = request.answer.lease
            if request.answer.hit_tokens - local_tokens >= min_load_tokens:
                return None
            assert request.asked is not None, "an answer without a question"
            request.asked, request.answer, request.newer = (request.asked[0], local_tokens), MISS, None
            request.epoch = 0  # a cancelled lease ends its epoch
            return request.attachment, lease

    def drop_lookup(self, request_id: str) -> tuple[Attachment, str] | None:
        """The engine computes all of the request: what its lookup found, or finds when it is answered, is of no use.
        Returns the lease, to be cancelled in the background."""
        with self._lock:
            request = self._requests.get(request_id)
            if request is None or request.asked is None:
                return None
            lease = request.lease
            request.forget_lookup()
            return (request.attachment, lease) if lease is not None else None

    def finished(self, request_id: str) -> tuple[Attachment, str] | None:
        """Forgets the request. Returns a lease that was never handed out, to be cancelled in the background."""
        with self._lock:
            request = self._requests.pop(request_id, None)
            if request is None or (lease := request.lease) is None:
                return None
            return request.attachment, lease

    def cancel(self, attachment: Attachment, lease: str) -> None:
        """Background."""
        tell(self.session, attachment, self.session.client.cancel, lease, attachment.session, attachment.member)

    def keeps_lease(self, lease: str) -> bool:
        """Answers the server's question about an old lease. Keep it while the request waits, and once after the plan
        was sent, so that the ranks have time to start."""
        with self._lock:
            for request in self._requests.values():
                if request.lease == lease:
                    return True
                if request.handed_out == lease:
                    request.handed_out = None
                    return True
        return False

    def _leased(self, request_id: str) -> RequestState | None:
        """Under `_lock`: the request, if its lookup was answered with a lease."""
        request = self._requests.get(request_id)
        return request if request is not None and request.answer is not None and request.answer.lease else None
