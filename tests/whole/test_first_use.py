"""Whatever kvdock lacks on a machine, the engine serves, and one sentence in its log says what to do."""

from __future__ import annotations

from pathlib import Path

import pytest
from api_helpers import ServerProcess
from engines import MARK, Engine
from stories import on_no_gpu
from whole_engines import PROMPTS

from kvdock.client.client import Client

pytestmark = [MARK, pytest.mark.timeout(400)]


def test_on_a_gpu_that_cannot_be_used_it_serves_without_kvdock(
    models: dict[str, Path], server: ServerProcess, tmp_path: Path
) -> None:
    with Engine(models["llama"], server.unix, **on_no_gpu(tmp_path)) as engine:
        runs, _ = engine.generate(PROMPTS)
        engine.flush()
        assert engine.generate(PROMPTS) == (runs, [0, 0, 0])
        said = [line for line in engine.log_text().splitlines() if "kvdock stands aside" in line]
        assert len(said) == 1 and "NVIDIA driver" in said[0], engine.log_text()[-4000:]
        with Client(server.unix) as client:
            assert client.status().counters["lookups"] == 0
