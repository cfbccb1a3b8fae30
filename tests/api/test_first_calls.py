"""What a first call makes is made before it comes: else the turn in which it is answered takes ms for that."""

from __future__ import annotations

import json
import subprocess
import sys

from paths import ROOT

CALLED = ROOT / "tests" / "support" / "called_first.py"


def test_no_first_call_imports_compiles_or_reads_what_python_remembers() -> None:
    done = subprocess.run(
        [sys.executable, str(CALLED)], cwd=ROOT, env={"PYTHONPATH": str(ROOT)}, capture_output=True, text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == []
