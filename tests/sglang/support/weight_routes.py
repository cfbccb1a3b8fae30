"""Ways in which an engine's weights change while it runs, as jobs of engine_process.py.

    {"do": "change", "route": …, "folder": …}, with "version" as SGLang has it, and "flush": whether SGLang flushes its
    cache with the update, where it can

brings the weights of another model's folder. {"do": "across"} generates while they change, and {"do": "rpc"} calls a
method of SGLang's Scheduler.

What RDMA writes into parameters is written by a method that bring_pokes() gives to SGLang's Scheduler, and whose name
does not give it away.
"""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any


def weights_of(folder: str) -> list[tuple[str, Any]]:
    from safetensors.torch import load_file

    return [pair for path in sorted(Path(folder).glob("*.safetensors")) for pair in load_file(path).items()]


def bring_pokes() -> None:
    """Gives SGLang's classes what the jobs call, in this process and those that are forked from it."""
    from sglang.srt.managers.scheduler import Scheduler
    from sglang.srt.managers.scheduler_components.weight_updater import SchedulerWeightUpdaterManager
    from sglang.srt.runtime_context import get_parallel

    def write(worker: Any, folder: str) -> None:
        worker.model_runner.model.load_weights(weights_of(folder))

    def poke(self: Any, folder: str) -> None:
        write(self.tp_worker, folder)

    def hot_swap_weights(self: Any, folder: str) -> None:
        """What a plugin may bring, or SGLang's next version."""
        write(self.tp_worker, folder)

    def swap(self: Any, folder: str) -> None:
        self.weight_updater.hot_swap_weights(folder)

    def take_the_updates_place(self: Any, only_rank: int | None = None, calls_through: bool = False) -> None:
        """As a plugin does it that comes late and knows no registry."""
        before = SchedulerWeightUpdaterManager.update_weights_from_disk
        if only_rank in (None, get_parallel().tp_rank + get_parallel().pp_rank):

            def update(updater: Any, request: Any) -> Any:
                return before(updater, request) if calls_through else None

            SchedulerWeightUpdaterManager.update_weights_from_disk = update

    Scheduler.poke, Scheduler.swap = poke, swap
    Scheduler.take_the_updates_place = take_the_updates_place
    SchedulerWeightUpdaterManager.hot_swap_weights = hot_swap_weights


def change(engine: Any, route: str, folder: str, version: str | None = None, flush: bool = False) -> dict[str, Any]:
    """`route`: several may be joined by "and"."""
    for one in route.split(" and "):
        ROUTES[one](engine, folder, version, flush)
    return {}


def _call(engine: Any, name: str, request: Any) -> Any:
    return engine.loop.run_until_complete(getattr(engine.tokenizer_manager, name)(request, None))


def disk(engine: Any, model: str, version: str | None, flush: bool) -> Any:
    from sglang.srt.managers.io_struct import UpdateWeightFromDiskReqInput

    request = UpdateWeightFromDiskReqInput(model_path=model, weight_version=version, flush_cache=flush)
    return _call(engine, "update_weights_from_disk", request)


def tensor(engine: Any, model: str, version: str | None, flush: bool) -> Any:
    _send(engine, model, version, flush, parts=1)


def buckets(engine: Any, model: str, version: str | None, flush: bool) -> Any:
    _send(engine, model, version, False, parts=3)


def _send(engine: Any, model: str, version: str | None, flush: bool, parts: int) -> None:
    from sglang.srt.managers.io_struct import UpdateWeightsFromTensorReqInput

    engine.begin_weight_update()
    weights = weights_of(model)
    for at in range(parts):
        _call(engine, "update_weights_from_tensor", UpdateWeightsFromTensorReqInput(
            serialized_named_tensors=engine._serialize_tensors_per_rank(weights[at::parts], None), flush_cache=flush,
            weight_version=version,
        ))
    engine.end_weight_update()


def distributed(engine: Any, model: str, version: str | None, flush: bool) -> Any:
    """A trainer in a thread of this process sends over gloo."""
    import torch
    from sglang.srt.managers.io_struct import UpdateWeightsFromDistributedReqInput
    from sglang.srt.utils import init_custom_process_group

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    ranks = engine.tokenizer_manager.server_args.tp_size
    weights, group = weights_of(model), f"trainer {port}"

    def train() -> None:
        made = init_custom_process_group(
            backend="gloo", init_method=f"tcp://127.0.0.1:{port}", world_size=1 + ranks, rank=0, group_name=group
        )
        for _, weight in weights:
            torch.distributed.broadcast(weight, src=0, group=made)

    trainer = threading.Thread(target=train)
    trainer.start()
    engine.init_weights_update_group("127.0.0.1", port, 1, 1 + ranks, group, "gloo")
    engine.begin_weight_update()
    said = _call(engine, "update_weights_from_distributed", UpdateWeightsFromDistributedReqInput(
        names=[name for name, _ in weights], dtypes=[str(weight.dtype).split(".")[1] for _, weight in weights],
        shapes=[list(weight.shape) for _, weight in weights], group_name=group, flush_cache=flush,
        weight_version=version,
    ))
    engine.end_weight_update()
    trainer.join()
    return said


def rdma(engine: Any, model: str, version: str | None, flush: bool) -> Any:
    begin(engine, model, version, flush)
    end(engine, model, version, flush)
    if version is not None:  # SGLang takes none with it
        name_version(engine, model, version, flush)


def begin(engine: Any, model: str, version: str | None, flush: bool) -> Any:
    engine.begin_weight_update()
    return engine.collective_rpc("poke", folder=model)


def end(engine: Any, model: str, version: str | None, flush: bool) -> Any:
    return engine.end_weight_update()


def ipc(engine: Any, model: str, version: str | None, flush: bool) -> Any:
    """There is no sender, so SGLang says that it has failed. Nobody can know how far it has come."""
    from sglang.srt.managers.io_struct import UpdateWeightsFromIPCReqInput

    request = UpdateWeightsFromIPCReqInput(zmq_handles={}, flush_cache=flush, weight_version=version)
    said = _call(engine, "update_weights_from_ipc", request)
    engine.collective_rpc("poke", folder=model)
    return said


def unknown(engine: Any, model: str, version: str | None, flush: bool) -> Any:
    return engine.collective_rpc("swap", folder=model)


def memory(engine: Any, model: str, version: str | None, flush: bool) -> Any:
    engine.release_memory_occupation(["weights"])
    engine.collective_rpc("poke", folder=model)
    return engine.resume_memory_occupation(["weights"])


def name_version(engine: Any, model: str, version: str | None, flush: bool) -> Any:
    from sglang.srt.managers.io_struct import UpdateWeightVersionReqInput

    request = UpdateWeightVersionReqInput(new_version=version, abort_all_requests=False)
    return engine.loop.run_until_complete(engine.tokenizer_manager.update_weight_version(request))


ROUTES: dict[str, Callable[[Any, str, str | None, bool], Any]] = {
    "disk": disk, "tensor": tensor, "buckets": buckets, "distributed": distributed, "rdma": rdma, "begin": begin,
    "end": end, "ipc": ipc, "unknown": unknown, "memory": memory, "version": name_version,
}


async def renew(engine: Any, after_s: float, folder: str, flush: bool) -> None:
    """All requests wait while the weights become those of a folder, and give back their KV."""
    from sglang.srt.managers.io_struct import (
        ContinueGenerationReqInput,
        PauseGenerationReqInput,
        UpdateWeightFromDiskReqInput,
    )

    await asyncio.sleep(after_s)
    manager = engine.tokenizer_manager
    await manager.pause_generation(PauseGenerationReqInput(mode="retract"))
    await manager.update_weights_from_disk(UpdateWeightFromDiskReqInput(model_path=folder, flush_cache=flush), None)
    await manager.continue_generation(ContinueGenerationReqInput())


def across(engine: Any, prompt: list[int], model: str, new: int, route: str = "disk") -> dict[str, Any]:
    """Generates `new` tokens, and changes the weights after the first of them while the request keeps its KV."""
    from sglang.srt.managers.io_struct import (
        ContinueGenerationReqInput,
        GenerateReqInput,
        PauseGenerationReqInput,
        UpdateWeightFromDiskReqInput,
    )

    manager = engine.tokenizer_manager

    async def run() -> list[int]:
        asked = GenerateReqInput(
            input_ids=prompt, sampling_params={"temperature": 0, "max_new_tokens": new, "ignore_eos": True}, stream=True
        )
        stream = manager.generate_request(asked, None)
        await anext(stream)
        await manager.pause_generation(PauseGenerationReqInput(mode="in_place"))
        await manager.update_weights_from_disk(
            UpdateWeightFromDiskReqInput(model_path=model, flush_cache=False), None
        )
        await manager.continue_generation(ContinueGenerationReqInput())
        outs = [out async for out in stream]
        return list(outs[-1]["output_ids"])

    return {"tokens": engine.loop.run_until_complete(asyncio.wait_for(run(), 120))}


def rpc(engine: Any, method: str, how: dict[str, Any]) -> dict[str, Any]:
    engine.collective_rpc(method, **how)
    return {}


JOBS: dict[str, Callable[..., dict[str, Any]]] = {"change": change, "across": across, "rpc": rpc}
