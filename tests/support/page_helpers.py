"""What the status page's tests share: bodies, functions to read the page, and a small real HTTP server.

The bodies are encoded from the structs of kvdock/protocol/, so a changed schema breaks these tests first. `PageServer`
can hang, refuse one path, stop and come back on its port.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.resources import files
from typing import Any, Self
from urllib.parse import parse_qs, unquote, urlsplit

import msgspec
import page_views as views
from playwright.sync_api import Browser, BrowserContext, Page, expect

from kvdock.protocol import schemas
from kvdock.protocol.admin_schemas import Namespaces
from kvdock.protocol.events import kind_of
from kvdock.protocol.hits import ComputedWhy, PromptRun
from kvdock.protocol.outcomes import Outcome, OutcomeView, view_of
from kvdock.protocol.reports import (
    Caller,
    ChunkCounts,
    Degraded,
    HitDays,
    Leases,
    LeaseView,
    MoverView,
    PoolView,
    Problem,
    Requests,
    RequestView,
    Series,
    Stats,
    Status,
    TierView,
    Verdict,
)

GIB = 1 << 30
MIB = 1 << 20
CONTENT_TYPES = {".html": "text/html", ".js": "text/javascript", ".css": "text/css", ".svg": "image/svg+xml"}
Bodies = dict[str, Any]
OpenPage = Callable[..., Page]


def status(**changes: Any) -> Status:
    """The status of a ready server with traffic, with `changes`."""
    healthy = Status(
        status="ok", version="0.1.0", pool_id="3fa90c51d27be604", incarnation=3, uptime_s=93_784.0,
        now=1_700_000_000.0, pool=live_pool(), chunks=ChunkCounts(reserved=24, ready=4731, quarantined=9),
        sessions=3, leases=3, reservations=1,
        counters={
            "lookups": 18_402, "lookup_tokens": 61_204_512, "loaded_tokens": 18_361_353, "stored_chunks": 9_204,
            "stored_bytes": 18_408 * MIB, "loaded_bytes": 412 * GIB, "evicted_chunks": 4_440, "mismatches": 0,
        },
        hits=views.hits(61_204_512),
    )
    return msgspec.structs.replace(healthy, **changes)


def degraded(*reasons: str) -> list[Degraded]:
    """As a status has it."""
    return [Degraded(reason=reason, since=1_699_999_900.0) for reason in reasons]


def with_tiers(**changes: Any) -> Status:
    """The status of a server with a disk that is used, a store that fails, and one that was never open."""
    disk = TierView(
        name="disk", state="open", objects=61_204, bytes_used=122 * GIB, bytes_limit=200 * GIB, wear_bytes=431 * GIB,
        queued_bytes=96 * MIB, load_bytes_per_s=2.9e9, load_latency_s=0.002, fetches=4_102, fetch_s=310.5,
        counters={"stored_bytes": 410 * GIB, "loaded_bytes": 1_300 * GIB, "damaged": 2},
    )
    redis = TierView(
        name="redis", state="off", why="its calls fail or are late", objects=9_104,
        bytes_used=18 * GIB, counters={"stored_bytes": 18 * GIB, "loaded_bytes": 0, "damaged": 0},
    )
    objects = TierView(name="objects", state="off", why="it cannot be opened")
    mover = MoverView(
        silent_s=0.3, restarts=0, lost_lookups=0, declined=0, waiting=3, wait_s={"fulfilled": 402.0, "expired": 12.0},
        waits={"fulfilled": 812, "shortened": 0, "expired": 6, "withdrawn": 0},
    )
    return msgspec.structs.replace(status(tiers=[disk, redis, objects], mover=mover), **changes)


def live_pool() -> PoolView:
    ready, reserved, quarantined = 4731 * 2 * MIB, 24 * 2 * MIB, 9 * 2 * MIB
    allocated = 3 * 4 * GIB
    return PoolView(
        limit_bytes=16 * GIB, allocated_bytes=allocated, prefaulted_bytes=10 * GIB,
        free_bytes=allocated - ready - reserved - quarantined - 3 * 4096, reserved_bytes=reserved, ready_bytes=ready,
        quarantined_bytes=quarantined, held_bytes=706 * MIB, segments=3,
    )


def empty_pool() -> PoolView:
    return PoolView(
        limit_bytes=16 * GIB, allocated_bytes=0, prefaulted_bytes=0, free_bytes=0, reserved_bytes=0, ready_bytes=0,
        quarantined_bytes=0, held_bytes=0, segments=0,
    )


def segments(count: int = 3) -> schemas.Segments:
    each = [
        schemas.Segment(
            id=i, name=f"/kvdock-3fa9-{i:04}", bytes=4 * GIB, data_offset=4096,
            prefaulted_bytes=4 * GIB if i < 2 else 2 * GIB, used_bytes=(3900, 3600, 1024)[i % 3] * MIB,
        )
        for i in range(count)
    ]
    return schemas.Segments(pool_id="3fa90c51d27be604", lock_file="/run/kvdock/lock", segments=each)


def stats(points: int = 300) -> Stats:
    def wave(base: float, swing: float, period: float) -> list[float | None]:
        return [base + swing * math.sin(i / period) * math.cos(i / (period * 2.7)) for i in range(points)]

    hits = wave(0.78, 0.14, 17)
    if points > 100:
        hits[70:82] = [None] * 12
    rows: list[tuple[str, str, Any, str, list[float | None]]] = [
        ("loaded_share", "Loaded from kvdock", "ratio", "Prompt tokens", hits),
        ("loaded", "Loaded", "bytes_per_s", "traffic", wave(3.1 * GIB, 1.9 * GIB, 9)),
        ("stored", "Stored", "bytes_per_s", "traffic", wave(0.7 * GIB, 0.4 * GIB, 13)),
        ("lookups", "Lookups", "per_s", "calls", wave(212, 60, 11)),
        ("stores", "Stores", "per_s", "calls", wave(64, 22, 19)),
        ("ready", "Ready", "bytes", "pool", wave(9.2 * GIB, 0.3 * GIB, 40)),
        ("held", "Held", "bytes", "pool", wave(0.7 * GIB, 0.2 * GIB, 15)),
    ]
    series = [Series(name=n, title=t, unit=u, chart=c, values=v) for n, t, u, c, v in rows]
    return Stats(interval_s=1.0, age_s=0.4, series=series)


def member(
    id: str, ranks: list[int], state: Any = "live", age: float = 0.6, scheduler: bool = False
) -> schemas.MemberView:
    return schemas.MemberView(id=id, ranks=ranks, scheduler=scheduler, state=state, heartbeat_age_s=age)


def session(id: str, label: str, model: str, members: list[schemas.MemberView], **changes: Any) -> schemas.SessionView:
    plain_one = schemas.SessionView(
        session=id, instance=f"instance-{id}", label=label, model=model, namespace="7c" * 32, members=members,
        leases=1, reservations=0, held_bytes=212 * MIB, age_s=8_040.0,
    )
    return msgspec.structs.replace(plain_one, **changes)


def live_sessions() -> schemas.Sessions:
    ranks = [member(f"m{r}", [r], age=0.2 + r / 10) for r in range(8)]
    ranks[5] = member("m5", [5], "suspect", 7.2)
    return schemas.Sessions(sessions=[
        session("s1", "vllm-prod-0", "Qwen/Qwen3-235B-A22B", [member("ms", [], scheduler=True, age=0.3), *ranks],
                leases=2, held_bytes=454 * MIB, age_s=93_000.0),
        session("s2", "vllm-prod-1", "meta-llama/Llama-3.3-70B-Instruct",
                [member("n0", [0], scheduler=True, age=1.1), member("n1", [1], age=1.4)], reservations=1),
        session("s3", "", "deepseek-ai/DeepSeek-V3.2", [member("d0", [0], "dead", 14.0, scheduler=True)],
                leases=1, held_bytes=40 * MIB, age_s=412.0),
    ])


def grant(
    number: int, kind: Any, session_id: str, request: str, readers: int, remaining: list[int], **changes: Any
) -> LeaseView:
    young = LeaseView(
        grant=f"{(3 << 40) + number:016x}", kind=kind, session=session_id, request=request, epoch=0, readers=readers,
        remaining=remaining, chunks=53, bytes=106 * MIB, age_s=0.8, closed=False,
    )
    return msgspec.structs.replace(young, **changes)


def live_leases() -> Leases:
    return Leases(leases=[
        grant(101, "lease", "s1", "chatcmpl-8e1f04", 8, [0, 1, 2, 5], epoch=1, age_s=1.4),
        grant(102, "lease", "s1", "chatcmpl-91aa20", 8, list(range(8)), chunks=174, bytes=348 * MIB, age_s=0.3),
        grant(103, "reservation", "s2", "store-4410", 2, [1], chunks=24, bytes=48 * MIB, age_s=0.2),
        grant(99, "lease", "s3", "req-17", 1, [0], chunks=20, bytes=40 * MIB, age_s=71.0, closed=True),
    ])


def outcome(tokens: int, found: int, why: ComputedWhy, local: int = 32) -> OutcomeView:
    """All that was found behind the local tokens was loaded, from memory; the others were computed for that reason,
    and the last seven because they fill no chunk."""
    loaded = max(0, found - local)
    runs = [
        PromptRun(tokens=local, origin="local"), PromptRun(tokens=loaded, origin="loaded", source="memory"),
        PromptRun(tokens=tokens - local - loaded, origin="computed", why=why),
        PromptRun(tokens=7, origin="computed", why="tail"),
    ]
    told = Outcome(
        request="r", prompt_tokens=tokens + 7, local_tokens=local, found_tokens=found, loaded_tokens=loaded, why=why,
    )
    return view_of(told, [run for run in runs if run.tokens])


def live_requests(count: int = 14, newest: float = 1_700_000_000.0) -> Requests:
    names = ("vllm-prod-0", "vllm-prod-1", "")
    rows = []
    for i in range(count):
        store, tokens = i % 4 == 3, 512 + (i * 7919) % 30_000
        hit = 0 if store else (tokens * ((i * 37) % 101) // 100) // 16 * 16
        rows.append(RequestView(
            at=newest - i * 1.7, kind="store" if store else "lookup", session=f"s{i % 3 + 1}", label=names[i % 3],
            request=f"chatcmpl-{(i * 2654435761) % (1 << 24):06x}", tokens=tokens, hit_tokens=hit,
            chunks=(tokens if store else hit) // 256, bytes=(tokens if store else hit) // 256 * 2 * MIB,
            took_us=90 + (i * 613) % 2400,
            outcome=None if store or i % 3 else outcome(tokens, hit, "late" if i % 2 else "load_failed"),
        ))
    return Requests(requests=rows)


ADMIN = Caller(scopes=["health", "read", "admin"], tenant="")
NOBODY = Caller(scopes=["health"], tenant=None)


def live_bodies() -> Bodies:
    return {
        "whoami": ADMIN, "verdict": views.verdict(), "hits": views.hit_days(),
        "status": with_tiers(), "stats": stats(), "sessions": live_sessions(), "leases": live_leases(),
        "requests": live_requests(), "segments": segments(), "namespaces": views.namespaces(),
        "prefixes": views.prefixes(), "curve": views.curve(), "config": views.config(), "events": views.events(),
    }


def empty_bodies() -> Bodies:
    zero = dict.fromkeys(status().counters, 0)
    none = ChunkCounts(reserved=0, ready=0, quarantined=0)
    return {
        "whoami": ADMIN, "verdict": Verdict(effect="idle", headline="kvdock is up. No request has ended yet."),
        "hits": HitDays(days=[]),
        "status": status(
            pool=empty_pool(), chunks=none, sessions=0, leases=0, reservations=0, counters=zero, uptime_s=4.0,
            hits=views.NO_HITS,
        ),
        "stats": history(),
        "sessions": schemas.Sessions(sessions=[]),
        "leases": Leases(leases=[]),
        "requests": Requests(requests=[]),
        "segments": segments(0),
        "namespaces": Namespaces(namespaces=[]),
        "prefixes": views.prefixes(0),
        "curve": views.curve((None,) * 7),
        "config": views.config(),
        "events": [],
    }


def series(name: str, unit: Any, chart: str, values: list[float | None]) -> Series:
    return Series(name=name, title=name.title(), unit=unit, chart=chart, values=values)


def history(*each: Series) -> Stats:
    return Stats(interval_s=1.0, age_s=0.0, series=list(each))


# --------------------------------------------------------------------------- looking at the page


PATIENCE_MS = 60_000
"""How long a test waits for what the page shows, on a busy machine."""


DRAWN = """() => ["history", "sessions", "grants", "requests"].every(id => {
    const panel = document.getElementById(id);
    const parts = () => [...panel.querySelectorAll("tbody tr, .ticks text, .hint")];
    return panel && (!panel.open || parts().some(part => part.checkVisibility({ visibilityProperty: true })));
})"""
"""Each of these panels shows something, or is folded, as some are on a narrow screen."""


def wait_phase(page: Page, phase: str) -> None:
    expect(page.locator(f"body[data-phase={phase}]")).to_be_attached(timeout=PATIENCE_MS)


def plain(text: str | None) -> str:
    return " ".join((text or "").replace("\u00a0", " ").split())


def row(page: Page, table: str, text: str) -> str:
    rows = page.get_by_role("table", name=table).get_by_role("row").filter(has_text=text)
    return plain(" ".join(rows.all_inner_texts()))


@contextmanager
def opening(browser: Browser) -> Iterator[OpenPage]:
    """What the fixture `open_page` gives; its pages are closed at the end. `now`: the reader's clock stands there."""
    contexts: list[BrowserContext] = []

    def open_one(url: str, *, drawn: bool = True, access_token: str = "", now: str = "", **options: Any) -> Page:
        context = browser.new_context(**({"viewport": {"width": 1280, "height": 4000}} | options))
        contexts.append(context)
        page = context.new_page()
        page.set_default_timeout(PATIENCE_MS)
        if now:
            page.clock.set_fixed_time(now)
        page.goto(url)
        if access_token:
            page.fill("#token", access_token)
            page.press("#token", "Enter")
        if drawn:
            # Playwright's own selectors would take a third more of the processor time that a page takes.
            page.wait_for_function(DRAWN, polling=50)
        return page

    yield open_one
    for context in contexts:
        context.close()


@contextmanager
def modules_alone(browser: Browser, **options: Any) -> Iterator[Page]:
    """A page to import single modules in. The status page itself would ask and draw all the time beside them."""
    with PageServer() as page_server, browser.new_context(**options) as context:
        page = context.new_page()
        page.goto(f"{page_server.url}no_such_page")
        yield page


# --------------------------------------------------------------------------- the server


@dataclass
class PageServer:
    """Serves kvdock/web/ at / and /static/, `bodies` at /v1/, and the list of events as a stream. Use as a context
    manager.

    `refuse` holds paths that answer 500; `hang()` keeps every /v1/ answer back until `resume()`. What is sent is kept
    in `sent` and answered from `answers`. `pages`: how many items a page of a list has, where it is one of several.
    """

    bodies: Bodies = field(default_factory=live_bodies)
    refuse: set[str] = field(default_factory=set)
    on_path: Callable[[str], None] = lambda path: None
    sent: list[tuple[str, str, Any]] = field(default_factory=list)
    answers: dict[str, Any] = field(default_factory=dict)
    pages: dict[str, int] = field(default_factory=dict)
    helps: str = "# HELP kvdock_lookups_total Lookups, repeats within an epoch not counted\n"

    def __post_init__(self) -> None:
        self._go = threading.Event()
        self._go.set()
        self._port = 0
        self._server: ThreadingHTTPServer | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._port}/"

    def hang(self) -> None:
        self._go.clear()

    def resume(self) -> None:
        self._go.set()

    def start(self) -> None:
        """Listens on a free port the first time, and on the same one after a stop."""
        self._server = ThreadingHTTPServer(("127.0.0.1", self._port), self._handler())
        self._port = self._server.server_address[1]
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.02})
        self._thread.start()

    def stop(self) -> None:
        if self._server is None:
            return
        self._go.set()
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()
        self._server = None

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def answer(self, path: str, cursor: int = 0) -> tuple[int, str, bytes]:
        """(status, content type, body) of one GET."""
        self.on_path(path)
        if path == "/metrics":
            return 200, "text/plain", self.helps.encode()
        if path.startswith("/v1/"):
            self._go.wait(timeout=PATIENCE_MS / 1000)
            return self._api_answer(unquote(path.removeprefix("/v1/")), cursor)
        name = "index.html" if path == "/" else path.removeprefix("/static/")
        file = files("kvdock.web").joinpath(name)
        if not file.is_file() or ".." in name:
            return 404, "text/plain", b"no such file"
        return 200, CONTENT_TYPES["." + name.rsplit(".", 1)[-1]], file.read_bytes()

    def _api_answer(self, name: str, cursor: int) -> tuple[int, str, bytes]:
        if name in self.refuse:
            why = Problem(type="about:blank", title="Broken", status=500, detail="on purpose", code="broken")
            return 500, "application/problem+json", msgspec.json.encode(why)
        if name not in self.bodies:
            return 404, "text/plain", b"no such path"
        body = self.bodies[name]
        if name in self.pages:
            built, most = msgspec.to_builtins(body), self.pages[name]
            left = len(built[name]) - cursor - most
            body = {name: built[name][cursor : cursor + most], "next": str(cursor + most) if left > 0 else None}
        return 200, "application/json", msgspec.json.encode(body)

    def stream(self, query: dict[str, list[str]], last_id: str) -> bytes:
        """Events of the wanted kinds behind the last one that was seen."""
        wanted = query.get("kinds", [""])[0].split(",")
        seen = int(last_id.partition("-")[2] or 0)
        pieces = [b"retry: 1000\n\n"]
        for one in self.bodies["events"]:
            name = kind_of(type(one))
            if one.seq > seen and (wanted == [""] or name in wanted):
                body = msgspec.json.encode(one)
                pieces.append(b"id: 3-%d\nevent: %s\ndata: %s\n\n" % (one.seq, name.encode(), body))
        return b"".join(pieces)

    def take(self, method: str, path: str, body: Any) -> tuple[int, bytes]:
        """(status, body) of the answer to what was sent."""
        self.sent.append((method, path, body))
        return (200, msgspec.json.encode(self.answers[path])) if path in self.answers else (404, b"{}")

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        server = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                content = self.rfile.read(int(self.headers["Content-Length"]))
                code, body = server.take(self.command, self.path, msgspec.json.decode(content))
                self.send_response(code)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            do_PATCH = do_POST

            def do_GET(self) -> None:
                url = urlsplit(self.path)
                code, kind, body = server.answer(url.path, int(parse_qs(url.query).get("cursor", ["0"])[0]))
                if url.path == "/v1/events" and code == 200:
                    body = server.stream(parse_qs(url.query), self.headers.get("Last-Event-ID", ""))
                try:
                    self.send_response(code)
                    self.send_header("Content-Type", kind)
                    self.send_header("Content-Length", str(len(body)))
                    self.end_headers()
                    self.wfile.write(body)
                except (BrokenPipeError, ConnectionResetError):
                    pass  # the page gave up on a hanging answer

            def log_message(self, format: str, *args: object) -> None:
                """Logs nothing."""

        return Handler
