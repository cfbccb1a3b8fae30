"""The server's memory levels off: all that it remembers of requests that have ended has a bound.

The bounds are some 32,768 requests, stores and leases (4 times `table_grants`), and 16,384 answers of requests that
have not ended: a server of an hour or two has them full. Here they are small. Python's own count of allocated blocks is
compared, because memory of the process says little about a few kilobytes.
"""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Final

import pytest
from paths import ROOT

TURNS: Final = 1200
"""More than any of the bounds below."""
MOST_BLOCKS_A_TURN: Final = 1
"""One that remembers a request has five and more blocks for each."""
PROGRAM: Final = """
import gc, json, sys, tempfile, threading
from bench.serving import Engine, chain
from kvdock.api import server
from kvdock.api.feeds import sse
from kvdock.api.record import hits
from kvdock.api.settings import Settings
from kvdock.client.client import Client

turns, blocks = int(sys.argv[1]), []
hits.MOST_ANSWERS = 256

def drive(address):
    with Client(address.unix, timeout_s=30.0) as client:
        engine = Engine(client, "one", 4096)
        for number in range(3 * turns):
            keys = chain(2, f"{number}")
            engine.store(keys)
            engine.look_up(keys)
            if (number + 1) % turns == 0:
                engine.beat()
                gc.collect()
                blocks.append(sys.getallocatedblocks())
        engine.close()
    serving.stop()

with tempfile.TemporaryDirectory(prefix="kvdock-test-") as folder:
    settings = Settings.load({
        "socket_path": f"{folder}/s.sock", "port": 0, "pool_bytes": 16 << 20, "segment_bytes": 16 << 20,
        "table_grants": 256, "recent_requests": 16, "missed_heartbeats": 100_000, "log_level": "error",
    })
    serving = server.Server(settings, on_ready=lambda at: threading.Thread(target=drive, args=(at,)).start())
    serving.run()
print(json.dumps(blocks))
"""


@pytest.mark.security
def test_what_is_remembered_of_requests_levels_off() -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(TURNS)], cwd=ROOT, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    first, second, third = json.loads(done.stdout)
    assert third - second < MOST_BLOCKS_A_TURN * TURNS, (first, second, third)
