"""Whatever the bytes of a slot are, its reader touches nothing outside it, and all code paths agree. A process of its
own: reading beyond a buffer ends it."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
from paths import ROOT


@pytest.mark.parametrize("seed", range(2))
def test_nothing_outside_of_hostile_slots_and_parts_is_touched(seed: int) -> None:
    program = [sys.executable, str(ROOT / "tests/support/packed_fuzz.py"), str(seed), "400"]
    done = subprocess.run(program, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert min(found.get(kind, 0) for kind in ("unpacked", "refused", "packed", "stored raw")) >= 20, found
