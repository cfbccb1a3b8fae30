"""The engine: requests in, tokens out, one step at a time.

Owns the model and the KV memory; the scheduler owns queues and blocks. A step has these parts: take in the loads and
stores that the connector has finished, schedule, compute each request's chunk, offer the new KV to the connector,
sample, end the requests that are complete. Not thread-safe: one thread calls the engine. The connector may copy in
threads of its own.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kvdock.connectors.interface import BlocksRead, Connector, GroupBlocks, LookupResult, Miss, Progress
from kvdock.engine import tokenizer as bytes_tokenizer
from kvdock.engine.config import EngineConfig
from kvdock.engine.kv_cache import KVCache
from kvdock.engine.model import Runner, Step
from kvdock.engine.request import Arrival, Completion, Request, RequestError, SamplingParams, State, sample
from kvdock.engine.scheduler import Scheduler, Work
from kvdock.engine.tokenizer import Tokenizer


@dataclass(frozen=True)
class TokenOutput:
    """One sampled token; `completion` is set for the last token of a request."""

    request_id: str
    token: int
    completion: Completion | None


class Engine:
    """An engine without a connector makes its own KV memory. A connector needs the KV memory that it copies to and
    from, so make a KVCache first, then the connector, and pass both. With several ranks, make a ProcessGroup (ranks.py)
    and pass its `runner` instead of `kv`.

    Sets torch's thread count for the whole process. Raises ConfigError when `kv` was made for another config."""

    def __init__(
        self,
        config: EngineConfig,
        connector: Connector | None = None,
        *,
        kv: KVCache | None = None,
        runner: Runner | None = None,
        tokenizer: Tokenizer = bytes_tokenizer,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.config = config
        self.clock = clock
        self.tokenizer = tokenizer
        self.runner = runner if runner is not None else Runner(config, kv)
        self.kv = self.runner.kv
        self.connector: Connector = connector if connector is not None else NoConnector()
        self.scheduler = Scheduler(config, self.connector)
        self.requests: dict[str, Request] = {}
        self._arrivals = 0

    # ------------------------------------------------------------------ requests

    def add_request(
        self, prompt: str | Sequence[int], sampling: SamplingParams | None = None, request_id: str | None = None, *,
        traceparent: str = "",
    ) -> str:
        """Queues a prompt and returns the request's id. `traceparent`: its W3C trace context. Raises RequestError if
        the request can never be served."""
        sampling = sampling if sampling is not None else SamplingParams()
        tokens = self.tokenizer.encode(prompt) if isinstance(prompt, str) else list(prompt)
        request_id = request_id if request_id is not None else f"request-{self._arrivals}"
        if request_id in self.requests:
            raise RequestError(f"request_id: found {request_id!r} in use, wanted a new one")
        if not tokens:
            raise RequestError("prompt: found no tokens, wanted at least 1")
        strange = [t for t in tokens if not 0 <= t < self.config.model.vocab_size]
        if strange:
            raise RequestError(f"prompt: found token {strange[0]}, wanted 0..{self.config.model.vocab_size - 1}")
        length = len(tokens) + sampling.max_tokens
        if length > self.config.max_request_tokens:
            raise RequestError(
                f"prompt and max_tokens: found {length} tokens, wanted at most {self.config.max_request_tokens}"
            )
        request = Request(request_id, tokens, sampling, Arrival(self._arrivals, self.clock(), traceparent))
        self._arrivals += 1
        self.requests[request_id] = request
        self.scheduler.add(request)
        return request_id

    def abort(self, request_id: str) -> Completion:
        """Ends a request now. If it is being loaded, its id stays in use until the load has ended. Raises RequestError
        for an id that no unfinished request has."""
        request = self.requests.get(request_id)
        if request is None or request.state is State.FINISHED:
            raise RequestError(f"request_id: found {request_id!r}, wanted an unfinished request")
        return self._finish(request, "aborted")

    def generate(
        self, prompts: Sequence[str | Sequence[int]], sampling: SamplingParams | None = None
    ) -> list[Completion]:
        """Runs the prompts, and all other queued requests, to the end. Returns completions in the order of
        `prompts`."""
        ids = [self.add_request(prompt, sampling) for prompt in prompts]
        done: dict[str, Completion] = {}
        while self.has_unfinished:
            for output in self.step():
                if output.completion is not None:
                    done[output.request_id] = output.completion
        return [done[request_id] for request_id in ids]

    @property
    def has_unfinished(self) -> bool:
        return any(request.state is not State.FINISHED for request in self.requests.values())

    # ------------------------------------------------------------------ steps

    def step(self) -> list[TokenOutput]:
        """Computes one chunk or token of each request that can run; if none can, waits for the connector.

        Raises RankLost when another rank has ended. Then nothing can be computed any more: close the engine."""
        self.runner.check()
        self._take_in(self.connector.poll(0.0))
        works = self.scheduler.schedule()
        if not works and (self.has_unfinished or self.scheduler.loading):
            self._take_in(self.connector.poll(self.config.idle_wait_s))
        return [output for work in works for output in self._compute(work)]

    def drain(self, timeout_s: float) -> bool:
        """Waits, without computing, for loads and stores in progress. True: all have ended. False: `timeout_s` is
        over."""
        deadline = self.clock() + timeout_s
        while self.scheduler.storing or self.scheduler.loading:
            left_s = deadline - self.clock()
            if left_s <= 0:
                return False
            self._take_in(self.connector.poll(min(left_s, self.config.idle_wait_s)))
        return True

    def close(self) -> None:
        """Aborts unfinished requests and closes the connector, which waits for its copies."""
        for request in list(self.requests.values()):
            if request.state is not State.FINISHED:
                self._finish(request, "aborted")
        self.connector.close()

    def check_integrity(self) -> None:
        """Raises AssertionError unless lists, states and blocks agree; tests call it after each step."""
        self.scheduler.check_integrity()

    def _compute(self, work: Work) -> list[TokenOutput]:
        request = work.request
        table = tuple(tuple(blocks) for blocks in request.table)
        logits = self.runner.run(Step(tuple(request.tokens[work.start : work.end]), work.start, table))
        self.scheduler.advance(work)
        self.scheduler.offer(request)
        if work.end < len(request.tokens):
            return []
        token = sample(logits, request.sampling, request.generator)
        if request.sampling.keep_logits:
            request.logits.append(logits)
        return [self._append(request, token)]

    def _append(self, request: Request, token: int) -> TokenOutput:
        request.tokens.append(token)
        if request.metrics.time_to_first_token_s is None:
            request.metrics.time_to_first_token_s = self.clock() - request.arrival.at_s
        completion = None
        if token == self.tokenizer.EOS and not request.sampling.ignore_eos:
            completion = self._finish(request, "stop")
        elif len(request.output) == request.sampling.max_tokens:
            completion = self._finish(request, "length")
        return TokenOutput(request.id, token, completion)

    def _finish(self, request: Request, reason: str) -> Completion:
        self.scheduler.finish(request)
        if request.id not in self.scheduler.loading:
            del self.requests[request.id]
        return Completion(
            request.id, request.tokens[: request.prompt_length], request.output, self.tokenizer.decode(request.output),
            reason, request.metrics, request.logits,
        )

    def _take_in(self, progress: Progress) -> None:
        for load in progress.loads:
            aborted = self.scheduler.load_done(load)
            if aborted is not None:
                del self.requests[aborted.id]
        for store in progress.stores:
            self.scheduler.store_done(store)


class NoConnector:
    """The connector of an engine without kvdock: it loads and stores nothing."""

    def lookup(
        self, request_id: str, token_ids: Sequence[int], local_tokens: int, traceparent: str = ""
    ) -> LookupResult:
        return Miss()

    def begin_load(self, request_id: str, block_ids: GroupBlocks, local_tokens: int, hit_tokens: int) -> None:
        raise AssertionError("begin_load: found a call, wanted none: lookup finds nothing")

    def begin_store(
        self, request_id: str, token_ids: Sequence[int], block_ids: GroupBlocks, computed_tokens: int
    ) -> BlocksRead:
        return ()

    def poll(self, timeout_s: float = 0.0) -> Progress:
        return Progress()

    def finished(self, request_id: str, *, comes_back: bool = False) -> None:
        return None

    def close(self) -> None:
        return None
