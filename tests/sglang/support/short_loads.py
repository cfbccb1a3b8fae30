"""What a short load costs SGLang's scheduler thread and the interpreter that it shares with kvdock's threads.

    PYTHONPATH=on_cpu:ROOT:ROOT/tests/support python short_loads.py --model FOLDER --address unix:/… [--pages 32]

There is no GPU: the linker is kvdock's own over SGLang's pools on the CPU, beside a server of its own, and the main
thread does what SGLang's does for a request that comes into an idle engine: it looks the request up as it arrives,
looks it up again to admit it, begins the load, launches 32 layers (short steps of Python and many small calls of torch,
which release the interpreter lock as those of a GPU do), and asks for the verdict. It does not wait for layers, because
a CPU has no streams.

Prints a JSON object: medians in ms, and per load how often each thread took the interpreter lock between the arrival
and the verdict, how long it waited for it (gil_probe.c), and its processor time.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections import defaultdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

HERE = Path(__file__).parent
PAGE, LAYERS = 64, 32
KINDS = ("load", "local")


class Seen(ctypes.Structure):
    _fields_ = (
        ("id", ctypes.c_long), ("waits", ctypes.c_uint64), ("waited_ns", ctypes.c_uint64),
        ("longest_ns", ctypes.c_uint64), ("conditions", ctypes.c_void_p * 8), ("signals", ctypes.c_uint64 * 8),
    )


class Probe:
    """What gil_probe.c has counted so far, by thread."""

    def __init__(self) -> None:
        self._library = ctypes.CDLL(None)
        self._library.gil_probe_threads.restype = ctypes.POINTER(Seen)

    def read(self) -> dict[str, tuple[int, int, float, float]]:
        """(times that the lock was taken, times that it was waited for, ms waited, ms of processor time)."""
        names = {thread.native_id: thread for thread in threading.enumerate()}
        seen, threads = {}, self._library.gil_probe_threads()
        for at in range(self._library.gil_probe_count()):
            one = threads[at]
            thread = names.get(one.id)
            if thread is None or thread.ident is None:
                continue
            cpu_s = time.clock_gettime(time.pthread_getcpuclockid(thread.ident))
            taken = sum(one.signals) // 2  # one signal when the lock is taken, and one when it is released
            seen[thread.name] = taken, one.waits, one.waited_ns / 1e6, cpu_s * 1e3
        return seen


def preloaded(folder: str) -> dict[str, str]:
    library = Path(folder, "gil_probe.so")
    subprocess.run(["cc", "-O2", "-shared", "-fPIC", "-o", library, HERE / "gil_probe.c", "-ldl"], check=True)
    return {"LD_PRELOAD": str(library)}


class Launch:
    """What the launch of a forward pass does to the interpreter lock."""

    def __init__(self) -> None:
        import torch

        self._add, self._one, self._out = torch.add, torch.ones(16), torch.empty(16)

    def layer(self) -> None:
        for _ in range(14):
            self._add(self._one, self._one, out=self._out)
            sum([step * 3 for step in range(450)])  # arguments and checks

    def __call__(self) -> None:
        for _ in range(LAYERS):
            self.layer()


class Scheduler:
    """SGLang's scheduler thread, as far as a linker sees it."""

    def __init__(self, model: str, address: str, pages: int, extra: dict[str, Any], goes_on: bool) -> None:
        """`goes_on`: the thread does not wait for an answer, but turns its loop."""
        import torch
        from linker_checks import scheduler, transfer
        from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool
        from sglang.srt.server_args import ServerArgs

        from kvdock.connectors.sglang.linker import KvdockLinker

        self._transfer, self._launch, self._pages = transfer, Launch(), pages
        pool = MHATokenToKVPool(
            size=4 * pages * PAGE, head_num=1, head_dim=16, layer_num=LAYERS, page_size=PAGE, dtype=torch.bfloat16,
            device="cpu", enable_memory_saver=False,
        )
        args = ServerArgs(
            model_path=model, served_model_name="short", device="cpu", load_format="safetensors",
            skip_tokenizer_init=True, page_size=PAGE,
        )
        args.resolve_once()
        params = SimpleNamespace(
            page_size=PAGE, token_to_kv_pool_allocator=SimpleNamespace(get_kvcache=lambda: pool), pp_size=1, pp_rank=0,
            attn_cp_size=1, attn_tp_cache_group=None, tp_cache_group=None, sidecar_draft_device_pools=(),
            mtp_draft_device_pools=(), mtp_draft_mamba_pools=(), swa_retain_window=None, enable_metrics=False,
            req_to_token_pool=None, enable_kv_cache_events=False, is_eagle=False,
        )
        given = {"address": address, "load_if_cheaper": False, "lookup_wait_s": 0.05, **extra}
        self.linker = KvdockLinker(args, params, components=[SimpleNamespace(name="FULL")], extra_config=given)
        self.linker.guard.meet(scheduler())
        self._goes_on = goes_on
        if goes_on:
            patience = self.linker._zero.connector.lookups.waits.patience
            patience.wait = lambda question: question.answered.done()  # for this process alone

    def store(self, keys: list[str]) -> None:
        self.linker.naming.parent = ""
        assert self.linker.offload([self._transfer(keys, list(range(self._pages)))])
        while not self.linker.num_completed_offloads():
            time.sleep(0.001)  # as SGLang's loop turns
        assert self.linker.pop_completed_offload()

    def admit(self, rid: str, keys: list[str]) -> dict[str, float]:
        """Seconds since the arrival, by what has happened then."""
        linker, pages, seen = self.linker, list(range(self._pages, 2 * self._pages)), {}
        began = time.perf_counter()

        def note(name: str) -> None:
            seen[name] = time.perf_counter() - began

        linker.holding.arrives = True
        linker.lookup(rid, [self._transfer(keys)])
        linker.holding.arrives = False
        note("asked")
        self._launch.layer()  # the loop's turn
        promised, turns = linker.lookup(rid, [self._transfer(keys)]), 1
        while linker.holding.starts(rid):
            linker.num_completed_offloads()
            if self._goes_on:
                self._launch.layer()
            else:
                time.sleep(0.001)  # as SGLang's loop turns (lookups.IDLE_S)
            promised, turns = linker.lookup(rid, [self._transfer(keys)]), turns + 1
        note("answered")
        assert promised == [len(keys)], promised
        assert linker.load(rid, [self._transfer(keys, pages)])
        index = linker.start_layer_wise_loading()
        note("begun")
        linker.layer_done_counter.set_consumer(-1)
        self._launch()
        note("launched")
        assert linker.finish_layer_wise_loading(index)
        note("judged")
        linker.num_completed_offloads()
        seen["turns"] = turns * 1e-3
        return seen

    def compute(self) -> dict[str, float]:
        """The same of a request whose KV is on the device."""
        began = time.perf_counter()
        self._launch.layer()
        self._launch()
        return {"launched": time.perf_counter() - began}


def measured(scheduler: Scheduler, loads: int) -> dict[str, Any]:
    from linker_checks import keys_of

    probe, times = Probe(), defaultdict[str, list[float]](list)
    threads: dict[str, dict[str, list[tuple[float, ...]]]] = {kind: defaultdict(list) for kind in KINDS}
    for number in range(-5, loads):  # the first ones do not count
        keys = keys_of(f"prompt {number}", scheduler._pages)
        scheduler.store(keys)
        time.sleep(0.03)  # until stores are hashed and reported
        for kind in KINDS:
            before = probe.read()
            seen = scheduler.admit(str(number), keys) if kind == "load" else scheduler.compute()
            after = probe.read()
            time.sleep(0.02)  # until the load is reported
            if number < 0:
                continue
            for name, taken_s in seen.items():
                times[f"{kind}_{name}_ms"].append(taken_s * 1e3)
            for name, now in after.items():
                then = before.get(name, (0, 0, 0.0, 0.0))
                threads[kind][name].append(tuple(b - a for a, b in zip(then, now, strict=True)))
    of_threads = {
        kind: {
            name: dict(zip(
                ("taken", "waits", "waited_ms", "cpu_ms"),
                (round(statistics.fmean(column), 3) for column in zip(*rows, strict=True)), strict=True,
            ))
            for name, rows in of_kind.items() if any(row[0] for row in rows)
        }
        for kind, of_kind in threads.items()
    }
    medians = {name: round(statistics.median(values), 3) for name, values in times.items()}
    return {"loads": loads, **medians, "threads": of_threads}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--address", required=True, help="of a server that serves nobody else")
    parser.add_argument("--pages", type=int, default=32)
    parser.add_argument("--loads", type=int, default=100)
    parser.add_argument("--connector", type=json.loads, default={}, help="settings of the linker, as JSON")
    parser.add_argument("--goes-on", action="store_true", help="lookups do not wait for the server's answer")
    chosen = parser.parse_args()
    if "LD_PRELOAD" not in os.environ:
        with tempfile.TemporaryDirectory() as folder:
            sys.exit(subprocess.run([sys.executable, *sys.argv], env=os.environ | preloaded(folder)).returncode)
    scheduler = Scheduler(chosen.model, chosen.address, chosen.pages, chosen.connector, chosen.goes_on)
    print(json.dumps(measured(scheduler, chosen.loads)))
    scheduler.linker.close()


if __name__ == "__main__":
    main()
