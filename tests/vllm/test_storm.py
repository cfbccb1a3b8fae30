"""Two `vllm serve` share a server that is killed and halted under load: no request fails or is answered otherwise.

The second instance has kvdock under vLLM's MultiConnector, with statistics on.
"""

from __future__ import annotations

import json
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path

import httpx
import pytest
from engines import ENGINE_PYTHON, HERE, ROOT
from ports import held_port

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600)]

KVDOCK = Path(sys.executable).parent / "kvdock"
STORM_S = float(os.environ.get("STORM_S", "24"))
AT_ONCE, BASES, PROMPTS, NEW = 30, 5, 60, 8
KILL_AFTER_S, STOP_S = 4.0, 4.0
RESET_EVERY_S = 2.0
"""vLLM's own caches are emptied so often, and they are small, so that there is something to load."""
PLACES = (ROOT, ENGINE_PYTHON.parent.parent, KVDOCK.parent.parent, Path(tempfile.gettempdir()))
FOLDERS = {one for path in PLACES for one in (path, path.resolve())}
"""Those of the checkout, of the environments and of the test. Lines of vLLM name them, whatever they are called."""
LOG_LINES = 50
"""One screen."""
OURS = {
    "kv_connector": "KvdockConnector", "kv_role": "kv_both",
    # A tiny model computes as fast as it loads, and two engines and a server share a small machine's cores.
    "kv_connector_extra_config": {"load_if_cheaper": False, "lookup_wait_s": 0.25},
}
BESIDE = {
    "kv_connector": "MultiConnector", "kv_role": "kv_both", "kv_load_failure_policy": "recompute",
    "kv_connector_extra_config": {"connectors": [OURS]},
}
SERVE = [
    "--dtype", "float32", "--max-model-len", "1024", "--enforce-eager", "--block-size", "32",
    "--num-gpu-blocks-override", "100", "--max-num-seqs", "8", "--served-model-name", "model", "--host", "127.0.0.1",
]


class Server:
    """`kvdock serve` at one socket, each in the place of the one before."""

    def __init__(self, folder: Path) -> None:
        self.address, self._log = f"unix:{folder}/kvdock.sock", (folder / "kvdock.log").open("w")
        self._command = [
            str(KVDOCK), "serve", "--socket-path", f"{folder}/kvdock.sock", "--port", "0", "--pool-bytes", "64MiB",
        ]
        self.start()

    def start(self) -> None:
        self.process = subprocess.Popen(self._command, stdout=self._log, stderr=subprocess.STDOUT)

    def storm(self, end_s: float) -> dict[str, int]:
        """Killed and started again, then halted for a while, in turns."""
        seen = {"killed": 0, "halted": 0}
        while time.monotonic() < end_s:
            time.sleep(KILL_AFTER_S)  # it serves
            self.process.kill()
            self.process.wait()
            self.start()
            seen["killed"] += 1
            time.sleep(KILL_AFTER_S)  # it serves
            os.kill(self.process.pid, signal.SIGSTOP)
            time.sleep(STOP_S)  # longer than any call waits for it
            os.kill(self.process.pid, signal.SIGCONT)
            seen["halted"] += 1
        return seen

    def close(self) -> None:
        self.process.terminate()
        self.process.wait(30)
        self._log.close()


@contextmanager
def instance(model: Path, port: int, transfer: dict[str, object], address: str, log: Path) -> Iterator[str]:
    environ = {
        **os.environ, "KVDOCK_ADDRESS": address, "VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1", "TORCHDYNAMO_DISABLE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "OMP_NUM_THREADS": "1", "VLLM_SERVER_DEV_MODE": "1",
    }
    command = [
        ENGINE_PYTHON, HERE / "serve_process.py", model, *SERVE, "--port", str(port),
        "--kv-transfer-config", json.dumps(transfer),
    ]
    with log.open("w") as out, subprocess.Popen(
        command, stdout=out, stderr=subprocess.STDOUT, env=environ, start_new_session=True
    ) as process:
        try:
            yield f"http://127.0.0.1:{port}"
        finally:
            process.terminate()
            try:
                process.wait(20)
            finally:
                if process.poll() is None:
                    os.killpg(process.pid, signal.SIGKILL)


def ready(url: str, log: Path) -> None:
    end_s = time.monotonic() + 240
    while time.monotonic() < end_s:
        try:
            if httpx.get(f"{url}/health").status_code == 200:
                return
        except httpx.TransportError:
            time.sleep(0.5)  # it is not there yet
    raise AssertionError(log.read_text()[-3000:])


def prompts() -> list[list[int]]:
    """Some share their first part."""
    source = random.Random(4)
    bases = [[source.randrange(5, 250) for _ in range(300)] for _ in range(BASES)]
    return [bases[at % BASES] + [source.randrange(5, 250) for _ in range(at * 3 + 1)] for at in range(PROMPTS)]


def answer(client: httpx.Client, url: str, prompt: list[int], **own: object) -> list[int]:
    asked = {
        "model": "model", "prompt": prompt, "max_tokens": NEW, "temperature": 0, "return_token_ids": True,
        **({"kv_transfer_params": {"kvdock": own}} if own else {}),
    }
    answered = client.post(f"{url}/v1/completions", json=asked, timeout=120)
    assert answered.status_code == 200, answered.text
    return list(answered.json()["choices"][0]["token_ids"])


@pytest.mark.sweep
def test_a_server_that_is_killed_and_halted_fails_no_request_and_changes_no_answer(
    models: dict[str, Path], tmp_path: Path
) -> None:
    ports, logs = [held_port(), held_port()], [tmp_path / "first.log", tmp_path / "second.log"]
    with ExitStack() as stack:
        server = Server(tmp_path)
        stack.callback(server.close)
        urls = [
            stack.enter_context(instance(models["llama"], port, transfer, server.address, log))
            for port, transfer, log in zip(ports, (OURS, BESIDE), logs, strict=True)
        ]
        for url, log in zip(urls, logs, strict=True):
            ready(url, log)
        # Connections are not kept: one that the other side closes at that moment looks like a request that failed.
        client = stack.enter_context(httpx.Client(limits=httpx.Limits(max_keepalive_connections=0)))
        asked = prompts()
        with ThreadPoolExecutor(AT_ONCE) as pool:
            right = list(pool.map(lambda prompt: answer(client, urls[0], prompt, load=False, store=False), asked))
            for url in (*urls, urls[0]):  # what one stores the other loads, and it again
                assert list(pool.map(partial(answer, client, url), asked)) == right
                client.post(f"{url}/reset_prefix_cache")
            end_s = time.monotonic() + STORM_S
            storm = pool.submit(server.storm, end_s)
            turns, found = iter(range(1 << 30)), list[tuple[int, list[int]]]()
            lock = threading.Lock()

            def asks() -> None:
                while time.monotonic() < end_s:
                    with lock:
                        turn = next(turns)
                    at = turn * 7 % PROMPTS
                    answered = answer(client, urls[turn % 2], asked[at])
                    with lock:
                        found.append((at, answered))

            def resets() -> None:
                while time.monotonic() < end_s:
                    time.sleep(RESET_EVERY_S)
                    for url in urls:
                        client.post(f"{url}/reset_prefix_cache?reset_running_requests=true")

            working = [pool.submit(resets), *(pool.submit(asks) for _ in range(AT_ONCE - 2))]
            for one in working:
                one.result()
            seen = storm.result()
        loaded = [loaded_tokens(client, url) for url in urls]
    assert seen["killed"] >= 2 and seen["halted"] >= 2
    assert len(found) > AT_ONCE and min(loaded) > 1000, (len(found), loaded)
    assert [at for at, answered in found if answered != right[at]] == []
    for log in logs:
        lines = lines_of_kvdock(log.read_text())
        assert len(lines) <= LOG_LINES, "\n".join(lines)
        assert not [line for line in lines if "ERROR" in line or "Traceback" in line]


def lines_of_kvdock(log: str) -> list[str]:
    """Those that name kvdock otherwise than in the path of one of FOLDERS."""
    for folder in sorted(map(str, FOLDERS), key=len, reverse=True):
        log = re.sub(re.escape(folder) + r"(?![\w.-])", "", log)
    return [line for line in log.splitlines() if "kvdock" in line.lower()]


def loaded_tokens(client: httpx.Client, url: str) -> float:
    """All that this instance has loaded from the server."""
    samples = [line for line in client.get(f"{url}/metrics").text.splitlines() if line.startswith(HITS)]
    return sum(float(line.rsplit(" ", 1)[1]) for line in samples)


HITS = "vllm:external_prefix_cache_hits_total"
