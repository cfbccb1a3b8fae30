"""The server process: one event loop, listening on a Unix socket and on TCP, over one pool.

It binds both sockets, opens the pool, serves and drains; on SIGHUP it reads settings and access tokens again. At its
end, unless it is killed, it removes the sockets, segments, table and lock file; a drain may keep the last three
(kvdock/api/pool/sessions.py). Start-up problems are StartupError, raised before anything is served. Imports neither
torch nor numpy: the server has no GPU context and starts in under a second.
"""

from __future__ import annotations

import asyncio
import errno
import gc
import itertools
import logging
import os
import re
import secrets
import signal
import socket
import stat
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import ExitStack, asynccontextmanager, contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import Final, NamedTuple

import msgspec
import uvicorn
from fastapi import FastAPI
from starlette.types import ASGIApp

from kvdock import __version__
from kvdock.api.access.access_file import AccessFile
from kvdock.api.admin import Admin
from kvdock.api.build import Parts, build, create_app
from kvdock.api.clock import Clocks
from kvdock.api.errors import AccessFileError, SettingsError, StartupError
from kvdock.api.feeds.feeds import open_extras
from kvdock.api.http.connection import Connection, check_uvicorn, connection_class
from kvdock.api.http.first_calls import prepare_loop
from kvdock.api.http.limits import ConnectionLimits, descriptors_wanted, raise_descriptors, unix_connections
from kvdock.api.http.pace import Pace
from kvdock.api.keeper import Keeper
from kvdock.api.log import set_format
from kvdock.api.pool.adopt import HAND_OVER
from kvdock.api.pool.pool import Pool, open_pool
from kvdock.api.pool.sessions import Drain
from kvdock.api.record.journal import Journal
from kvdock.api.settings import Settings, is_loopback
from kvdock.api.tiers.process import MoverProcess
from kvdock.api.turns import LONG_READ_BYTES, next_slice
from kvdock.protocol.admin_schemas import Limits
from kvdock.protocol.cores import prevent_core_dumps
from kvdock.protocol.errors import ApiError
from kvdock.protocol.events import Draining, Ended, Ready, Reread

log = logging.getLogger("kvdock.api")

_NO_SHARED_MEMORY = (
    "shared memory cannot be used: {}; mount a tmpfs at /dev/shm that this user may write (in a container: --ipc host "
    "or --shm-size)"
)

SWITCH_S = 0.0005
"""A thread of this process that computes (the API's document, a long access file) gives the event loop its turn after
this long, and not after Python's 5 ms."""
GC_THRESHOLDS = (20_000, 1000, 1_000_000)
"""Python's own collections come in the turn of whoever makes one more object, which may be a call's: they are left for
what many calls make within YOUNG_S. All others have turns of their own (`collect_garbage`). None walks records of
sessions, requests and chunks: they are structs with gc=False, and no cycle contains one."""
GRACE_S = 1
"""How long calls in flight may take to end at shutdown, in every case."""
LIVE = frozenset(Limits.__struct_fields__)
AT_ONCE = LIVE | {"log_format"}
YOUNG_S = 0.02
"""How often objects that are new are looked at for garbage. Python does it once so many more were made than freed:
where as many old ones are freed as new ones stay, tens of thousands come together first, which takes up to 13 ms."""
FULL_EVERY, SELDOM = 10, 100
"""After how many of these looks all objects are looked at that are not set aside, which a busy server makes by the
thousand each second, or sooner, once the looks together have taken `SHORT_S`; but after `SELDOM` times as many, if that
has taken `SHORT_S` or longer and has found garbage."""
SHORT_S = 0.0005


class Rereading:
    """Reads settings and access tokens again while the server runs. `source` reads all settings anew, as at the start,
    and raises SettingsError.

    The limits, as the call for limits checks and changes them, and the log's format change at once. Other settings keep
    their values until the next start, and the log names them. Nothing changes if a setting is refused. A limit that a
    call has changed since stays, unless the settings themselves name another value than before."""

    def __init__(
        self, settings: Settings, source: Callable[[], Settings], *, access: AccessFile, admin: Admin, journal: Journal,
        manager: ServiceManager,
    ) -> None:
        self._settings, self._source = settings, source
        self._access, self._admin, self._journal, self._manager = access, admin, journal, manager
        self._one_at_a_time = asyncio.Lock()

    async def run(self) -> None:
        """Raises nothing: errors are logged."""
        async with self._one_at_a_time:
            self._manager.reloading()
            try:
                await self._reread()
            except (SettingsError, ApiError) as error:
                log.error("nothing was changed: %s", error)
                self._manager.ready(f"nothing was changed: {error}")
            else:
                self._manager.ready("has read its settings and access tokens again")

    async def _reread(self) -> None:
        read = msgspec.structs.asdict(await asyncio.to_thread(self._source))
        before = msgspec.structs.asdict(self._settings)
        changed = {name: value for name, value in read.items() if value != before[name]}
        at_once = {name: value for name, value in changed.items() if name in AT_ONCE}
        limits = {name: value for name, value in at_once.items() if name in LIVE}
        if limits:
            await self._admin.change_limits(limits, "settings")
        self._settings = msgspec.structs.replace(self._settings, **at_once)
        set_format(self._settings.log_format)
        await self._access.reread()
        self._journal.publish(Reread(needs_restart=sorted(changed.keys() - at_once.keys())))


class Addresses(NamedTuple):
    http: str
    """e.g. http://127.0.0.1:7410"""
    unix: str
    """e.g. unix:/run/user/1000/kvdock.sock"""
    pool_id: int


OnReady = Callable[[Addresses], None]


class Server:
    """`run` serves until SIGINT, which ends it at once, or SIGTERM, which drains it first. Raises StartupError.

    Call `run` in any thread, and `stop` from any thread: it acts like SIGINT. `on_ready` is called once, when both
    addresses answer and there is memory to give out.
    """

    def __init__(self, settings: Settings, on_ready: OnReady, source: Callable[[], Settings] | None = None) -> None:
        """`source` reads the settings anew; None: SIGHUP reads only access tokens."""
        self._settings, self._source = settings, source or (lambda: settings)
        self._journal = Journal(time.time)
        self._on_ready = on_ready
        self._manager = ServiceManager(os.environ)
        self._stop_wanted = threading.Event()
        self._early: list[int] = []
        """Signals that came before there was anything to stop."""
        self._terminal = Terminal()
        self._uvicorn: _Uvicorn | None = None
        self._drain: Drain | None = None
        self._failure: BaseException | None = None

    def stop(self) -> None:
        self._stop_wanted.set()
        if self._uvicorn is not None:
            self._uvicorn.should_exit = True

    def take_signal(self, number: int) -> None:
        """For signals that come while the server starts or cleans up, in the main thread. They mean what they mean
        while it serves (`_Uvicorn.handle_exit`), so a server that is stopped while it starts keeps its pool."""
        if number == signal.SIGHUP and self._terminal.has_gone():
            number = signal.SIGTERM  # which drains as well
        if self._uvicorn is None:
            self._early.append(number)
        else:
            self._uvicorn.handle_exit(number, None)

    def run(self) -> None:
        settings = self._settings
        _prepare_process()
        try:
            access, extras = AccessFile(settings.access_file), open_extras(settings, __version__)
        except AccessFileError as error:
            raise StartupError("access_file", str(error)) from error
        with ExitStack() as undo:
            undo.callback(extras.close)  # when the last event has been handed out
            tcp = undo.enter_context(bind_tcp(settings.host, settings.port))
            unix = undo.enter_context(bind_unix(settings.socket_path))
            pool = self._open_pool()
            undo.callback(self._close, pool)
            parts = build(settings, pool, access, Clocks(), journal=self._journal, extras=extras)
            extras.start(parts.feeds.kv, parts.background)
            rereading = Rereading(
                settings, self._source, access=access, admin=parts.handlers.admin, journal=self._journal,
                manager=self._manager,
            )
            keeper, self._drain = parts.keeper, parts.drain
            addresses = Addresses(_url(tcp), f"unix:{settings.socket_path}", pool.pool_id)
            mover = MoverProcess(settings, parts.mover_client, addresses.unix) if settings.has_tiers else None

            @asynccontextmanager
            async def lifespan(app: FastAPI) -> AsyncIterator[None]:
                task = asyncio.create_task(keeper.run())
                task.add_done_callback(self._keeper_ended)
                _begin_rounds(parts, settings.watch_s)
                if mover is not None:
                    parts.drain.has_written = mover.has_written
                    parts.background.begin("serving lower tiers", lambda: _serve_tiers(keeper, mover))
                yield
                if parts.drain.keeps_pool:
                    await parts.sampler.keep()
                task.cancel()
                await asyncio.wait([task])
                await parts.background.end()
                if mover is not None:
                    await mover.stop()

            async def say_ready() -> None:
                await keeper.ready.wait()
                self._journal.publish(Ready(address=addresses.unix, pool_bytes=settings.pool_bytes))
                await _settle()
                self._on_ready(addresses)
                self._manager.ready(f"serves engines at {addresses.unix}, HTTP at {addresses.http}")

            app = create_app(settings, parts, lifespan)
            self._uvicorn = _Uvicorn(
                uvicorn_config(app, connections_of(connection_limits(settings), parts)), self._terminal,
                lambda: parts.background.once("announcing the server", say_ready()),
                lambda: parts.background.once("reading settings and access tokens again", rereading.run()),
                parts.drain, lambda: self._publish_drain(pool), self._manager.alive,
            )
            self._uvicorn.should_exit = self._stop_wanted.is_set()
            for number in self._early:
                self._uvicorn.handle_exit(number, None)
            self._uvicorn.run(sockets=[tcp, unix])
        if self._failure is not None:
            raise self._failure

    def _open_pool(self) -> Pool:
        """Raises StartupError."""
        try:
            return open_pool(
                self._settings, secrets.randbits, publish=self._journal.publish,
                catches_signals=threading.current_thread() is threading.main_thread(),
            )
        except OSError as error:
            raise StartupError("no_shared_memory", _NO_SHARED_MEMORY.format(error)) from error

    def _publish_drain(self, pool: Pool) -> None:
        self._manager.stopping("is draining: no new leases")
        stats = pool.table.stats()
        self._journal.publish(Draining(
            is_takeover=self._drain is not None and self._drain.is_takeover, leases=stats["leases"],
            reservations=stats["reservations"],
        ))

    def _close(self, pool: Pool) -> None:
        keep = self._failure is None and self._drain is not None and self._drain.keeps_pool
        self._manager.stopping("leaves its pool" if keep else "removes its pool")
        self._journal.publish(Ended(pool=f"{pool.pool_id:016x}", keeps_pool=keep))
        self._journal.flush()
        if not keep:
            pool.close()
            return
        pool.leave()

    def _keeper_ended(self, task: asyncio.Task[None]) -> None:
        """A server without its keeper would never notice a death, so it stops."""
        if not task.cancelled():
            self._failure = task.exception()
            self.stop()


def _prepare_process() -> None:
    """Before there is a pool to lose. Raises StartupError: not_installed."""
    check_uvicorn(uvicorn.__version__)
    sys.setswitchinterval(SWITCH_S)
    prevent_core_dumps()


def connections_of(limits: ConnectionLimits, parts: Parts, pace: Pace | None = None) -> type[Connection]:
    """The connections of one server, whose status says who has all of them."""
    made = connection_class(limits, parts.meter, pace)
    parts.handlers.probes.full_connections = made.counts.full
    return made


def _begin_rounds(parts: Parts, watch_s: float) -> None:
    """What a server does again and again, beside the keeper."""
    parts.feeds.begin(parts.background)
    parts.background.begin("collecting garbage", collect_garbage)
    parts.background.begin("watching for full tables", lambda: parts.handlers.probes.watch(watch_s))


async def _settle() -> None:
    """Does now what would stall calls later."""
    await prepare_loop()
    gc.freeze()  # start-up objects live to the end: collections would walk them
    gc.set_threshold(*GC_THRESHOLDS)


async def collect_garbage() -> None:
    """Until cancelled. Each collection has a turn of its own, in place of some call's. There is none while collections
    are disabled: a thread is making much that stays (`not_collected`).

    A full one that was long and found nothing sets all objects aside, so the next one walks what came since then. They
    end with their last reference, as all do, but a circle of references that has one of them stays for good: so that is
    not done while circles are made.
    """
    full_at, new_s, is_seldom = FULL_EVERY, 0.0, False
    for number in itertools.count(1):
        await asyncio.sleep(YOUNG_S)
        await next_slice()
        if not gc.isenabled():
            continue
        began_s = time.thread_time()
        if number < full_at and (is_seldom or new_s < SHORT_S):
            gc.collect(1)
            new_s += time.thread_time() - began_s  # a full one takes about as long for what these have walked
            continue
        found = gc.collect()
        is_long = time.thread_time() - began_s >= SHORT_S
        if is_long and not found:
            gc.freeze()
        new_s, is_seldom = 0.0, is_long and found > 0
        full_at = number + (SELDOM * FULL_EVERY if is_seldom else FULL_EVERY)


async def _serve_tiers(keeper: Keeper, mover: MoverProcess) -> None:
    await keeper.ready.wait()
    await mover.run()


_Begin = Callable[[], object]
"""Begins some work in the background."""


class Terminal:
    """The terminal that the process was started from, if there is one. The kernel sends SIGHUP when it is closed;
    people send it to have settings read again."""

    def __init__(self) -> None:
        self.is_outlived = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
        """The process was started to survive it (nohup)."""
        self._was_there = _has_terminal()

    def has_gone(self) -> bool:
        return self._was_there and not _has_terminal()


def _has_terminal() -> bool:
    try:
        os.close(os.open("/dev/tty", os.O_RDWR | os.O_NOCTTY))
    except OSError:
        return False
    return True


class _Uvicorn(uvicorn.Server):
    """uvicorn that announces itself, drains, and exits with status 0 after a signal."""

    def __init__(
        self, config: uvicorn.Config, terminal: Terminal, announce: _Begin, reread: _Begin, drain: Drain,
        publish_drain: Callable[[], None], show_life: Callable[[], None],
    ) -> None:
        """`show_life` is called every 0.1 s."""
        super().__init__(config)
        self._terminal, self._announce, self._reread = terminal, announce, reread
        self._publish_drain = publish_drain
        self._drain, self._show_life = drain, show_life
        self._has_published = False
        self._wants_reread = False

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self._announce()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """The first SIGTERM drains, and so does the end of the terminal; SIGHUP otherwise has settings and tokens read
        again. HAND_OVER drains and leaves the pool to the next server. A second SIGTERM, or SIGINT at any time, ends
        the server at once."""
        if sig == signal.SIGHUP and not self._terminal.has_gone():
            self._wants_reread = True
            return
        if sig == signal.SIGHUP and self._terminal.is_outlived:
            return
        if sig == HAND_OVER:
            self._drain.hand_over(self.server_state.tasks)
            return
        if sig != signal.SIGINT and not self._drain.begun:
            self._drain.begin(self.server_state.tasks)
            return
        if sig == signal.SIGINT:
            self._drain.remove_pool()
        self.should_exit = True

    async def on_tick(self, counter: int) -> bool:
        """Called every 0.1 s. Returns whether the server is to end."""
        self._show_life()
        if self._drain.begun and not self._has_published:
            self._has_published = True
            self._publish_drain()
        if self._wants_reread:
            self._wants_reread = False
            self._reread()
        return await super().on_tick(counter) or self._drain.ended()

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """uvicorn's own version raises the signal again afterwards, which would look like a crash."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, HAND_OVER)
        before = {number: signal.signal(number, self.handle_exit) for number in numbers}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


def ending_signals() -> tuple[signal.Signals, ...]:
    """The signals that end a server. SIGHUP is one, unless the process was started to survive it (nohup)."""
    outlives = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    return (signal.SIGINT, signal.SIGTERM) if outlives else (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def connection_limits(settings: Settings) -> ConnectionLimits:
    """Raises this process's limit of descriptors; warns if the system allows too few."""
    descriptors, wanted = raise_descriptors(), descriptors_wanted(settings.tcp_connections)
    if descriptors < wanted:
        log.warning(
            "the system allows %d open descriptors, wanted %d: raise the limit (ulimit -n, LimitNOFILE) or serve with "
            "fewer tcp_connections", descriptors, wanted,
        )
    return ConnectionLimits(
        tcp_connections=settings.tcp_connections,
        unix_connections=unix_connections(descriptors, settings.tcp_connections),
    )


def uvicorn_config(app: ASGIApp, connections: type[Connection]) -> uvicorn.Config:
    return uvicorn.Config(
        app,
        loop="uvloop",
        http=connections,
        ws="none",
        lifespan="on",
        log_config=None,
        log_level="warning",
        access_log=False,
        server_header=False,
        date_header=False,
        proxy_headers=False,
        timeout_keep_alive=connections.limits.idle_s,
        timeout_graceful_shutdown=GRACE_S,
    )


def _url(tcp: socket.socket) -> str:
    host, port = tcp.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


# --------------------------------------------------------------------------- the service manager

# Tells the service manager how the server is, in systemd's protocol: datagrams to the socket that NOTIFY_SOCKET names.
#
# `Type=notify` in a unit means that the service counts as started only once it says so. Without a service manager
# nothing is sent.

WATCHDOG_SHARE: Final = 3
"""A watchdog gets this many messages within its time."""


class ServiceManager:
    """Every method may be called at any time: a message that cannot be sent is lost, which the manager will notice."""

    def __init__(self, environ: Mapping[str, str]) -> None:
        name = environ.get("NOTIFY_SOCKET", "")
        self._address = f"\0{name[1:]}" if name.startswith("@") else name
        is_watched = environ.get("WATCHDOG_PID", "") in ("", str(os.getpid()))
        watchdog_us = re.fullmatch(r"[0-9]{1,20}", environ.get("WATCHDOG_USEC", ""))
        self._watch_s = int(watchdog_us[0]) / 1e6 / WATCHDOG_SHARE if is_watched and watchdog_us else 0.0
        self._watched_s = 0.0

    def ready(self, status: str) -> None:
        """The server answers, or has read its settings again. `status`: one line for people."""
        self._send(f"READY=1\nSTATUS={status.splitlines()[0]}")

    def reloading(self) -> None:
        self._send(f"RELOADING=1\nMONOTONIC_USEC={time.clock_gettime_ns(time.CLOCK_MONOTONIC) // 1000}")

    def stopping(self, status: str) -> None:
        self._send(f"STOPPING=1\nSTATUS={status}")

    def alive(self) -> None:
        """Call it often from the event loop: it sends as often as the watchdog wants."""
        now_s = time.monotonic()
        if self._watch_s and now_s - self._watched_s >= self._watch_s:
            self._watched_s = now_s
            self._send("WATCHDOG=1")

    def _send(self, message: str) -> None:
        if not self._address:
            return
        with suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK) as sock:
            sock.sendto(message.encode(), self._address)


# --------------------------------------------------------------------------- the listening sockets

# Binds the two listening sockets. A live server's address is refused; a dead server's is taken over.



@contextmanager
def bind_tcp(host: str, port: int) -> Iterator[socket.socket]:
    """A bound socket, not yet listening; port 0: the system chooses. Warns beyond loopback: the port has no TLS, and
    access tokens cross it. Raises StartupError: address_in_use, bad_address."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
    except socket.gaierror as error:
        raise StartupError("bad_address", f"host {host!r}: {error.strerror}") from error
    with socket.socket(family, kind, protocol) as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, LONG_READ_BYTES)  # so much is read in one turn of the loop
        try:
            sock.bind(address)
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                raise StartupError("address_in_use", f"port {port} on {host} is in use: choose another") from error
            raise StartupError("bad_address", f"cannot listen on {host}:{port}: {error.strerror}") from error
        if not is_loopback(host):
            log.warning(
                "the port on %s speaks plain HTTP: whoever can read the network there reads access tokens and answers; "
                "keep it on loopback, behind a proxy with TLS (docs/operate/security.md)", host,
            )
        yield sock


@contextmanager
def bind_unix(path: str) -> Iterator[socket.socket]:
    """A bound socket whose file has mode 0600; the file is removed at the end if it is still the same one.

    Raises StartupError: socket_in_use if a live server answers there, bad_address if the file is something else, or if
    others could put something else in its place."""
    _require_own_folder(Path(path).absolute().parent)
    _remove_stale(path)
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
        umask = os.umask(0o177)  # nobody else may connect, not even between bind and a chmod
        try:
            sock.bind(path)
            sock.listen()  # at once: a socket that refuses connections would look stale to another server
        except OSError as error:
            raise StartupError("bad_address", _cannot("make the socket", path, error)) from error
        finally:
            os.umask(umask)
        inode = _inode(path)
        try:
            yield sock
        finally:
            if _inode(path) == inode:
                Path(path).unlink()


def _require_own_folder(folder: Path) -> None:
    """Makes a missing folder, which only this user can open."""
    try:
        with suppress(FileExistsError):
            folder.mkdir(mode=0o700)
        found, link = folder.stat(), folder.lstat()
    except OSError as error:
        raise StartupError("bad_address", _cannot("use the socket's folder", folder, error)) from error
    if not {found.st_uid, link.st_uid} <= {os.geteuid(), 0} or found.st_mode & 0o022:
        raise StartupError(
            "bad_address",
            f"socket folder {folder}: found {stat.filemode(found.st_mode)} of user {found.st_uid}, wanted one that "
            f"nobody but user {os.geteuid()} or root can write to: choose another socket_path",
        )


def _remove_stale(path: str) -> None:
    try:
        mode = Path(path).lstat().st_mode
    except FileNotFoundError:
        return
    except OSError as error:
        raise StartupError("bad_address", _cannot("use the socket path", path, error)) from error
    if not stat.S_ISSOCK(mode):
        raise StartupError("bad_address", f"{path} exists and is no socket: choose another socket_path")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(1.0)
        try:
            probe.connect(path)
        except (ConnectionRefusedError, FileNotFoundError):
            pass  # nobody listens: its server is dead
        except OSError as error:
            raise StartupError("socket_in_use", f"socket {path}: {error}") from error
        else:
            raise StartupError("socket_in_use", f"another server answers at {path}: stop it, replace it "
                               "with --takeover, or choose another socket_path")
    try:
        Path(path).unlink(missing_ok=True)
    except OSError as error:
        raise StartupError("bad_address", _cannot("replace the stale socket", path, error)) from error


def _cannot(do: str, path: str | Path, error: OSError) -> str:
    return (
        f"cannot {do} {path}: {error.strerror}; choose another socket_path, in a folder that user {os.geteuid()} may "
        "write to"
    )


def _inode(path: str) -> int | None:
    try:
        return Path(path).stat().st_ino
    except FileNotFoundError:
        return None
