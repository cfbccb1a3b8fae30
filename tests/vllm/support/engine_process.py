"""vLLM engines on the CPU, each in a process of its own: it reads jobs as JSON lines and writes answers.

    python engine_process.py SOCKET_FD

Engines are forked from this program, which has imported vLLM (engine_forker.py). A message at the socket is {"model":
"folder", "address": "unix:/…" or null, …}.

A job is one of Jobs' methods and its arguments, {"do": "generate", "prompts": [[…]]}. The first line that an engine
writes says what it is made of. Log-probabilities travel as hexadecimal floats: what is compared is every bit.

Engines run on the CPU, or on a GPU where KVDOCK_ENGINES_DEVICE is "cuda" and KVDOCK_CPU_ENGINES a folder whose
bin/python has a vLLM for GPUs.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

from engine_forker import answers, carry_out, fork_engines
from serve_process import fork_processes
from weight_routes import change, register_transfer

os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
os.environ.update(
    HF_HUB_OFFLINE="1", VLLM_ENABLE_V1_MULTIPROCESSING="0", VLLM_CPU_KVCACHE_SPACE="1", VLLM_NO_USAGE_STATS="1",
    TORCHDYNAMO_DISABLE="1",  # to compile how log-probabilities are gathered takes longer than all that engines compute
    VLLM_CPU_OMP_THREADS_BIND="nobind", OMP_NUM_THREADS="1",  # threads that wait for each other spin
)

KV_DEVICE = os.environ.get("KVDOCK_ENGINES_DEVICE", "cpu")
NEW = 12
"""Tokens that a request generates."""
ON_GPU = {"dtype": "bfloat16", "kv_cache_memory_bytes": 1 << 30}
"""Attention there takes no float32, and several engines share a GPU: none can measure what is free."""


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


@contextmanager
def during_a_step(core: Any, address: str) -> Iterator[None]:
    """A request that the core has received comes to its scheduler once lower tiers have loaded something, and then
    nothing for a while: as if a long step ran meanwhile."""
    from kvdock.client.client import Client

    def loaded_bytes() -> int:
        with Client(address) as client:
            return sum(one.counters["loaded_bytes"] for one in client.status().tiers)

    real, before = core.add_request, loaded_bytes()

    def add_request(*request: Any) -> None:
        nonlocal before
        found, end_s = [before], time.monotonic() + 20
        while (len(found) < 5 or found[0] == found[-1] or found[-4] != found[-1]) and time.monotonic() < end_s:
            time.sleep(0.2)  # the server does not say when a load ends: it is asked again
            found.append(loaded_bytes())
        before = found[-1]
        real(*request)

    core.add_request = add_request
    try:
        yield
    finally:
        core.add_request = real


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


def brought_of(connector: Any) -> dict[str, int]:
    """By the request's name, how many tokens connectors bring from now on."""
    real, brought = connector.update_state_after_alloc, {}

    def update_state_after_alloc(request: Any, blocks: Any, external_tokens: int) -> None:
        real(request, blocks, external_tokens)
        brought[request.request_id] = brought.get(request.request_id, 0) + external_tokens

    connector.update_state_after_alloc = update_state_after_alloc
    return brought


@contextmanager
def most_held(scheduler: Any) -> Iterator[list[int]]:
    """How many blocks requests hold when each step has been scheduled."""
    real, pool, held = scheduler.schedule, scheduler.kv_cache_manager.block_pool, [0]

    def schedule(*arguments: Any, **more: Any) -> Any:
        planned = real(*arguments, **more)
        held.append(pool.num_gpu_blocks - 1 - pool.get_num_free_blocks())  # one is the null block
        return planned

    scheduler.schedule = schedule
    try:
        yield held
    finally:
        scheduler.schedule = real


def reset_as_it_loads(llm: Any, scheduler: Any, prompts: list[list[int]], params: Any) -> dict[str, Any]:
    """vLLM's prefix cache is reset, and what runs is preempted, while all `prompts` load."""
    from vllm.distributed.kv_transfer import kv_transfer_state

    worker = kv_transfer_state._KV_CONNECTOR_AGENT._worker
    real, polls = worker._take_ended, 0

    def take_ended(awaited: Any) -> None:
        nonlocal polls
        polls += is_reset is not None
        if polls > 20:  # of the reset
            real(awaited)

    is_reset: bool | None = None
    worker._take_ended = take_ended
    names = [f"as it loads {number}" for number in range(len(prompts))]
    for name, tokens in zip(names, prompts, strict=True):
        llm.llm_engine.add_request(name, {"prompt_token_ids": tokens}, params)
    asked = [one for one in scheduler.requests.values() if one.request_id.startswith("as it loads")]
    while any(one.status.name != "WAITING_FOR_REMOTE_KVS" for one in asked):
        llm.llm_engine.step()
    is_reset = False
    try:
        is_reset = llm.reset_prefix_cache(reset_running_requests=True)
    finally:
        worker._take_ended = real
    ended = {}
    while len(ended) < len(names):
        ended.update({out.request_id: bits_of(out) for out in llm.llm_engine.step() if out.finished})
    return {"reset": is_reset, "runs": [ended[name] for name in names]}


def asked_of(
    prompts: list[list[int]], images: list[tuple[str | None, list[int]]], cache_salt: str | None
) -> list[dict[str, Any]]:
    """As vLLM has prompts. `images`: none, or one for each, by name if it has one, and colour."""
    asked: list[dict[str, Any]] = [{"prompt_token_ids": prompt} for prompt in prompts]
    for one in asked if cache_salt is not None else ():
        one["cache_salt"] = cache_salt
    for one, (name, colour) in zip(asked, images, strict=False):
        from models import SIDE
        from PIL import Image

        one["multi_modal_data"] = {"image": Image.new("RGB", (SIDE, SIDE), tuple(colour))}
        if name is not None:
            one["multi_modal_uuids"] = {"image": [name]}
    return asked


def settings_of(said: dict[str, Any]) -> dict[str, Any]:
    """What the engine is made with."""
    transfer: dict[str, Any] = {}
    if said["address"]:
        extra = {
            "address": said["address"], "chunk_tokens": 64,
            "timeout_s": 20.0, "lookup_wait_s": 1.0,  # a busy machine is no lost server
            "load_if_cheaper": False,  # a tiny model computes as fast as it loads
            **said.get("extra", {}),
        }
        transfer = {"kv_transfer_config": {
            "kv_connector": said.get("connector", ["KvdockConnector"])[0],
            "kv_connector_module_path": said.get("connector", ["", "kvdock.connectors.vllm"])[1],
            "kv_role": "kv_both", "kv_load_failure_policy": "recompute", "kv_connector_extra_config": extra,
        }}
        if "before" in said or "behind" in said:
            both = [*said.get("before", ()), transfer["kv_transfer_config"], *said.get("behind", ())]
            transfer = {"kv_transfer_config": {
                "kv_connector": "MultiConnector", "kv_role": "kv_both", "kv_load_failure_policy": "recompute",
                "kv_connector_extra_config": {"connectors": both},
            }}
    wanted = {
        "skip_tokenizer_init": True, "dtype": "float32", "max_model_len": 1024, "enforce_eager": True, "block_size": 32,
        "seed": 0, "num_gpu_blocks_override": said.get("blocks", 200), "max_num_seqs": 4, "max_num_batched_tokens": 256,
        "disable_log_stats": True, **transfer, **(ON_GPU if KV_DEVICE == "cuda" else {}), **said.get("engine", {}),
    }
    if KV_DEVICE == "cpu" and "kv_lora_rank" in json.loads((Path(said["model"]) / "config.json").read_text()):
        wanted["attention_backend"] = "CPU_MLA"  # on a CPU with AMX the usual one is another, which takes no float32
    return wanted


def keep_prefixes() -> None:
    """With latent attention vLLM turns its prefix cache off on a CPU, although what it computes there behind a prefix
    is right. Only with that cache is there a local hit to compare a load with."""
    from vllm.platforms.cpu import CpuPlatform

    real = CpuPlatform.check_and_update_config

    def check_and_update_config(cls: type, vllm_config: Any) -> None:
        real(vllm_config)
        vllm_config.cache_config.enable_prefix_caching = True

    CpuPlatform.check_and_update_config = classmethod(check_and_update_config)


@contextmanager
def ends_of(engine: Any) -> Iterator[dict[str, float]]:
    """When each request has ended."""
    real, ended = engine.step, dict[str, float]()

    def step() -> Any:
        outs = real()
        ended.update({out.request_id: time.monotonic() for out in outs if out.finished})
        return outs

    engine.step = step
    try:
        yield ended
    finally:
        engine.step = real


class Jobs:
    """An engine, and what is counted of it. Each public method is a job, and returns its answer."""

    def __init__(self, llm: Any, address: str) -> None:
        from vllm import SamplingParams

        self._llm, self._address = llm, address
        self._core = llm.llm_engine.engine_core.engine_core
        self.scheduler = self._core.scheduler
        self._drafts = drafts_of(self.scheduler)
        connector = self.scheduler.connector
        self._brought = brought_of(connector) if connector is not None else {}
        self._params = SamplingParams(max_tokens=NEW, temperature=0, ignore_eos=True, detokenize=False, logprobs=3)

    def flush(self, connector: bool = False) -> dict[str, Any]:
        """Resets vLLM's prefix cache, and that of its connector as well."""
        self.drain()
        return {"flushed": self._llm.reset_prefix_cache(reset_connector=connector)}

    def metrics(self) -> dict[str, Any]:
        """What Prometheus would read."""
        from prometheus_client import generate_latest

        self.drain()
        return {"text": generate_latest().decode()}

    def drain(self) -> dict[str, Any]:
        while self.scheduler.has_requests():
            self._llm.llm_engine.step()
            time.sleep(0.001)  # stores end in other threads
        return {}

    def reset_as_it_loads(self, prompts: list[list[int]]) -> dict[str, Any]:
        self._brought.clear()
        found = reset_as_it_loads(self._llm, self.scheduler, prompts, self._params)
        self.drain()
        return {**found, "brought": sum(self._brought.values())}

    def change(self, route: str, folder: str, version: str | None = None, flush: bool = False) -> dict[str, Any]:
        """Other weights (weight_routes.py). vLLM flushes nothing with them."""
        change(self._llm, route, folder, version)
        return {}

    def generate(
        self, prompts: list[list[int]], *, new: int = NEW, at_once: bool = False, samples: int = 1,
        adapter: list[Any] | None = None, images: Any = (), cache_salt: str | None = None,
        handed: dict[str, Any] | None = None, kvdock: dict[str, Any] | None = None, admitted: str = "",
    ) -> dict[str, Any]:
        """`new`: how many tokens each generates; `at_once`: side by side; `admitted`: how they come to the scheduler
        (_way); `samples`: how many answers are drawn to each; `adapter`: [name, number, folder]. kv_transfer_params say
        `kvdock` to kvdock and `handed` to another connector; what the engine gives to be handed on is "handed" of the
        answer. "drafts" are what each step was given to check, request by request; "brought" is how many tokens
        connectors brought, and "held" how many blocks requests held at most."""
        from vllm.lora.request import LoRARequest

        params = self._params
        # One after the other, if not told otherwise: how requests are batched changes the last bits by itself.
        asked = asked_of(prompts, images, cache_salt)
        params.max_tokens = new
        batches = [asked] if at_once else [[one] for one in asked]
        request = LoRARequest(*adapter) if adapter is not None else None
        told = {**(handed or {}), **({"kvdock": kvdock} if kvdock is not None else {})}
        params.extra_args = {"kv_transfer_params": told} if told else None
        self._drafts.clear()
        self._brought.clear()
        params.n = samples
        params.temperature, params.seed = (0.0, None) if samples == 1 else (1.0, 3)
        began_s = time.monotonic()
        llm = self._llm
        with self._way(admitted, len(prompts)), most_held(self.scheduler) as held, ends_of(llm.llm_engine) as ends:
            outs = [
                out for batch in batches for out in llm.generate(batch, params, use_tqdm=False, lora_request=request)
            ]
        return {
            "runs": [bits_of(out) for out in outs], "cached": [out.num_cached_tokens for out in outs],
            "why": [out.outputs[0].finish_reason for out in outs],
            "took_s": [ends[out.request_id] - began_s for out in outs],
            "drafts": self._drafts, "handed": [out.kv_transfer_params for out in outs],
            "brought": sum(self._brought.values()), "held": max(held),
            "samples": [[list(one.token_ids) for one in out.outputs] for out in outs],
        }

    def _way(self, admitted: str, count: int) -> AbstractContextManager[None]:
        """"together": in one step; "during a step": while one runs."""
        if admitted == "during a step":
            return during_a_step(self._core, self._address)
        return together(self.scheduler.connector, count) if admitted == "together" else nullcontext()


def serve(said: dict[str, Any]) -> None:
    os.environ.update(said.get("environ", {}))
    answer = answers()
    from vllm import LLM

    if said.get("keeps_prefixes"):
        keep_prefixes()
    if "weight_transfer_config" in said.get("engine", {}):
        register_transfer()
    llm = LLM(model=said["model"], tokenizer=said["model"], **settings_of(said))
    jobs = Jobs(llm, said["address"])
    answer({"groups": len(jobs.scheduler.kv_cache_config.kv_cache_groups)})
    carry_out(answer, jobs)
    llm.llm_engine.engine_core.shutdown()
    left = [thread.name for thread in threading.enumerate() if thread.name.startswith("kvdock")]
    if left:
        sys.exit(f"threads of the connector outlived it: {left}")


if __name__ == "__main__":
    if KV_DEVICE == "cpu":  # a fork cannot use a GPU that its parent has looked at
        fork_processes()
    fork_engines(int(sys.argv[1]), serve)
