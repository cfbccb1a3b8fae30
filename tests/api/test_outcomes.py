"""What engines tell of requests that have ended: it joins the lookups it is about, and is bounded, whoever tells it."""

from __future__ import annotations

import asyncio
import gc
import tracemalloc
from contextlib import closing
from typing import Any

import pytest
from api_helpers import Engine, ServerProcess, attach, keys, post, raw, unique
from paths import ROOT
from server_fixtures import attached_engine

from kvdock.api.record.requests import Detail, RecentRequests
from kvdock.client.client import Client
from kvdock.protocol.errors import ApiError
from kvdock.protocol.hits import COMPUTED
from kvdock.protocol.outcomes import MAX_OUTCOMES, Outcome, view_of
from kvdock.protocol.reports import RequestView

engine = attached_engine(label="teller", has_own_model=True)


def told(request: str, **more: Any) -> Outcome:
    return Outcome(request=request, prompt_tokens=100, found_tokens=64, loaded_tokens=32, local_tokens=16, **more)


def test_every_lookup_of_a_request_shows_its_outcome_and_no_other(client: Client, engine: Engine) -> None:
    name = unique("told")
    for epoch in (1, 2):
        engine.lookup(keys(1, name), request=name, epoch=epoch)
    engine.store(keys(1, name), store=f"{name}-store")
    engine.lookup(keys(1, name), request=f"{name}-other")
    assert {view.outcome for view in client.requests(request=name).requests} == {None}
    engine.heartbeat(outcomes=[told(name, why="load_failed")])
    views = client.requests(request=name).requests
    assert [(view.request, view.kind, view.outcome is not None) for view in views] == [
        (f"{name}-other", "lookup", False), (f"{name}-store", "store", False), (name, "lookup", True),
        (name, "lookup", True),
    ]
    outcome = views[-1].outcome
    assert outcome is not None and outcome.why == "load_failed"
    assert (outcome.prompt_tokens, outcome.local_tokens) == (100, 16)
    assert (outcome.found_tokens, outcome.loaded_tokens) == (64, 32)


def test_a_request_that_looked_up_nothing_is_a_row_of_its_own_once(client: Client, engine: Engine) -> None:
    name = unique("bypassed")
    for _ in range(2):  # the answer to the first heartbeat was lost
        engine.heartbeat(outcomes=[Outcome(request=name, prompt_tokens=70, why="bypassed_media")])
    (view,) = client.requests(request=name).requests
    assert (view.kind, view.tokens, view.hit_tokens, view.label) == ("ended", 70, 0, "teller")
    assert view.session == engine.listed and view.outcome is not None
    assert [run.why for run in view.outcome.runs] == ["bypassed_media", "tail"]
    engine.heartbeat(outcomes=[Outcome(request=name, prompt_tokens=71)])
    assert len(client.requests(request=name).requests) == 2, "another request of that name"


def test_a_request_is_told_once_and_a_later_one_of_its_name_is_another(client: Client, engine: Engine) -> None:
    name = unique("again")
    engine.lookup(keys(1, name), request=name, epoch=1)
    for _ in range(2):
        engine.heartbeat(outcomes=[told(name)])
    engine.lookup(keys(1, name), request=name, epoch=2)
    newer, older = client.requests(request=name).requests
    assert newer.outcome is None and older.outcome is not None
    engine.heartbeat(outcomes=[told(name, why="late")])
    newer, older = client.requests(request=name).requests
    assert newer.outcome is not None and older.outcome is not None
    assert (newer.outcome.why, older.outcome.why) == ("late", "")


def test_an_outcome_joins_the_lookups_of_its_own_session_alone(client: Client, engine: Engine) -> None:
    name = unique("mine")
    other = attach(client, model=unique("model"))
    other.lookup(keys(1, name), request=name)
    engine.heartbeat(outcomes=[told(name)])
    ended, lookup = client.requests(request=name).requests
    assert (ended.kind, ended.session) == ("ended", engine.listed)
    assert (lookup.session, lookup.outcome) == (other.listed, None)
    other.leave()


def test_what_did_not_fit_is_counted(client: Client, engine: Engine) -> None:
    before = client.status().counters
    engine.heartbeat(outcomes=[told(unique("fits"))], outcomes_dropped=7)
    after = client.status().counters
    assert after["dropped_outcomes"] - before["dropped_outcomes"] == 7
    assert after["outcomes"] - before["outcomes"] == 1


def test_a_heartbeat_without_outcomes_is_as_before(server: ServerProcess, engine: Engine) -> None:
    status, answer = post(server.unix, f"/v1/sessions/{engine.session}/heartbeat", {"member": engine.member})
    assert status == 200 and "outcomes" not in answer


GOOD: dict[str, Any] = {"request": "r", "prompt_tokens": 1}


@pytest.mark.security
@pytest.mark.parametrize("outcomes", [
    [{"prompt_tokens": 1}], [{"request": "r"}], [GOOD | {"request": ""}], [GOOD | {"request": "x" * 257}],
    [GOOD | {"why": "x" * 65}], [GOOD | {"why": "a reason in words"}], [GOOD | {"why": "late\n"}],
    [GOOD | {"why": "<b>"}], [GOOD | {"prompt_tokens": -1}], [GOOD | {"loaded_tokens": 1 << 31}],
    [GOOD | {"found_tokens": "1"}], [GOOD | {"more": 1}], [GOOD] * (MAX_OUTCOMES + 1), GOOD,
])
def test_an_outcome_out_of_bounds_is_refused_and_nothing_is_kept(
    server: ServerProcess, client: Client, engine: Engine, outcomes: Any
) -> None:
    before = client.status().counters["outcomes"]
    body = {"member": engine.member, "outcomes": outcomes}
    status, answer = post(server.unix, f"/v1/sessions/{engine.session}/heartbeat", body)
    assert (status, answer["code"]) == (422, "invalid_body")
    assert client.status().counters["outcomes"] == before


@pytest.mark.security
def test_the_list_stays_as_long_as_it_is_whatever_engines_tell() -> None:
    with ServerProcess(recent_requests=50) as server, Client(server.unix) as client, closing(attach(client)) as engine:
        for round_ in range(20):
            engine.lookup(keys(1, "own"), request=f"own-{round_}")
            engine.heartbeat(outcomes=[told(f"{round_}-{number}-{'x' * 200}") for number in range(MAX_OUTCOMES)])
        views = client.requests(limit=1000).requests
        assert len(views) == 50 and {view.kind for view in views} == {"ended"}


NO_DETAIL = Detail(bytes(32))


def view(request: str, kind: Any = "lookup", outcome: Outcome | None = None) -> RequestView:
    return RequestView(
        at=0.0, kind=kind, session="s", label="", request=request, tokens=0, hit_tokens=0, chunks=0, bytes=0,
        took_us=0, outcome=None if outcome is None else view_of(outcome, []),
    )


@pytest.mark.security
def test_nothing_is_remembered_of_requests_that_are_not_listed_any_more() -> None:
    recent = RecentRequests(keep=100)

    def round_of(seed: int) -> None:
        for number in range(300):
            name = f"{seed}-{number}"
            for _ in range(number % 3):
                recent.add("", view(name), NO_DETAIL)
            recent.add("", view(f"{name}-store", "store"), NO_DETAIL)
            if number % 2:
                recent.ended("", view(name, "ended", told(name)), NO_DETAIL)
            recent.ended("", view("the same", "ended", told("the same", why=f"w{number % 5}")), NO_DETAIL)

    round_of(0)
    tracemalloc.start()
    before, _ = tracemalloc.get_traced_memory()
    for seed in range(1, 30):
        round_of(seed)
    after, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert after - before < 200_000, "about what a hundred rows take"
    listed, _ = asyncio.run(recent.view(1000, 0, lambda tenant: True))
    assert len(listed) == 100
    assert set(recent._without_outcome) | set(recent._with_outcome) <= {f"s {one.request}" for one in listed}


def test_no_collection_of_garbage_walks_what_is_remembered_by_request() -> None:
    recent = RecentRequests(keep=1000)
    for number in range(300):
        recent.add("", view(f"{number}"), NO_DETAIL)
        recent.add("", view(f"{number}"), NO_DETAIL)
        if number % 2:
            recent.ended("", view(f"{number}", "ended", told(f"{number}")), NO_DETAIL)
    for remembered in (recent._without_outcome, recent._with_outcome):
        assert len(remembered) == 150 and not gc.is_tracked(remembered)


def test_ids_are_found_by_how_they_begin_over_pages(client: Client, engine: Engine) -> None:
    name = unique("begins")
    for number in range(5):
        engine.lookup(keys(1, name), request=f"{name}-{number}")
        engine.lookup(keys(1, name), request=f"x{name}-{number}")
    found, cursor = [], None
    while True:
        page = client.requests(limit=2, cursor=cursor, request=name)
        found += [view.request for view in page.requests]
        cursor = page.next
        if cursor is None:
            break
    assert found == [f"{name}-{number}" for number in (4, 3, 2, 1, 0)]
    assert client.requests(request=f"{name}-3").requests[0].request == f"{name}-3"
    assert client.requests(request="%_*").requests == []


@pytest.mark.security
def test_how_an_id_begins_has_a_bound(server: ServerProcess) -> None:
    assert raw(server.unix, "GET", f"/v1/requests?request={'x' * 257}")[0] == 422
    with Client(server.unix) as client, pytest.raises(ApiError) as error:
        client.requests(request="x" * 257)
    assert error.value.code == "bad_argument"


def test_the_documentation_has_every_reason_in_the_words_that_people_see() -> None:
    documented = (ROOT / "docs/operate/observe.md").read_text()
    for why, words in COMPUTED.items():
        assert f"| `{why}` | {words} |" in documented, why
