"""Linkers that are made to go wrong, for tests: SGLang loads them in the place of kvdock's own.

A test says when by making a file in the folder KVDOCK_ODD.
"""

from __future__ import annotations

import ctypes
import json
import os
import threading
import time
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

from kvdock.connectors.sglang.linker import KvdockLinker
from kvdock.connectors.sglang.loads import Ready
from kvdock.connectors.sglang.setup import drafts_of
from kvdock.datapath.errors import copy_error


def happens(what: str) -> bool:
    return (Path(os.environ["KVDOCK_ODD"]) / what).exists()


class DamagedLinker(KvdockLinker):
    """Damages a stored byte between the promise of a load and the load, once: rank 0's, or that of the rank whose
    number the file has."""

    def start_layer_wise_loading(self) -> int:
        self._damage(self._loads._queued.values())
        return super().start_layer_wise_loading()

    def _damage(self, loads: Collection[Any]) -> None:
        if self._ranks.rank == 0 and loads and happens("damage"):
            writer = int((Path(os.environ["KVDOCK_ODD"]) / "damage").read_text() or 0)
            for load in loads:
                part = load.plan.pieces[-1].parts[writer]
                address = load.attachment.segments.address(part.segment, part.offset, part.length)
                byte = ctypes.c_ubyte.from_address(address + 5)
                byte.value ^= 1
            (Path(os.environ["KVDOCK_ODD"]) / "damage").unlink()


class DamagedEarlyLinker(DamagedLinker):
    """Does so to loads before admissions."""

    def __init__(self, *args: Any, **more: Any) -> None:
        super().__init__(*args, **more)
        real = self._loads.start_early

        def start_early(load: Any, ready: Callable[[], Ready]) -> int:
            self._damage([load])
            return real(load, ready)

        self._loads.start_early = start_early  # type: ignore[method-assign]  # for this process alone


class ApartLinker(KvdockLinker):
    """The last stage is attached to no session, and says so ("apart") or does not ("lost")."""

    def __init__(self, *args: Any, **more: Any) -> None:
        super().__init__(*args, **more)
        if self._ranks.stage == 0:
            return
        session, notes = self._rank_pools.worker.session, self._ranks.notes
        attachment_to, attached = session.attachment_to, notes.attached

        def lost(epoch: Any) -> Any:
            return None if happens("lost") else attachment_to(epoch)

        def told(session: str) -> None:
            attached("" if happens("apart") else session)

        session.attachment_to, notes.attached = lost, told  # type: ignore[method-assign]  # for this process alone


class StageStoresNothing(KvdockLinker):
    """What the last stage copies of a store is lost."""

    def __init__(self, *args: Any, **more: Any) -> None:
        super().__init__(*args, **more)
        worker = self._rank_pools.worker
        real = worker.submit_store

        def submit_store(attachment: Any, plan: Any, **how: Any) -> Any:
            storing = real(attachment, plan, **how)
            if self._ranks.stage > 0 and happens("lost"):
                storing.wait(None)
                storing.error = copy_error("blocks", found="a test", wanted="none")
            return storing

        worker.submit_store = submit_store  # type: ignore[method-assign]  # for this process alone


PATIENCE_S = 3.0
"""How long a verdict waits for the launch of the next step."""


class LateVerdictLinker(DamagedLinker):
    """The verdict on a load is there once the next step is launched. If none is, it is there in the end, and "late" is
    written down."""

    def __init__(self, *args: Any, **more: Any) -> None:
        super().__init__(*args, **more)
        self._odd_steps, self._odd_launch = threading.Condition(), dict[str, int]()
        self._odd_counter, worker = self._loads.counter, self._rank_pools.worker
        real, finish_load = self._odd_counter.set_consumer, worker.finish_load

        def set_consumer(index: int) -> None:
            with self._odd_steps:
                real(index)
                self._odd_steps.notify_all()

        def verdict(loading: Any) -> int:
            return self._verdict(loading, finish_load)

        self._odd_counter.set_consumer = set_consumer  # type: ignore[method-assign]  # for this process alone
        worker.finish_load = verdict  # type: ignore[method-assign]  # for this process alone

    def start_layer_wise_loading(self) -> int:
        for load in self._loads._queued.values():
            self._odd_launch[load.plan.lease] = self._odd_counter.batches + 2  # its own step is the next one
        return super().start_layer_wise_loading()

    def _verdict(self, loading: Any, finish_load: Any) -> int:
        valid: int = finish_load(loading)
        step = self._odd_launch.pop(loading.plan.lease)
        if happens("hold"):
            with self._odd_steps:
                if not self._odd_steps.wait_for(lambda: self._odd_counter.batches >= step, PATIENCE_S):
                    (Path(os.environ["KVDOCK_ODD"]) / "late").touch()
        return valid


class FailingLinker(KvdockLinker):
    """The copies of a load cannot be begun."""

    def start_layer_wise_loading(self) -> int:
        real = self._rank_pools.worker.submit_load

        def submit_load(attachment: Any, plan: Any, bands: Any = None, **how: Any) -> Any:
            loading = real(attachment, plan, bands, **how)
            if happens("fail"):
                self._rank_pools.worker._load_lost(copy_error("blocks", found="a test", wanted="none"), loading)
            return loading

        self._rank_pools.worker.submit_load = submit_load  # type: ignore[method-assign]  # for this process alone
        return super().start_layer_wise_loading()


class LateLinker(KvdockLinker):
    """The indices of a load's pages are there long after the forward pass has begun, and so are its copies."""

    def _ready(self) -> Ready:
        def wait() -> None:
            time.sleep(0.5)  # by then a forward pass that waits for nothing has read what was there before

        return Ready(lambda: False, wait)


class HeldEarlyLinker(KvdockLinker):
    """The copies of an early load begin once there is a file "go". Before that, "begun" is written down."""

    def __init__(self, *args: Any, **more: Any) -> None:
        super().__init__(*args, **more)
        real = self._loads.start_early

        def start_early(load: Any, ready: Callable[[], Ready]) -> int:
            (Path(os.environ["KVDOCK_ODD"]) / "begun").touch()
            return real(load, lambda: Ready(lambda: False, self._wait_to_go))

        self._loads.start_early = start_early  # type: ignore[method-assign]  # for this process alone

    def _wait_to_go(self) -> None:
        while not happens("go"):
            time.sleep(0.001)  # between two looks


STEPS = 5


class LateUntilStepsLinker(KvdockLinker):
    """The indices of a load's pages are there once STEPS more steps have been launched, or as many as the file "steps"
    says. If they are not, the indices are there in the end, and "late" is written down."""

    def _ready(self) -> Ready:
        counter, end_s = self._loads.counter, time.monotonic() + PATIENCE_S
        told = (Path(os.environ["KVDOCK_ODD"]) / "steps").read_text() if happens("steps") else STEPS
        steps = counter.batches + int(told)

        def wait() -> None:
            while counter.batches < steps:
                if time.monotonic() > end_s:
                    (Path(os.environ["KVDOCK_ODD"]) / "late").touch()
                    return
                time.sleep(0.001)  # between two looks

        return Ready(lambda: False, wait)


class HeldOffersLinker(KvdockLinker):
    """Offers wait before the server is asked for room."""

    def __init__(self, *args: Any, **more: Any) -> None:
        super().__init__(*args, **more)
        self._offloads._offering.run(self._hold)

    def _hold(self) -> None:
        while not happens("go"):
            time.sleep(0.01)  # between two looks


class SlowLinker(KvdockLinker):
    """Each step that computes a prompt takes long, so that another engine has time to wait for it."""

    def planned(self) -> None:
        super().planned()
        time.sleep(0.3)  # the step itself, as on a model of that size


class DearLinker(KvdockLinker):
    """Loads take half a second, as far as it knows."""

    def _loads_took(self, batch_s: float, copies: Any) -> None:
        super()._loads_took(batch_s, [(tokens, 0.5) for tokens, _ in copies])


class ForgetfulLinker(KvdockLinker):
    """A control: what it says it has loaded is zeros, so tokens must differ."""

    def start_layer_wise_loading(self) -> int:
        loads = list(self._loads._queued.values())
        index = super().start_layer_wise_loading()
        if index >= 0:
            for loading in self._loads._batches[index].submitted.result():
                loading.wait(None)
            pool = self.pools["kv"]  # type: ignore[index]  # the name's text is as good
            for load in loads:
                for buffer in (*pool.k_buffer, *pool.v_buffer):
                    buffer[load.indices["kv"]] = 0
        return index


class DraftlessLinker(KvdockLinker):
    """A control: what a load has brought of the draft's KV is zeros, so fewer drafts are accepted."""

    def __init__(self, server_args: Any, params: Any, **more: Any) -> None:
        self._drafts = drafts_of(params)
        super().__init__(server_args, params, **more)

    def finish_layer_wise_loading(self, counter_index: int) -> bool:
        batch = self._loads._batches.get(counter_index)
        landed = super().finish_layer_wise_loading(counter_index)
        if batch is not None and happens("forget"):
            for load in batch.loads:
                for draft in self._drafts:
                    for buffer in (*draft.k_buffer, *draft.v_buffer):
                        buffer[load.indices["kv"]] = 0
        return landed


class TellingLinker(KvdockLinker):
    """Writes down what it is offered, and what it knows to come before that."""

    def offload(self, transfers: Any, session_id: str | None = None) -> bool:
        with (Path(os.environ["KVDOCK_ODD"]) / "offered").open("a") as file:
            file.write(json.dumps([self.naming.parent, list(transfers[0].keys)]) + "\n")
        return super().offload(transfers, session_id)


class OnNoGpu(KvdockLinker):
    """Asked to copy on a GPU that this process cannot use."""

    @staticmethod
    def device_of(kvcache: Any) -> str:
        return "cuda:0"
