"""What keeps an engine's captures of CUDA graphs whole holds by construction: native code reaches the driver through
one class, which puts its thread in the relaxed capture mode; one module makes the threads of engines' processes."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import PurePosixPath

import pytest
from sources import sources

DRIVER = {PurePosixPath("csrc/cuda/driver.cpp"), PurePosixPath("csrc/cuda/driver.h")}
THREADS = PurePosixPath("kvdock/datapath/threads.py")
IN_ENGINES = tuple(f"kvdock/{room}/" for room in ("client", "connectors", "datapath", "engine", "protocol", "shm"))
OTHER_WAYS = re.compile(r"\bdl(?:m?open|sym)\b|libcuda|cudart|cuda_runtime|<cuda\.h>|\bcuda\.bindings\b")
NAMES_TABLE = re.compile(r"(?<!&)\bDriver\b")
NEW_THREAD = re.compile(r"\bThread\s*\(|\bThreadPoolExecutor\b|\bimport\b.*\bThread\b|\bstart_new_thread\b")
Files = Mapping[PurePosixPath, str]


def found(pattern: re.Pattern[str], files: Files) -> list[str]:
    return [
        f"{path}:{number}: {line.strip()}" for path, text in files.items()
        for number, line in enumerate(text.splitlines(), 1) if pattern.search(line)
    ]


def ways_around_calls(files: Files) -> list[str]:
    """Native code that could call the driver without a Calls."""
    native = {path: text for path, text in files.items() if path.parts[0] == "csrc" and path not in DRIVER}
    python = {path: text for path, text in files.items() if str(path).startswith(IN_ENGINES) and path.suffix == ".py"}
    return found(OTHER_WAYS, native) + found(NAMES_TABLE, native) + found(OTHER_WAYS, python)


def threads_elsewhere(files: Files) -> list[str]:
    return found(NEW_THREAD, {
        path: text for path, text in files.items()
        if str(path).startswith(IN_ENGINES) and path.suffix == ".py" and path != THREADS
    })


def given_out(header: str) -> list[str]:
    """What a header gives out of the table of entry points; comments are left out."""
    code = re.sub(r"//.*", "", header)
    return [line.strip() for line in code.splitlines() if NAMES_TABLE.search(line)]


def test_the_driver_is_called_through_calls_alone() -> None:
    files = sources()
    assert "const ContextGuard cu(device_);" in files[PurePosixPath("csrc/cuda/memory.cpp")]
    assert ways_around_calls(files) == []
    assert given_out(files[PurePosixPath("csrc/cuda/driver.h")]) == [
        "struct Driver {", "const Driver* operator->() const { return &table_; }", "const Driver& table_;",
    ]


def test_threads_of_engines_processes_are_made_in_one_module() -> None:
    files = sources()
    assert found(NEW_THREAD, {THREADS: files[THREADS]})
    assert threads_elsewhere(files) == []


@pytest.mark.parametrize(("path", "line"), [
    ("csrc/cuda/copier.cpp", 'dlsym(dlopen("x", RTLD_NOW), "cuMemAlloc_v2");'),
    ("csrc/cuda/copier.cpp", "const Driver& kept = *cu.operator->();"),
    ("csrc/base/pause.cpp", "#include <cuda_runtime.h>"),
    ("kvdock/connectors/worker.py", 'ctypes.CDLL("libcuda.so.1")'),
])
def test_another_way_to_the_driver_is_found(path: str, line: str) -> None:
    assert len(ways_around_calls({PurePosixPath(path): line})) == 1


@pytest.mark.parametrize("line", [
    "threading.Thread(target=run).start()", "with ThreadPoolExecutor(1) as pool:", "from threading import Lock, Thread",
])
def test_a_thread_that_another_module_starts_is_found(line: str) -> None:
    assert len(threads_elsewhere({PurePosixPath("kvdock/connectors/worker.py"): line})) == 1
    assert threads_elsewhere({PurePosixPath("kvdock/api/keeper.py"): line}) == [], "no engine's process"
