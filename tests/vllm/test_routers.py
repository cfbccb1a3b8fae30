"""Routers' own code reads the KV events of the server: vLLM's classes, and Dynamo's indexer."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from typing import Any
from urllib.error import URLError
from urllib.request import Request, urlopen

import pytest
from api_helpers import ServerProcess, eventually
from connector_helpers import BLOCK, CHUNK, Rig
from engine_helpers import prompt
from engines import ENGINE_PYTHON
from kv_readers import endpoints
from ports import held_port
from schedulers import Schedulers, every_version

from kvdock.client.client import Client
from kvdock.protocol.admin_schemas import ClearCache

pytestmark = pytest.mark.vllm


@every_version
@pytest.mark.parametrize(
    ("windows", "sizes"), [([None], [16]), ([48, None], [32, 16])], ids=["1group", "2sizes"],
)
def test_vllm_reads_of_the_server_what_its_own_engine_said(
    version: str, windows: list[int | None], sizes: list[int], schedulers: Schedulers
) -> None:
    settings = endpoints()
    with ServerProcess(pool_bytes=64 << 20, segment_bytes=64 << 20, heartbeat_s=0.1, **settings) as server:
        found = schedulers.run(
            version, "told_by_the_server", server.unix, settings["kv_events_endpoint"],
            settings["kv_events_replay_endpoint"], windows, sizes, module="router_scenarios",
        )
    assert found == {"stored": 128, "same": 128, "again": 128, "wrong": []}


class Indexer:
    """`python -m dynamo.indexer`, a process."""

    def __init__(self) -> None:
        self._port = held_port()
        self._process = subprocess.Popen(
            [ENGINE_PYTHON, "-m", "dynamo.indexer", "--port", str(self._port)], stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        eventually(self._answers, 30.0)

    def _answers(self) -> bool:
        assert self._process.poll() is None, "it ended"
        try:
            urlopen(f"http://127.0.0.1:{self._port}/workers", timeout=5.0).close()
        except URLError:
            return False
        return True

    def post(self, path: str, **body: Any) -> Any:
        asked = Request(
            f"http://127.0.0.1:{self._port}{path}", data=json.dumps(body).encode(),
            headers={"content-type": "application/json"},
        )
        with urlopen(asked, timeout=10.0) as answer:
            return json.load(answer)

    def prefix(self, tokens: list[int]) -> int:
        """How many of these tokens the server has in host memory, as the indexer believes."""
        found = self.post("/query", token_ids=tokens, model_name="m")["instances"]
        return int(found["1"]["cpu"]) if found else 0

    def close(self) -> None:
        with self._process:
            self._process.kill()


@pytest.fixture
def indexer() -> Iterator[Indexer]:
    made = Indexer()
    yield made
    made.close()


@pytest.mark.parametrize("form", ["map", "array"])
def test_dynamo_s_indexer_finds_what_lookups_find(form: str, indexer: Indexer) -> None:
    settings = endpoints()
    early, late = prompt(1, 4 * CHUNK), prompt(2, 6 * CHUNK)
    with ServerProcess(**settings, kv_events_form=form) as server, Client(server.unix) as client:
        rig = Rig(server.unix)
        rig.store("early", early, range(len(early) // BLOCK))  # before it listens
        indexer.post(
            "/register", instance_id=1, endpoint=settings["kv_events_endpoint"], model_name="m", block_size=CHUNK,
            replay_endpoint=settings["kv_events_replay_endpoint"],
        )
        rig.store("late", late, range(len(late) // BLOCK))

        def finds(of_early: int, of_late: int) -> bool:
            return (indexer.prefix(early), indexer.prefix(late)) == (of_early, of_late)

        eventually(lambda: finds(len(early), len(late)), 30.0)
        assert indexer.prefix([*late[: 3 * CHUNK], *early]) == 3 * CHUNK, "the prefix alone"
        client.clear(ClearCache())
        eventually(lambda: finds(0, 0), 30.0)
        rig.close()
