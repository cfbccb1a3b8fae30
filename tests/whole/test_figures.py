"""What an engine has loaded and stored is among the metrics that it exports."""

from __future__ import annotations

from pathlib import Path

import pytest
from api_helpers import ServerProcess
from engines import MARK, Engine
from stories import COLD, EXPORTED, METRICS, WARM, with_figures
from whole_engines import HITS, PROMPTS, comes_back

pytestmark = [MARK, pytest.mark.timeout(400)]


def test_figures_are_among_the_engines_metrics(models: dict[str, Path], server: ServerProcess, tmp_path: Path) -> None:
    with Engine(models["llama"], server.unix, **with_figures(tmp_path)) as engine:
        engine.generate(PROMPTS)
        engine.drain()
        cold = engine.figures()
        assert all(any(name.startswith(f"kvdock_{figure}") for name in cold) for figure in METRICS)
        assert cold.items() >= {"kvdock_attached": 1, "kvdock_load_tokens_total": 0, **COLD}.items()
        assert EXPORTED in engine.do("metrics")["text"]
        assert comes_back(engine)[1] == HITS
        engine.drain()
        assert engine.figures().items() >= {"kvdock_load_tokens_total": sum(HITS), **WARM}.items()
