"""What pages of other origins can do to a server whose own page is open beside them, and what hostile names can do to
that page. `evil.test` is a name that leads to this machine (tests/support/page_fixtures.py)."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from admin_helpers import ok
from api_helpers import OPERATOR, Engine, ServerProcess, access_file, attach, eventually, keys, unique
from page_helpers import OpenPage
from playwright.sync_api import Browser, BrowserContext, Page, expect

from kvdock.api.access.access_file import entry
from kvdock.client.client import Client
from kvdock.protocol.schemas import Lookup
from kvdock.protocol.wire_types import Scope

pytest_plugins = ["page_fixtures"]
pytestmark = [pytest.mark.page, pytest.mark.security]

STORED = keys(2, "hostile pages")


@pytest.fixture(scope="module")
def evil_port() -> Iterator[int]:
    """A server that answers every GET with an empty page, under any host name."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            body = b"<!doctype html><title>evil</title>"
            self.send_response(200)
            self.send_header("Content-Type", "text/html")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:
            """Logs nothing."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as running:
        thread = threading.Thread(target=running.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        yield running.server_address[1]
        running.shutdown()
        thread.join()


@pytest.fixture
def engine(server: ServerProcess) -> Iterator[Engine]:
    with Client(server.unix) as client:
        attached = attach(client, model=unique("model"))
        attached.store(STORED)
        yield attached
        attached.leave()


@pytest.fixture
def context(browser: Browser) -> Iterator[BrowserContext]:
    made = browser.new_context(bypass_csp=True)
    yield made
    made.close()


# ------------------------------------------------------------------ pages of other origins

ATTACK = """async ([target, session, namespace, stored]) => {
  const read = [];
  const calls = [
    ["POST", "/v1/cache/clear", {}], ["PATCH", "/v1/config", { session_grants: 1 }],
    ["DELETE", `/v1/sessions/${session}`, undefined], ["DELETE", "/v1/chunks", { namespace, keys: stored }],
    ["POST", "/v1/pins", { namespace, keys: stored, ttl_s: 60 }], ["POST", "/v1/lookups", { namespace, keys: stored }],
    ["GET", "/v1/status", undefined], ["GET", "/v1/sessions", undefined], ["GET", "/metrics", undefined],
    ["GET", "/", undefined], ["GET", "/openapi.json", undefined],
  ];
  const bodies = (body) => body === undefined ? [[undefined, null]] : [
    [JSON.stringify(body), "text/plain"], [JSON.stringify(body), "application/json"],
    [JSON.stringify(body), "application/x-www-form-urlencoded"], [new Uint8Array([0x80]), "application/msgpack"],
  ];
  const tries = [];
  for (const [method, path, content] of calls)
    for (const [body, type] of bodies(content))
      for (const mode of ["cors", "no-cors"]) tries.push(async () => {
        const headers = type ? { "Content-Type": type } : {};
        const answer = await fetch(target + path, { method, mode, headers, body, credentials: "include" });
        if (answer.type !== "opaque") read.push(`fetch ${method} ${path}`);
        if (await answer.text()) read.push(`the text of ${method} ${path}`);
      });
  await Promise.all(tries.map((one) => one().catch(() => 0)));
  for (const [method, path, content] of calls.slice(0, 6)) {
    navigator.sendBeacon(target + path, JSON.stringify(content ?? {}));
    navigator.sendBeacon(target + path, new Blob([JSON.stringify(content ?? {})], { type: "application/json" }));
    for (const enctype of ["text/plain", "application/x-www-form-urlencoded", "multipart/form-data"]) {
      const frame = document.body.appendChild(document.createElement("iframe"));
      frame.name = `f${document.querySelectorAll("iframe").length}`;
      const form = document.body.appendChild(document.createElement("form"));
      Object.assign(form, { method: "POST", action: target + path, enctype, target: frame.name });
      const field = form.appendChild(document.createElement("input"));
      Object.assign(field, { name: JSON.stringify(content ?? {}).slice(0, -1) + ',"x":"', value: '"}' });
      form.submit();
    }
  }
  return read;
}"""


@pytest.mark.parametrize("host", ["127.0.0.1", "evil.test"])
def test_no_other_page_changes_or_reads_anything_beside_the_page_with_a_token(
    server: ServerProcess, engine: Engine, context: BrowserContext, evil_port: int, host: str
) -> None:
    mine, evil = context.new_page(), context.new_page()
    mine.goto(server.http)
    enter(mine, OPERATOR)
    expect(mine.locator("#sessions")).to_contain_text(engine.body.instance)
    config, before = ok(server.http, "GET", "/v1/config"), counters(server)
    evil.goto(f"http://{host}:{evil_port}/")
    target = [server.http.rstrip("/"), engine.session, engine.attached.namespace, STORED]
    assert evil.evaluate(ATTACK, target) == []
    eventually(lambda: counters(server)["refusals"] >= before["refusals"] + 40)  # the attack has arrived
    assert engine.client.lookup(Lookup(namespace=engine.attached.namespace, keys=STORED)).hit_tokens == 32
    assert ok(server.http, "GET", "/v1/config") == config
    after = counters(server)
    for name in ("evicted_chunks", "stored_chunks"):
        assert after[name] == before[name], name
    assert engine.heartbeat(), "its session is still there"
    expect(mine.locator("#sessions")).to_contain_text(engine.body.instance)


LOOK = """async ([target, paths]) => {
  const seen = {};
  const loads = (tag, attribute, url) => new Promise((done) => {
    const node = document.createElement(tag);
    node.onload = () => done("load"); node.onerror = () => done("error");
    if (tag === "link") node.rel = "stylesheet";
    node[attribute] = url;
    document.body.append(node);
  });
  for (const path of paths) {
    const url = target + path;
    seen[path] = [
      await loads("img", "src", url), await loads("script", "src", url), await loads("link", "href", url),
      await new Promise((done) => {
        const socket = new WebSocket(url.replace("http", "ws"));
        socket.onopen = () => done("open"); socket.onerror = () => done("error");
      }),
      await new Promise((done) => {
        const events = new EventSource(url);
        events.onopen = () => done("open"); events.onerror = () => { events.close(); done("error"); };
      }),
    ];
  }
  return seen;
}"""


def test_no_other_page_sees_by_loading_it_whether_something_exists(
    server: ServerProcess, engine: Engine, context: BrowserContext, evil_port: int
) -> None:
    evil = context.new_page()
    evil.goto(f"http://evil.test:{evil_port}/")
    paths = ["/v1/status", "/metrics", f"/v1/sessions/{engine.listed}", "/v1/sessions/none", "/static/app.js"]
    seen = evil.evaluate(LOOK, [server.http.rstrip("/"), paths])
    assert seen == {path: ["error"] * 5 for path in paths}


@pytest.mark.parametrize("path", ["", "docs", "v1/status"])
def test_no_other_page_shows_it_in_a_frame(
    server: ServerProcess, context: BrowserContext, evil_port: int, path: str
) -> None:
    evil = context.new_page()
    evil.goto(f"http://evil.test:{evil_port}/")
    evil.evaluate("""url => new Promise(done => {
      const frame = document.createElement("iframe");
      frame.onload = done; frame.src = url; document.body.append(frame);
    })""", f"{server.http.rstrip('/')}/{path}")
    shown = evil.frames[1]
    assert shown.url.startswith("chrome-error:"), shown.url
    assert "kvdock" not in shown.content()


def test_a_foreign_name_for_this_address_gets_nothing_not_even_totals(
    server: ServerProcess, context: BrowserContext
) -> None:
    port = server.http.rstrip("/").rpartition(":")[2]
    page = context.new_page()
    answer = page.goto(f"http://evil.test:{port}/")
    assert answer is not None and answer.status == 421
    asked = page.evaluate("""async () => {
      const json = { "Content-Type": "application/json" }, found = {};
      for (const path of ["/", "/v1/status", "/v1/stats", "/metrics", "/livez", "/docs", "/openapi.json"])
        found[path] = await fetch(path).then(async (a) => [a.status, await a.text()]);
      found["/v1/cache/clear"] = await fetch("/v1/cache/clear", { method: "POST", headers: json, body: "{}" })
        .then(async (a) => [a.status, await a.text()]);
      return found;
    }""")
    for path, (status, text) in asked.items():
        assert (status, json.loads(text)["code"]) == (421, "wrong_host"), path
        assert f"{server.pool_id:016x}" not in text


# ------------------------------------------------------------------ the token


def enter(page: Page, token: str) -> None:
    page.fill("#token", token)
    page.press("#token", "Enter")


EVERYWHERE_ELSE = """async () => JSON.stringify([
  { ...localStorage }, document.cookie, location.href, history.state, window.name,
  document.documentElement.outerHTML, [...document.querySelectorAll("input")].map((node) => node.value),
  performance.getEntries().map((entry) => entry.name), await indexedDB.databases(), await caches.keys(),
  Object.getOwnPropertyNames(window).map((name) => typeof window[name] === "string" ? window[name] : ""),
])"""


def test_the_token_is_kept_for_the_tab_alone_and_ends_with_it(
    server: ServerProcess, engine: Engine, open_page: OpenPage
) -> None:
    page = open_page(server.http, access_token=OPERATOR)
    expect(page.locator("#sessions")).to_contain_text(engine.body.instance)
    assert page.evaluate("history.length") <= 2
    assert page.evaluate("({ ...sessionStorage })") == {"kvdock-token": OPERATOR}
    assert OPERATOR not in page.evaluate(EVERYWHERE_ELSE)
    assert OPERATOR not in json.dumps(page.context.storage_state()) and page.context.cookies() == []
    page.reload()
    expect(page.locator("#sessions")).to_contain_text(engine.body.instance)
    expect(page.locator("#locked")).to_be_hidden()
    page.close()
    other = page.context.new_page()
    other.goto(server.http)
    expect(other.locator("#locked")).to_be_visible()
    expect(other.locator("#sessions")).to_be_hidden()
    assert other.evaluate("({ ...sessionStorage })") == {} and engine.body.instance not in other.content()


def test_a_token_that_the_server_does_not_know_is_not_kept(server: ServerProcess, open_page: OpenPage) -> None:
    page = open_page(server.http, drawn=False)
    enter(page, "nobodys-token")
    expect(page.locator("#token-refused")).to_have_text(re.compile("does not know this token"))
    eventually(lambda: page.evaluate("({ ...sessionStorage })") == {})


@pytest.mark.parametrize("scopes", [None, ["read"], ["health"], ["admin"]])
def test_opening_the_page_causes_no_refused_call(
    open_page: OpenPage, tmp_path: Path, scopes: list[Scope] | None
) -> None:
    """With every panel open, with no token and with one of each scope, and again from what the tab has kept."""
    token = "t" * 40
    path = access_file(tmp_path, *([entry("one", token, scopes, "")] if scopes else []))
    with ServerProcess(access_file=str(path)) as server:
        page = open_page(server.http, drawn=False)
        if scopes:
            enter(page, token)
        expect(page.locator("#locked")).to_be_visible(visible=scopes in (None, ["health"]))
        for is_kept in (False, True):
            if is_kept:
                page.reload()
            page.evaluate("for (const node of document.querySelectorAll('details.panel')) node.open = true")
            page.wait_for_timeout(2_500)
        expect(page.locator("#pill")).to_have_text("Ready")
        assert counters(server)["refusals"] == 0


def test_the_page_of_a_tenant_says_whose_its_figures_are(open_page: OpenPage, tmp_path: Path) -> None:
    token = "t" * 40
    path = access_file(tmp_path, entry("one", token, ["read"], "team-a"))
    with ServerProcess(access_file=str(path)) as server:
        page = open_page(server.http, access_token=token)
        expect(page.locator("#whose")).to_have_text(
            "Totals and charts are of all tenants; lists are of the tenant team-a."
        )
        operators = open_page(server.http, access_token=OPERATOR)
        expect(operators.locator("#admin")).to_be_visible()
        expect(operators.locator("#whose")).to_be_hidden()


def test_the_focus_is_on_the_page_after_the_token_is_accepted(server: ServerProcess, open_page: OpenPage) -> None:
    page = open_page(server.http, drawn=False, viewport={"width": 1280, "height": 700})
    enter(page, OPERATOR)
    expect(page.locator("#sessions")).to_be_visible()
    expect(page.locator("#main")).to_be_focused()
    assert page.evaluate("scrollY") == 0


def test_without_a_token_the_page_shows_totals_and_asks_for_one(
    server: ServerProcess, engine: Engine, open_page: OpenPage
) -> None:
    page = open_page(server.http, drawn=False)
    for shown in ("#locked", "#tiles", "#totals", "#pool", "#history"):
        expect(page.locator(shown)).to_be_visible()
    for hidden in ("#sessions", "#grants", "#requests", "#token-refused", "#banner"):
        expect(page.locator(hidden)).to_be_hidden()
    assert page.evaluate("document.querySelector('#token').type") == "password"
    assert engine.body.instance not in page.content()


def test_a_wrong_token_is_refused_in_a_sentence_and_the_right_one_shows_sessions(
    server: ServerProcess, engine: Engine, open_page: OpenPage
) -> None:
    page = open_page(server.http, drawn=False)
    for _ in range(2):
        enter(page, "nobodys-token")
        expect(page.locator("#token-refused")).to_have_text(re.compile("does not know this token"))
        expect(page.locator("#pill")).to_have_text("Ready")
        expect(page.locator("#banner")).to_be_hidden()
    enter(page, OPERATOR)
    expect(page.locator("#sessions")).to_contain_text(engine.body.instance)
    expect(page.locator("#locked")).to_be_hidden()


def test_a_token_revoked_while_the_page_is_open_brings_the_form_back(open_page: OpenPage, tmp_path: Path) -> None:
    path = access_file(tmp_path)
    with ServerProcess(access_file=str(path)) as server:
        page = open_page(server.http, access_token=OPERATOR)
        expect(page.locator("#sessions")).to_be_visible()
        path.write_text("")
        expect(page.locator("#locked")).to_be_visible()
        for panel in ("#sessions", "#grants", "#requests"):
            expect(page.locator(panel)).to_be_hidden()
        expect(page.locator("#pill")).to_have_text("Ready")
        expect(page.locator("#banner")).to_be_hidden()


# ------------------------------------------------------------------ hostile names

SCRIPT = "<img src=x onerror=\"window.owned=1\"></td></script><script>window.owned=1</script>"
NAMES = {
    "markup": SCRIPT,
    "bidi": "safe\u202egpj.exe\u2066\u2067\u202dtail\u200f",
    "long": "W" * 256,
    "hidden": "\x1b[31mred\x07\u200b\ufeff\u2028\r\nend",
    "marks": "Z" + "\u0300\u0489" * 127,
    "joined": "\U0001f469\u200d" * 128,
    "blank": "two\u00a0words\u3164\u2003\U0001d159",
}


@pytest.fixture(scope="module")
def named(server: ServerProcess) -> Iterator[None]:
    """A session with each of the names wherever a caller can put one, a lookup, and a reservation that stays open."""
    engines = []
    with Client(server.unix) as client:
        for name in NAMES.values():
            each = attach(client, instance=name, member=name, label=name, model=name, revision=name, adapter=name)
            each.store(keys(1, name), store=f"s{name}"[:256])
            each.lookup(keys(1, name), request=name)
            each.reserve(keys(1, f"open {name}"), store=name)
            engines.append(each)
        yield
        for each in engines:
            each.leave()


SHOWN_BIDI = "safe\\u202egpj.exe\\u2066\\u2067\\u202dtail\\u200f"
SHOWN_BLANK = "two\\u00a0words\\u3164\\u2003\\u{1d159}"
SHOWN_HIDDEN = "\\u001b[31mred\\u0007\\u200b\\ufeff\\u2028\\u000d\\u000aend"
UNSEEN = """() => {
  const unseen = /[\\p{Cc}\\p{Cf}\\p{Zl}\\p{Zp}]/u, found = [];
  for (const node of document.querySelectorAll("main *, .notices *, dialog *")) {
    const read = ["title", "aria-label", "data-head"].map((name) => node.getAttribute(name) ?? "");
    const own = [...node.childNodes].filter((one) => one.nodeType === 3).map((one) => one.data.trim());
    if ([...read, ...own].some((text) => unseen.test(text))) found.push(node.outerHTML);
  }
  return found;
}"""
"""Elements whose own text, or the text of an attribute that people read, has such characters."""
NOT_ISOLATED = """() => [...document.querySelectorAll("main *, .notices *")].filter((node) =>
  [...node.childNodes].some((text) => text.nodeType === 3 && /[\\u202a-\\u202e\\u2066-\\u2069]/.test(text.data))
  && getComputedStyle(node).display === "inline" && getComputedStyle(node).unicodeBidi !== "isolate"
).map((node) => node.outerHTML)"""


def test_hostile_names_are_text_of_bounded_size_that_turns_no_other_text_around(
    server: ServerProcess, named: None, open_page: OpenPage
) -> None:
    page = open_page(server.http, access_token=OPERATOR)
    dialogs: list[str] = []
    page.on("dialog", lambda dialog: dialogs.append(dialog.message))
    for panel in ("sessions", "grants", "requests"):
        expect(page.locator(f"#{panel}")).to_contain_text(SCRIPT)
        expect(page.locator(f"#{panel}")).to_contain_text(SHOWN_BIDI)
        expect(page.locator(f"#{panel}")).to_contain_text(SHOWN_HIDDEN)
    for panel in ("sessions", "requests"):  # the list of grants is longer than is shown
        expect(page.locator(f"#{panel}")).to_contain_text(SHOWN_BLANK)
    assert page.evaluate(UNSEEN) == []
    for width in (390, 768, 1280, 1920):
        page.set_viewport_size({"width": width, "height": 900})
        eventually(lambda: page.evaluate("document.documentElement.scrollWidth - innerWidth") == 0)  # charts follow
        assert page.evaluate("document.documentElement.scrollHeight") < (20_000 if width < 960 else 8_000)
        assert page.evaluate(NOT_ISOLATED) == []
    assert page.locator("img").count() == 1 and page.locator("main :is(script, img, iframe)").count() == 0
    assert page.evaluate("window.owned") is None and dialogs == []
    page.get_by_role("button", name=f"Explain {SHOWN_BLANK}").first.click()
    dialog = page.get_by_role("dialog", name=f"Request {SHOWN_BLANK}")
    expect(dialog.get_by_role("heading", name="Where")).to_be_visible()
    assert page.evaluate(UNSEEN) == []


@pytest.mark.parametrize("path", [
    f"docs?q={SCRIPT}#{SCRIPT}", f"?q={SCRIPT}#{SCRIPT}", f"v1/sessions/{SCRIPT}", SCRIPT, f"v1/status?{SCRIPT}=1",
], ids=["docs", "page", "session", "nowhere", "parameter"])
def test_a_hostile_url_runs_no_script(server: ServerProcess, named: None, context: BrowserContext, path: str) -> None:
    page = context.new_page()  # which obeys no policy of the page: what is markup would run
    page.goto(f"{server.http.rstrip('/')}/{path}")
    assert page.evaluate("window.owned") is None
    assert page.locator("[onerror], img[src=x]").count() == 0


def counters(server: ServerProcess) -> dict[str, Any]:
    found: dict[str, Any] = ok(server.http, "GET", "/v1/status")["counters"]
    return found
