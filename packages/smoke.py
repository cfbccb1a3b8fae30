"""What a new installation must be able to do, on the CPU: `python packages/smoke.py PROGRAM…`.

PROGRAM is the Python to test, with what must stand before it (an emulator): the server and `kvdock doctor` run under
it, too. One engine's connector stores blocks through a server, and another one's loads them, byte for byte the same.
The last line is "N passed, 0 failed".
"""

from __future__ import annotations

import ctypes
import importlib.util
import json
import os
import platform
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import kvdock
from kvdock import _core
from kvdock.client.client import Client
from kvdock.connectors import conformance
from kvdock.connectors.conformance import Bench
from kvdock.connectors.engine_connector import ConnectorSettings, EngineConnector
from kvdock.connectors.session import Identity
from kvdock.datapath.layout import paged_layout
from kvdock.protocol.errors import ApiError, ServerUnavailable
from kvdock.protocol.schemas import Group, Manifest

PATIENCE_S = 120.0
LAYERS, HEADS, HEAD_SIZE, BLOCK_TOKENS, CHUNK_TOKENS, BLOCKS = 2, 2, 32, 16, 64, 64
KERNELS = ["sm_80", "sm_90", "sm_100", "compute_80"]


class HostTensor:
    """KV memory of a layer, with what kvdock asks of a tensor: its address, shape and strides."""

    def __init__(self, *shape: int) -> None:
        self.shape: Sequence[int] = shape
        self.bytes = 2
        for length in shape:
            self.bytes *= length
        self._memory = ctypes.create_string_buffer(self.bytes + 64)
        self._at = -ctypes.addressof(self._memory) % 64

    def data_ptr(self) -> int:
        return ctypes.addressof(self._memory) + self._at

    def stride(self) -> Sequence[int]:
        strides = [1]
        for length in reversed(self.shape[1:]):
            strides.insert(0, strides[0] * length)
        return strides

    def element_size(self) -> int:
        return 2

    def block(self, kind: int, block: int) -> memoryview:
        """The bytes of a block's K (0) or V (1)."""
        size = self.bytes // (2 * BLOCKS)
        at = self._at + (kind * BLOCKS + block) * size
        return memoryview(self._memory).cast("B")[at : at + size]


class Engine:
    """A Subject of the conformance checks that needs no torch."""

    def __init__(self, name: str, address: str) -> None:
        self.label = f"{name}-{os.getpid()}"
        self.chunk_tokens, self.block_tokens, self.num_blocks = CHUNK_TOKENS, BLOCK_TOKENS, BLOCKS
        self.windows: Sequence[int | None] = [None]
        self.layers = [HostTensor(2, BLOCKS, BLOCK_TOKENS, HEADS, HEAD_SIZE) for _ in range(LAYERS)]
        layout = paged_layout("NL_X_TWO_NB_BS_NH_HS", self.layers, block_tokens=BLOCK_TOKENS)
        manifest = Manifest(
            model="smoke", revision="1", kv_dtype="float16", layers=LAYERS, kv_heads=HEADS, head_size=HEAD_SIZE,
            token_order=layout.token_order, chunk_tokens=CHUNK_TOKENS, block_tokens=BLOCK_TOKENS, tensor_parallel=1,
            writers=1, groups=(Group(part_bytes=layout.part_bytes(CHUNK_TOKENS // BLOCK_TOKENS)),), cache_salt="",
        )
        settings = ConnectorSettings(address, timeout_s=PATIENCE_S)
        identity = Identity(self.label, self.label, label=self.label)
        self.connector = EngineConnector(settings, manifest, identity, [layout])

    def _planes(self, block: int) -> list[memoryview]:
        return [layer.block(kind, block) for layer in self.layers for kind in (0, 1)]

    def fill(self, block: int, seed: int) -> None:
        source = random.Random(seed)
        for plane in self._planes(block):
            plane[:] = source.randbytes(len(plane))

    def contents(self, block: int) -> bytes:
        return b"".join(self._planes(block))

    def close(self) -> None:
        self.connector.close()


def bare() -> None:
    """There is nothing here that a wheel may not count on."""
    assert importlib.util.find_spec("torch") is None and importlib.util.find_spec("numpy") is None
    assert _core.cuda_kernels() == KERNELS, f"kernels: found {_core.cuda_kernels()}, wanted {KERNELS}"
    if platform.machine() == "x86_64" and " avx2 " in Path("/proc/cpuinfo").read_text():
        assert _core.cpu_paths()[0] == "avx2", f"copies: found {_core.cpu_paths()}, wanted AVX2's"


def served(program: list[str], folder: str) -> tuple[subprocess.Popen[bytes], str]:
    """A server, and its address once it is ready."""
    socket = f"{folder}/kvdock.sock"
    server = subprocess.Popen([
        *program, "-m", "kvdock", "serve", "--socket-path", socket, "--port", "0", "--pool-bytes", "64MiB",
        "--segment-bytes", "16MiB",
    ])
    client = Client(f"unix:{socket}")
    deadline = time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline and server.poll() is None:
        with suppress(ServerUnavailable, ApiError):
            if client.status().status == "ok":
                return server, client.address
        time.sleep(0.2)  # until the server is asked again
    server.kill()
    raise SystemExit(f"the server is not ready: status {server.wait()}")


def main(program: list[str]) -> None:
    conformance.ANSWER_S = conformance.LONGEST_CALL_S = PATIENCE_S  # an emulator may take its time
    bare()
    passed = 1
    with tempfile.TemporaryDirectory(prefix="kvdock-smoke-") as folder:
        server, address = served(program, folder)
        try:
            for number, check in enumerate(conformance.CHECKS):
                check(Bench(lambda name: Engine(name, address), address, seed=number))
                passed += 1
            doctor = [*program, "-m", "kvdock", "doctor", "--server", address, "--json"]
            found = json.loads(subprocess.run(doctor, stdout=subprocess.PIPE, check=True).stdout)
            assert found["ok"] and kvdock.__version__ in found["checks"][0]["found"], found
            passed += 1
        finally:
            server.terminate()
            status = server.wait(PATIENCE_S)
    assert status == 0, f"the server ended with {status}"
    print(f"{passed} passed, 0 failed")


if __name__ == "__main__":
    main(sys.argv[1:])
