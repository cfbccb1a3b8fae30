"""The parts that only rank 0 has, because it looks up and reserves at the server for all ranks of its engine."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from kvdock.connectors.announcer import Announcer, Announcing
from kvdock.connectors.chunk_statistics import ChunkStatistics
from kvdock.connectors.cost import LoadChoice, LoadOrCompute, PrefillSpeed
from kvdock.connectors.lookups import LookupRecord, Verification
from kvdock.connectors.requests import RequestCallbacks
from kvdock.connectors.running_weights import RunningWeights
from kvdock.connectors.scheduler import SchedulerConnector
from kvdock.connectors.session import EngineSession, SessionObserver
from kvdock.connectors.sglang.figures import Figures
from kvdock.connectors.sglang.hints import RequestHints
from kvdock.connectors.sglang.loads import QueuedLoad
from kvdock.connectors.sglang.lookups import Chains, PageLookups
from kvdock.connectors.sglang.outcomes import PageOutcomes
from kvdock.connectors.sglang.setup import Settings
from kvdock.connectors.verify import ChecksumVerifier, HashAhead, Trust
from kvdock.connectors.waits import AwaitTiers, ComputeOnce, Patience, Waits
from kvdock.connectors.worker import cores_of, hash_threads

KNOWN_PAGES = 1 << 16
"""How many pages Known remembers at most."""


def known_of(session: str, epoch: int) -> str:
    """The scope in which pages are known: a session with a server, and an epoch of the engine's weights."""
    return f"{session} {epoch}"


class Known:
    """Pages that this engine has just loaded, so that the server has them. Only SGLang's thread uses it."""

    def __init__(self, most: int = KNOWN_PAGES) -> None:
        self._pages: OrderedDict[str, bool] = OrderedDict()
        """By page, whether it was the last page of a load."""
        self._most, self._of = most, ""

    def add(self, pages: Sequence[str], of: str) -> None:
        """Adds pages that are at the server. `of`: their scope, from known_of()."""
        if of != self._of:
            self._pages.clear()
            self._of = of
        self._pages.update({page: page == pages[-1] for page in pages})
        while len(self._pages) > self._most:
            self._pages.popitem(last=False)

    def take(self, pages: Sequence[str], of: str, *, has_state: bool = False) -> int:
        """How many of the first pages are known. These are then forgotten, because the next offer of them may come much
        later. `has_state`: the last page is offered with a state, so it counts as known only if it was the last page of
        a load."""
        for at, page in enumerate(pages):
            ended_load = self._pages.pop(page, None) if of == self._of else None
            if ended_load is None or (has_state and not ended_load and at + 1 == len(pages)):
                return at
        return len(pages)


@dataclass(frozen=True)
class RankZero:
    """`ahead`: hashes the parts that rank 0 has stored, so that they can be promised at once; None: they are hashed
    when they are looked up. `announcer`: of what this engine can load; None: the engine publishes no events. `hints`:
    reads the hints of requests; None: they are not read."""

    connector: SchedulerConnector
    lookups: PageLookups
    outcomes: PageOutcomes
    chains: Chains
    known: Known
    trust: Trust
    ahead: HashAhead | None = None
    announcer: Announcer | None = None
    hints: RequestHints | None = None

    @classmethod
    def of(
        cls, session: EngineSession, settings: Settings, *, ranks: int, weights: RunningWeights, speed: PrefillSpeed,
        figures: Figures, clock: Callable[[], float], has_events: bool = False, has_pairs: bool = False,
    ) -> RankZero:
        """`ranks`: how many ranks the engine has. `clock`: a monotonic clock, in seconds. `has_events`: the engine
        publishes KV cache events. `has_pairs`: a page's hash is that of pairs of tokens."""
        announcer = Announcer(session) if has_events else None
        page_tokens, known_speed = session.manifest.chunk_tokens, speed if settings.load_if_cheaper else None
        chains, trust = Chains(weights), Trust(settings.trust_s, clock)
        cost, share = LoadOrCompute(speed, clock) if settings.load_if_cheaper else None, settings.compute_once
        verifier = ChecksumVerifier(session, threads=hash_threads(cores_of(ranks)), trust=trust)

        def declined(name: str, why: str, tokens: int) -> None:
            figures.add(f"declined_{why}")
            lookups.declined(name, why, tokens)

        connector = SchedulerConnector(
            session, readers=max(ranks, session.manifest.writers),
            callbacks=RequestCallbacks(
                chains.of, chains.is_stored, chains.traceparent_of,
                observer=Announcing(announcer, chains.chunks_of, chains.names_of), has_tokens=False
            ),
            waits=Waits(
                Patience(settings.lookup_wait_s, clock, settings.timeout_s), clock=clock,
                once=ComputeOnce(share, speed, clock, partial(figures.waited, "")) if share > 0 else None,
                tiers=AwaitTiers(settings.tier_wait_s, known_speed, clock, partial(figures.waited, "tier_")),
            ),
            choice=LoadChoice(settings, cost), verification=Verification(verifier, is_eager=True),
            record=LookupRecord(
                partial(figures.add, "lookup_seconds"), declined,
                ChunkStatistics(page_tokens) if settings.chunk_statistics else None,
            ),
        )
        lookups = PageLookups(
            connector, chains, figures, page_tokens, settings.verify_wait_s, settings.tier_wait_s, clock
        )
        ahead = HashAhead(trust) if settings.trust_s > 0 else None
        outcomes = PageOutcomes(connector.ended, speed, lookups, clock)
        hints = RequestHints(page_tokens, partial(figures.add, "hints_ignored"), has_pairs=has_pairs)
        return cls(connector, lookups, outcomes, chains, Known(), trust, ahead, announcer, hints)

    def preferences_of(self, req: Any) -> Callable[[], None] | None:
        """A call to the server, to be made in the background, with what the hints of SGLang's Req want. None: it wants
        nothing, or has not ended by itself."""
        attachment = self.connector.session.attachment
        wanted = self.hints.of(req) if self.hints is not None and attachment is not None else None
        if wanted is None or attachment is None:
            return None
        keys = self.chains.keys(attachment.namespace, wanted.pages)
        return partial(self.connector.send_preferences, attachment, keys, wanted.preferences)

    def wants_names(self) -> bool:
        """Whether anybody reads the names by which routers know pages."""
        attachment = self.connector.session.attachment
        return self.announcer is not None or (attachment is not None and attachment.wants_blocks)

    def observer(self) -> SessionObserver:
        """What the session's heartbeats call."""
        changed = self.announcer.changed if self.announcer is not None else None
        return SessionObserver(self.connector.lookups.keeps_lease, changed)

    def weights_change(self) -> None:
        """No answer and no announced chunk holds for the weights that the engine runs from now on."""
        self.lookups.reset()
        if self.announcer is not None:
            self.announcer.weights_changed()

    def load_ended(self, load: QueuedLoad, ok: bool | None) -> None:
        """A load has ended. `ok`: whether it is complete; None: it was cancelled."""
        self.lookups.loaded(load.rid, ok)
        if ok is not None and not load.is_early:
            self.outcomes.load_ended(load.rid, ok, load.took_s, load.copy_s)
        session = load.attachment.session
        if ok:  # each rank has hashed its own parts during the load
            self.known.add(load.pages, known_of(session, load.epoch))
            self.trust.add_loaded(session, load.plan)
        elif ok is False:
            self.trust.clear()

    def close(self) -> None:
        if self.ahead is not None:
            self.ahead.close()
        self.connector.close()
