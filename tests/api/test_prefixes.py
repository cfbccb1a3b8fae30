"""GET /v1/prefixes: where prefixes fork, what goes on from there, their labels, and the search for them."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from api_helpers import Engine, ServerProcess, access_file, attach, keys
from app_rig import OWN, opened

from kvdock.api.access.access_file import entry
from kvdock.api.access.peer import Peer
from kvdock.api.record.labels import MOST_LABEL_KEYS, MOST_LABELS_OF_TENANT
from kvdock.api.reports.contents import MOST_QUESTIONS, Contents
from kvdock.client.client import Client
from kvdock.protocol.admin_schemas import PinChunks
from kvdock.protocol.errors import ApiError
from kvdock.protocol.reports import Prefixes, PrefixView
from kvdock.protocol.schemas import Hint

CHUNK_BYTES = 16384
SYSTEM = keys(4, "system")
ANSWERS = [keys(2 + number, f"answer {number}") for number in range(3)]


@pytest.fixture
def forked() -> Iterator[Engine]:
    """An engine at a server of its own that has stored three prompts with a common part."""
    with ServerProcess() as server, Client(server.unix) as client:
        engine = attach(client)
        for answer in ANSWERS:
            engine.store([*SYSTEM, *answer])
        yield engine
        engine.close()


def below(engine: Engine, row: PrefixView, limit: int | None = None, cursor: str | None = None) -> Prefixes:
    return engine.client.prefixes(limit, cursor=cursor, namespace=row.namespace, below=row.fork_key)


def labels(client: Client, search: str = "") -> dict[str, list[str]]:
    """By first key. A count serves those who ask within a second."""
    return {one.key: one.labels for one in client.prefixes(search=search).prefixes}


def label(engine: Engine, chain: list[str], name: str) -> None:
    engine.client.hint(Hint(session=engine.session, member=engine.member, keys=chain, label=name))


def keep(engine: Engine, chain: list[str], name: str = "", duration_s: float = 600) -> int:
    return engine.client.pin(PinChunks(
        namespace=engine.attached.namespace, keys=chain, duration_s=duration_s, name=name or msgspec.UNSET
    )).chunks


# --------------------------------------------------------------------------- where they fork


def test_a_prefix_is_listed_up_to_its_fork_and_unfolds_into_branches(forked: Engine) -> None:
    (row,) = forked.client.prefixes().prefixes
    assert (row.key, row.chunks, row.bytes) == (SYSTEM[0], 13, 13 * CHUNK_BYTES)
    assert (row.fork_key, row.shared_tokens, row.shared_bytes) == (SYSTEM[-1], 64, 4 * CHUNK_BYTES)
    assert (row.branches, row.branch_bytes, row.is_kept, row.labels) == (3, 9 * CHUNK_BYTES, False, [])
    found = below(forked, row)
    assert {(one.key, one.fork_key, one.shared_tokens, one.branches) for one in found.prefixes} == {
        (answer[0], answer[-1], 16 * len(answer), 0) for answer in ANSWERS
    }
    assert (found.prefix_count, found.next) == (3, None)
    assert below(forked, found.prefixes[0]).prefixes == []


def test_branches_come_page_by_page(forked: Engine) -> None:
    (row,) = forked.client.prefixes().prefixes
    seen: list[str] = []
    cursor: str | None = None
    for page in range(3):
        found = below(forked, row, limit=1, cursor=cursor)
        seen += [one.key for one in found.prefixes]
        cursor = found.next
        assert (cursor is None) == (page == 2) and found.prefix_count == 3
    assert sorted(seen) == sorted(answer[0] for answer in ANSWERS)


def test_what_is_asked_for_in_part_or_wrongly_is_refused(forked: Engine) -> None:
    space = forked.attached.namespace
    for named, key in (("", SYSTEM[0]), (space, ""), (space, "ab"), (space, "x" * 64)):
        with pytest.raises(ApiError, match="namespace and below go together"):
            forked.client.prefixes(namespace=named, below=key)
    with pytest.raises(ApiError) as unknown:
        forked.client.prefixes(namespace="00" * 32, below=SYSTEM[0])
    assert unknown.value.code == "unknown_namespace"


# --------------------------------------------------------------------------- labels


def test_a_kept_prefix_has_its_name_until_it_is_kept_no_longer(forked: Engine) -> None:
    assert keep(forked, [*SYSTEM, *ANSWERS[1], *keys(1, "absent")], "the bot") == 7
    (row,) = forked.client.prefixes().prefixes
    assert (row.labels, row.is_kept) == (["the bot"], True)
    branches = {one.key: (one.labels, one.is_kept) for one in below(forked, row).prefixes}
    assert branches == {
        answer[0]: (["the bot"] if at == 1 else [], at == 1) for at, answer in enumerate(ANSWERS)
    }
    keep(forked, SYSTEM, "the bot")
    assert {one.key: one.labels for one in below(forked, row).prefixes} == {answer[0]: [] for answer in ANSWERS}
    keep(forked, [*SYSTEM, *ANSWERS[1]], duration_s=0)
    (row,) = forked.client.prefixes().prefixes
    assert (row.labels, row.is_kept) == ([], False)


@pytest.mark.parametrize("name", ["\u202eabc", "a\u200bb", " ends", "two\nlines", "a\u3164"])
def test_a_name_that_cannot_be_read_is_refused(forked: Engine, name: str) -> None:
    with pytest.raises(ApiError) as why:
        keep(forked, SYSTEM, name)
    assert why.value.code == "bad_argument"
    with pytest.raises(ApiError) as why:
        label(forked, SYSTEM, name)
    assert why.value.code == "invalid_body"
    assert labels(forked.client) == {SYSTEM[0]: []}


def test_a_name_that_is_too_long_is_refused(forked: Engine) -> None:
    assert keep(forked, SYSTEM, "n" * 64) == 4
    with pytest.raises(ApiError) as why:
        keep(forked, SYSTEM, "n" * 65)
    assert why.value.code == "invalid_body"


def test_a_clients_label_names_what_its_requests_share(forked: Engine) -> None:
    label(forked, [*SYSTEM, *ANSWERS[0]], "bot")
    (row,) = forked.client.prefixes().prefixes
    assert row.labels == ["bot"]
    assert {one.key: one.labels for one in below(forked, row).prefixes}[ANSWERS[0][0]] == ["bot"]
    label(forked, [*SYSTEM, *ANSWERS[1]], "bot")
    keep(forked, SYSTEM[:1])  # the next calls get a new count
    (row,) = forked.client.prefixes().prefixes
    assert row.labels == ["bot"]
    assert {tuple(one.labels) for one in below(forked, row).prefixes} == {()}, "it has moved to the common part"


def test_a_label_is_no_hint_and_goes_alone(forked: Engine) -> None:
    with pytest.raises(ApiError, match="a label is no hint"):
        forked.client.hint(Hint(
            session=forked.session, member=forked.member, keys=SYSTEM, label="bot", priority=3, duration_s=5
        ))


def test_the_labels_of_a_tenant_are_bounded_and_the_oldest_goes(forked: Engine) -> None:
    for number in range(MOST_LABELS_OF_TENANT):
        label(forked, SYSTEM, f"label {number:03}")
    label(forked, SYSTEM, "label 000")  # it is used again
    label(forked, [*SYSTEM, *keys(MOST_LABEL_KEYS, "long")], "one more")
    assert forked.client.prefixes(search="label 001").prefixes == []
    assert len(forked.client.prefixes(search="label 000").prefixes) == 1
    (row,) = forked.client.prefixes().prefixes
    assert len(row.labels) == 8, "a row shows at most eight labels"


def test_labels_are_kept_for_the_next_server_of_the_pool() -> None:
    with ServerProcess(on_exit="keep") as server:
        with Client(server.unix) as client:
            engine = attach(client)
            for answer in ANSWERS:
                engine.store([*SYSTEM, *answer])
            label(engine, [*SYSTEM, *ANSWERS[0]], "bot")
            keep(engine, [*SYSTEM, *ANSWERS[1]], "named")
            engine.close()
        server.stop()
        with ServerProcess(**{**server.settings, "on_exit": "remove"}) as second, Client(second.unix) as client:
            (row,) = client.prefixes().prefixes
            assert sorted(row.labels) == ["bot", "named"] and row.is_kept
            engine = attach(client)
            label(engine, [*SYSTEM, *ANSWERS[0], *keys(1, "more")], "bot")
            found = {one.key: one.labels for one in below(engine, row).prefixes}
            assert found == {ANSWERS[0][0]: ["bot"], ANSWERS[1][0]: ["named"], ANSWERS[2][0]: []}
            engine.close()


# --------------------------------------------------------------------------- search


def test_prefixes_are_found_by_label_model_tenant_and_key(tmp_path: Path) -> None:
    tokens = {name: f"{name}-token-" + "t" * 32 for name in ("red", "blue")}
    entries = [entry(name, token, ["engine"], f"team-{name}") for name, token in tokens.items()]
    with ServerProcess(access_file=str(access_file(tmp_path, *entries))) as server:
        for name, token in tokens.items():
            with Client(server.unix, access_token=token) as client:
                engine = attach(client, model=f"Model-{name}")
                engine.store(keys(3, name))
                engine.store(keys(3, f"other {name}"))
                label(engine, keys(3, name), f"Bot {name}")
                engine.close()
        firsts = {name: {keys(1, name)[0], keys(1, f"other {name}")[0]} for name in tokens}
        with Client(server.unix) as operator:
            assert set(labels(operator, search="MODEL-red")) == firsts["red"]
            assert set(labels(operator, search="team-blue")) == firsts["blue"]
            assert labels(operator, search="bot red") == {keys(1, "red")[0]: ["Bot red"]}
            assert set(labels(operator, search="bot")) == {keys(1, name)[0] for name in tokens}
            assert set(labels(operator, search=keys(3, "blue")[2][:8].upper())) == {keys(1, "blue")[0]}
            assert labels(operator, search=keys(3, "blue")[2][:3]) == {}, "too few digits"
            assert labels(operator, search="nothing has this") == {}
        with Client(server.unix, access_token=tokens["red"]) as client:
            found = client.prefixes(search="bot")
            assert [one.key for one in found.prefixes] == [keys(1, "red")[0]] and found.prefix_count == 1
            assert labels(client, search="model-blue") == labels(client, search="team-blue") == {}
            with Client(server.unix) as operator:
                (other,) = {one.namespace for one in operator.prefixes(search="team-blue").prefixes}
            with pytest.raises(ApiError) as why:
                client.prefixes(namespace=other, below=keys(3, "blue")[0])
            assert why.value.code == "unknown_namespace"


@pytest.mark.security
def test_a_tenant_that_searches_much_leaves_others_room() -> None:
    async def story(contents: Contents) -> None:
        async def search(peer: Peer, text: str) -> str:
            try:
                await contents.prefixes(peer, 5, search=text)
            except ApiError as refusal:
                return refusal.code
            return "found"

        async def all_of(peer: Peer, count: int) -> list[asyncio.Task[str]]:
            tasks = [asyncio.create_task(search(peer, f"{peer.tenant} {number}")) for number in range(count)]
            await asyncio.sleep(0)  # each of them waits for its census now, or is refused
            return tasks

        one, two = (OWN._replace(scopes=frozenset({"read"}), tenant=name) for name in ("a", "b"))
        async with contents._turn:
            asked = [await all_of(peer, MOST_QUESTIONS) for peer in (one, two, OWN)]
        found = [Counter(await asyncio.gather(*tasks)) for tasks in asked]
        half = MOST_QUESTIONS // 2
        assert found == [{"found": half, "too_busy": half}] * 2 + [{"too_busy": MOST_QUESTIONS}]
        assert not contents._waiting
        async with contents._turn:
            asked = [await all_of(OWN, MOST_QUESTIONS + 1)]
        assert Counter(await asyncio.gather(*asked[0])) == {"found": MOST_QUESTIONS, "too_busy": 1}

    with opened() as rig:
        asyncio.run(story(rig.parts.handlers.lists._contents))
