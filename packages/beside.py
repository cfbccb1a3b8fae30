"""What `pip install kvdock` adds to an environment that has an engine: `python packages/beside.py UV`.

For each engine it resolves kvdock's dependencies with every version that the engine's list in pins/ has, and prints
what is new. uv finds no solution, and the status is 1, if a version there would have to change, or if more is new than
packages/beside.txt says. It asks the package index.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).parent.parent
EXPECTED: Final = ROOT / "packages" / "beside.txt"
ENGINES: Final = ("vllm", "sglang")


def dependencies(*projects: str) -> list[str]:
    """What the distributions ask for, without kvdock-engine, which kvdock has at its own version."""
    return [
        line for name in projects for line in tomllib.loads((ROOT / name).read_text())["project"]["dependencies"]
        if not line.startswith("kvdock-engine")
    ]


def pinned(engine: str) -> list[str]:
    """Every version that the environment of an engine's tests has."""
    return re.findall(r"^([a-z0-9.-]+==[^\s;]+)", (ROOT / f"pins/{engine}.txt").read_text(), re.MULTILINE)


def added(uv: str, engine: str, wanted: list[str]) -> list[str]:
    """The names of the packages that are new beside the engine's."""
    here = pinned(engine)
    with tempfile.TemporaryDirectory() as folder:
        constraints = Path(folder, "engine.txt")
        constraints.write_text("\n".join(here) + "\n")
        command = [uv, "pip", "compile", "--quiet", "--no-annotate", "--no-header", "--python-version", "3.11",
                   "--constraints", str(constraints), "-"]
        done = subprocess.run(command, input="\n".join(wanted), capture_output=True, text=True, cwd=ROOT)
    if done.returncode:
        raise SystemExit(f"beside {engine}, versions that it has would change:\n{done.stderr}")
    found = set(re.findall(r"^([a-z0-9.-]+)==", done.stdout, re.MULTILINE))
    return sorted(found - {pin.partition("==")[0] for pin in here})


def main(uv: str) -> int:
    lines = []
    for engine in ENGINES:
        for name, projects in (("kvdock-engine", ("pyproject.toml",)),
                               ("kvdock", ("packages/server/pyproject.toml", "pyproject.toml"))):
            new = ", ".join(added(uv, engine, dependencies(*projects))) or "nothing"
            lines.append(f"{name} beside {engine} changes nothing and adds: {new}\n")
    print(*lines, sep="", end="")
    if (text := "".join(lines)) != EXPECTED.read_text():
        print(f"{EXPECTED.name} says otherwise:\n{EXPECTED.read_text()}", file=sys.stderr)
    return int(text != EXPECTED.read_text())


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
