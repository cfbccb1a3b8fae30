"""One vLLM engine on the CPU, in a process of its own: reads jobs as JSON lines, writes answers.

    python engine_process.py '{"model": "folder", "address": "unix:/…" or null, …}'

A job is {"do": "generate", "prompts": [[…]]}, with "at_once" if they are to run side by side and "together" if they
are to be admitted in one step, {"do": "reset"},
{"do": "drain"} or {"do": "metrics"}, what Prometheus would read. The first line it writes says what the engine is made
of. Log-probabilities travel as hexadecimal floats: what is compared is every bit. "drafts" are what each step was given
to check, request by request.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
os.environ.update(
    HF_HUB_OFFLINE="1", VLLM_ENABLE_V1_MULTIPROCESSING="0", VLLM_CPU_KVCACHE_SPACE="1", VLLM_NO_USAGE_STATS="1"
)


def bits_of(out: Any) -> list[list[Any]]:
    """A request's tokens with their log-probabilities."""
    made = out.outputs[0]
    return [[token, at[token].logprob.hex()] for token, at in zip(made.token_ids, made.logprobs, strict=True)]


@contextmanager
def together(connector: Any, count: int) -> Iterator[None]:
    """No lookup is answered before all `count` are, so that batches do not depend on how fast the server is."""
    real = connector.get_num_new_matched_tokens
    first, answered, is_open = "", 0, False

    def lookup(request: Any, local_tokens: int) -> tuple[int | None, bool]:
        nonlocal first, answered, is_open
        first = first or request.request_id
        if request.request_id == first:  # another step
            is_open, answered = is_open or answered == count, 0
        found: tuple[int | None, bool] = real(request, local_tokens)
        answered += found[0] is not None
        return found if is_open else (None, False)

    connector.get_num_new_matched_tokens = lookup
    try:
        yield
    finally:
        connector.get_num_new_matched_tokens = real


def drafts_of(scheduler: Any) -> list[list[int]]:
    """What it is given to check from now on. On the CPU no step is scheduled ahead, so all drafts come through here."""
    real = scheduler.update_draft_token_ids
    drafts: list[list[int]] = []

    def update_draft_token_ids(drafted: Any) -> None:
        real(drafted)
        given = [scheduler.requests[name].spec_token_ids for name in drafted.req_ids if name in scheduler.requests]
        drafts.extend(list(tokens) for tokens in given if tokens)  # none before the prompt is computed

    scheduler.update_draft_token_ids = update_draft_token_ids
    return drafts


def main() -> None:
    said = json.loads(sys.argv[1])
    os.environ.update(said.get("environ", {}))
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print is no answer
    from vllm import LLM, SamplingParams

    transfer: dict[str, Any] = {}
    if said["address"]:
        extra = {"address": said["address"], "chunk_tokens": 64, "timeout_s": 20.0, **said.get("extra", {})}
        transfer = {"kv_transfer_config": {
            "kv_connector": said.get("connector", ["KvdockConnector"])[0],
            "kv_connector_module_path": said.get("connector", ["", "kvdock.connectors.vllm"])[1],
            "kv_role": "kv_both", "kv_load_failure_policy": "recompute", "kv_connector_extra_config": extra,
        }}
    wanted = {
        "skip_tokenizer_init": True, "dtype": "float32", "max_model_len": 1024, "enforce_eager": True, "block_size": 32,
        "seed": 0, "num_gpu_blocks_override": said.get("blocks", 200), "max_num_seqs": 4, "max_num_batched_tokens": 256,
        "disable_log_stats": True, **transfer, **said.get("engine", {}),
    }
    llm = LLM(model=said["model"], tokenizer=said["model"], **wanted)
    scheduler = llm.llm_engine.engine_core.engine_core.scheduler
    groups = scheduler.kv_cache_config.kv_cache_groups

    def say(answer: dict[str, Any]) -> None:
        print(json.dumps(answer), file=answers, flush=True)

    def drain() -> None:
        while scheduler.has_requests():
            llm.llm_engine.step()
            time.sleep(0.001)  # stores end in other threads

    drafts = drafts_of(scheduler)
    say({"groups": len(groups)})
    params = SamplingParams(max_tokens=12, temperature=0, ignore_eos=True, detokenize=False, logprobs=3)
    for line in sys.stdin:
        job = json.loads(line)
        if job["do"] == "reset":
            drain()
            say({"reset": llm.reset_prefix_cache(reset_connector=job.get("connector", False))})
        elif job["do"] == "metrics":
            from prometheus_client import generate_latest

            drain()
            say({"text": generate_latest().decode()})
        elif job["do"] == "drain":
            drain()
            say({})
        else:
            # One after the other, if not told otherwise: how requests are batched changes the last bits by itself.
            asked = [{"prompt_token_ids": prompt} for prompt in job["prompts"]]
            batches = [asked] if job.get("at_once") else [[one] for one in asked]
            drafts.clear()
            with together(scheduler.connector, len(asked)) if job.get("together") else nullcontext():
                outs = [out for batch in batches for out in llm.generate(batch, params, use_tqdm=False)]
            cached = [out.num_cached_tokens for out in outs]
            say({"runs": [bits_of(out) for out in outs], "cached": cached, "drafts": drafts})
    llm.llm_engine.engine_core.shutdown()


if __name__ == "__main__":
    main()
