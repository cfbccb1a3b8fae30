"""Identifies LoRA adapters by the content of their files, not by their names.

vLLM's workers read an adapter's files when they first need it, and again after it was evicted from their memory. vLLM's
own prefix cache identifies adapters by name. So a digest of the files identifies what is computed with an adapter only
if its files have not changed since before vLLM first read them, and if its name and number have meant this one folder
ever since. What is computed with other adapters is not cached, and a log line says why.

Why it is enough to compare file attributes. Let sizes, inodes and times of the last change be equal at two moments, and
let the last change before the first moment be older than a tick of the clock that stamps changes. Then nothing was
written between the two, so what vLLM has read between them is what was hashed between them. The first moment is
- the start of this engine, for files that have not changed since;
- for other files, the moment in which kvdock meets the adapter: its first request arrives, or EngineCore.add_lora is
  called. That moment is used only while kvdock certainly meets each adapter before a worker reads it
  (AdapterLoads.hears).
The second moment is each later step. The chunks that a step has computed are stored once the files were checked after
the step ended (OpenStores.start), and dropped if they differ then.

Threads: the engine's thread meets and checks adapters, the background reads their files.
"""

from __future__ import annotations

import hashlib
import logging
import os
import sys
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from stat import S_ISLNK
from typing import Any

from kvdock.connectors.vllm.arrivals import CORE
from kvdock.connectors.vllm.weight_changes import Hook, hook
from kvdock.connectors.weights import FindSnapshot, hub_snapshot

log = logging.getLogger("kvdock.vllm")

FILES = ("adapter_config.json", "adapter_model.safetensors", "adapter_model.bin", "adapter_model.pt")
"""The files that vLLM reads in an adapter's folder: the first, and one of the others."""
CLOCK_TICK_NS = 20_000_000
"""File systems note the time of a change as of the kernel's last tick, so it may look this much too old."""
READ_BYTES = 1 << 20
STILL_USED = 8
"""For this many steps after its last use an adapter is still checked: longer than a store is held back after its
step."""

Run = Callable[..., Future[None]]
"""Runs a function with its arguments in the background."""


@dataclass(frozen=True)
class Look:
    """The attributes of an adapter's files. `state` differs after any change; `changed_ns`: the time of the last
    change, in ns since 1970."""

    state: tuple[tuple[int, ...], ...]
    changed_ns: int


@dataclass
class Adapter:
    """`path`: as the request names it, `folder`: where its files are. `digest`: None until the files were read. `why`:
    the reason why KV that is computed with it is not cached, with advice; "": it is cached."""

    name: str
    path: str
    folder: Path | None = None
    is_local: bool = True
    """True: `path` is a folder. False: it is the adapter's name on a hub."""
    why: str = ""
    is_logged: bool = False
    """Whether `why` was logged."""
    digest: bytes | None = None
    look: Look | None = None
    checked: int = -1
    """The step in which its files were last checked."""
    used: int = -1
    """The last step for which a request needed it."""

    @property
    def is_sound(self) -> bool:
        return not self.why


class Adapters:
    """`began_ns`: when this engine started, ns since 1970, before any adapter was loaded. `hears`: whether every
    adapter is met before a worker reads it. `now_ns`: the time in ns since 1970; `sleep`: sleeps for a number of
    seconds; `find_snapshot`: see hub_snapshot."""

    def __init__(
        self, run: Run, began_ns: int, *, hears: Callable[[], bool] = lambda: False,
        now_ns: Callable[[], int] = time.time_ns, sleep: Callable[[float], None] = time.sleep,
        find_snapshot: FindSnapshot = hub_snapshot,
    ) -> None:
        self._run, self._began_ns, self._hears, self._now_ns = run, began_ns, hears, now_ns
        self._sleep, self._find_snapshot = sleep, find_snapshot
        self._by_name: dict[str, Adapter] = {}
        self._by_number: dict[int, Adapter] = {}

    def meet(self, asked: Any) -> Adapter:
        """The adapter of `asked`, a LoRARequest. Must be called for every request with one, in the order of arrival."""
        adapter = self._by_name.get(asked.lora_name)
        if adapter is None:
            adapter = self._by_name[asked.lora_name] = Adapter(asked.lora_name, asked.lora_path)
            self._begin(adapter, asked)
        elif adapter.path != asked.lora_path:
            adapter.why = adapter.why or (
                f"its name stands for {adapter.path} and for {asked.lora_path}: give each folder a name of its own."
            )
        first = self._by_number.setdefault(asked.lora_int_id, adapter)
        if first is not adapter:
            for one in (first, adapter):
                one.why = one.why or (
                    f"its number {asked.lora_int_id} stands for {first.name} and for {adapter.name}: give each one of "
                    "its own."
                )
        return adapter

    def _begin(self, adapter: Adapter, asked: Any) -> None:
        adapter.folder = folder_of(adapter.path, self._find_snapshot)
        adapter.is_local = is_local(adapter.path)
        adapter.look = look_at(adapter.folder, is_local=adapter.is_local)
        since_ns = self._settled_ns(adapter) if self._hears() else self._began_ns
        if getattr(asked, "tensorizer_config_dict", None):
            adapter.why = "tensorizer loads it, not from the files in its folder: load it without."
        elif adapter.look is None:
            adapter.why = (
                f"no adapter lies at {adapter.path}, and the hub's cache on this machine has none of that name: "
                "download it before it is loaded."
            )
        elif adapter.look.changed_ns + CLOCK_TICK_NS > since_ns:
            adapter.why = (
                "its files were written while it was loaded, or since this engine started and before kvdock heard of "
                "it: load it under another name, once they are complete."
            )
        else:
            self._run(self._read, adapter)

    def _settled_ns(self, adapter: Adapter) -> int:
        """When the adapter's files were looked at. If they were written less than a tick ago, waits for a tick and
        looks again: within one tick, another change would not show."""
        looked_ns = self._now_ns()
        rest_ns = adapter.look.changed_ns + CLOCK_TICK_NS - looked_ns if adapter.look is not None else -1
        if 0 <= rest_ns <= CLOCK_TICK_NS:
            self._sleep((rest_ns + 1_000_000) / 1e9)
            looked_ns = self._now_ns()
            adapter.look = look_at(adapter.folder, is_local=adapter.is_local)
        return looked_ns

    def check(self, adapter: Adapter, step: int) -> bool:
        """Whether a request may use the adapter's digest. Looks at the adapter's files once in each step."""
        adapter.used = step
        return self._is_as_it_was(adapter, step)

    def _is_as_it_was(self, adapter: Adapter, step: int) -> bool:
        if adapter.is_sound and adapter.checked != step:
            adapter.checked = step
            if self._look(adapter) != adapter.look:
                adapter.why = "its files have changed: give each version a folder and a name of its own."
        return adapter.is_sound

    def _look(self, adapter: Adapter) -> Look | None:
        """The present attributes of the adapter's files. None if there are none, or if its path means another folder by
        now."""
        if is_local(adapter.path) != adapter.is_local:
            return None
        return look_at(adapter.folder, is_local=adapter.is_local)

    def log(self, adapter: Adapter) -> None:
        """If the adapter is not cached, logs the reason, once."""
        if adapter.why and not adapter.is_logged:
            adapter.is_logged = True
            log.warning("what is computed with the adapter %s is not cached: %s", adapter.name, adapter.why)

    def lost(self, step: int) -> bool:
        """Whether an adapter that a request used in the last STILL_USED steps has become unsound now."""
        used = [one for one in self._by_name.values() if one.is_sound and step - one.used <= STILL_USED]
        return not all(self._is_as_it_was(adapter, step) for adapter in used)

    def _read(self, adapter: Adapter) -> None:
        """Background: hashes the adapter's files."""
        digest, why = None, "its files have changed while they were read: give each version a folder of its own."
        try:
            assert adapter.folder is not None
            digest = digest_of_files(adapter.folder)
            if self._look(adapter) != adapter.look:
                digest = None
        except OSError as error:
            why = f"its files cannot be read ({error}): let this user read them, and load it under another name."
        finally:
            if digest is None:
                adapter.why = adapter.why or why
            adapter.digest = digest


def is_local(path: str) -> bool:
    return path.startswith("~") or Path(path).is_absolute() or Path(path).exists()


def folder_of(path: str, find_snapshot: FindSnapshot) -> Path | None:
    """The folder in which vLLM's workers find the adapter, by the rules of its get_adapter_absolute_path. None: it is
    not on this machine yet."""
    if is_local(path):
        return Path(path).expanduser().absolute()
    if os.environ.get("VLLM_USE_MODELSCOPE", "").lower() in ("1", "true"):
        return None  # another hub's cache
    return find_snapshot(path, None, None)


def look_at(folder: Path | None, *, is_local: bool = True) -> Look | None:
    """The attributes of the adapter in `folder`; None if it has none. Links are followed, and their own attributes are
    included. `is_local` False: the folder is a snapshot in the hub's cache, and refs/main there names the current
    snapshot, so it is included, too."""
    if folder is None:
        return None
    try:
        above = [one.lstat() for one in (folder, *folder.parents)]
        files = [
            (file.lstat(), file.stat()) if (file := folder / name).exists() else None for name in FILES
        ]
        if files[0] is None or not any(files[1:]):
            return None
        seen = [folder.stat(), *(one for one in above if S_ISLNK(one.st_mode))]
        if not is_local:
            seen.append((folder.parent.parent / "refs" / "main").stat())
    except OSError:
        return None
    seen += [one for both in files if both is not None for one in both]
    state = tuple((one.st_dev, one.st_ino, one.st_size, one.st_mtime_ns, one.st_ctime_ns) for one in seen)
    return Look(state, max(one.st_ctime_ns for one in seen))


def digest_of_files(folder: Path) -> bytes:
    """32 bytes: the SHA-256 of all files of the adapter that vLLM may read. Raises OSError if one cannot be read."""
    digest = hashlib.sha256()
    for name in FILES:
        if not (folder / name).exists():
            continue
        with (folder / name).open("rb") as file:
            digest.update(f"{name} {(folder / name).stat().st_size}\n".encode())
            while piece := file.read(READ_BYTES):
                digest.update(piece)
    return digest.digest()


# --------------------------------------------------------------------------------
# Adapters that vLLM loads before any request names them: by EngineCore.add_lora, as its servers do.
#
# Connectors meet an adapter before a worker reads its files (Adapters). Other calls that make workers read adapters, a
# collective_rpc with "lora" in its name or a function, are recorded: from then on an adapter is trusted only if its
# files are older than the engine. Both use hooks that prove that they are in force (weight_changes.py).


class AdapterLoads:
    """Notices the adapters that vLLM's EngineCores in this process load."""

    def __init__(self) -> None:
        self._hooks: tuple[Hook, ...] = ()
        self._is_unheard = False
        """Whether workers may have read adapters that no connector has met."""

    def listen(self) -> None:
        """From now on cores report each adapter to their connectors before they load it, by
        `kvdock_adapter(lora_request)`."""
        core = getattr(sys.modules.get(CORE), "EngineCore", None)  # not loaded: this process has no core
        if core is None or self._hooks:
            return
        loads, calls = hook(core, "add_lora"), hook(core, "collective_rpc")
        loads.listen_before(self._load)
        calls.listen_before(self._call)
        self._hooks = loads, calls

    def hears(self) -> bool:
        """Whether every adapter is met before a worker reads it."""
        return bool(self._hooks) and not self._is_unheard and not any(one.why_not() for one in self._hooks)

    def miss(self) -> None:
        """An adapter was loaded when there was no connector to meet it."""
        self._is_unheard = True

    def _load(self, core: Any, args: tuple[Any, ...], more: dict[str, Any]) -> None:
        try:
            asked = (*args, *more.values())[0]
            connector = core.scheduler.connector
            for one in (connector, *getattr(connector, "_connectors", ())):  # MultiConnector has several
                if hasattr(one, "kvdock_adapter"):
                    one.kvdock_adapter(asked)
        except Exception:  # vLLM loads the adapter all the same, even if its core is not as expected here
            self._is_unheard = True
            log.exception("KV of adapters whose files were written after the start is not cached from now on")

    def _call(self, core: Any, args: tuple[Any, ...], more: dict[str, Any]) -> None:
        method = args[0] if args else more.get("method")
        if not isinstance(method, str) or "lora" in method.lower():
            self._is_unheard = True


LOADS = AdapterLoads()
