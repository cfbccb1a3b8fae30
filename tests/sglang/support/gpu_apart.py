"""Whole SGLangs on GPUs, of which one computes prompts for one that decodes, beside one that does both.

    python gpu_apart.py BACKEND MODEL ADDRESS FOLDER

BACKEND: what sends the KV, as --disaggregation-transfer-backend has it: from one GPU to the other, if there are two.
Prints {name: answers}: "cold", "local" (a local hit), "loaded", "failed" (damage while it is loaded) and "again". Each
answer is [[token, log-probability as hex] of each token, tokens that were not computed], or how the request failed.
There is one of each engine, "alone" (without kvdock, so for "cold" and "local" only), "prefill" and "decode".
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOM_S = "60"
"""How long an engine waits for KV, in seconds."""


class Child:
    """An engine in a process of its own."""

    def __init__(self, role: str, gpu: int, said: list[str]) -> None:
        self._process = subprocess.Popen(
            [sys.executable, __file__, "--role", role, str(gpu), *said], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            text=True,
        )

    def tell(self, **job: Any) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(job) + "\n")
        self._process.stdin.flush()

    def answer(self) -> Any:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        assert line, "an engine ended"
        return json.loads(line)

    def flush(self) -> None:
        self.tell(do="flush")
        self.answer()

    def end(self) -> None:
        self._process.kill()


def main(backend: str, model: str, address: str, folder: str) -> None:
    import torch
    from gpu_waits import wait_until_stored
    from ports import held_port

    from bench.engine_child import wait_until_pinned

    other = 1 if torch.cuda.device_count() > 1 else 0
    said = [backend, model, address, folder, str(held_port())]
    engines = {role: Child(role, gpu, said) for role, gpu in (("alone", 0), ("prefill", 0), ("decode", other))}
    for engine in engines.values():
        engine.answer()  # it has started
    wait_until_pinned(address)
    found = {}
    for room, name in enumerate(("cold", "local", "loaded", "failed", "again"), 1):
        if name in ("loaded", "failed", "again"):
            wait_until_stored(address)
            engines["prefill"].flush()
        if name == "failed":
            Path(folder, "damage").touch()
        asked = list(engines) if name in ("cold", "local") else ["prefill", "decode"]
        for role in asked:
            engines[role].tell(do="run", room=room)
        found[name] = {role: engines[role].answer() for role in asked}
    for engine in engines.values():
        engine.end()
    print(json.dumps(found), flush=True)


def settings_of(role: str, gpu: int, backend: str, model: str, address: str, port: str) -> dict[str, Any]:
    """What an engine is made with."""
    import gpu_engine

    settings = gpu_engine.settings_of("wide", model, address) | {"base_gpu_id": gpu}
    if role == "prefill":
        settings["unified_cache_external_linker_config"] |= {
            "linker": "DamagedLinker", "linker_module_path": "odd_linkers",
        }
    else:
        settings = {name: value for name, value in settings.items() if "external_linker" not in name}
    if role != "alone":
        settings |= {
            "disaggregation_mode": role, "disaggregation_transfer_backend": backend,
            "disaggregation_bootstrap_port": int(port), "disaggregation_decode_retraction_backup": "cpu_tensor",
        }
    return settings


def serve(role: str, gpu: str, backend: str, model: str, address: str, folder: str, port: str) -> None:
    """One engine: it reads jobs as JSON lines."""
    os.environ.update(
        KVDOCK_ODD=folder, HF_HUB_OFFLINE="1", SGLANG_HOST_IP="127.0.0.1", SGLANG_DISAGGREGATION_WAITING_TIMEOUT=ROOM_S
    )
    from engine_forker import answers

    answer = answers()
    import sglang
    from gpu_engine import NEW, PROMPT
    from gpu_waits import wait_until_flushed

    engine = sglang.Engine(**settings_of(role, int(gpu), backend, model, address, port))
    answer({"ready": True})
    asked = {"temperature": 0, "max_new_tokens": NEW, "ignore_eos": True}
    where = {} if role == "alone" else {"bootstrap_host": "127.0.0.1", "bootstrap_port": int(port)}
    for line in sys.stdin:
        job = json.loads(line)
        if job["do"] == "flush":
            wait_until_flushed(lambda: bool(engine.flush_cache().success))
            answer({"flushed": True})
            continue
        try:
            said = engine.generate(
                input_ids=PROMPT, sampling_params=asked, return_logprob=True, logprob_start_len=len(PROMPT) - 1,
                **(where and where | {"bootstrap_room": job["room"]}),
            )
        except Exception as error:  # whatever ended the request is told
            answer([f"{type(error).__name__}: {error}", 0])
            continue
        about = said["meta_info"]
        tokens = [[token, float(p).hex()] for p, token, _ in about["output_token_logprobs"]]
        answer([tokens, about["cached_tokens"]])


if __name__ == "__main__":
    if sys.argv[1] == "--role":
        serve(*sys.argv[2:])
    else:
        main(*sys.argv[1:])
