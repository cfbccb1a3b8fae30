"""On the path of a Python that is to run SGLang on a CPU: prepares it before SGLang is imported, in that process and in
all that SGLang starts. See tests/sglang/support/cpu_only.py."""

from __future__ import annotations

import importlib.abc
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType


class BeforeSGLang(importlib.abc.MetaPathFinder):
    """Finds nothing."""

    def find_spec(self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None) -> None:
        if fullname == "sglang":
            sys.meta_path.remove(self)
            sys.path.append(str(Path(__file__).parents[1]))
            from cpu_only import fork_processes, prepare

            prepare()
            fork_processes()


sys.meta_path.insert(0, BeforeSGLang())
