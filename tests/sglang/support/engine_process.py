"""SGLang engines on the CPU, each in processes of its own: it reads jobs as JSON lines and writes answers.

    python engine_process.py SOCKET_FD

Engines are forked from this program, which has imported SGLang (engine_forker.py). A message at the socket is {"model":
"folder", "address": "unix:/…" or null, …}; {"contract": [model, address]} runs contract.py instead.

A job is {"do": "generate", "prompts": [[…]]}, with "at_once" if they are to run side by side, "new": how many tokens
each generates, "abort_s": after how many seconds all of them are aborted, or the one whose id is "rid", "beside": a
prompt whose tokens are generated from before they start until they have ended, "beside_new": at most so many of them,
"renew": the arguments of weight_routes.renew(), behind the seconds after which it is called, "rooms": one for each
prompt (bootstrap_room), "custom_params" (a list: one for each prompt), "kv_hints", "cache_salt" and "extra_key" as
SGLang has them. Other jobs: {"do": "abort"}, which starts prompts side by side and aborts each one; {"do": "flush"},
what /flush_cache does; {"do": "metrics"}; those of weight_routes.py.
Log-probabilities travel as hexadecimal floats: what is compared is every bit. "cached" are the tokens of each prompt
that were not computed, "why" how each ended, "took_s" when, "verified" how often the target has verified drafts.
"""

from __future__ import annotations

import asyncio
import os
import sys
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from functools import partial
from types import SimpleNamespace
from typing import Any

import odd_plugins
import weight_routes
from cpu_only import fork_processes, prepare
from engine_forker import answers, carry_out, fork_engines

os.environ.update(
    SGLANG_USE_CPU_ENGINE="1", HF_HUB_OFFLINE="1", OMP_NUM_THREADS="1", TORCHDYNAMO_DISABLE="1",
    CUDA_VISIBLE_DEVICES="", TOKENIZERS_PARALLELISM="false", SGLANG_MAMBA_CONV_DTYPE="float32",
)

NEW = 12
"""Tokens that a request generates."""
IDLE_MS = 10
"""How long an idle engine waits for a request before its loop turns."""


def import_sglang() -> None:
    prepare()
    import torch
    from cpu_drafts import bring_drafts
    from cpu_states import bring_states

    assert torch.get_num_threads() == 1, "threads that wait for each other spin, and PyTorch was imported too early"
    import sglang.srt.entrypoints.engine
    import sglang.srt.function_call.function_call_parser
    import sglang.srt.managers.scheduler
    import sglang.srt.mem_cache.unified_radix_cache
    import sglang.srt.models.registry  # noqa: F401  # with all that an engine imports: hundreds of models

    read_windows_where_they_are()
    bring_states()
    bring_drafts()
    keep_attention_latent()
    weight_routes.bring_pokes()
    leave_cores_to_others()
    look_for_no_copies_of_methods()
    mark_moments_on_the_cpu()
    fork_processes()


def mark_moments_on_the_cpu() -> None:
    """What sends KV from one engine to another asks for events of a GPU, whatever the device is. PyTorch has those of a
    CPU, where all that a thread has asked for is computed."""
    import torch

    torch.cuda.Event, torch.cuda.current_stream = torch.cpu.Event, torch.cpu.current_stream


def leave_cores_to_others() -> None:
    """SGLang's loop turns without a pause while there is nothing to compute: each idle engine would keep a core busy.
    What it has for this, --sleep-on-idle, waits up to a second for a request, and no store is seen to end meanwhile."""
    from sglang.srt.managers.scheduler_components.idle_sleeper import IdleSleeper

    IdleSleeper.maybe_sleep = lambda sleeper: sleeper.poller.poll(IDLE_MS)


def look_for_no_copies_of_methods() -> None:
    """SGLang looks through all modules for names that were imported from where a hook is put, for each hook and in each
    process: a second an engine. What is in a class is imported from nowhere."""
    from sglang.srt.plugins import hook_registry

    real = hook_registry._propagate_patch

    def propagate(original: object, wrapped: object, source: object) -> int:
        return 0 if isinstance(source, type) else real(original, wrapped, source)

    hook_registry._propagate_patch = propagate


def read_windows_where_they_are() -> None:
    """On a CPU, SGLang writes the KV of a sliding window into its own pool, and reads it by the slots of the other one.
    So what it computes there depends on what the pool held before."""
    from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend

    def reading(real: Any) -> Any:
        def run(self: Any, query: Any, output: Any, k: Any, v: Any, slots: Any, *more: Any, **how: Any) -> Any:
            if self.use_sliding_window_kv_pool and how.get("sliding_window_size") is not None:
                slots = self.token_to_kv_pool.translate_loc_from_full_to_swa(slots.long())
            return real(self, query, output, k, v, slots, *more, **how)

        return run

    for name in ("_run_sdpa_forward_extend", "_run_sdpa_forward_decode"):
        setattr(TorchNativeAttnBackend, name, reading(getattr(TorchNativeAttnBackend, name)))


def keep_attention_latent() -> None:
    """On a CPU, SGLang would read KV of whole heads where its pool has their latent form (MLA)."""
    from sglang.srt.models.deepseek_common.attention_backend_handler import AttentionBackendRegistry
    from sglang.srt.models.deepseek_common.attention_forward_methods.forward_methods import AttnForwardMethod

    AttentionBackendRegistry.register("torch_native", lambda attention, batch: AttnForwardMethod.MLA)


def settings_of(said: dict[str, Any]) -> dict[str, Any]:
    """What the engine is made with."""
    linker: dict[str, Any] = {}
    if said["address"] and "plugin" not in said:
        extra = {
            "address": said["address"], "timeout_s": 20.0,
            "lookup_wait_s": 1.0, "verify_wait_s": 10.0,  # a busy machine is no lost server
            "load_if_cheaper": False,  # tiny models compute quicker than a busy machine loads
            **said.get("extra", {}),
        }
        name, module = said.get("linker", ["KvdockLinker", "kvdock.connectors.sglang"])
        linker = {
            "enable_unified_cache_external_linker": True, "unified_cache_external_linker_backend": "dynamic",
            "unified_cache_external_linker_config": {
                "linker": name, "linker_module_path": module, "linker_extra_config": extra,
            },
        }
    return {
        "model_path": said["model"], "device": "cpu", "load_format": "safetensors", "skip_tokenizer_init": True,
        "dtype": "float32", "attention_backend": "torch_native", "sampling_backend": "pytorch",
        "disable_cuda_graph": True, "mem_fraction_static": 0.6, "page_size": 64, "max_total_tokens": 4096,
        "chunked_prefill_size": 256, "log_level": "warning", "watchdog_timeout": 3600, "grammar_backend": "none",
        "max_running_requests": 4, "max_mamba_cache_size": 64, "skip_server_warmup": True, "random_seed": 0,
        "sleep_on_idle": True,
        **linker, **said.get("engine", {}),
    }


def serve(said: dict[str, Any]) -> None:
    if "contract" in said:
        import contract

        contract.main(*said["contract"])
        return
    os.environ.update(said.get("environ", {}))
    answer = answers()
    import sglang

    if "plugin_of_others" in said:
        getattr(odd_plugins, said["plugin_of_others"])()
    engine = sglang.Engine(**settings_of(said))

    answer({"ready": True})
    carry_out(answer, SimpleNamespace(**{name: partial(job, engine) for name, job in JOBS.items()}))
    engine.shutdown()


def generate(
    engine: Any, prompts: list[list[int]], new: int = NEW, at_once: bool = False, abort_s: float | None = None,
    custom_params: Any = None, beside: list[int] | None = None, beside_new: int = 3000,
    renew: list[Any] | None = None, rooms: list[int] | None = None, **more: Any,
) -> dict[str, Any]:
    from sglang.srt.managers.io_struct import GenerateReqInput

    each, tasks = custom_params if isinstance(custom_params, list) else [custom_params] * len(prompts), []
    of_rooms = rooms or [None] * len(prompts)

    # One after the other, if not told otherwise: how requests are batched changes the last bits by itself.
    async def one(prompt: list[int], custom: Any, room: int | None) -> Any:
        began_s = time.monotonic()
        asked = GenerateReqInput(
            input_ids=prompt, sampling_params={
                "temperature": 0, "max_new_tokens": new, "ignore_eos": True, "custom_params": custom,
            },
            return_logprob=True, logprob_start_len=-1 if "image_data" in more else len(prompt) - 1,
            bootstrap_room=room, **more,
        )
        if abort_s is not None:
            ends = partial(engine.tokenizer_manager.abort_request, more.get("rid", ""), abort_all="rid" not in more)
            engine.loop.call_later(abort_s, ends)
        if renew is not None:
            tasks.append(asyncio.create_task(weight_routes.renew(engine, *renew)))
        out = await anext(engine.tokenizer_manager.generate_request(asked, None))
        return {**out, "took_s": time.monotonic() - began_s}

    async def every() -> tuple[list[Any], str]:
        return (await all_of(), "") if beside is None else await while_it_runs(engine, beside, beside_new, all_of)

    async def all_of() -> list[Any]:
        if at_once:
            return await asyncio.gather(*map(one, prompts, each, of_rooms), return_exceptions=True)
        return [await caught(one(*all_three)) for all_three in zip(prompts, each, of_rooms, strict=True)]

    async def caught(asked: Any) -> Any:
        try:
            return await asked
        except Exception as error:  # whatever ended the request is told
            return error

    runs, cached, why, took_s, verified = [], [], [], [], []
    outs, beside_why = engine.loop.run_until_complete(every())
    for out in outs:
        if isinstance(out, Exception):
            runs.append(None)
            cached.append(0)
            why.append(f"{type(out).__name__}: {out}")
            continue
        about = out["meta_info"]
        runs.append([[token, float(p).hex()] for p, token, _ in about["output_token_logprobs"]])
        cached.append(about.get("cached_tokens", 0))  # not of a request that was aborted in its prompt
        why.append(about["finish_reason"]["type"])
        took_s.append(out["took_s"])
        verified.append(about.get("spec_verify_ct"))
    return {
        "runs": runs, "cached": cached, "why": why, "took_s": took_s, "verified": verified, "beside_why": beside_why,
    }


async def while_it_runs(
    engine: Any, prompt: list[int], new: int, work: Callable[[], Awaitable[list[Any]]]
) -> tuple[list[Any], str]:
    """Does the work once a request for the prompt has said a token, and aborts the request then. With how it ended."""
    from sglang.srt.managers.io_struct import GenerateReqInput

    asked = GenerateReqInput(
        rid=f"beside-{time.monotonic_ns()}", input_ids=prompt, stream=True,
        sampling_params={"temperature": 0, "max_new_tokens": new, "ignore_eos": True},
    )
    why, outputs = "abort", engine.tokenizer_manager.generate_request(asked, None)
    await anext(outputs)
    found = await work()
    engine.tokenizer_manager.abort_request(asked.rid)
    with suppress(ValueError):  # so it tells of some aborts
        async for out in outputs:
            why = (out["meta_info"]["finish_reason"] or {"type": why})["type"]
    return found, why


def abort(engine: Any, prompts: list[list[int]]) -> dict[str, Any]:
    """Starts all prompts. Every second one is aborted at once, while it waits or is computed, and the others once they
    have said a token."""
    from sglang.srt.managers.io_struct import GenerateReqInput

    manager, why = engine.tokenizer_manager, []

    async def one(at: int, prompt: list[int]) -> None:
        rid = f"aborted-{len(why)}-{at}"
        asked = GenerateReqInput(
            rid=rid, input_ids=prompt, sampling_params={"temperature": 0, "max_new_tokens": 400, "ignore_eos": True},
            stream=True,
        )
        outputs = manager.generate_request(asked, None)
        if at % 2:
            asyncio.get_running_loop().call_soon(manager.abort_request, rid)
        reason = "abort"
        with suppress(ValueError):  # so it tells of some aborts
            async for out in outputs:
                manager.abort_request(rid)
                reason = (out["meta_info"]["finish_reason"] or {"type": "none"})["type"]
        why.append(reason)

    async def every() -> None:
        await asyncio.gather(*(one(at, prompt) for at, prompt in enumerate(prompts)))

    engine.loop.run_until_complete(every())
    return {"why": why}


def flush(engine: Any, patience_s: float = 10.0) -> dict[str, Any]:
    """SGLang flushes nothing in the turn of its loop in which a request's last token was said."""
    end_s = time.monotonic() + patience_s
    while not (flushed := bool(getattr(engine.flush_cache(), "success", True))) and time.monotonic() < end_s:
        time.sleep(0.01)  # until its loop has turned, of which it says nothing
    return {"flushed": flushed}


def metrics(engine: Any) -> dict[str, Any]:
    from prometheus_client import CollectorRegistry, generate_latest, multiprocess

    registry = CollectorRegistry()
    multiprocess.MultiProcessCollector(registry)
    return {"text": generate_latest(registry).decode()}


JOBS = {"generate": generate, "abort": abort, "flush": flush, "metrics": metrics, **weight_routes.JOBS}


if __name__ == "__main__":
    import_sglang()
    fork_engines(int(sys.argv[1]), serve)
