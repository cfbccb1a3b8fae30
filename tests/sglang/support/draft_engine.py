"""A whole SGLang on a GPU whose draft model is the target once more, so that all drafts are accepted as long as both
have their KV.

    python draft_engine.py MODEL ADDRESS FOLDER

Prints {name: [tokens, cached tokens, how often the target has verified]} of one prompt: "cold", "local" (a local hit),
"loaded", and "forgotten": loaded by a linker that leaves the draft's KV out.
"""

from __future__ import annotations

import json
import os
import random
import sys
import time
from pathlib import Path
from typing import Any

import sglang

from bench.engine_child import wait_until_pinned
from kvdock.client.client import Client

PROMPT = [random.Random(7).randrange(3, 600) for _ in range(5 * 64 + 9)]


def main(model: str, address: str, folder: str) -> None:
    os.environ.update(KVDOCK_ODD=folder, HF_HUB_OFFLINE="1")
    engine = sglang.Engine(
        model_path=model, dtype="bfloat16", skip_tokenizer_init=True, page_size=64, max_total_tokens=4096,
        mem_fraction_static=0.3, max_running_requests=4, disable_cuda_graph=True, attention_backend="triton",
        sampling_backend="pytorch", grammar_backend="none", log_level="warning", skip_server_warmup=True,
        speculative_algorithm="STANDALONE", speculative_draft_model_path=model, speculative_num_steps=3,
        speculative_eagle_topk=1, speculative_num_draft_tokens=4, enable_unified_cache_external_linker=True,
        unified_cache_external_linker_backend="dynamic", unified_cache_external_linker_config={
            "linker": "DraftlessLinker", "linker_module_path": "odd_linkers", "linker_extra_config": {
                "address": address, "lookup_wait_s": 1.0, "load_if_cheaper": False,
            },
        },
    )

    def run() -> list[Any]:
        answer = engine.generate(
            input_ids=PROMPT, sampling_params={"temperature": 0, "max_new_tokens": 40, "ignore_eos": True}
        )
        about = answer["meta_info"]
        return [answer["output_ids"], about["cached_tokens"], about["spec_verify_ct"]]

    wait_until_pinned(address)
    found = {"cold": run(), "local": run()}
    for name in ("loaded", "forgotten"):
        wait_until_stored(address)
        if name == "forgotten":
            Path(folder, "forget").touch()
        engine.flush_cache()
        found[name] = run()
    print(json.dumps(found), flush=True)
    os._exit(0)  # to take a whole engine apart takes seconds


def wait_until_stored(address: str) -> None:
    end_s = time.monotonic() + 30.0
    with Client(address) as client:
        while (status := client.status()).reservations or status.counters["stored_chunks"] < len(PROMPT) // 64:
            assert time.monotonic() < end_s, "what was computed is not stored"
            time.sleep(0.05)  # the server does not say when a store ends: it is asked again


if __name__ == "__main__":
    main(*sys.argv[1:])
