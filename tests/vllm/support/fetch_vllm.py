"""A vLLM's Python files without its compiled code, which no Scheduler runs: 50 MB of more than 600.

    python fetch_vllm.py VERSION FOLDER
    python fetch_vllm.py newest PREFIX      the newest release that there is, into PREFIX and its version; prints that

Pip downloads the wheel into a temporary folder, which is removed at the end.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

PINS = Path(__file__).parents[3] / "pins/vllm-versions.txt"
KEPT = (".py", ".json", "/METADATA", "/entry_points.txt")


def pinned(version: str, folder: Path) -> list[str]:
    """Options for pip: this version, with the hashes that its files may have. They lie in a file in `folder`."""
    found = re.search(rf"^vllm=={re.escape(version)} .*(?:\n    --hash=.*)+", PINS.read_text(), re.MULTILINE)
    if found is None:
        raise SystemExit(f"{PINS} has no hashes of vllm {version}: add it to BETWEEN and run `make pins`")
    wanted = folder / "wanted.txt"
    wanted.write_text(found[0] + "\n")
    return ["--require-hashes", "--requirement", str(wanted)]


def fetch(version: str, folder: str) -> None:
    with tempfile.TemporaryDirectory(prefix="kvdock-vllm-") as temporary:
        pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "download", "--quiet", "--no-deps"]
        wanted = ["vllm"] if version == "newest" else pinned(version, Path(temporary))
        subprocess.run([*pip, "--only-binary", ":all:", "--dest", f"{temporary}/wheel", *wanted], check=True)
        wheel, = Path(temporary, "wheel").iterdir()
        if version == "newest":
            found = wheel.name.split("-")[1]
            folder += found
            print(found)
        with zipfile.ZipFile(wheel) as packed:
            packed.extractall(folder, [name for name in packed.namelist() if name.endswith(KEPT)])


if __name__ == "__main__":
    fetch(sys.argv[1], sys.argv[2])
