"""How much shared memory this process may still allocate.

A shared-memory object larger than its file system would fail in the middle of a store; one larger than the control
group allows would get a process killed. Both are checked before anything is made.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from kvdock.shm.errors import PoolTooSmall
from kvdock.shm.objects import SHM_DIR

# Version 1 writes "no limit" as the largest page count; no machine has this many bytes.
_NO_LIMIT_BYTES = 1 << 60


@dataclass(frozen=True)
class Capacity:
    """Where the limits are read from; the defaults are the running system's."""

    shm_dir: Path = SHM_DIR
    proc_cgroup: Path = Path("/proc/self/cgroup")
    cgroup_root: Path = Path("/sys/fs/cgroup")

    def limits(self) -> Iterator[tuple[str, int]]:
        """(name, bytes still available) of each limit that exists."""
        there = os.statvfs(self.shm_dir)
        yield str(self.shm_dir), there.f_bavail * there.f_frsize
        for folder, limit_name, usage_name in self._memory_groups():
            limit = _read_bytes(folder / limit_name)
            usage = _read_bytes(folder / usage_name)
            if limit is not None and usage is not None and limit < _NO_LIMIT_BYTES:
                reclaimable = _inactive_file_bytes(folder / "memory.stat")
                yield f"control group {folder}", max(0, limit - max(0, usage - reclaimable))

    def sizes(self) -> Iterator[tuple[str, int]]:
        """(name, bytes in all) of /dev/shm and of each memory limit that exists."""
        there = os.statvfs(self.shm_dir)
        yield f"the size of {self.shm_dir}", there.f_blocks * there.f_frsize
        for folder, limit_name, _ in self._memory_groups():
            limit = _read_bytes(folder / limit_name)
            if limit is not None and limit < _NO_LIMIT_BYTES:
                yield f"the memory limit of the control group {folder}", limit

    def require(self, size_bytes: int) -> None:
        """Raises PoolTooSmall, naming the tightest limit, unless `size_bytes` more can be allocated."""
        where, available = min(self.limits(), key=lambda limit: limit[1])
        if available < size_bytes:
            raise PoolTooSmall(f"free memory in {where}", found=available, wanted=size_bytes)

    def _memory_groups(self) -> Iterator[tuple[Path, str, str]]:
        """This process's control group and its ancestors: each of them may have a limit."""
        try:
            lines = self.proc_cgroup.read_text().splitlines()
        except OSError:
            return  # a system without control groups has no such limit
        for line in lines:
            number, controllers, path = line.split(":", 2)
            if number == "0" and controllers == "":
                yield from _walk(self.cgroup_root, path, "memory.max", "memory.current")
            elif "memory" in controllers.split(","):
                yield from _walk(self.cgroup_root / "memory", path, "memory.limit_in_bytes", "memory.usage_in_bytes")


def _walk(root: Path, path: str, limit_name: str, usage_name: str) -> Iterator[tuple[Path, str, str]]:
    # A container may see its own group mounted at the root while `path` is the host's name for it: skip folders
    # that do not exist.
    parts = [part for part in path.split("/") if part not in ("", "..")]
    for depth in range(len(parts), -1, -1):
        folder = root.joinpath(*parts[:depth])
        if (folder / limit_name).is_file():
            yield folder, limit_name, usage_name


def _read_bytes(path: Path) -> int | None:
    try:
        text = path.read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdigit() else None  # "max": no limit


def _inactive_file_bytes(path: Path) -> int:
    """Page cache that the kernel gives back before it kills anyone; shared memory is not part of it."""
    try:
        lines = path.read_text().splitlines()
    except OSError:
        return 0
    fields = dict(line.split(" ", 1) for line in lines if " " in line)
    return int(fields.get("total_inactive_file", fields.get("inactive_file", "0")))
