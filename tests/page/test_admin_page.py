"""The changes that an administrator can make on the status page of a real server: each asks first, with its
consequences."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import page_helpers as say
import pytest
from api_helpers import OPERATOR, Engine, ServerProcess, access_file, attach, eventually, keys, unique
from page_helpers import OpenPage
from playwright.sync_api import Locator, Page, expect

from kvdock.api.access.access_file import entry
from kvdock.client.client import Client
from kvdock.protocol.admin_schemas import EvictChunks
from kvdock.protocol.schemas import Lookup

pytest_plugins = ["page_fixtures"]
pytestmark = pytest.mark.page

READER = "reader-" + "1" * 32
STORED = keys(4, "administration")
EVERYTHING = EvictChunks(free_bytes=16 << 20)


@pytest.fixture
def busy(tmp_path: Path) -> Iterator[tuple[ServerProcess, Engine]]:
    """A separate server, because the changes would disturb other tests. One engine has stored four chunks."""
    path = access_file(tmp_path, entry("reader", READER, ["read"], ""))
    with ServerProcess(access_file=str(path)) as server, Client(server.unix) as client:
        engine = attach(client, model=unique("model"))
        engine.store(STORED)
        yield server, engine
        engine.leave()


@pytest.fixture
def admin_page(busy: tuple[ServerProcess, Engine], open_page: OpenPage) -> Page:
    page = open_page(busy[0].http, access_token=OPERATOR)
    page.locator("#admin > summary").click()
    expect(page.get_by_role("button", name="Clear…")).to_be_visible()
    return page


def form(page: Page, title: str) -> Locator:
    return page.locator("#admin form", has=page.get_by_role("heading", name=title, exact=True))


def found(engine: Engine) -> int:
    return engine.client.lookup(Lookup(namespace=engine.attached.namespace, keys=STORED)).hit_tokens


@pytest.mark.security
def test_a_token_that_may_only_read_is_shown_no_administration(
    busy: tuple[ServerProcess, Engine], open_page: OpenPage
) -> None:
    page = open_page(busy[0].http, access_token=READER)
    expect(page.locator("#sessions")).to_contain_text(busy[1].body.instance)
    expect(page.locator("#admin")).to_be_hidden()
    page.wait_for_timeout(1_500)
    expect(page.locator("#admin")).to_be_hidden()
    expect(page.locator("#cached")).to_be_visible()


def test_it_says_whether_what_is_cached_survives_a_restart(admin_page: Page) -> None:
    expect(admin_page.locator("#admin .advice")).to_contain_text("all cached chunks are lost. A takeover keeps them")


@pytest.mark.security
def test_clearing_says_what_is_lost_and_does_nothing_until_it_is_confirmed(
    busy: tuple[ServerProcess, Engine], admin_page: Page
) -> None:
    _, engine = busy
    clear = form(admin_page, "Clear")
    clear.get_by_role("button", name="Clear…").click()
    question = admin_page.get_by_role("dialog", name="Clear the whole cache?")
    expect(question).to_contain_text("4\u00a0chunks (64.0\u00a0KiB) will not be found any more, of every model")
    expect(question).to_contain_text("This cannot be undone.")
    expect(question.get_by_role("button", name="Cancel")).to_be_focused()
    admin_page.keyboard.press("Escape")
    expect(question).to_be_hidden()
    assert found(engine) == 64
    clear.locator("select").select_option(engine.attached.namespace)
    clear.get_by_role("button", name="Clear…").click()
    question = admin_page.get_by_role("dialog", name=f"Clear {engine.body.manifest.model}")
    question.get_by_role("button", name="Clear", exact=True).click()
    expect(clear.locator(".said")).to_have_text("Cleared 4\u00a0chunks.")
    assert found(engine) == 0
    expect(admin_page.locator("#tiles .tile", has_text="Cached")).to_contain_text("0\u00a0B")


def test_evicting_says_how_much_goes_and_refuses_what_is_no_size(
    busy: tuple[ServerProcess, Engine], admin_page: Page
) -> None:
    evict = form(admin_page, "Free memory")
    evict.locator("input").fill("some")
    evict.get_by_role("button", name="Evict…").click()
    expect(evict.locator(".said")).to_have_text('Not done: "some" is not a size: write it as 8 GiB.')
    evict.locator("input").fill("1 MiB")
    evict.get_by_role("button", name="Evict…").click()
    expect(admin_page.get_by_role("dialog")).to_contain_text("so nothing is evicted")
    admin_page.get_by_role("button", name="Cancel").click()
    evict.locator("input").fill("16 MiB")
    evict.get_by_role("button", name="Evict…").click()
    question = admin_page.get_by_role("dialog")
    expect(question).to_contain_text("that can be hit are evicted, the least valuable chunks first")
    admin_page.get_by_role("button", name="Evict", exact=True).click()
    expect(evict.locator(".said")).to_contain_text("Evicted 4\u00a0chunks (64.0\u00a0KiB)")
    assert found(busy[1]) == 0


def test_a_kept_prefix_survives_eviction_and_goes_once_it_is_unpinned(
    busy: tuple[ServerProcess, Engine], admin_page: Page
) -> None:
    server, engine = busy
    keep = form(admin_page, "Keep a prefix")
    keep.get_by_label("Key of").fill("beef")
    keep.get_by_role("button", name="Keep…").click()
    expect(keep.locator(".said")).to_have_text("Not done: a key has 64 hex digits, this has 4 characters.")
    keep.get_by_label("Key of").fill(STORED[-1])
    keep.get_by_role("button", name="Keep…").click()
    expect(admin_page.get_by_role("dialog")).to_contain_text("not evicted for an hour")
    admin_page.get_by_role("button", name="Keep", exact=True).click()
    expect(keep.locator(".said")).to_have_text("Kept for an hour.")
    with Client(server.unix) as client:
        client.evict(EVERYTHING)
        assert found(engine) == 64, "what precedes a kept chunk stays as well"
        keep.get_by_label("For").select_option("0")
        keep.get_by_role("button", name="Keep…").click()
        admin_page.get_by_role("button", name="Stop", exact=True).click()
        expect(keep.locator(".said")).to_have_text("Not kept any more.")
        client.evict(EVERYTHING)
    assert found(engine) == 0


def test_a_prefix_is_kept_from_the_list_as_far_as_its_lookups_found_it(
    busy: tuple[ServerProcess, Engine], open_page: OpenPage
) -> None:
    server, engine = busy
    engine.release(engine.lookup(STORED[:3], "reader").lease, 0)  # before the page asks: what is counted lasts a while
    page = open_page(server.http, access_token=OPERATOR)
    page.get_by_role("radio", name="Prefix").check()
    named = f"the prefix {STORED[0][:12]}"
    page.get_by_role("button", name=f"Keep {named}").click()
    expect(page.get_by_role("dialog")).to_contain_text("Its first 48\u00a0tokens")
    page.get_by_role("button", name="Keep", exact=True).click()
    expect(page.locator("#cached tbody tr:visible")).to_contain_text("Kept for an hour.")
    with Client(server.unix) as client:
        client.evict(EVERYTHING)
    assert found(engine) == 48
    page.get_by_role("button", name=f"Remove {named}").click()
    page.get_by_role("button", name="Remove", exact=True).click()
    expect(page.get_by_text("No prefix is cached.")).to_be_visible()
    assert found(engine) == 0


def test_limits_are_changed_together_and_wrong_ones_are_refused_in_words(
    busy: tuple[ServerProcess, Engine], admin_page: Page
) -> None:
    server, _ = busy
    limits = form(admin_page, "Limits")
    limits.get_by_role("button", name="Change…").click()
    expect(limits.locator(".said")).to_have_text("All values are as they were.")
    limits.get_by_label("Session cap").fill("half")
    limits.get_by_role("button", name="Change…").click()
    expect(limits.locator(".said")).to_have_text('Not done: "half" is not a share: write it as 65 %.')
    limits.get_by_label("Session cap").fill("50 %")
    limits.get_by_label("Eviction").select_option("lru")
    limits.get_by_label("Session grants").fill("17")
    limits.get_by_role("button", name="Change…").click()
    question = say.plain(admin_page.get_by_role("dialog").inner_text())
    assert "Session cap: 100 % → 50 %. Session grants: 4096 → 17. Eviction: adaptive → lru." in question
    admin_page.get_by_role("button", name="Change", exact=True).click()
    expect(limits.locator(".said")).to_have_text("Changed.")
    with Client(server.unix) as client:
        now = client.config().limits
        assert (now.session_cap, now.session_grants, now.eviction) == (0.5, 17, "lru")
    limits.get_by_label("Pool bytes").fill("900 TiB")
    limits.get_by_role("button", name="Change…").click()
    admin_page.get_by_role("button", name="Change", exact=True).click()
    expect(limits.locator(".said")).to_contain_text("Not done: it answered")
    eventually(lambda: "900" in limits.get_by_label("Pool bytes").input_value())


def test_a_smaller_pool_says_what_is_lost(busy: tuple[ServerProcess, Engine], admin_page: Page) -> None:
    limits = form(admin_page, "Limits")
    limits.get_by_label("Pool bytes").fill("8 MiB")
    limits.get_by_role("button", name="Change…").click()
    question = admin_page.get_by_role("dialog", name="Change limits?")
    expect(question).to_contain_text("Pool bytes: 16.0 MiB → 8.00 MiB.")
    expect(question).to_contain_text("may be evicted: whole segments are emptied and freed.")
    admin_page.get_by_role("button", name="Cancel").click()
    with Client(busy[0].unix) as client:
        assert client.config().limits.pool_bytes == 16 << 20
