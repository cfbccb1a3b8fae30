"""The text of every file that is, or would be, committed; in a source archive, of every file that it had. A picture has
none."""

from __future__ import annotations

import ast
import os
import re
import subprocess
from functools import cache, lru_cache
from pathlib import PurePosixPath

from paths import ROOT

PICTURES = frozenset({".png"})


MADE = re.compile(r"\.venv.*|\..*_cache|\.hypothesis|__pycache__|build|dist|out|PKG-INFO|_core\.pyi|.*\.(so|pyc)")
"""Names of what is made in a checkout, as .gitignore has them, and by the source archive."""


def listed() -> list[str]:
    if not (ROOT / ".git").exists():
        found = []
        for folder, folders, files in os.walk(ROOT):
            folders[:] = [name for name in folders if not MADE.fullmatch(name)]
            found += [os.path.relpath(f"{folder}/{name}", ROOT) for name in files if not MADE.fullmatch(name)]
        return sorted(found)
    # A checkout may belong to another user than the one who tests it, as in a container.
    git = ["git", "-c", "safe.directory=*", "ls-files", "-z", "-co", "--exclude-standard"]
    return subprocess.run(git, cwd=ROOT, capture_output=True, text=True, check=True).stdout.split("\0")


@cache
def sources() -> dict[PurePosixPath, str]:
    paths = [PurePosixPath(name) for name in listed() if name and (ROOT / name).is_file()]
    return {path: "" if path.suffix in PICTURES else (ROOT / path).read_text() for path in paths}


@lru_cache(maxsize=1)
def nodes(text: str) -> tuple[ast.AST, ...]:
    """The syntax tree of a Python file, its module first. To parse takes longest: look at one file after the other."""
    return tuple(ast.walk(ast.parse(text)))
