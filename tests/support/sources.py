"""The text of every file that is, or would be, committed."""

from __future__ import annotations

import subprocess
from functools import cache
from pathlib import PurePosixPath

from paths import ROOT


@cache
def sources() -> dict[PurePosixPath, str]:
    # A checkout may belong to another user than the one who tests it, as in a container.
    git = ["git", "-c", "safe.directory=*", "ls-files", "-z", "-co", "--exclude-standard"]
    listed = subprocess.run(git, cwd=ROOT, capture_output=True, text=True, check=True).stdout.split("\0")
    return {PurePosixPath(name): (ROOT / name).read_text() for name in listed if name and (ROOT / name).is_file()}
