"""Opens the tiers that the settings name, each in its own thread, so a tier that cannot be opened delays no other."""

from __future__ import annotations

import logging
import queue
import threading
import tomllib
from collections.abc import Callable
from functools import partial
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from typing import NamedTuple

from kvdock.protocol.mover_schemas import MoverConfig
from kvdock.tiers.mover.namespaces import PoolMemory
from kvdock.tiers.tier import Deadline, NotInstalled, Store, Tier, TierError, TierUrlError

log = logging.getLogger("kvdock.tiers")

OPEN_S = 10.0
"""How long a tier may take to open."""
RETRY_S = 5.0
WRONG_S = 60.0
"""After how long a tier whose setting is wrong is tried again. The server has found it right before it started, so what
it names is away for a while: a folder that is not mounted, or a file of certificates that is being replaced."""
CLOSE_S = 5.0
"""How long a tier that was opened for a check may take to close."""

GROUP = "kvdock.tiers"
"""The group of the entry points that name stores."""
CHECKOUT = Path(__file__).parents[3] / "packages/server/pyproject.toml"

OPENING = "it is being opened"
UNOPENED = "it cannot be opened"
WRONG_SETTING = "its setting is wrong"


class _Opener(NamedTuple):
    """`open_tier` imports what the tier needs when it is called."""

    name: str
    open_tier: Callable[[], Tier]


class OpeningTiers:
    """Tiers that are being opened. `memory`: registers the pool's segments with each tier that needs this, before the
    tier is used. None: no tier needs it."""

    def __init__(self, config: MoverConfig, memory: PoolMemory | None) -> None:
        openers = _openers(config)
        self._memory = memory
        self._opened: queue.SimpleQueue[Tier] = queue.SimpleQueue()
        self._closed = threading.Event()
        self.order = [opener.name for opener in openers]
        """The names of the tiers in the order in which they are asked: the quickest first."""
        self.unopened: dict[str, tuple[str, str]] = dict.fromkeys(self.order, (OPENING, ""))
        """Tiers that are not open yet, each with the reason and the error."""
        for opener in openers:
            threading.Thread(
                target=self._open, args=(opener,), name=f"kvdock-open-{opener.name}", daemon=True
            ).start()

    def take_opened(self) -> list[Tier]:
        """The tiers that have been opened since the last call."""
        found = []
        while not self._opened.empty():
            found.append(self._opened.get())
            del self.unopened[found[-1].name]
        return found

    def close(self) -> None:
        self._closed.set()

    def _open(self, opener: _Opener) -> None:
        logged = ""
        while not self._closed.is_set():
            try:
                tier = opener.open_tier()
                if self._memory is not None:
                    self._memory.use(tier)
                self._opened.put(tier)
                return
            except Exception as error:  # also what the library of a store raises: the tier is tried again
                pause_s, why, said = _judged(error)
                self.unopened[opener.name] = (why, said)
                if said != logged:
                    log.warning("the tier %s is not used yet: %s: %s", opener.name, why, said)
                logged = said
            self._closed.wait(pause_s)


def _judged(error: Exception) -> tuple[float, str, str]:
    """(after how many seconds to try again, why the tier is not open, the error)."""
    if isinstance(error, TierUrlError):
        return WRONG_S, WRONG_SETTING, str(error)
    return RETRY_S, UNOPENED, error.why if isinstance(error, TierError) else f"{type(error).__name__}: {error}"


def try_to_open(config: MoverConfig) -> dict[str, str]:
    """Opens each tier once, and closes it again. Returns by name why it cannot be opened; "": it can."""
    found = {}
    for opener in _openers(config):
        try:
            opener.open_tier().close(Deadline(CLOSE_S))
        except Exception as error:  # as where tiers are opened for use
            _, why, said = _judged(error)
            found[opener.name] = str(error) if isinstance(error, TierError) else f"{why}: {said}"
        else:
            found[opener.name] = ""
    return found


def check_settings(config: MoverConfig) -> None:
    """Raises what opening a tier would raise whatever its storage does: ValueError for a wrong setting,
    NotInstalled for a missing package."""
    if config.disk_path:
        from kvdock.tiers.disk.tier import Sizes

        try:
            Sizes.of(config.disk_bytes)
        except TierError as error:
            raise ValueError(f"the tier disk cannot be used: {error.why}") from error
    for name, url in config.stores.items():
        try:
            find_store(name).check(url)
        except TierUrlError as error:
            raise ValueError(f"the tier {name} cannot be used: {error}") from error


def registers_memory(config: MoverConfig) -> bool:
    """Whether a tier that the settings name needs the pool's memory registered (Registers): Mooncake over RDMA."""
    for name, url in config.stores.items():
        try:
            if find_store(name).registers_memory(url):
                return True
        except (TierUrlError, TierError):  # the tier is not opened, and OpeningTiers reports why
            continue
    return False


def find_store(name: str) -> Store:
    """The store that the entry point `name` names. Raises TierUrlError if there is none; TierError if it cannot be
    imported (NotInstalled)."""
    found = {entry.name: entry for entry in (*entry_points(group=GROUP), *_in_checkout())}
    if name not in found:
        raise TierUrlError(
            f"found no entry point {name!r} in the group {GROUP}, wanted one of {', '.join(sorted(found))}: install "
            "the package that has the store"
        )
    try:
        store = found[name].load()
    except Exception as error:  # the code of another package, which may raise anything
        raise NotInstalled(name, f"{found[name].value} cannot be imported: {error}") from error
    if not isinstance(store, Store):
        raise TierUrlError(f"found {type(store).__name__} at {found[name].value}, wanted a kvdock.tiers.tier.Store")
    return store


def _in_checkout() -> list[EntryPoint]:
    """kvdock's own entry points if it is imported from a checkout: a checkout that is only on Python's path has no
    metadata, and the metadata of an editable installation may be older than the checkout."""
    try:
        project = tomllib.loads(CHECKOUT.read_text())["project"]
    except (OSError, tomllib.TOMLDecodeError, KeyError):
        return []
    if project.get("name") != "kvdock":
        return []
    return [EntryPoint(name, value, GROUP) for name, value in project["entry-points"][GROUP].items()]


def _openers(config: MoverConfig) -> list[_Opener]:
    """One opener for each tier, in the order in which the tiers are asked."""

    def disk() -> Tier:
        from kvdock.tiers.disk.tier import DiskTier

        return DiskTier.open(Path(config.disk_path), config.disk_bytes)

    stores = [_Opener(name, partial(_open_store, name, url)) for name, url in config.stores.items()]
    return [_Opener("disk", disk), *stores] if config.disk_path else stores


def _open_store(name: str, url: str) -> Tier:
    """Raises TierUrlError, TierError."""
    tier = find_store(name).open_tier(url, Deadline(OPEN_S))
    if tier.name != name:
        tier.close(Deadline(0.0))
        raise TierUrlError(f"found a tier named {tier.name!r}, wanted {name!r}, as its entry point is named")
    return tier
