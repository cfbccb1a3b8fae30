"""Engines that compute prompts for one that decodes (--disaggregation-mode), on the CPU: Mooncake sends KV over TCP."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engines import Engine
from ports import held_port
from whole_engines import PROMPTS

TRANSFER = {"disaggregation_transfer_backend": "mooncake_tcp"}
DECODE = {**TRANSFER, "disaggregation_mode": "decode", "disaggregation_decode_retraction_backup": "cpu_tensor"}
"""SGLang would keep the KV of retracted requests in memory that a GPU's driver has pinned."""
ENVIRON = {"SGLANG_HOST_IP": "127.0.0.1", "SGLANG_DISAGGREGATION_WAITING_TIMEOUT": "60"}
_rooms = itertools.count(1)


def decoder(model: Path, engine: dict[str, Any], environ: dict[str, str]) -> Engine:
    """It gets its KV from others, and kvdock does not serve it."""
    return Engine(model, None, engine={**DECODE, **engine}, environ={**ENVIRON, **environ})


@dataclass(frozen=True)
class Sent:
    """What both engines answered, and the rooms of the prompts: what both know a request by."""

    prefill: dict[str, Any]
    decode: dict[str, Any]
    rooms: list[int]

    def decoded(self) -> tuple[list[Any], list[int]]:
        """As WholeEngine.generate: both engines have answered well, and say the same first token."""
        for answer in (self.prefill, self.decode):
            assert set(answer["why"]) == {"length"}, answer["why"]
        assert self.prefill["runs"] == [run[:1] for run in self.decode["runs"]]
        assert self.prefill["cached"] == self.decode["cached"]
        return self.decode["runs"], self.decode["cached"]


class Sender(Engine):
    """An engine that computes prompts for `to`, which decodes."""

    def __init__(
        self, model: Path, address: str, to: Engine, engine: dict[str, Any], environ: dict[str, str], **said: Any
    ) -> None:
        self._to, self._port = to, held_port()
        prefill = {**TRANSFER, "disaggregation_mode": "prefill", "disaggregation_bootstrap_port": self._port}
        super().__init__(model, address, engine={**prefill, **engine}, environ={**ENVIRON, **environ}, **said)

    def send(self, prompts: Sequence[Sequence[int]] = PROMPTS, **how: Any) -> Sent:
        """Asks both engines."""
        rooms = [next(_rooms) for _ in prompts]
        where = {"rooms": rooms, "bootstrap_host": "127.0.0.1", "bootstrap_port": self._port}
        for engine in (self, self._to):
            engine.tell("generate", prompts=prompts, **where, **how)
        return Sent(self.answer(), self._to.answer(), rooms)
