"""Random use of engines of several models, with a server that dies: no block is lost and no token is wrong.

Repeat with KVDOCK_SOAK_SEED=…, lengthen with KVDOCK_SOAK_STEPS=…; every failure prints the seed.
"""

from __future__ import annotations

import pytest
from soak_helpers import BLOCKS, seed_and_steps, soak


@pytest.mark.timeout(900)
@pytest.mark.sweep("model")
@pytest.mark.parametrize("model", list(reversed(BLOCKS)))
def test_random_use_loses_no_block_and_no_token(
    model: str, sweeps: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    seed, steps = seed_and_steps(1200 if sweeps else 150)
    with capsys.disabled():
        print(f"\nsoak of {model}: KVDOCK_SOAK_SEED={seed} KVDOCK_SOAK_STEPS={steps}")
    seen = soak(seed, model, steps)
    with capsys.disabled():
        print(f"soak of {model}: {dict(seen)}")
    wanted = {"ended", "loaded tokens", "preempted"} if steps >= 1000 else {"ended"}
    assert all(seen[name] for name in wanted), f"found {dict(seen)}, wanted some of each of {sorted(wanted)}"
