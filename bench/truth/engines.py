"""The processes of bench.truth: engines, each around vLLM's real Scheduler, and what they say of their requests."""

from __future__ import annotations

import json
import os
import socket
import subprocess
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Self

ROOT = Path(__file__).resolve().parents[2]
PROGRAM = ROOT / "tests/vllm/support/truth_engine.py"
CHUNK = 128
"""Tokens of a chunk."""
PROMPT = 5 * CHUNK + 50
PATIENCE_S = 60.0
LLAMA, MISTRAL = "LlamaForCausalLM", "MistralForCausalLM"
MODELS = {LLAMA: "llama", MISTRAL: "mistral"}
"""The models of engines, as manifests name them, with their types."""
Request = dict[str, Any]
Truth = dict[str, Any]
"""What an engine says of a request: see tests/vllm/support/truth_engine.py."""


def named(prefix: str, seeds: Sequence[int], tokens: int = PROMPT, **more: Any) -> list[Request]:
    """A request for each seed, which its name ends with. Prompts of one seed and length are equal."""
    return [{"name": f"{prefix}-{seed}", "parts": [[seed, tokens]], **more} for seed in seeds]


class Engines:
    """The process that engines are forked from. `with Engines(…) as engines`: ended at the end."""

    def __init__(self, python: Path, folder: Path) -> None:
        self._address = str(folder / "engines.sock")
        environ = {**os.environ, "PYTHONPATH": f"{PROGRAM.parent}:{ROOT}", "PYTHONDONTWRITEBYTECODE": "1"}
        self._process = subprocess.Popen(
            [str(python), str(PROGRAM), self._address], env=environ, stdout=subprocess.PIPE, text=True
        )

    def __enter__(self) -> Self:
        assert self._process.stdout is not None
        if not self._process.stdout.readline():
            raise RuntimeError(f"the engines have ended with status {self._process.wait()}")
        return self

    def __exit__(self, *exc: object) -> None:
        self._process.terminate()
        self._process.communicate()

    def engine(self, address: str, model: str = LLAMA, **settings: Any) -> Engine:
        """An engine of the server at `address`. `model`: of MODELS."""
        return Engine(self._address, {
            "address": address, "model": model, "config": {"architectures": [model], "model_type": MODELS[model]},
            "blocks": 4096, "budget": 8192, "seqs": 16, "overlap": True, "chunk_tokens": CHUNK,
            "lookup_wait_s": 1.0, **settings,
        })


class Engine:
    """`with Engine(…) as engine`: ended at the end."""

    def __init__(self, address: str, settings: dict[str, Any]) -> None:
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.connect(address)
        self._lines = self._socket.makefile("rw")
        self._say(settings)
        self.answer()

    def _say(self, what: dict[str, Any]) -> None:
        self._lines.write(json.dumps(what) + "\n")
        self._lines.flush()

    def start(self, requests: Sequence[Request], *, in_turn: bool = False) -> None:
        """answer() waits for their end. `in_turn`: each begins when the one before has ended."""
        self._say({"in_turn" if in_turn else "run": list(requests)})

    def answer(self) -> dict[str, Truth]:
        line = self._lines.readline()
        if not line:
            raise RuntimeError("an engine has ended")
        return dict(json.loads(line))

    def run(self, requests: Sequence[Request], *, in_turn: bool = False) -> dict[str, Truth]:
        self.start(requests, in_turn=in_turn)
        return self.answer()

    def forget(self) -> None:
        """Empties vLLM's own prefix cache."""
        self._say({"forget": True})
        self.answer()

    def damage(self, chunk: int) -> None:
        """The next load that copies this chunk of a prompt finds a bit flipped in the pool."""
        self._say({"damage": chunk})
        self.answer()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_WR)
            self._lines.readline()  # "": it has left the server
        self._lines.close()
        self._socket.close()
