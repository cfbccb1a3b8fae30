"""`python -m bench.model` on a tiny trace: every figure that it promises, and what follows from the rules."""

from __future__ import annotations

import json
from itertools import product
from pathlib import Path

import pytest

from bench import model

FIGURES = ("cached_share", "took_s", "ttft_mean_ms", "ttft_p50_ms", "ttft_p99_ms")
SESSIONS, TURNS = 6, 4


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    """Conversations of which each turn continues the one before by a block, one turn of each at a time."""
    path = tmp_path / "trace.jsonl"
    rows = [
        {
            "timestamp": 1000 * number, "input_length": 512 * (turn + 3) - 100, "output_length": 20,
            "hash_ids": [0, *(1000 * session + at for at in range(1, turn + 3))],
        }
        for number, (turn, session) in enumerate(product(range(TURNS), range(SESSIONS)))
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def figures(capsys: pytest.CaptureFixture[str], trace: Path, *more: str) -> dict[str, float]:
    assert model.main(["--json", "--trace", str(trace), "--sessions", str(SESSIONS), *more]) == 0
    found: dict[str, float] = json.loads(capsys.readouterr().out)
    return found


def test_it_tells_all_figures_of_all_kinds_and_modes(capsys: pytest.CaptureFixture[str], trace: Path) -> None:
    found = figures(capsys, trace, "--gpu-gib", "1", "--host-gib", "1")
    served = [f"{mode}_{kind}" for mode in model.MODES for kind in model.KINDS]
    assert set(found) == {"seed", "requests"} | {f"{one}_{name}" for one in served for name in FIGURES}
    assert (found["seed"], found["requests"]) == (1, SESSIONS * TURNS)
    for one in served:
        assert 0 < found[f"{one}_cached_share"] < 1 and found[f"{one}_took_s"] > 0
        assert 0 < found[f"{one}_ttft_p50_ms"] <= found[f"{one}_ttft_p99_ms"] <= 1000 * found[f"{one}_took_s"]
    assert found == figures(capsys, trace, "--gpu-gib", "1", "--host-gib", "1"), "it is the same each time"


def test_room_for_everything_finds_more_than_a_little(capsys: pytest.CaptureFixture[str], trace: Path) -> None:
    """With little on the GPU, and one request at a time, so that what came before is there."""
    modest = ("--modes", "one", "--gpu-gib", "0.5", "--concurrency", "1")
    little, much = (figures(capsys, trace, *modest, "--host-gib", gib) for gib in ("0.25", "8"))
    for kind in model.KINDS:
        assert little[f"one_{kind}_cached_share"] < much[f"one_{kind}_cached_share"]
        assert little[f"one_{kind}_took_s"] > much[f"one_{kind}_took_s"]
