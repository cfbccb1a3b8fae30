"""The ways in which programs give a running vLLM other weights. Each loads those of a model's folder."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

EXTENSION = "weight_routes.Extension"
CHANGED = "embed_tokens"
"""In these tensors the weights of models.py's "llama-b" and "llama-c" differ."""


def tensors_of(folder: str) -> Iterator[tuple[str, Any]]:
    """The rest is the same, and vLLM packs it for the CPU."""
    from safetensors.torch import load_file

    for file in sorted(Path(folder).glob("*.safetensors")):
        for name, tensor in load_file(file).items():
            if CHANGED in name:
                yield name, tensor


class Extension:
    """A worker extension, as trainers bring one: vLLM knows none of its methods."""

    model_runner: Any

    def refresh_policy(self, folder: str) -> None:
        """Writes into the parameters, past the model's own load_weights."""
        write_into(self.model_runner.get_model(), folder)

    def is_ready(self) -> bool:
        return True


def write_into(model: Any, folder: str) -> None:
    """Into the parameters' memory."""
    own = dict(model.named_parameters())
    for name, tensor in tensors_of(folder):
        own[name].data[: len(tensor)].copy_(tensor)


def register_transfer() -> None:
    """A weight transfer engine "folder", for vLLM's own start, update and finish of an update."""
    from dataclasses import dataclass

    from vllm.distributed.weight_transfer.base import WeightTransferEngine
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

    @dataclass
    class Nothing:
        """It needs no connection."""

    @dataclass
    class Update:
        folder: str

    class FromFolder(WeightTransferEngine[Nothing, Update]):
        init_info_cls, update_info_cls = Nothing, Update

        def init_transfer_engine(self, init_info: Nothing) -> None:
            """There is nobody to connect to."""

        def start_weight_update(self) -> None:
            """Parameters are written in place."""

        def update_weights(self, update_info: dict[str, Any]) -> None:
            write_into(self.model, self.parse_update_info(update_info).folder)

        def receive_weights(self, update_info: Update) -> None:
            write_into(self.model, update_info.folder)

        def finish_weight_update(self) -> None:
            """All is in place."""

        def shutdown(self) -> None:
            """Nothing is held."""

    WeightTransferEngineFactory.register_engine("folder", FromFolder)


def _reload(llm: Any, folder: str) -> None:
    llm.collective_rpc("reload_weights", kwargs={"weights_path": folder})


def _function(llm: Any, folder: str) -> None:
    llm.collective_rpc(lambda worker: write_into(worker.model_runner.get_model(), folder))


def _extension(llm: Any, folder: str) -> None:
    llm.collective_rpc("refresh_policy", args=(folder,))


def _transfer(llm: Any, folder: str) -> None:
    llm.collective_rpc("start_weight_update")
    llm.collective_rpc("update_weights", kwargs={"update_info": {"folder": folder}})
    llm.collective_rpc("finish_weight_update")


def _model(llm: Any, folder: str) -> None:
    """As a trainer in the same process does it, with no call to the engine."""
    worker = llm.llm_engine.model_executor.driver_worker
    getattr(worker, "worker", worker).model_runner.get_model().load_weights(tensors_of(folder))


ROUTES: dict[str, Callable[[Any, str], None]] = {
    "reload": _reload, "function": _function, "extension": _extension, "transfer": _transfer, "model": _model,
}


def change(llm: Any, route: str, folder: str, version: str | None) -> None:
    """`version`: what the engine is told to call them; None: nothing."""
    ROUTES[route](llm, folder)
    if version is not None:
        llm.llm_engine.engine_core.set_weight_version(version)
