"""Runs the native core's tests with a sanitizer compiled into the extension.

    make sanitize                       address and undefined behaviour, then threads
    python tests/support/sanitize.py thread     one of them
    python tests/support/adoption_fuzz.py       damaged tables, as long as you like

A finding ends the run with the sanitizer's own report. Leaks are not looked for: an interpreter never frees all.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Final, NamedTuple

from kill_build import build
from paths import ROOT


class Sanitizer(NamedTuple):
    flags: str
    runtime: str
    options: dict[str, str]
    tests: tuple[str, ...]


KINDS: Final = {
    "address": Sanitizer(
        "-fsanitize=address,undefined -fno-sanitize-recover=undefined -fno-omit-frame-pointer -g", "libasan.so",
        {"ASAN_OPTIONS": "detect_leaks=0:abort_on_error=0", "UBSAN_OPTIONS": "print_stacktrace=1"},
        ("table", "curve", "copy/test_copy.py", "copy/test_checksum.py", "copy/test_packed.py",
         "segments/test_segments.py", "segments/test_liveness.py", "pack", "damage"),
    ),
    "thread": Sanitizer(
        "-fsanitize=thread -g", "libtsan.so", {"TSAN_OPTIONS": "halt_on_error=1:report_signal_unsafe=0"},
        ("table/test_census.py", "copy/test_copy.py", "copy/test_checksum.py", "copy/test_packed.py",
         "segments/test_segments.py", "segments/test_liveness.py"),
    ),
}


def runtime_of(library: str) -> str:
    """Where the compiler keeps it. It must be in a process before all else: the interpreter knows nothing of it."""
    compiler = os.environ.get("CXX", "c++")
    return subprocess.run(
        [compiler, f"-print-file-name={library}"], capture_output=True, text=True, check=True
    ).stdout.strip()


def environment(kind: Sanitizer, core: Path) -> dict[str, str]:
    """For a process that loads `core` in place of the usual extension, with `import sanitized_core`."""
    # The C++ library too: what it throws is looked at from the start, or not at all.
    preload = f"{runtime_of(kind.runtime)} {runtime_of('libstdc++.so.6')}"
    return {**os.environ, **kind.options, "LD_PRELOAD": preload, "KVDOCK_TEST_CORE": str(core)}


def run(name: str) -> int:
    kind = KINDS[name]
    environ = environment(kind, build(f"sanitize-{name}", kind.flags))
    tests = [str(ROOT / "tests" / test) for test in kind.tests if test != "damage"]
    # Not captured: a report must be seen, and what it is about ends the process.
    pytest = [sys.executable, "-m", "pytest", "-qxs", "-p", "sanitized_core", "-p", "no:cacheprovider", *tests]
    status = subprocess.run(pytest, cwd=ROOT, env=environ).returncode
    if status == 0 and "damage" in kind.tests:
        program = "import sanitized_core, damage_helpers as d; d.main(1, 200); d.main_of_use(1, 50)"
        status = subprocess.run([sys.executable, "-c", program], cwd=ROOT / "tests/support", env=environ).returncode
    return status


if __name__ == "__main__":
    for chosen in sys.argv[1:] or KINDS:
        if status := run(chosen):
            sys.exit(status)
