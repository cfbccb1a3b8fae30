"""Rank 0's lookups: which pages that the engine lacks can be loaded, and which of them are promised to SGLang.

The question is sent when a request arrives in SGLang's queue (a hook in hooks.py), so that the answer and the
verification are there when SGLang first tries to admit it.

SGLang looks up the tail of a prompt: the pages behind those on its device, by their hashes. It looks the tail up again
in every round in which it tries to admit the request. If it admits the request, it computes the pages that were not
promised. So a request may be held back (holding.py) until the server has answered, until the found pages are hashed,
and until lower tiers have loaded (kvdock/connectors/waits.py). SGLang aborts a request whose promised load fails, so
only verified pages are promised.

The device may hold more of the prompt at the next lookup, because another request has computed it: the tail is then a
suffix of the one before, and the answer still holds. For any other tail, a new question is sent.

SGLang does not report the end of a request that has loaded nothing. A request that was not looked up for FORGET_S is
forgotten, and its lease is cancelled. If it is looked up later, a new question is sent.

With compute_once, a question promises to the server that its request computes and stores what is not found. So the
question of a request that was admitted is kept until the request ends: then the promise of what it has not stored is
withdrawn.

Threads: SGLang's scheduler thread calls everything; threads of the scheduler connector make chains, too.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from kvdock.connectors.announcer import ChunkOf, NameOf
from kvdock.connectors.interface import Hit, Pending
from kvdock.connectors.plans import LoadPlan
from kvdock.connectors.requests import Chain
from kvdock.connectors.running_weights import RunningWeights
from kvdock.connectors.scheduler import SchedulerConnector
from kvdock.connectors.session import Attachment
from kvdock.connectors.sglang.figures import Figures
from kvdock.connectors.sglang.page_names import NOTHING, About
from kvdock.connectors.sglang.updates import START, UNKNOWN
from kvdock.protocol.keys import UNKNOWN_PARENT, HashedChain, tagged

FORGET_S = 10.0
HASH_WAIT_S = 0.1
"""How long a request waits for images that are still being hashed."""
_BYPASSED = "bypassed_"
MOST_COMPUTING = 16_384
"""The most requests with a promise that were admitted and have not ended. SGLang does not report every end, so the
oldest is forgotten then."""
MOST_EXPECTED = 16
"""For how many requests in the queue the server keeps what was found, because they have asked on arrival. Further ones
ask when SGLang first tries to admit them."""


@dataclass
class _Asked:
    """`pages`: the hashes of the tail that was looked up; `local`: how many of them the device has by now. `asked_s`:
    when the request was looked up last; `first_s`: when it first was. `verified_by_s`: the time until which the request
    waits for the verification of the found pages; `was_late`: the verification took longer. `waits`: whether more may
    be promised later; `until_s`: the time until which the request may wait at most, even if it is looked up with other
    pages. `found`: how many of the first pages the server had, by the last answer; `why`: why fewer were promised, as
    in Outcome; `load_bytes`: what the load copies, over all ranks.
    """

    name: str
    pages: tuple[str, ...]
    asked_s: float
    first_s: float
    local: int = 0
    verified_by_s: float | None = None
    was_late: bool = False
    waits: bool = False
    until_s: float | None = None
    found: int = 0
    why: str = ""
    load_bytes: int = 0


@dataclass(frozen=True)
class Answered:
    """What a request's last lookup has come to when SGLang admits the request. `local_tokens`: the tokens of the looked
    up pages that the device has by now; `found_tokens`: those of the first pages that the server had; `why`: why fewer
    were promised, as in Outcome; `load_bytes`: what the load copies, over all ranks; `missing_pages`: how many of the
    last pages that were looked up the server did not have; -1: it is to be asked for them again."""

    name: str
    local_tokens: int
    found_tokens: int
    why: str
    load_bytes: int
    missing_pages: int


class Chains:
    """The keys of lookups and stores, by the name of the question or the offer. A name is bound to the weights that the
    engine runs when the name is given; its pages are looked up and stored under these weights alone."""

    def __init__(self, weights: RunningWeights) -> None:
        self._weights = weights
        self._pages: dict[str, tuple[Sequence[str], str | None, bytes]] = {}
        self._about: dict[str, About] = {}

    def named(
        self, name: str, pages: Sequence[str], parent: str | None = UNKNOWN, about: About = NOTHING
    ) -> None:
        """`parent`: the hash of the page before the first one, START or UNKNOWN."""
        if about != NOTHING:
            self._about[name] = about
        self._pages[name] = pages, parent, self._weights.tag

    def traceparent_of(self, name: str) -> str:
        """See RequestCallbacks, as for is_stored."""
        return self._about.get(name, NOTHING).traceparent

    def why_not(self, name: str) -> str:
        """Why pages with images have no keys now, as in Media.why_not; empty: they have, or have no images."""
        marked = self._about.get(name, NOTHING).marked
        return marked.marks.why_not() if marked is not None else ""

    def is_stored(self, name: str) -> bool:
        return self._about.get(name, NOTHING).is_stored and not self._weights.is_stale

    def forget(self, name: str) -> None:
        self._pages.pop(name, None)
        self._about.pop(name, None)

    def keys(self, namespace: bytes, pages: Sequence[str]) -> list[bytes]:
        """The keys of pages of the weights that the engine runs now."""
        chain = HashedChain(tagged(namespace, self._weights.tag), 1, pages, 1)
        chain.follow()
        return chain.keys

    def chunks_of(self, name: str) -> ChunkOf | None:
        """See Announcing, as for names_of."""
        pages, tokens = self._pages.get(name), self._about.get(name, NOTHING).tokens
        return partial(tokens.chunk, pages[0]) if pages is not None and tokens is not None else None

    def names_of(self, name: str) -> NameOf | None:
        pages, tokens = self._pages.get(name), self._about.get(name, NOTHING).tokens
        return partial(tokens.name, pages[0]) if pages is not None and tokens is not None else None

    def of(self, name: str, namespace: bytes, page_tokens: int) -> Chain:
        """See ChainOf."""
        pages, parent, tag = self._pages.get(name, ((), UNKNOWN, b""))
        marked = self._about.get(name, NOTHING).marked
        if marked is not None:
            pages, parent = marked.named(pages, parent)
        chain = HashedChain(tagged(namespace, tag), page_tokens, pages, page_tokens)
        if parent is UNKNOWN:
            chain.parent = UNKNOWN_PARENT
        elif parent != START:
            chain.parent = chain.key_of(parent)
        return chain


class PageLookups:
    """`verify_wait_s`: how long a request may wait for the verification of found pages; `tier_wait_s`: for lower tiers.
    `clock`: a monotonic clock, in seconds."""

    def __init__(
        self, connector: SchedulerConnector, chains: Chains, figures: Figures, page_tokens: int,
        verify_wait_s: float, tier_wait_s: float, clock: Callable[[], float],
    ) -> None:
        self._connector, self._chains, self._figures, self._clock = connector, chains, figures, clock
        self._page_tokens, self._verify_wait_s = page_tokens, verify_wait_s
        self._most_s = tier_wait_s + verify_wait_s
        self._batches, self._late = 0, 0
        self._asked: dict[str, _Asked] = {}
        self._begun: dict[str, _Asked] = {}
        """Requests whose load SGLang has asked for, until it has admitted them."""
        self._loading: dict[str, str] = {}
        """Requests whose plan was handed out, with the names of their questions."""
        self._computing: OrderedDict[str, str] = OrderedDict()
        """Requests with a promise that were admitted, with the names of their questions."""
        self._count = 0

    def expect(self, rid: str, pages: Sequence[str], about: About = NOTHING) -> None:
        """The request has arrived, and will look up these pages, or those of them that the device then lacks. Sends the
        question, and waits for nothing."""
        if len(self._asked) < MOST_EXPECTED:
            asked = self._known(rid, tuple(pages), about)
            if not self._chains.why_not(asked.name):
                self._connector.lookups.expect(asked.name, range(len(pages) * self._page_tokens))

    def ask(self, rid: str, pages: Sequence[str], about: About = NOTHING) -> int:
        """How many of the first of `pages` are promised."""
        asked = self._known(rid, tuple(pages), about)
        found = self._found(asked)
        asked.waits = found is None and self._may_wait(asked)
        return found or 0

    def waits(self, rid: str, anew: bool) -> bool:
        """Whether the request waits for more: by the last lookup, or, `anew`, by one that is made now."""
        asked = self._asked.get(rid)
        if asked is None:
            return False
        if anew:
            asked.asked_s, asked.waits = self._clock(), self._found(asked) is None and self._may_wait(asked)
        return asked.waits

    def _may_wait(self, asked: _Asked) -> bool:
        """Whether the request may wait longer. The time counts from its first wait, because a request that is looked up
        with other pages each time would otherwise wait for the full time again and again."""
        now_s, once = self._clock(), self._connector.lookups.waits.once
        if asked.until_s is None:
            once_s = once.longest_s(len(asked.pages) * self._page_tokens) if once is not None else 0.0
            asked.until_s = now_s + self._most_s + once_s
        return now_s < asked.until_s

    def _found(self, asked: _Asked) -> int | None:
        """How many pages that the device lacks may be promised. None: more may be found soon."""
        if (why := self._chains.why_not(asked.name)) or asked.why.startswith(_BYPASSED):
            asked.why = _BYPASSED + why if why else ""
        if why:
            return None if why == "unready" and self._clock() - asked.first_s < HASH_WAIT_S else 0
        size, late = self._page_tokens, self._connector.lookups.late
        hit = self._connector.lookups.lookup(asked.name, range(len(asked.pages) * size), asked.local * size)
        if self._connector.lookups.late > late:
            asked.why = "late"
        if not isinstance(hit, Hit):
            return None if isinstance(hit, Pending) else 0
        asked.found = hit.tokens // size
        if self._connector.lookups.is_verified(asked.name):
            return hit.tokens // size - asked.local
        now_s = self._clock()
        if asked.verified_by_s is None:
            asked.verified_by_s = now_s + self._verify_wait_s
        if now_s < asked.verified_by_s:
            return None
        if not asked.was_late:
            asked.was_late, asked.why = True, "unverified"
            self._figures.add("lookups_unverified")
        return 0

    def _known(self, rid: str, pages: tuple[str, ...], about: About) -> _Asked:
        asked = self._asked.get(rid)
        if asked is not None:
            local = len(asked.pages) - len(pages)
            if local >= asked.local and asked.pages[local:] == pages:
                asked.local, asked.asked_s = local, self._clock()
                return asked
            self._finish(asked.name)
        now_s, until_s = self._clock(), asked.until_s if asked is not None else None
        first_s = asked.first_s if asked is not None else now_s
        self._begun.pop(rid, None)
        self._count += 1
        name = f"{rid}-{self._count}"  # a new name, so that no state of an earlier question is used
        self._chains.named(name, pages, about=about)
        asked = self._asked[rid] = _Asked(name, pages, now_s, first_s, until_s=until_s)
        self._figures.add("lookup_tokens", len(pages) * self._page_tokens)
        return asked

    def declined(self, name: str, why: str, tokens: int) -> None:
        """The pages that the question of that name has found are not loaded; see LookupRecord."""
        for asked in self._asked.values():
            if asked.name == name:
                asked.found, asked.why = tokens // self._page_tokens, f"declined_{why}"

    def admitted(self, rid: str) -> Answered | None:
        """SGLang has admitted the request: what it has not begun to load by now, it computes. None: the request was not
        looked up."""
        asked = self._begun.pop(rid, None)
        begins = asked is None
        if begins and (asked := self._asked.pop(rid, None)) is None:
            return None
        assert asked is not None
        if self._connector.lookups.waits.once is not None:
            self._computes(rid, asked.name)
        elif begins:
            self._finish(asked.name)
        size, once = self._page_tokens, self._connector.lookups.waits.once
        missing = len(asked.pages) - asked.found if once is None else -1
        return Answered(asked.name, asked.local * size, asked.found * size, asked.why, asked.load_bytes, missing)

    def _computes(self, rid: str, name: str) -> None:
        """The request computes what it does not load, as its question has promised."""
        self.ended(rid)
        self._computing[rid] = name
        if self._loading.get(rid) != name:
            self._connector.lookups.drop_lookup(name)
        if len(self._computing) > MOST_COMPUTING:
            self.ended(next(iter(self._computing)))

    def ended(self, rid: str) -> None:
        """The request has ended, or has lost its KV: it stores no more than was offered by now."""
        name = self._computing.pop(rid, None)
        if name is not None and self._loading.get(rid) != name:
            self._finish(name)

    def drop(self, rid: str) -> None:
        """The request has ended before it was admitted, or is not looked up any more."""
        asked = self._asked.pop(rid, None)
        if asked is not None:
            self._finish(asked.name)

    def begin_load(self, rid: str, pages: int) -> tuple[Attachment, LoadPlan] | None:
        """Makes the plan to load the first `pages` pages that were looked up last. None: the lease is gone, or is for
        another length. In place of blocks, the plan's pieces have the numbers of the load's pages."""
        asked = self._asked.pop(rid, None)
        if asked is None:
            return None
        self._begun[rid], asked.why = asked, "load_failed"
        end = asked.local + pages
        numbers = array("q", [0]) * asked.local + array("q", range(pages))
        columns = self._columns(numbers, asked.local, end)
        local_tokens, hit_tokens = asked.local * self._page_tokens, end * self._page_tokens
        started = self._connector.lookups.begin_load(asked.name, columns, local_tokens, hit_tokens)
        if started is None:
            self._finish(asked.name)
        else:
            self._loading[rid], asked.load_bytes = asked.name, self._connector.lookups.bytes_of(started[1])
            self._figures.add("hit_tokens", pages * self._page_tokens)
        return started

    def _columns(self, numbers: array[int], local: int, end: int) -> list[array[int]]:
        """For each group, the numbers of its pages before `end`; for a window, only the last ones, behind -1."""
        columns = []
        for group in self._connector.session.manifest.groups:
            first = 0
            if group.kind == "window":
                first = max(local, end - -(-group.window_tokens // self._page_tokens))
            columns.append(array("q", [-1]) * first + numbers[first:])
        return columns

    def loaded(self, rid: str, ok: bool | None) -> None:
        """A load has ended. `ok`: True: it is complete; False: it failed; None: it was given up or cancelled."""
        name = self._loading.pop(rid, None)
        if name is None:
            return
        if ok is False:
            self._connector.lookups.load_failed(name, 0)
        if self._computing.get(rid) != name:
            self._finish(name)

    def tick(self, batches: int) -> None:
        """Called in each iteration of SGLang's loop: forgets requests that were not looked up for FORGET_S. `batches`:
        how many forward passes have started so far."""
        is_idle, self._batches = batches == self._batches, batches
        self._connector.lookups.step(is_idle)
        if self._connector.lookups.late > self._late:
            self._figures.add("lookups_late", self._connector.lookups.late - self._late)
            self._late = self._connector.lookups.late
        now_s = self._clock()
        for rid in [rid for rid, asked in self._asked.items() if now_s - asked.asked_s > FORGET_S]:
            self._finish(self._asked.pop(rid).name)
        for rid in [rid for rid, begun in self._begun.items() if now_s - begun.asked_s > FORGET_S]:
            del self._begun[rid]  # SGLang did not admit it

    def reset(self) -> None:
        """SGLang has forgotten all requests, or computes with other weights: no answer holds any more."""
        for asked in self._asked.values():
            self._finish(asked.name)
        self._asked.clear()
        self._begun.clear()
        for rid in list(self._computing):
            self.ended(rid)

    def _finish(self, name: str) -> None:
        self._connector.finished(name)
        self._chains.forget(name)
