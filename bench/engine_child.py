"""An engine to measure, in a process of its own that reads jobs as JSON lines: the code that all such engines share."""

from __future__ import annotations

import contextlib
import itertools
import json
import random
import select
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from kvdock.client.client import Client
from kvdock.protocol.schemas import MOVER_LABEL

START_S = 300.0
END_S = 30.0
PINNED_S = 60.0
CPU_SLOWER = 5
"""The factor of time limits without a GPU."""
STILL_S = 2.0
"""A pool that has not grown for this long is taken to have its final size."""

LLAMA_8B: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_act": "silu", "hidden_size": 4096,
    "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8,
    "head_dim": 128, "vocab_size": 128256, "max_position_embeddings": 131072, "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0, "tie_word_embeddings": False, "bos_token_id": 1, "eos_token_id": 2,
}


class Failed(RuntimeError):
    """A job failed, and its engine has ended."""


def prompt(rng: random.Random, vocabulary: int, tokens: int) -> list[int]:
    return [rng.randrange(3, vocabulary) for _ in range(tokens)]


class Child:
    """An engine that runs `module` with the argument `said`, in which "kind" is its kind. `address`: its server's;
    `slower`: a factor of its time limits. `facts` are known once `started` has returned."""

    def __init__(self, module: str, said: dict[str, Any], *, address: str, log_at: Path, slower: int = 1) -> None:
        self.kind: str = said["kind"]
        self.address = address
        self.facts: dict[str, Any] = {}
        self._began = time.monotonic()
        self._slower = slower
        self._log_at = log_at
        self._log = log_at.open("w")
        self._process = subprocess.Popen(
            [sys.executable, "-m", module, json.dumps(said)], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            stderr=self._log, text=True, cwd=Path(__file__).parent.parent,
        )

    def started(self) -> None:
        self.facts = self._answer(self._began + START_S * self._slower)

    def do(self, what: str, limit_s: float = 60.0, **more: Any) -> dict[str, Any]:
        """Runs a job and returns its answer. Raises Failed without one a little after `limit_s` (later on a CPU)."""
        assert self._process.stdin is not None
        limit_s *= self._slower
        try:
            self._process.stdin.write(json.dumps({"do": what, "limit_s": limit_s, **more}) + "\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            raise Failed(f"{self.kind}: the engine has ended; {self._end_of_log()}") from None
        return self._answer(time.monotonic() + limit_s + 15.0)

    def _answer(self, until: float) -> dict[str, Any]:
        stdout = self._process.stdout
        assert stdout is not None
        ready, _, _ = select.select([stdout], [], [], max(0.0, until - time.monotonic()))
        line = stdout.readline() if ready else ""
        answer: dict[str, Any] = json.loads(line) if line else {"error": "it ended" if ready else "no answer in time"}
        if "error" in answer:
            raise Failed(f"{self.kind}: {answer['error']}; {self._end_of_log()}")
        return answer

    def _end_of_log(self) -> str:
        lines = self._log_at.read_text(errors="replace").splitlines()
        return f"its log ends: {' | '.join(lines[-6:])}"

    def close(self) -> None:
        assert self._process.stdin is not None and self._process.stdout is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        try:
            self._process.wait(END_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait(END_S)
        self._process.stdout.close()
        self._log.close()


def wait_until_pinned(address: str) -> None:
    """Waits until the pool has grown and every worker has page-locked all of it: chunks in other memory would be
    misses."""
    until = time.monotonic() + PINNED_S
    grown, since = -1, time.monotonic()
    with Client(address) as client:
        while True:
            pool = client.status().pool
            segments = max((segment.id + 1 for segment in client.segments().segments), default=0)
            pinned = [
                member.pinned_through or 0 for session in client.sessions().sessions for member in session.members
                if member.state == "live" and member.ranks and session.label != MOVER_LABEL
            ]
            if pool.allocated_bytes != grown:
                grown, since = pool.allocated_bytes, time.monotonic()
            done = grown >= pool.limit_bytes or time.monotonic() - since > STILL_S
            if done and pinned and min(pinned) >= segments:
                return
            if time.monotonic() > until:
                raise Failed(f"kvdock: workers have page-locked {pinned} of {segments} segments after {PINNED_S} s")
            time.sleep(0.1)  # between two queries of how far the pool is page-locked


def pace(times: list[list[float]], start: float, end: float) -> dict[str, Any]:
    """Rate and gaps of the tokens whose times are in (start, end]."""
    inside = [[at for at in seen if start <= at <= end] for seen in times]
    gaps_ms = sorted((b - a) * 1e3 for seen in inside for a, b in itertools.pairwise(seen))
    tokens = sum(len([at for at in seen if at > start]) for seen in inside)
    return {
        "tokens_per_s": tokens / (end - start), "window_s": end - start,
        "gap_ms_p50": statistics.median(gaps_ms), "gap_ms_p99": gaps_ms[len(gaps_ms) * 99 // 100],
    }
