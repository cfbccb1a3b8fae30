"""A vLLM's Python files without its compiled code, which no Scheduler runs: 50 MB of more than 600.

    python fetch_vllm.py VERSION FOLDER

Pip downloads the wheel into a temporary folder, which is removed at the end.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

KEPT = (".py", ".json", "/METADATA", "/entry_points.txt")


def fetch(version: str, folder: Path) -> None:
    with tempfile.TemporaryDirectory(prefix="kvdock-vllm-") as temporary:
        pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "download", "--quiet", "--no-deps"]
        subprocess.run([*pip, "--only-binary", ":all:", "--dest", temporary, f"vllm=={version}"], check=True)
        wheel, = Path(temporary).iterdir()
        with zipfile.ZipFile(wheel) as packed:
            packed.extractall(folder, [name for name in packed.namelist() if name.endswith(KEPT)])


if __name__ == "__main__":
    fetch(sys.argv[1], Path(sys.argv[2]))
