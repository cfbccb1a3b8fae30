"""vLLM's API server in a process of its own, on the CPU, asked over HTTP as clients ask it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import MappingProxyType
from typing import Any, Self
from urllib.request import Request, urlopen

from api_helpers import comes_true
from engines import ENGINE_PYTHON, HERE
from ports import held_port
from prometheus_client.parser import text_string_to_metric_families

NAME = "model"
"""The served name."""
ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "VLLM_CPU_KVCACHE_SPACE": "2",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "1",  # threads that wait for each other spin
}


class ServedEngine:
    """`with ServedEngine(model, logs, *arguments) as engine`: ended by SIGTERM, with time to end in order.

    It starts while the caller goes on: wait_ready() waits for it. `arguments` go to vLLM, as `vllm serve` has them;
    `environ` is added to the environment.
    """

    def __init__(self, model: Path, logs: Path, *arguments: str, environ: dict[str, str] | None = None) -> None:
        self._port = held_port()
        self.url = f"http://127.0.0.1:{self._port}"
        self.log_path = logs / f"vllm-{self._port}.log"
        program = [ENGINE_PYTHON, HERE / "serve_process.py", model]
        served = ["--host", "127.0.0.1", "--port", str(self._port), "--served-model-name", NAME]
        inherited = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
        with self.log_path.open("w") as log:
            self.process = subprocess.Popen(
                [*program, *served, "--shutdown-timeout", "10", "--gpu-memory-utilization", "0.3", *arguments],
                env={**inherited, **ENVIRONMENT, **(environ or {})}, stdin=subprocess.DEVNULL, stdout=log, stderr=log,
                start_new_session=True,
            )

    def wait_ready(self, seconds: float = 600.0) -> Self:
        assert comes_true(self._is_healthy, seconds), f"vLLM did not start:\n{self.log_text()[-4000:]}"
        return self

    def _is_healthy(self) -> bool:
        assert self.process.poll() is None, f"vLLM ended:\n{self.log_text()[-4000:]}"
        try:
            with urlopen(f"http://127.0.0.1:{self._port}/health", timeout=5.0):
                return True
        except OSError:
            return False

    def complete(self, prompts: Sequence[Any], *, at_a_time: int = 1, **how: Any) -> list[dict[str, Any]]:
        """The answers of /v1/completions, in the order of `prompts`; `how` is sent with each of them."""
        with ThreadPoolExecutor(at_a_time) as pool:
            return list(pool.map(lambda prompt: self.post("/v1/completions", {"prompt": prompt, **how}), prompts))

    def metrics(self) -> dict[str, float]:
        """What it exports: the sums over labels, by name."""
        with urlopen(f"http://127.0.0.1:{self._port}/metrics", timeout=30.0) as answer:
            text = answer.read().decode()
        sums: dict[str, float] = {}
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                sums[sample.name] = sums.get(sample.name, 0.0) + sample.value
        return sums

    def post(self, path: str, body: Mapping[str, Any] = MappingProxyType({})) -> dict[str, Any]:
        """On a connection of its own: one that the other side closes at that moment looks like a failed request."""
        asked = Request(
            f"http://127.0.0.1:{self._port}{path}", data=json.dumps({"model": NAME, **body}).encode(),
            headers={"content-type": "application/json"},
        )
        with urlopen(asked, timeout=300.0) as answer:
            found: dict[str, Any] = json.loads(answer.read() or b"{}")
            return found

    def log_text(self) -> str:
        return self.log_path.read_text()

    def close(self) -> int:
        """Its exit status; that of SIGKILL if it does not end by itself. What it started has ended too."""
        if self.process.poll() is None:
            self.process.terminate()
        try:
            return self.process.wait(60)
        except subprocess.TimeoutExpired:
            os.killpg(self.process.pid, signal.SIGKILL)
            return self.process.wait(60)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()
