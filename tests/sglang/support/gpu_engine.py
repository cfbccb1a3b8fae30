"""A whole SGLang on a GPU.

    python gpu_engine.py KIND MODEL ADDRESS FOLDER

Prints {name: [tokens, cached tokens, how often the target has verified drafts]} of one prompt: "cold", "local" (a local
hit) and "loaded". Of every KIND but "draft", [token, log-probability as hex] takes the place of a token: every bit is
compared. "draft" has the target once more as its draft model, so that all drafts are accepted as long as both have
their KV; it adds "forgotten": loaded by a linker that leaves the draft's KV out.
"""

from __future__ import annotations

import json
import os
import random
import sys
from pathlib import Path
from typing import Any

import sglang
from gpu_waits import wait_until_flushed, wait_until_stored

from bench.engine_child import wait_until_pinned

PROMPT = [random.Random(7).randrange(3, 600) for _ in range(5 * 64 + 9)]
NEW = 40


def settings_of(kind: str, model: str, address: str) -> dict[str, Any]:
    """What the engine is made with."""
    linker = ["DraftlessLinker", "odd_linkers"] if kind == "draft" else ["KvdockLinker", "kvdock.connectors.sglang"]
    drafts = {
        "speculative_algorithm": "STANDALONE", "speculative_draft_model_path": model, "speculative_num_steps": 3,
        "speculative_eagle_topk": 1, "speculative_num_draft_tokens": 4,
    }
    return {
        "model_path": model, "dtype": "bfloat16", "skip_tokenizer_init": True, "page_size": 64,
        "max_total_tokens": 4096, "mem_fraction_static": 0.2, "max_running_requests": 4, "max_mamba_cache_size": 64,
        "chunked_prefill_size": 1024, "attention_backend": "triton", "sampling_backend": "pytorch",
        "grammar_backend": "none", "log_level": "warning", "skip_server_warmup": True,
        "enable_unified_cache_external_linker": True, "unified_cache_external_linker_backend": "dynamic",
        "unified_cache_external_linker_config": {
            "linker": linker[0], "linker_module_path": linker[1], "linker_extra_config": {
                "address": address, "lookup_wait_s": 1.0, "verify_wait_s": 10.0, "load_if_cheaper": False,
            },
        },
        **(drafts if kind == "draft" else {}),
    }


def main(kind: str, model: str, address: str, folder: str) -> None:
    os.environ.update(KVDOCK_ODD=folder, HF_HUB_OFFLINE="1")
    engine = sglang.Engine(**settings_of(kind, model, address))

    def run() -> list[Any]:
        asked = {"temperature": 0, "max_new_tokens": NEW, "ignore_eos": True}
        if kind == "draft":
            answer = engine.generate(input_ids=PROMPT, sampling_params=asked)
            tokens = answer["output_ids"]
        else:
            answer = engine.generate(
                input_ids=PROMPT, sampling_params=asked, return_logprob=True, logprob_start_len=len(PROMPT) - 1
            )
            tokens = [[token, float(p).hex()] for p, token, _ in answer["meta_info"]["output_token_logprobs"]]
        about = answer["meta_info"]
        return [tokens, about["cached_tokens"], about.get("spec_verify_ct")]

    wait_until_pinned(address)
    found = {"cold": run(), "local": run()}
    for name in ("loaded", "forgotten") if kind == "draft" else ("loaded",):
        wait_until_stored(address)
        if name == "forgotten":
            Path(folder, "forget").touch()
        wait_until_flushed(lambda: bool(engine.flush_cache().success))
        found[name] = run()
    print(json.dumps(found), flush=True)
    os._exit(0)  # to take a whole engine apart takes seconds


if __name__ == "__main__":
    main(*sys.argv[1:])
