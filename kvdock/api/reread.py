"""Settings and access tokens that are read again while the server runs (SIGHUP).

What may change at once does: the limits, and how the log is written. Of the others the log says that they count from
the next start. Nothing changes where something is refused. A limit that a call has changed since stays, unless the
settings themselves name another value than before.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

import msgspec

from kvdock.api.access.access_file import AccessFile
from kvdock.api.admin import Admin
from kvdock.api.errors import SettingsError
from kvdock.api.log import set_up
from kvdock.api.record.journal import Journal
from kvdock.api.settings import Settings
from kvdock.protocol.admin_schemas import Limits
from kvdock.protocol.errors import ApiError
from kvdock.protocol.events import Reread

log = logging.getLogger("kvdock.api")

OF_THE_LOG = frozenset({"log_level", "log_format"})
AT_ONCE = frozenset(Limits.__struct_fields__) | OF_THE_LOG


class Rereading:
    """`source` reads all settings anew, as at the start: SettingsError."""

    def __init__(
        self, settings: Settings, source: Callable[[], Settings], *, access: AccessFile, admin: Admin, journal: Journal
    ) -> None:
        self._settings, self._source = settings, source
        self._access, self._admin, self._journal = access, admin, journal
        self._one_at_a_time = asyncio.Lock()

    async def run(self) -> None:
        """Raises nothing: what is wrong is in the log."""
        async with self._one_at_a_time:
            try:
                await self._reread()
            except (SettingsError, ApiError) as error:
                log.error("nothing was changed: %s", error)

    async def _reread(self) -> None:
        read = msgspec.structs.asdict(await asyncio.to_thread(self._source))
        before = msgspec.structs.asdict(self._settings)
        changed = {name: value for name, value in read.items() if value != before[name]}
        at_once = {name: value for name, value in changed.items() if name in AT_ONCE}
        limits = {name: value for name, value in at_once.items() if name not in OF_THE_LOG}
        if limits:
            await self._admin.change_limits(limits, "settings")
        self._settings = msgspec.structs.replace(self._settings, **at_once)
        set_up(self._settings.log_level, self._settings.log_format)
        await self._access.reread()
        self._journal.publish(Reread(needs_restart=sorted(changed.keys() - at_once.keys())))
