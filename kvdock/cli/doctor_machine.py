"""The checks of `kvdock doctor` on the machine: memory and its limits, huge pages, ulimits, GPU, nvcc.

They only read. The paths are passed in, so that tests can describe other machines.
"""

from __future__ import annotations

import os
import re
import resource
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from kvdock.api.pool.capacity import Capacity
from kvdock.cli.words import size

LEAST_OPEN_FILES = 4096
PROBE_TIMEOUT_S = 15.0

Level = Literal["ok", "note", "problem"]


@dataclass(frozen=True)
class Finding:
    check: str
    level: Level
    found: str
    advice: str = ""
    """What to do; empty when there is nothing to do."""


@dataclass(frozen=True)
class Machine:
    """The paths to check; by default those of the running system."""

    shm_dir: Path = Path("/dev/shm")
    proc: Path = Path("/proc")
    sys: Path = Path("/sys")
    programs: str | None = None
    """Search path for nvidia-smi and nvcc; None: the environment's."""
    nvcc_places: tuple[Path, ...] = (Path("/usr/local/cuda/bin/nvcc"),)


def machine_findings(machine: Machine, wanted_bytes: int) -> Iterator[Finding]:
    """`wanted_bytes`: the most shared memory that a server started now would need."""
    yield from _memory(machine, wanted_bytes)
    yield _huge_pages(machine)
    yield _open_files(*resource.getrlimit(resource.RLIMIT_NOFILE))
    yield _locked_memory(resource.getrlimit(resource.RLIMIT_MEMLOCK)[0])
    yield _gpu(machine)
    yield _nvcc(machine)


# --------------------------------------------------------------------------- memory


def _memory(machine: Machine, wanted_bytes: int) -> Iterator[Finding]:
    """Shared memory, then the control groups: the server checks the same limits before it starts."""
    if not machine.shm_dir.is_dir():
        yield Finding(
            "shared memory", "problem", f"{machine.shm_dir} does not exist",
            f"mount -t tmpfs -o size=… tmpfs {machine.shm_dir}; in a container: --ipc host, or mount the host's",
        )
        return
    if not os.access(machine.shm_dir, os.W_OK):
        yield Finding(
            "shared memory", "problem", f"{machine.shm_dir} cannot be written", "mount it so that this user may write"
        )
        return
    capacity = Capacity(machine.shm_dir, machine.proc / "self/cgroup", machine.sys / "fs/cgroup")
    (_, free_bytes), *groups = capacity.limits()
    total_bytes = shutil.disk_usage(machine.shm_dir).total
    said = f"{size(free_bytes)} free of {size(total_bytes)} in {machine.shm_dir}"
    kind = _file_system(machine)
    if free_bytes < wanted_bytes:
        yield Finding(
            "shared memory", "problem", f"{said}, {size(wanted_bytes)} needed for pool_bytes and the chunk table",
            "serve with a smaller --pool-bytes, or give more: docker run --shm-size, or "
            f"mount -o remount,size=… {machine.shm_dir}",
        )
    elif (available_bytes := _available_bytes(machine)) is not None and available_bytes < wanted_bytes:
        yield Finding(
            "shared memory", "note", f"{said}, but the machine has only {size(available_bytes)} of memory available",
            f"a full pool needs {size(wanted_bytes)}: serve with a smaller --pool-bytes, or the machine will swap",
        )
    elif kind not in ("tmpfs", ""):
        yield Finding("shared memory", "note", f"{said}, on {kind}", "use a tmpfs: this may write to a disk")
    else:
        yield Finding("shared memory", "ok", said)
    yield _control_group(groups, wanted_bytes)


def _control_group(groups: list[tuple[str, int]], wanted_bytes: int) -> Finding:
    if not groups:
        return Finding("control group", "ok", "no memory limit")
    where, free_bytes = min(groups, key=lambda group: group[1])
    said = f"{size(free_bytes)} left in {where.removeprefix('control group ')}"
    if free_bytes >= wanted_bytes:
        return Finding("control group", "ok", said)
    return Finding(
        "control group", "problem", f"{said}, {size(wanted_bytes)} needed for pool_bytes and the chunk table",
        "raise the limit (docker --memory, Kubernetes resources.limits.memory, systemd MemoryMax), or serve with a "
        "smaller --pool-bytes",
    )


def _available_bytes(machine: Machine) -> int | None:
    """Memory that programs can use without swapping; None if unknown."""
    found = re.search(r"^MemAvailable:\s+(\d+) kB$", _text(machine.proc / "meminfo"), re.MULTILINE)
    return int(found[1]) * 1024 if found else None


def _file_system(machine: Machine) -> str:
    """Type of the file system mounted there; '' if unknown."""
    for line in reversed(_text(machine.proc / "mounts").splitlines()):
        fields = line.split(" ")
        if len(fields) > 2 and fields[1] == str(machine.shm_dir):
            return fields[2]
    return ""


def _huge_pages(machine: Machine) -> Finding:
    path = machine.sys / "kernel/mm/transparent_hugepage/shmem_enabled"
    chosen = re.search(r"\[(\w+)\]", _text(path))
    if chosen is None:
        return Finding("huge pages", "note", f"{path} does not exist: shared memory has small pages")
    if chosen[1] in ("never", "deny"):
        return Finding(
            "huge pages", "note", f"{chosen[1]} for shared memory", f"for faster copies: echo advise > {path} (as root)"
        )
    return Finding("huge pages", "ok", f"{chosen[1]} for shared memory")


# --------------------------------------------------------------------------- ulimits


def _open_files(soft: int, hard: int) -> Finding:
    if soft == resource.RLIM_INFINITY or soft >= LEAST_OPEN_FILES:
        return Finding("open files", "ok", f"{_limit(soft)} (ulimit -n)")
    return Finding(
        "open files", "note", f"{soft}, at most {_limit(hard)} (ulimit -n)",
        f"for many engines: ulimit -n {LEAST_OPEN_FILES}, or systemd LimitNOFILE={LEAST_OPEN_FILES}",
    )


def _locked_memory(soft: int) -> Finding:
    if soft == resource.RLIM_INFINITY:
        return Finding("locked memory", "ok", "unlimited (ulimit -l)")
    return Finding(
        "locked memory", "note", f"{size(soft)} (ulimit -l); the server locks none",
        "engines that page-lock the pool for a GPU may need more: ulimit -l unlimited, docker --ulimit memlock=-1, "
        "systemd LimitMEMLOCK=infinity",
    )


def _limit(value: int) -> str:
    return "unlimited" if value == resource.RLIM_INFINITY else str(value)


# --------------------------------------------------------------------------- GPU


def _gpu(machine: Machine) -> Finding:
    driver = re.search(r"Kernel Module.*?\s(\d+\.[\d.]+)", _text(machine.proc / "driver/nvidia/version"))
    program = shutil.which("nvidia-smi", path=machine.programs)
    if program is None:
        if driver is None:
            return Finding("GPU", "note", "none: engines on this machine copy with the CPU")
        return Finding("GPU", "note", f"driver {driver[1]}, but no nvidia-smi to list the GPUs")
    query = [program, "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader"]
    answered, said = _run(query)
    if not answered:
        return Finding("GPU", "note", f"nvidia-smi failed: {said}", "engines copy with the CPU until the driver works")
    return Finding("GPU", "ok", "; ".join(said.splitlines()))


def _nvcc(machine: Machine) -> Finding:
    found = shutil.which("nvcc", path=machine.programs)
    program = found or next((str(place) for place in machine.nvcc_places if place.is_file()), None)
    if program is None:
        return Finding("nvcc", "note", "none: needed only to build GPU kernels")
    answered, said = _run([program, "--version"])
    release = re.search(r"release ([\d.]+)", said)
    if not answered or release is None:
        return Finding("nvcc", "note", f"{program} does not tell its version: {said[-80:]}")
    return Finding("nvcc", "ok", f"{release[1]} at {program}")


def _run(command: list[str]) -> tuple[bool, str]:
    """Whether the command succeeded, and its output."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=PROBE_TIMEOUT_S, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return False, str(error)
    return done.returncode == 0, (done.stdout.strip() or done.stderr.strip())


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""
