"""Why a request missed: each reason is caused in a real server, and read where people read it."""

from __future__ import annotations

import json
import random
import time
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from api_helpers import MIB, Engine, ServerProcess, access_file, attach, eventually, keys, raw
from server_fixtures import fresh_server

from kvdock.api.access.access_file import entry
from kvdock.client.client import Client
from kvdock.protocol import schemas as s
from kvdock.protocol.admin_schemas import AskedQuota, ClearCache, DeleteChunks, EvictChunks, PatchConfig, PinChunks
from kvdock.protocol.errors import ApiError
from kvdock.protocol.hits import COMPUTED
from kvdock.protocol.keys import KeyChain, Mark, beginnings_of
from kvdock.protocol.outcomes import Outcome
from kvdock.protocol.reports import Break, Explanation, Parting

LARGE = (s.Group(part_bytes=MIB),)

server = fresh_server()


def broken(client: Client, request: str) -> Break:
    """Where the only lookup of the request ended."""
    (story,) = client.explain(request).lookups
    assert story.broke is not None and story.broke.in_words == COMPUTED[story.broke.why]
    assert story.broke.at_tokens == story.hit_tokens
    return story.broke


def texts(said: Explanation) -> list[str]:
    return [one.text for one in said.sentences]


def codes(said: Explanation) -> list[str]:
    return [one.code for one in said.sentences]


def test_a_request_that_found_all_is_told_as_it_was(client: Client) -> None:
    engine = attach(client, label="engine A")
    chain = keys(4)
    engine.store(chain)
    found = engine.lookup(chain, "r1")
    engine.release(found.lease, 0)
    engine.heartbeat(outcomes=[Outcome(
        request="r1", prompt_tokens=70, local_tokens=16, found_tokens=64, loaded_tokens=48, why="load_failed"
    )])
    said = client.explain("r1")
    (story,) = said.lookups
    assert (story.tokens, story.hit_tokens, story.chunks, story.bytes, story.broke) == (64, 64, 4, 65536, None)
    assert story.loaded_us is not None and story.loaded_us > 0 and story.engine == "engine A"
    assert said.outcome is not None and said.outcome.loaded_tokens == 48 and said.model == "test-model"
    text = "\n".join(texts(said))
    assert "engine A asked for 64 tokens, in whole chunks, and the server had the first 64 of them" in text
    assert "4 chunks (64.0 KiB)" in text and "Its prompt had 70 tokens, in this order:" in text
    assert "16 tokens that the engine's own cache had." in texts(said)
    assert "48 tokens loaded from memory." in texts(said)
    assert "6 tokens computed: they do not fill a chunk." in texts(said)
    engine.close()


def tokens_of(count: int, seed: str = "") -> list[int]:
    """The same seed gives the same first tokens."""
    return random.Random(seed).choices(range(100_000), k=count)


def stored(engine: Engine, tokens: list[int], marks: Sequence[Mark] = ()) -> None:
    engine.store(names(engine, tokens, marks), beginnings=beginnings_of(tokens))


def asked(engine: Engine, tokens: list[int], request: str, **more: Any) -> Explanation:
    """What is said of a request with that prompt."""
    engine.lookup(names(engine, tokens), request, beginnings=beginnings_of(tokens), **more)
    return engine.client.explain(request)


def names(engine: Engine, tokens: list[int], marks: Sequence[Mark] = ()) -> list[str]:
    """The keys of the prompt's chunks in the namespace of the engine."""
    namespace = bytes.fromhex(engine.attached.namespace)
    return [key.hex() for key in KeyChain(namespace, engine.attached.chunk_tokens, marks).extend(tokens)]


def test_another_namespace_that_has_the_prompt_is_named_with_what_it_differs_in(client: Client) -> None:
    engine = attach(client, model="/models/Llama", kv_dtype="bfloat16", cache_salt="a secret")
    other = attach(client, model="meta/Llama", kv_dtype="float8_e4m3fn", cache_salt="another secret")
    prompt = tokens_of(70)
    stored(other, prompt)
    said = asked(engine, prompt, "r1")
    assert broken(client, "r1").why == "never_stored"
    (found,) = said.elsewhere
    assert (found.namespace, found.tokens, found.parts) == (other.attached.namespace, 64, None)
    assert found.differs == {
        "model": ["/models/Llama", "meta/Llama"], "kv_dtype": ["bfloat16", "float8_e4m3fn"],
        "cache_salt": ["hidden", "hidden"],
    }
    last = said.sentences[-1]
    assert (last.code, last.advice) == ("other_namespace", "same_identity") and last.advice in said.advice
    assert "has the first 64 tokens of this prompt" in last.text
    assert "kv_dtype: 'bfloat16' here, 'float8_e4m3fn' there" in last.text
    assert "secret" not in json.dumps(texts(said))
    client.clear(ClearCache(namespace=other.attached.namespace))
    assert not asked(engine, prompt, "r2").elsewhere, "nothing of it is there any more"
    engine.close()
    other.close()


def test_a_namespace_that_shares_tensor_parallel_sizes_is_told_from_one_that_does_not(client: Client) -> None:
    with closing(attach(client)) as engine, closing(attach(client, any_tensor_parallel=True)) as other:
        stored(other, tokens_of(70))
        (found,) = asked(engine, tokens_of(70), "r1").elsewhere
        assert found.differs == {"any_tensor_parallel": [None, True]}


def test_other_namespaces_are_named_if_they_have_more_than_was_found(client: Client) -> None:
    engine, salted = attach(client), attach(client, cache_salt="one")
    large = attach(client, chunk_tokens=64, revision="b")
    prompt = tokens_of(4200)
    stored(engine, prompt[:256])
    stored(salted, prompt[:256])
    assert not asked(engine, prompt, "as much").elsewhere
    chunks = names(large, prompt)  # stored in two calls; the first has fewer than 1,024 tokens
    for start, end in ((0, 10), (10, len(chunks))):
        large.store(
            chunks[start:end], parent=chunks[start - 1] if start else None, beginnings=beginnings_of(prompt),
            chunks_before=start,
        )
    stored(salted, [*prompt[:2000], *tokens_of(2200, "own")])
    said = asked(engine, prompt, "more")
    assert broken(client, "more").at_tokens == 256
    assert [(one.namespace, one.tokens, one.parts) for one in said.elsewhere] == [
        (large.attached.namespace, 4096, None),
        (salted.attached.namespace, 1024, Parting(after_tokens=1024, before_tokens=4096)),
    ]
    told = [(one.code, one.advice) for one in said.sentences[-3:]]
    assert told == [("other_namespace", "same_identity"), ("other_namespace", ""), ("other_prompt", "steady_beginning")]
    assert "They part at one of the tokens 1,024 to 4,095" in texts(said)[-1]
    for one in (engine, salted, large):
        one.close()


def test_a_prompt_that_nobody_stored_has_no_lead(client: Client) -> None:
    engine, other = attach(client, kv_dtype="bfloat16"), attach(client, kv_dtype="float8_e4m3fn")
    stored(other, tokens_of(1100))
    template = [*tokens_of(64), *tokens_of(1000, "own")]  # as much as a chat template has in common
    for name, prompt in (("r1", tokens_of(1100, "new")), ("r2", template), ("r3", tokens_of(32, "short"))):
        said = asked(engine, prompt, name)
        assert not said.elsewhere and not said.goes_on and not said.advice
        assert codes(said) == ["asked", "not_given", "starts_anew", "not_ended", "nothing_stored", "ages"]
        assert texts(said)[-1].startswith("The server started ") and "ago, with a new pool, so " in texts(said)[-1]
    engine.close()
    other.close()


@pytest.mark.parametrize(
    ("chunk_tokens", "others", "own", "said", "parts"),
    [
        (16, [(48, 16)], (48, 32), ["diverges"], (48, 64)),
        (16, [(48, 16), (48, 160)], (48, 160), ["diverges", "changes_early"], (48, 64)),
        (16, [(48, 0)], (48, 32), ["longer_than_stored"], None),
        (512, [(80, 600)], (80, 600), ["parts_early", "changes_early"], (64, 256)),
        (512, [(80, 600), (90, 900), (200, 900)], (80, 600), ["parts_early", "changes_early"], (64, 256)),
        (512, [(300, 900)], (300, 900), ["parts_early", "changes_early"], (256, 512)),
        (512, [(3, 600)], (3, 600), ["starts_anew"], None),
    ],
    ids=["late", "early", "ends", "in the first chunk", "several ways", "at its end", "at once"],
)
def test_where_a_prompt_parts_from_what_is_stored(
    client: Client, chunk_tokens: int, others: list[tuple[int, int]], own: tuple[int, int], said: list[str],
    parts: tuple[int, int] | None,
) -> None:
    """Prompts are given as how many first tokens they share, and how many of their own follow."""
    engine = attach(client, chunk_tokens=chunk_tokens)
    for number, (shared, more) in enumerate(others):
        stored(engine, [*tokens_of(shared), *tokens_of(more, f"other {number}")])
    told = asked(engine, [*tokens_of(own[0]), *tokens_of(own[1], "own")], "r1")
    assert codes(told)[: 2 + len(said)] == ["asked", "not_given", *said]
    broke = broken(client, "r1")
    assert broke.parts == (Parting(after_tokens=parts[0], before_tokens=parts[1]) if parts else None)
    assert broke.others == (len(others) if parts else 0)
    assert bool(told.advice) == ("changes_early" in said)
    if parts:
        text = next(one.text for one in told.sentences if one.code == said[0])
        assert f"They part at one of the tokens {parts[0]} to {parts[1] - 1}, counted from 0" in text
    engine.close()


def test_a_prompt_with_the_same_tokens_and_another_image(client: Client) -> None:
    engine, prompt = attach(client), tokens_of(40)
    stored(engine, prompt, [Mark(0, 4, bytes(32))])
    said = asked(engine, prompt, "r1")
    assert codes(said)[:3] == ["asked", "not_given", "same_beginning"] and broken(client, "r1").same_tokens == 16
    assert broken(client, "r1").parts is None
    engine.close()


def test_what_others_go_on_with_where_a_prompt_parts_from_them(client: Client) -> None:
    engine, shared = attach(client), tokens_of(48)
    for name, uses in (("report", 3), ("summary", 1)):
        prompt = [*shared, *tokens_of(32, name)]
        stored(engine, prompt)
        for number in range(uses):
            engine.release(engine.lookup(names(engine, prompt), f"{name}-{number}").lease, 0)
    report = names(engine, [*shared, *tokens_of(32, "report")])
    client.pin(PinChunks(
        namespace=engine.attached.namespace, keys=report[4:5], duration_s=60, name="weekly report"
    ))
    prompt = [*shared, *tokens_of(64, "own")]
    engine.lookup(names(engine, prompt), "r1")
    stored(engine, prompt)
    said = client.explain("r1")
    assert [(one.key, one.labels) for one in said.goes_on] == [
        (report[3], ["weekly report"]), (names(engine, [*shared, *tokens_of(32, "summary")])[3], []),
    ]
    text = next(one.text for one in said.sentences if one.code == "goes_on")
    assert "'weekly report' (32.0 KiB, 3 uses, last used " in text
    assert names(engine, prompt)[3][:12] not in text
    engine.close()


def test_positions_in_a_prompt_whose_tail_was_looked_up_count_from_its_first_token(client: Client) -> None:
    engine = attach(client)
    trunk = keys(3)
    engine.store([*trunk, *keys(1, "one way")])
    engine.store(keys(1, "whole"))
    engine.lookup([*trunk, *keys(2, "own")], "tail")
    engine.lookup(keys(1, "new"), "new")
    engine.heartbeat(outcomes=[
        Outcome(request="tail", prompt_tokens=200, local_tokens=80, asked_from=80, found_tokens=128, loaded_tokens=48),
        Outcome(request="new", prompt_tokens=40, local_tokens=16, asked_from=16),
    ])
    said = client.explain("tail")
    assert said.outcome is not None and said.outcome.asked_from == 80
    assert [(run.tokens, run.source or run.why) for run in said.outcome.runs] == [
        (80, ""), (48, "memory"), (32, "never_stored"), (32, "not_asked"), (8, "tail"),
    ]
    text = "\n".join(texts(said))
    assert "The 32 tokens after the first 128 were not given" in text and "part at one of the tokens 128 to 143" in text
    said = client.explain("new")
    assert "The 16 tokens after the first 16 were not given" in "\n".join(texts(said))
    assert "starts_anew" not in codes(said), "its first chunk was not looked up"
    engine.close()


def test_a_request_is_found_by_how_its_id_begins_and_by_its_trace(client: Client) -> None:
    engine = attach(client)
    trace = "4bf92f3577b34da6a3ce929d0e0e4736"
    engine.lookup(keys(1), "chatcmpl-abc-0-1a2b3c4d", traceparent=f"00-{trace}-00f067aa0ba902b7-01")
    engine.lookup(keys(1), "chatcmpl-xyz")
    for name in ("chatcmpl-abc", "chatcmpl-abc-0-1a2b3c4d", trace, trace.upper(), f"00-{trace}-00f067aa0ba902b7-01"):
        assert client.explain(name).request == "chatcmpl-abc-0-1a2b3c4d", name
    engine.close()


def test_misses_are_remembered_when_the_list_has_forgotten_them() -> None:
    with ServerProcess(recent_requests=8) as server, Client(server.unix) as client:
        engine = attach(client)
        engine.lookup(keys(2), "missed")
        engine.heartbeat(outcomes=[Outcome(request="missed", prompt_tokens=40, why="late")])
        for number in range(50):
            engine.lookup(keys(1), f"other-{number}")
        assert "missed" not in {row.request for row in client.requests(limit=100).requests}
        said = client.explain("missed")
        assert said.outcome is not None and [run.why for run in said.outcome.runs] == ["never_stored", "tail"]
        assert broken(client, "other-30").why == "never_stored", "nor is one whose engine reports no ends"
        engine.close()


def test_hits_are_remembered_for_minutes(client: Client) -> None:
    engine = attach(client)
    engine.store(keys(1))
    for number in range(2000):  # those of 40 s of a busy server
        engine.release(engine.lookup(keys(1), f"hit-{number}").lease, 0)
    assert client.explain("hit-0").lookups[0].hit_tokens == 16
    engine.close()


def test_what_stores_pushed_out(client: Client) -> None:
    engine = attach(client, groups=LARGE)
    chain = keys(2, "old")
    engine.store(chain)
    engine.release(engine.lookup(chain, "before").lease, 0)
    time.sleep(2.1)  # uses are dated to the second
    for number in range(20):
        engine.store(keys(1, f"other {number}"))
    engine.lookup(chain, "r1")
    broke = broken(client, "r1")
    assert broke.why == "room" and broke.at_tokens in (0, 16)
    assert broke.gone_s is not None and broke.gone_s < 60
    assert broke.unused_s is not None and 0.5 < broke.unused_s < 60
    assert "evicted to make room for a store" in texts(client.explain("r1"))[1]
    engine.close()


def test_what_was_evicted_ahead() -> None:
    with ServerProcess(pool_bytes=8 * MIB, segment_bytes=8 * MIB) as server, Client(server.unix) as client:
        engine = attach(client, groups=LARGE)
        for number in range(6):
            engine.store(keys(1, f"{number}"))
        client.configure(PatchConfig(high_water=0.9, low_water=0.8))
        eventually(lambda: client.status().counters["evicted_chunks"] >= 5)
        engine.lookup(keys(1, "0"), "r1")
        assert broken(client, "r1").why == "ahead"
        engine.close()


def test_what_an_operator_evicted() -> None:
    with ServerProcess(pool_bytes=8 * MIB, segment_bytes=8 * MIB) as server, Client(server.unix) as client:
        engine = attach(client, groups=LARGE)
        engine.store(keys(1, "asked for"))
        assert client.evict(EvictChunks(free_bytes=8 * MIB)).chunks == 1
        engine.lookup(keys(1, "asked for"), "r1")
        assert broken(client, "r1").why == "evicted"
        assert "an operator evicted them" in " ".join(one.text for one in client.explain("r1").sentences)
        eventually(lambda: "an operator has evicted 1 chunks" in server.log_text())
        assert "for room in the pool" not in server.log_text()
        engine.close()


def test_what_went_with_its_segment() -> None:
    with ServerProcess(pool_bytes=8 * MIB, segment_bytes=4 * MIB) as server, Client(server.unix) as client:
        engine = attach(client, groups=LARGE)
        for number in range(6):
            engine.store(keys(1, f"{number}"))
        client.configure(PatchConfig(pool_bytes=4 * MIB))
        eventually(lambda: client.status().pool.segments == 1)
        for number in range(6):
            engine.lookup(keys(1, f"{number}"), f"r{number}")
        stories = [client.explain(f"r{number}").lookups[0] for number in range(6)]
        why = [story.broke.why for story in stories if story.broke is not None]
        assert why and set(why) == {"shrunk"}
        engine.close()


def test_what_a_quota_pushed_out(tmp_path: Path) -> None:
    token = "tenant-token-" + "t" * 32
    entries = [entry("team-a", token, ["engine"], "a")]
    with (
        ServerProcess(access_file=str(access_file(tmp_path, *entries))) as server, Client(server.unix) as operator,
        Client(server.unix, access_token=token) as client,
    ):
        operator.configure(PatchConfig(tenants={"a": AskedQuota(chunks=2)}))
        engine = attach(client)
        for number in range(4):
            engine.store(keys(1, f"{number}"))
        engine.lookup(keys(1, "0"), "r1")
        assert broken(client, "r1").why == "quota"
        engine.close()


def test_what_operators_took_and_what_was_damaged(client: Client) -> None:
    engine = attach(client)
    namespace = engine.attached.namespace
    for why in ("deleted", "mismatched", "cleared"):
        engine.store(keys(2, why))
        if why == "deleted":
            client.delete(DeleteChunks(namespace=namespace, keys=keys(2, why)[1:]))
        elif why == "cleared":
            client.clear(ClearCache(namespace=namespace))
        else:
            lease = engine.lookup(keys(2, why), "reads").lease
            assert lease is not None
            client.mismatch(s.ReportMismatch(session=engine.session, lease=lease, chunks=[1]))
            engine.release(lease, 0)
        engine.lookup(keys(2, why), why)
        broke = broken(client, why)
        assert (broke.why, broke.at_tokens) == (why, 0 if why == "cleared" else 16)
    engine.close()


def test_what_another_engine_is_storing(client: Client) -> None:
    engine, other = attach(client), attach(client)
    granted = other.reserve(keys(3))
    engine.lookup(keys(3), "r1")
    assert broken(client, "r1").why == "being_stored"
    other.commit(granted)
    engine.heartbeat(outcomes=[Outcome(request="r1", prompt_tokens=50, found_tokens=48, loaded_tokens=32)])
    waited = client.explain("r1").sentences[1]
    assert (waited.code, waited.advice, waited.text) == (
        "waited", "",
        "Of the 48 tokens, 32 came while the request waited: another engine computed and stored them.",
    )
    engine.lookup([*keys(3), *keys(1, "new")], "r2")
    engine.heartbeat(outcomes=[Outcome(request="r2", prompt_tokens=70, found_tokens=48, loaded_tokens=48)])
    assert "waited" not in codes(client.explain("r2")), "what was there at once was not waited for"
    engine.close()
    other.close()


def test_what_was_waited_for_is_told_of_an_engine_that_reports_no_ends(client: Client) -> None:
    engine, other = attach(client), attach(client)
    other.store(keys(1))
    granted = other.reserve(keys(3))
    engine.lookup(keys(3), "r1")
    other.commit(granted)
    engine.release(engine.lookup(keys(3), "r1").lease, 0)
    said = client.explain("r1")
    assert texts(said)[1] == (
        "Of the 32 tokens after the first 16, 32 came while the request waited: another engine computed and stored "
        "them."
    )
    (story,) = said.lookups
    assert (story.hit_tokens, story.last_hit_tokens, story.chunks, story.bytes) == (16, 48, 3, 3 * 16384)
    assert "3 chunks (48.0 KiB)" in texts(said)[2]
    engine.close()
    other.close()


def test_what_a_cap_or_page_locking_held_back() -> None:
    with ServerProcess(session_cap=0.2) as server, Client(server.unix) as client:
        engine = attach(client, groups=LARGE)
        for number in range(8):
            engine.store(keys(1, f"{number}"))
        chain = keys(5, "long")
        for at in range(len(chain)):
            engine.store(chain[: at + 1])
        engine.lookup(chain, "r1")
        broke = broken(client, "r1")
        assert broke.why == "held_bytes" and broke.at_tokens == 3 * 16
        engine.close()
    with ServerProcess(pool_bytes=8 * MIB, segment_bytes=4 * MIB) as server, Client(server.unix) as client:
        engine = attach(client, groups=LARGE)
        for number in range(5):
            engine.store(keys(1, f"{number}"))
        engine.heartbeat(pinned_through=1)
        engine.lookup(keys(1, "4"), "r1")
        assert broken(client, "r1").why == "pinning"
        engine.close()


def test_a_request_that_is_not_known_is_refused_by_name(client: Client) -> None:
    with pytest.raises(ApiError) as refused:
        client.explain("nobody's")
    assert (refused.value.code, refused.value.found) == ("unknown_request", "nobody's")


def test_a_tenant_explains_only_its_own(tmp_path: Path) -> None:
    tokens = {name: f"{name}-token-" + "t" * 32 for name in "ab"}
    entries = [entry(name, token, ["engine"], name) for name, token in tokens.items()]
    with ServerProcess(access_file=str(access_file(tmp_path, *entries))) as server:
        with Client(server.unix, access_token=tokens["a"]) as client:
            engine = attach(client)
            engine.lookup(keys(1), "of a")
            assert client.explain("of a").lookups
            engine.close()
        for token, status in ((tokens["a"], 200), (tokens["b"], 404)):
            asked = {"Authorization": f"Bearer {token}"}
            assert raw(server.http, "GET", "/v1/requests/of%20a/explain", headers=asked)[0] == status


def test_the_latest_of_an_id_is_explained_with_what_it_stored(client: Client) -> None:
    engine = attach(client)
    engine.lookup(keys(2), "r")
    engine.lookup(keys(2), "r", epoch=1)
    engine.store(keys(2), store="r")
    said: Explanation = client.explain("r")
    assert len(said.lookups) == 2 and said.lookups[0].at <= said.lookups[1].at
    assert "32 tokens were to be stored as r; 0 of them were there already." in texts(said)
    engine.close()


def test_of_an_id_that_several_engines_use_each_is_explained_by_its_session(client: Client) -> None:
    first, second = attach(client, label="engine A"), attach(client)
    first.store(keys(2))
    for engine, asked in ((first, keys(3)), (second, keys(2))):
        engine.release(engine.lookup(asked, "request-0").lease, 0)
    latest = client.explain("request-0")
    assert latest.lookups[0].engine == second.listed and latest.lookups[0].tokens == 32
    assert texts(latest)[-1] == (
        "Other engines had requests with this id, which are explained if their session is named: "
        f"engine A (session {first.listed})."
    )
    assert client.explain("request-0", session=first.listed).lookups[0].tokens == 48
    with pytest.raises(ApiError) as refused:
        client.explain("request-0", session="nobody's")
    assert refused.value.code == "unknown_request"
    first.close()
    second.close()


@pytest.mark.parametrize("name", ["a/b", "/", "x/explain", "50%2F50", "é ü?#&"])
def test_any_id_that_an_engine_may_choose_is_explained(client: Client, name: str) -> None:
    engine = attach(client)
    engine.lookup(keys(1), name)
    assert client.explain(name).request == name
    engine.close()
