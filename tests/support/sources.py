"""The text of every file that is, or would be, committed. A picture has none."""

from __future__ import annotations

import ast
import subprocess
from functools import cache, lru_cache
from pathlib import PurePosixPath

from paths import ROOT

PICTURES = frozenset({".png"})


@cache
def sources() -> dict[PurePosixPath, str]:
    # A checkout may belong to another user than the one who tests it, as in a container.
    git = ["git", "-c", "safe.directory=*", "ls-files", "-z", "-co", "--exclude-standard"]
    listed = subprocess.run(git, cwd=ROOT, capture_output=True, text=True, check=True).stdout.split("\0")
    paths = [PurePosixPath(name) for name in listed if name and (ROOT / name).is_file()]
    return {path: "" if path.suffix in PICTURES else (ROOT / path).read_text() for path in paths}


@lru_cache(maxsize=1)
def nodes(text: str) -> tuple[ast.AST, ...]:
    """The syntax tree of a Python file, its module first. To parse takes longest: look at one file after the other."""
    return tuple(ast.walk(ast.parse(text)))
