"""LoRA adapters by what their files hold, never by their names alone.

vLLM's workers read an adapter's files when they first need it, and again after it had to make room; its own prefix
cache knows adapters by name. So a digest of the files says what was computed only if they are as they were when this
engine started, and if the adapter's name and number have stood for this one folder ever since. An adapter of which that
is not known is not cached, until the engine is started again.

Threads: the engine's meets and checks adapters, the background reads their files.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from stat import S_ISLNK
from typing import Any

log = logging.getLogger("kvdock.vllm")

FILES = ("adapter_config.json", "adapter_model.safetensors", "adapter_model.bin", "adapter_model.pt")
"""What vLLM reads of an adapter's folder: the first, and one of the others."""
CLOCK_TICK_NS = 20_000_000
"""File systems note the time of a change as of the kernel's last tick, so it may look this much too old."""
READ_BYTES = 1 << 20

Run = Callable[..., Future[None]]
"""Runs a function with its arguments in the background."""


@dataclass(frozen=True)
class Look:
    """What the file system says of an adapter. `state` differs after any change; `changed_ns`: when the last one was,
    in ns since 1970."""

    state: tuple[tuple[int, ...], ...]
    changed_ns: int


@dataclass
class Adapter:
    """`path`: as the request names it. `digest`: None until the files were read."""

    path: str
    is_sound: bool = True
    digest: bytes | None = None
    look: Look | None = None
    checked: int = -1
    """The step in which its files were looked at last."""


class Adapters:
    """`began_ns`: when this engine started, ns since 1970, before any adapter was loaded."""

    def __init__(self, run: Run, began_ns: int) -> None:
        self._run, self._began_ns = run, began_ns
        self._by_name: dict[str, Adapter] = {}
        self._by_number: dict[int, Adapter] = {}

    def meet(self, asked: Any) -> Adapter:
        """That of `asked`, a LoRARequest. Every request's must come here, in the order of arrival."""
        adapter = self._by_name.get(asked.lora_name)
        if adapter is None:
            adapter = self._by_name[asked.lora_name] = Adapter(asked.lora_path)
            self._begin(adapter, asked)
        elif adapter.path != asked.lora_path:
            adapter.is_sound = False
        first = self._by_number.setdefault(asked.lora_int_id, adapter)
        if first is not adapter:
            first.is_sound = adapter.is_sound = False
        return adapter

    def _begin(self, adapter: Adapter, asked: Any) -> None:
        adapter.look = look_at(adapter.path)
        is_old = adapter.look is not None and adapter.look.changed_ns + CLOCK_TICK_NS <= self._began_ns
        if is_old and not getattr(asked, "tensorizer_config_dict", None):
            self._run(self._read, adapter)
        else:
            adapter.is_sound = False

    def check(self, adapter: Adapter, step: int) -> bool:
        """Whether the adapter is sound: looks at its files once in each step."""
        if adapter.is_sound and adapter.checked != step:
            adapter.checked = step
            adapter.is_sound = look_at(adapter.path) == adapter.look
        return adapter.is_sound

    def _read(self, adapter: Adapter) -> None:
        """Background."""
        digest = None
        try:
            digest = digest_of_files(adapter.path)
            if look_at(adapter.path) != adapter.look:
                digest = None
        except OSError as error:
            log.warning("kvdock: does not cache what is computed with the adapter %s: %s", adapter.path, error)
        finally:
            if digest is None:
                adapter.is_sound = False
            adapter.digest = digest


def look_at(path: str) -> Look | None:
    """None where there is no adapter: `path` may be a name on a hub. Links are followed, and count."""
    folder = Path(path).expanduser().absolute()
    try:
        above = [one.lstat() for one in (folder, *folder.parents)]
        files = [
            (file.lstat(), file.stat()) if (file := folder / name).exists() else None for name in FILES
        ]
        if files[0] is None or not any(files[1:]):
            return None
        seen = [folder.stat(), *(one for one in above if S_ISLNK(one.st_mode))]
    except OSError:
        return None
    seen += [one for both in files if both is not None for one in both]
    state = tuple((one.st_dev, one.st_ino, one.st_size, one.st_mtime_ns, one.st_ctime_ns) for one in seen)
    return Look(state, max(one.st_ctime_ns for one in seen))


def digest_of_files(path: str) -> bytes:
    """32 bytes: of all that vLLM may read of the adapter. OSError when a file cannot be read."""
    digest, folder = hashlib.sha256(), Path(path).expanduser()
    for name in FILES:
        if not (folder / name).exists():
            continue
        with (folder / name).open("rb") as file:
            digest.update(f"{name} {(folder / name).stat().st_size}\n".encode())
            while piece := file.read(READ_BYTES):
                digest.update(piece)
    return digest.digest()
