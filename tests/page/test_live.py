"""The status page of a real server with real engines, as after `make run`."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest
from api_helpers import OPERATOR, PATIENCE_S, ServerProcess, attach, eventually, keys
from frozen import frozen
from page_helpers import OpenPage, wait_phase
from playwright.sync_api import expect

from kvdock.client.client import Client
from kvdock.connectors.engine_connector import ConnectorSettings
from kvdock.connectors.session import Identity
from kvdock.engine.config import preset
from kvdock.engine.engine import Engine
from kvdock.engine.kv_cache import KVCache
from kvdock.engine.kvdock import connect
from kvdock.engine.request import SamplingParams
from kvdock.protocol.admin_schemas import PinChunks
from kvdock.protocol.outcomes import Outcome
from kvdock.protocol.schemas import Lookup

pytest_plugins = ["page_fixtures"]
pytestmark = pytest.mark.page

CHUNK_TOKENS = 64
PROMPT = "a long shared document, read by everyone. " * 8


def engine_at(server: ServerProcess, label: str) -> Engine:
    config = preset("tiny")
    kv = KVCache(config)
    identity = Identity(f"page-{label}", f"page-{label}", label=label)
    settings = ConnectorSettings(server.unix, timeout_s=PATIENCE_S)
    connector = connect(config, kv, settings, identity, chunk_tokens=CHUNK_TOKENS)
    return Engine(config, connector, kv=kv)


@pytest.fixture(scope="module")
def busy_server(server: ServerProcess) -> Iterator[ServerProcess]:
    """One engine has stored a prompt, another has loaded it; both are still attached."""
    engines = [engine_at(server, label) for label in ("writer <blink>", "reader")]
    for engine in engines:
        engine.generate([PROMPT], SamplingParams(max_tokens=2))
        assert engine.drain(10)
    yield server
    for engine in engines:
        engine.close()


def test_a_real_server_with_two_engines_is_shown_whole(busy_server: ServerProcess, open_page: OpenPage) -> None:
    errors: list[str] = []
    page = open_page(busy_server.http, access_token=OPERATOR)
    page.on("console", lambda message: errors.append(message.text) if message.type == "error" else None)
    expect(page.locator("#pill")).to_have_text("Ready")
    for label in ("writer <blink>", "reader"):
        expect(page.locator("#sessions")).to_contain_text(label)
    assert page.locator("#sessions blink").count() == 0, "a label is text, not markup"
    expect(page.locator("#requests")).to_contain_text("Lookup")
    page.locator("#requests select").select_option("all")
    expect(page.locator("#requests")).to_contain_text("Store")
    chunks = len(PROMPT.encode()) // CHUNK_TOKENS
    expect(page.locator("#pool")).to_contain_text(str(chunks))
    assert page.locator("#history svg").count() >= 3
    assert errors == []


def test_the_page_says_so_when_the_real_server_is_gone(open_page: OpenPage) -> None:
    with ServerProcess() as mortal:
        page = open_page(mortal.http, access_token=OPERATOR)
        expect(page.locator("#pill")).to_have_text("Ready")
        mortal.stop()
        expect(page.locator("#pill")).not_to_have_text("Ready")
        expect(page.locator("body")).to_contain_text("trying")


def test_an_empty_real_server_is_shown_as_ready_and_empty(open_page: OpenPage) -> None:
    with ServerProcess() as empty:
        page = open_page(empty.http, access_token=OPERATOR)
        expect(page.locator("#pill")).to_have_text("Ready")
        expect(page.locator("#sessions")).to_contain_text("No engine is attached yet.")
        expect(page.locator("table.list:visible")).to_have_count(0)


def test_figures_of_a_real_server_that_is_stopped_look_old_until_it_goes_on(open_page: OpenPage) -> None:
    with ServerProcess() as stopped:
        page = open_page(stopped.http, access_token=OPERATOR)
        expect(page.locator("#pill")).to_have_text("Ready")
        with frozen(stopped.process):
            wait_phase(page, "stale")
            expect(page.locator("#age")).to_have_text(re.compile(r"figures are \d+\ss old"))
            wait_phase(page, "gone")
        wait_phase(page, "live")
        expect(page.locator("#pill")).to_have_text("Ready")


def test_events_of_a_real_server_are_each_shown_once(open_page: OpenPage) -> None:
    """The page reads the kept events, then those after the last of them."""
    with ServerProcess() as server, Client(server.unix) as client:
        engines = [attach(client, label=f"engine {number}") for number in range(2)]
        page = open_page(server.http, access_token=OPERATOR)
        page.locator("#events select").select_option("engines")
        attached = page.locator("#events li", has_text="Attached")
        expect(attached).to_have_count(2)
        for _ in range(2):  # folded, it reads no more; unfolded, it goes on
            page.locator("#events > summary").click()
            page.wait_for_timeout(1_600)
        expect(attached).to_have_count(2)
        engines.append(attach(client, label="engine 2"))
        expect(attached).to_have_count(3)
        expect(attached.first).to_contain_text("engine 2")
        client.leave(engines[0].session, engines[0].member)
        expect(page.locator("#events li").first).to_contain_text("Left")
        for engine in engines:
            engine.close()


def test_a_real_request_is_explained_and_its_prefix_listed_and_removed(open_page: OpenPage) -> None:
    with ServerProcess() as server, Client(server.unix) as client:
        engine = attach(client, label="explained")
        chain = keys(4, "explained")
        engine.store(chain[:2])
        engine.release(engine.lookup(chain, request="chatcmpl-explained").lease, 0)
        page = open_page(server.http, access_token=OPERATOR)
        page.get_by_role("button", name="Explain chatcmpl-explained").click()
        dialog = page.get_by_role("dialog", name="Request chatcmpl-explained")
        expect(dialog).to_contain_text("Answered with32\u00a0tokens (50\u00a0%)")
        expect(dialog).to_contain_text("as far as the server remembers, they were never stored")
        page.keyboard.press("Escape")
        page.get_by_role("radio", name="Prefix").check()
        prefix = page.locator("#cached tbody tr:visible")
        expect(prefix).to_have_count(1)
        expect(prefix).to_contain_text(chain[0][:12])
        page.get_by_role("button", name="Remove the prefix").click()
        page.get_by_role("button", name="Remove", exact=True).click()
        eventually(lambda: client.lookup(Lookup(namespace=engine.attached.namespace, keys=chain)).hit_tokens == 0)
        engine.leave()


def test_a_prefix_unfolds_by_key_and_by_mouse_page_by_page_and_is_searched_for(open_page: OpenPage) -> None:
    system, answers = keys(4, "system"), [keys(2, f"answer {number}") for number in range(22)]
    with ServerProcess() as server, Client(server.unix) as client:
        engine = attach(client)
        for answer in answers:
            engine.store([*system, *answer])
        engine.store([*system, *answers[0], *keys(1, "left")])
        engine.store([*system, *answers[0], *keys(1, "right")])
        engine.store(keys(1, "alone"))
        client.pin(PinChunks(
            namespace=engine.attached.namespace, keys=[*system, answers[1][0]], duration_s=600, name="support <b>bot"
        ))
        for number in range(2):  # so that it comes first among the branches
            engine.release(engine.lookup([*system, *answers[0]], f"r{number}").lease, 0)
        page = open_page(server.http, access_token=OPERATOR)
        page.get_by_role("radio", name="Prefix").check()
        row = page.locator("#cached tbody tr:visible")
        expect(row).to_have_count(2)
        expect(row.first).to_contain_text(re.compile(
            r"support <b>bot\W+" + system[0][:12] + r", test-model, kept\W*64\W*of 800.*22\W*736\WKiB", re.DOTALL
        ))
        arrow = page.get_by_role("button", name=f"Branches of the prefix {system[0][:12]}")
        expect(arrow).to_have_attribute("aria-expanded", "false")
        expect(page.get_by_role("button", name="Branches of")).to_have_count(1)
        arrow.focus()
        page.keyboard.press("ArrowRight")
        expect(arrow).to_have_attribute("aria-expanded", "true")
        expect(row).to_have_count(2 + 20 + 1)
        expect(row.nth(1)).to_contain_text(f"goes on from {system[0][:12]}")
        page.get_by_role("button", name="2 more branches").click()
        expect(row).to_have_count(2 + 22)
        page.get_by_role("button", name=f"Branches of the prefix {answers[0][0][:12]}").press("Enter")
        expect(row).to_have_count(2 + 22 + 2)
        expect(row.nth(2)).to_contain_text(f"goes on from {answers[0][0][:12]}")
        arrow.focus()
        page.keyboard.press("ArrowLeft")
        expect(row).to_have_count(2)
        expect(arrow).to_be_focused()
        field = page.locator("#cached").get_by_role("searchbox", name="Search")
        field.fill("alone or not")
        expect(page.get_by_text("No cached prefix has that text.")).to_be_visible()
        field.fill("SUPPORT <")
        expect(row).to_have_count(1)
        field.fill(keys(1, "alone")[0][:6])
        expect(row).to_have_count(1)
        expect(row).to_contain_text(keys(1, "alone")[0][:12])
        engine.close()


def test_a_prefix_is_given_a_name_as_it_is_kept_from_the_list(open_page: OpenPage) -> None:
    chain = keys(3, "named")
    with ServerProcess() as server, Client(server.unix) as client:
        engine = attach(client)
        engine.store(chain)
        page = open_page(server.http, access_token=OPERATOR)
        page.get_by_role("radio", name="Prefix").check()
        page.get_by_role("button", name=f"Keep the prefix {chain[0][:12]}").click()
        page.get_by_label("Name, if it is to have one").fill("my bot")
        page.get_by_role("button", name="Keep", exact=True).click()
        row = page.locator("#cached tbody tr:visible")
        expect(row).to_contain_text("my bot")
        expect(row).to_contain_text("kept")
        assert client.prefixes(search="my bot").prefixes[0].last_key == chain[-1]
        engine.close()


def test_requests_of_a_real_server_are_found_by_how_their_ids_begin(open_page: OpenPage) -> None:
    """Finds also requests that are too old for the unfiltered list."""
    with ServerProcess(recent_requests=1000) as server, Client(server.unix) as client:
        engine = attach(client, label="told")
        chain = keys(2, "found by id")
        engine.store(chain)
        engine.lookup(chain, request="needle-1")
        for number in range(150):
            engine.lookup(keys(1, f"hay {number}"), request=f"hay-{number}")
        outcome = Outcome(request="needle-1", prompt_tokens=40, found_tokens=32, loaded_tokens=16, why="load_failed")
        engine.heartbeat(outcomes=[outcome])
        page = open_page(server.http, access_token=OPERATOR)
        rows = page.locator("#requests tbody tr")
        expect(rows).to_have_count(10)
        page.get_by_label("Request id begins with").fill("needle")
        expect(rows).to_have_count(1)
        expect(rows).to_contain_text("needle-1")
        expect(rows).to_contain_text("the load failed")
        page.get_by_label("Request id begins with").fill("nobody & nothing")
        expect(page.locator("#requests .hint")).to_have_text("No recent request has such an id.")
        page.get_by_label("Request id begins with").fill("")
        expect(rows).to_have_count(10)
        page.get_by_role("button", name="more").click()
        expect(rows).to_have_count(20)
        engine.leave()
