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
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import pytest
from engines import ENGINE_PYTHON, ROOT
from served_engine import ServedEngine

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
SERVE = (
    "--dtype", "float32", "--max-model-len", "1024", "--enforce-eager", "--block-size", "32",
    "--num-gpu-blocks-override", "100", "--max-num-seqs", "8", "--kv-transfer-config",
)


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


def prompts() -> list[list[int]]:
    """Some share their first part."""
    source = random.Random(4)
    bases = [[source.randrange(5, 250) for _ in range(300)] for _ in range(BASES)]
    return [bases[at % BASES] + [source.randrange(5, 250) for _ in range(at * 3 + 1)] for at in range(PROMPTS)]


def answer(engine: ServedEngine, prompt: list[int], **own: object) -> list[int]:
    """`own`: what it says to kvdock."""
    told = {"kv_transfer_params": {"kvdock": own}} if own else {}
    answered = engine.complete([prompt], max_tokens=NEW, temperature=0, return_token_ids=True, **told)
    return list(answered[0]["choices"][0]["token_ids"])


@pytest.mark.sweep
def test_a_server_that_is_killed_and_halted_fails_no_request_and_changes_no_answer(
    models: dict[str, Path], tmp_path: Path
) -> None:
    with ExitStack() as stack:
        server = Server(tmp_path)
        stack.callback(server.close)
        environ = {"KVDOCK_ADDRESS": server.address, "TORCHDYNAMO_DISABLE": "1", "VLLM_SERVER_DEV_MODE": "1"}
        engines = [
            stack.enter_context(
                ServedEngine(models["llama"], tmp_path, *SERVE, json.dumps(transfer), environ=environ)
            )
            for transfer in (OURS, BESIDE)
        ]
        for engine in engines:
            engine.wait_ready(240)
        asked = prompts()
        with ThreadPoolExecutor(AT_ONCE) as pool:
            right = list(pool.map(lambda prompt: answer(engines[0], prompt, load=False, store=False), asked))
            for engine in (*engines, engines[0]):  # what one stores the other loads, and it again
                assert list(pool.map(partial(answer, engine), asked)) == right
                engine.post("/reset_prefix_cache")
            end_s = time.monotonic() + STORM_S
            storm = pool.submit(server.storm, end_s)
            turns, found = iter(range(1 << 30)), list[tuple[int, list[int]]]()
            lock = threading.Lock()

            def asks() -> None:
                while time.monotonic() < end_s:
                    with lock:
                        turn = next(turns)
                    at = turn * 7 % PROMPTS
                    answered = answer(engines[turn % 2], asked[at])
                    with lock:
                        found.append((at, answered))

            def resets() -> None:
                while time.monotonic() < end_s:
                    time.sleep(RESET_EVERY_S)
                    for engine in engines:
                        engine.post("/reset_prefix_cache?reset_running_requests=true")

            working = [pool.submit(resets), *(pool.submit(asks) for _ in range(AT_ONCE - 2))]
            for one in working:
                one.result()
            seen = storm.result()
        loaded = [engine.metrics()[HITS] for engine in engines]
    assert seen["killed"] >= 2 and seen["halted"] >= 2
    assert len(found) > AT_ONCE and min(loaded) > 1000, (len(found), loaded)
    assert [at for at, answered in found if answered != right[at]] == []
    for engine in engines:
        lines = lines_of_kvdock(engine.log_text())
        assert len(lines) <= LOG_LINES, "\n".join(lines)
        assert not [line for line in lines if "ERROR" in line or "Traceback" in line]


def lines_of_kvdock(log: str) -> list[str]:
    """Those that name kvdock otherwise than in the path of one of FOLDERS."""
    for folder in sorted(map(str, FOLDERS), key=len, reverse=True):
        log = re.sub(re.escape(folder) + r"(?![\w.-])", "", log)
    return [line for line in log.splitlines() if "kvdock" in line.lower()]


HITS = "vllm:external_prefix_cache_hits_total"
"""All that an instance has loaded from the server."""
