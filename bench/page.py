"""The load of open status pages on the server, in per cent of a core.

    python -m bench.page --json

A server with engines, chunks, leases and a full list of recent requests; then tabs of a real browser show its page with
an administrator's token, all of them visible and every panel open. Rounds with and without tabs take turns. Time on a
core is the scheduler's own count of the server's process. `busy`: an engine makes lookups all the time, so that each
answer is new; its own load is in the rounds without tabs, too.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager

from playwright.sync_api import Browser, Page, sync_playwright

from bench.lookup_cpu import on_core_ns
from bench.serving import Engine, ServerProcess, chain
from kvdock.api.access.access_file import add_token
from kvdock.client.client import Client
from kvdock.protocol import schemas as s

POOL_BYTES = 1 << 30
ENGINES, CHUNKS, PROMPTS = 8, 64, 400
BUSY_PER_S = 50
SETTLE_S = 3.0
LIMIT_PERCENT = 1.0
OPEN_ALL = "for (const node of document.querySelectorAll('details.panel')) node.open = true"


def fill(engines: list[Engine]) -> None:
    for at in range(PROMPTS):
        engine = engines[at % len(engines)]
        engine.store(chain(CHUNKS, f"prompt {at}"))
        look_up(engine, at)


def look_up(engine: Engine, at: int) -> None:
    body = s.Lookup(
        session=engine.session, member=engine.member, request=f"request-{at}", epoch=at,
        keys=chain(CHUNKS, f"prompt {at % PROMPTS}"),
    )
    lease = engine.client.lookup(body).lease
    if lease is not None:
        engine.client.release(lease, s.ReleaseLease(session=engine.session, ranks=[0]))


@contextmanager
def busy(engine: Engine) -> Iterator[None]:
    """Makes lookups at an even pace, in a thread."""
    ended = threading.Event()

    def run() -> None:
        at = PROMPTS
        while not ended.wait(1 / BUSY_PER_S):
            look_up(engine, at)
            at += 1

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def percent_of_a_core(pid: int, seconds: float, pause: Callable[[float], object]) -> float:
    before, began = on_core_ns(pid), time.perf_counter()
    pause(seconds * 1000)
    return 100 * (on_core_ns(pid) - before) / 1e9 / (time.perf_counter() - began)


def open_tab(browser: Browser, url: str, token: str) -> Page:
    page = browser.new_context(viewport={"width": 1440, "height": 1000}).new_page()
    page.goto(url)
    page.fill("#token", token)
    page.press("#token", "Enter")
    page.wait_for_selector("#sessions tbody tr")
    page.evaluate(OPEN_ALL)
    return page


def measure(tabs: int, rounds: int, seconds: float, is_busy: bool) -> dict[str, float]:
    path = shutil.which("chromium-headless-shell") or shutil.which("chromium")
    if path is None:
        raise SystemExit("no chromium on the path")
    with ExitStack() as stack:
        access = f"{stack.enter_context(tempfile.TemporaryDirectory(prefix='kvdock-bench-'))}/access.toml"
        token = add_token(access, "bench", ["admin"])
        server = stack.enter_context(ServerProcess(
            "serve", pool_bytes=POOL_BYTES, access_file=access, log_level="warning", missed_heartbeats=100_000
        ))
        clients = [stack.enter_context(Client(server.unix)) for _ in range(ENGINES)]
        engines = [Engine(client, f"engine-{at}") for at, client in enumerate(clients)]
        for engine in engines:
            stack.callback(engine.close)
        fill(engines)
        if is_busy:
            stack.enter_context(busy(engines[0]))
        browser = stack.enter_context(sync_playwright()).chromium.launch(executable_path=path, args=["--no-sandbox"])
        stack.callback(browser.close)
        idle: list[float] = []
        shown: list[float] = []
        for _ in range(rounds):
            idle.append(percent_of_a_core(server.pid, seconds, lambda ms: time.sleep(ms / 1000)))
            pages = [open_tab(browser, server.http, token) for _ in range(tabs)]
            pages[0].wait_for_timeout(SETTLE_S * 1000)
            shown.append(percent_of_a_core(server.pid, seconds, pages[0].wait_for_timeout))
            for page in pages:
                page.context.close()
    added = statistics.median(with_tabs - without for with_tabs, without in zip(shown, idle, strict=True))
    return {
        "tabs": tabs, "without_percent": round(statistics.median(idle), 2),
        "with_percent": round(statistics.median(shown), 2), "added_percent": round(added, 2),
        "added_percent_limit": LIMIT_PERCENT,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tabs", type=int, default=5)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--busy", action="store_true", help="with lookups all the while")
    parser.add_argument("--json", action="store_true")
    chosen = parser.parse_args()
    figures = measure(chosen.tabs, chosen.rounds, chosen.seconds, chosen.busy)
    if chosen.json:
        sys.stdout.write(json.dumps(figures) + "\n")
    else:
        for name, value in figures.items():
            sys.stdout.write(f"{name:22} {value}\n")


if __name__ == "__main__":
    main()
