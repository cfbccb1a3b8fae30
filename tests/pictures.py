"""Takes the pictures that docs/ shows: a real server, its real page in a real browser, and what commands say of it.

    python -m tests.pictures

It writes docs/images/: the page from a phone's width to a large screen, light and dark, an explained request, and the
output of commands. Three engines have attached, looked up and stored; the bytes in their chunks are whatever lies in
the slots.
"""

from __future__ import annotations

import io
import os
import random
import re
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Literal

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "tests" / "support"))

import page_fixtures  # noqa: E402  # the path above leads there
from api_helpers import OPERATOR, Engine, ServerProcess, attach, keys  # noqa: E402  # the same
from playwright.sync_api import Browser, Page, Route, sync_playwright  # noqa: E402  # the same
from rich.console import Console  # noqa: E402  # the same
from rich.text import Text  # noqa: E402  # the same

from kvdock.client.client import Client  # noqa: E402  # the same
from kvdock.protocol.outcomes import Copied, Outcome  # noqa: E402  # the same

IMAGES = ROOT / "docs" / "images"
ENGINES = (("vllm-0", "example/chat-70b"), ("vllm-1", "example/chat-70b"), ("sglang-0", "example/code-32b"))
HOST = "gpu-node-3"
"""In place of the machine's own name."""
WORK_S = 40.0
MIB = 1 << 20
Scheme = Literal["light", "dark"]
PICTURES: tuple[tuple[str, int, int, Scheme, str], ...] = (
    # name, width, height of the screen, colour scheme, panel to scroll to
    ("page-1440-light", 1440, 900, "light", ""), ("page-1440-engines", 1440, 800, "light", "sessions"),
    ("page-1024-dark", 1024, 760, "dark", ""), ("page-390-dark", 390, 844, "dark", ""),
)
SHOWN_PATH = "/run/user/1000/kvdock.sock"
"""In place of the socket of this server."""
COLUMNS = 96


def work(engines: list[Engine], source: random.Random, ended: threading.Event) -> None:
    """Conversations that grow by turns: what was asked before is asked again, with more behind it."""
    turns: dict[tuple[str, int], int] = {}
    while not ended.wait(0.02):
        engine = source.choice(engines)
        who = engine.body.manifest.model, min(source.randrange(70), source.randrange(70))
        turns[who] = turns.get(who, 3) + 2
        chain = keys(min(turns[who], 40), f"{who}")
        request = f"chatcmpl-{source.getrandbits(40):010x}"
        found = engine.lookup(chain, request=request)
        if found.lease is not None:
            engine.release(found.lease, 0)
        granted = engine.reserve(chain, store=f"store-{source.getrandbits(40):010x}")
        if granted.reservation is not None:
            engine.commit(granted)
        tokens = 16 * len(chain)
        engine.heartbeat(
            outcomes=[Outcome(
                request=request, prompt_tokens=tokens + 9, found_tokens=found.hit_tokens,
                loaded_tokens=found.hit_tokens, loaded_bytes=found.hit_tokens * 1024, load_us=12 * found.hit_tokens,
                copy_us=9 * found.hit_tokens,
                prefill_tokens_per_s=2_000.0,
            )],
            copied=Copied(load_bytes=9 * MIB, load_us=700, store_bytes=4 * MIB, store_us=400, ceiling_bytes_per_s=18e9),
        )


def named(route: Route) -> None:
    """The server's answer, with another name for the machine."""
    answer = route.fetch()
    body = answer.json()
    route.fulfill(response=answer, json=body | ({"host": HOST} if body.get("host") else {}))


def opened(browser: Browser, url: str, width: int, height: int, scheme: Scheme) -> Page:
    context = browser.new_context(
        viewport={"width": width, "height": height}, color_scheme=scheme, reduced_motion="reduce"
    )
    page = context.new_page()
    page.route("**/v1/status", named)
    page.goto(url)
    page.fill("#token", OPERATOR)
    page.press("#token", "Enter")
    page.locator("#facts").get_by_text(HOST).wait_for()
    page.wait_for_timeout(2_500)
    return page


def explained(page: Page) -> None:
    """Opens the explanation of a request that loaded a part of its prompt."""
    page.locator("#requests select").select_option("missed")
    page.get_by_role("button", name="Pause").click()
    loaded = page.locator("td[data-head=Loaded] .main:not(:text-is('0')):not(:empty)")
    row = page.locator("#requests tbody tr").filter(has=loaded).first
    row.locator("button.link").click()
    page.locator("#explain").get_by_role("heading", name="Where").wait_for()


def said(server: ServerProcess, *command: str) -> None:
    """The picture of what a command prints about the server."""
    path = server.unix.removeprefix("unix:")
    shown = " ".join(["kvdock", *command])
    environ = {**os.environ, "KVDOCK_SOCKET_PATH": path, "FORCE_COLOR": "1", "COLUMNS": str(COLUMNS)}
    program = [sys.executable, "-m", "kvdock", *command]
    done = subprocess.run(program, capture_output=True, text=True, env=environ, timeout=60, check=False)
    console = Console(record=True, width=COLUMNS, file=io.StringIO())
    console.print(Text.from_ansi(f"$ {shown}\n{done.stdout}".replace(path, SHOWN_PATH)))
    drawn = console.export_svg(title="", unique_id=command[0])
    drawn = re.sub(r"\s*@font-face \{.*?\}", "", drawn, flags=re.DOTALL)  # a reader's browser would fetch those fonts
    lines = [line.rstrip() for line in drawn.splitlines()]
    (IMAGES / f"cli-{command[0]}.svg").write_text("\n".join(lines) + "\n")


def asked_again(client: Client) -> str:
    """A request that loaded a part of its prompt."""
    recent = client.requests(limit=200).requests
    return next(one.request for one in recent if one.outcome and one.outcome.loaded_tokens)


def main() -> None:
    IMAGES.mkdir(exist_ok=True)
    settings: dict[str, object] = {
        "pool_bytes": 24 * MIB, "segment_bytes": 8 * MIB, "history_interval_s": 0.25, "recent_requests": 10_000
    }
    with ServerProcess(**settings) as server, Client(server.unix) as client, sync_playwright() as playwright:
        engines = [attach(client, label=label, instance=label, model=model) for label, model in ENGINES]
        ended = threading.Event()
        worker = threading.Thread(target=work, args=(engines, random.Random(1), ended))
        worker.start()
        try:
            time.sleep(WORK_S)
            path = page_fixtures.browser_path()
            browser = playwright.chromium.launch(executable_path=path, args=page_fixtures.ARGS)
            for name, width, height, scheme, panel in PICTURES:
                page = opened(browser, server.http, width, height, scheme)
                if panel:
                    page.evaluate("id => document.getElementById(id).scrollIntoView()", panel)
                    page.wait_for_timeout(2_500)
                page.screenshot(path=IMAGES / f"{name}.png")
                if panel:
                    explained(page)
                    page.locator("#explain").screenshot(path=IMAGES / "page-explain.png")
                page.unroute_all(behavior="ignoreErrors")  # an answer may be on its way
                page.context.close()
            browser.close()
            for command in (["status"], ["doctor"], ["explain", asked_again(client)]):
                said(server, *command)
        finally:
            ended.set()
            worker.join()
        for engine in engines:
            engine.close()


if __name__ == "__main__":
    main()
