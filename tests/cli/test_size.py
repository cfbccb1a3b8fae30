"""`kvdock size`: the curve of a real server after lookups, and the formula before there are any."""

from __future__ import annotations

import json
from contextlib import closing

import pytest
from api_helpers import ServerProcess, attach, keys
from cli_helpers import kvdock, refusal

from kvdock.cli.size import Users, by_formula, share_in_words
from kvdock.client.client import Client
from kvdock.protocol import schemas as s
from kvdock.protocol.reports import CurvePoint

CHUNKS, PROMPTS = 20, 20
GROUPS = (s.Group(part_bytes=4096),)
SHAPE = ("--layers", "32", "--kv-heads", "8", "--head-size", "128")


def test_it_shows_what_pools_of_other_sizes_would_find() -> None:
    """A pool of 255 chunks; lookups ask for 400 chunks in turn."""
    with ServerProcess(pool_bytes=1 << 20, segment_bytes=1 << 20, eviction="lru") as server:
        assert "0 lookups are too few" in refusal(kvdock("size", "--server", server.unix), 1)
        with Client(server.unix) as client, closing(attach(client, groups=GROUPS)) as engine:
            for turn in range(4):
                for prompt in range(PROMPTS):
                    found = engine.lookup(keys(CHUNKS, str(prompt)), f"{turn}-{prompt}")
                    assert found.hit_tokens == 0
                    engine.store(keys(CHUNKS, str(prompt)))
            told = client.curve()
        said = kvdock("size", "--server", server.unix).stdout
        assert "80 lookups" in said and "the pool itself found 0 %" in said
        rows = [line for line in said.splitlines() if line.startswith(("1.0 MiB", "8.0 MiB", "unlimited"))]
        assert [" ".join(row.split()[-2:]) for row in rows] == ["0.0 %", "75.0 %", "75.0 %"]
        assert "tokens it holds" in said and "4,096 " in rows[0], "256 chunks of 16 tokens"
        assert "(now)" in rows[0] and "would find nearly as much as an unlimited one" in said
        command = said.splitlines()[-1].removeprefix("→ kvdock ")
        assert command == "config set pool_bytes=2MiB"
        answer = json.loads(kvdock("size", "--server", server.unix, "--json").stdout)
        assert answer["total"]["tokens"] == told.total.tokens
        sized = json.loads(kvdock(
            "size", "--server", server.unix, "--users", "3", "--tokens-each", "100", "--json"
        ).stdout)
        assert sized["pool_bytes"] == 300 * 4096 // 16, "from the namespace that has attached"
        done = kvdock(*command.split(), "--server", server.unix)
        assert done.returncode == 0, done.stderr


def test_the_formula_needs_no_server() -> None:
    asked = ("size", "--users", "200", "--tokens-each", "8000", "--shared-tokens", "2000", "--new-tokens", "500")
    sized = json.loads(kvdock(*asked, *SHAPE, "--json").stdout)
    assert sized["bytes_per_token"] == 2 * 32 * 8 * 128 * 2
    assert sized["pool_bytes"] == (2000 + 200 * 8000) * 131072
    assert sized["most_hit_share"] == pytest.approx(0.95)
    assert [point["users"] for point in sized["points"]] == [49, 99, 200]
    assert "195.6 GiB" in kvdock(*asked, *SHAPE).stdout
    half = json.loads(kvdock(*asked, *SHAPE, "--dtype", "fp8", "--json").stdout)
    assert 2 * half["pool_bytes"] == sized["pool_bytes"]


def test_a_share_of_the_room_serves_whole_users() -> None:
    """Memory for the shared tokens comes first: with less, no user's prompt fits."""
    sized = by_formula(10, Users(count=2, tokens_each=100, shared_tokens=10_000, new_tokens=0))
    assert [point.users for point in sized.points] == [0, 0, 2]
    assert by_formula(10, Users(count=1, tokens_each=10, shared_tokens=0, new_tokens=99)).most_hit_share == 0


@pytest.mark.parametrize(("asked", "said"), [
    (("--users", "3"), "both --users and --tokens-each"),
    (("--bytes-per-token", "3"), "needs --users and --tokens-each as well"),
    (("--users", "3", "--tokens-each", "5", "--layers", "3"), "all of --layers, --kv-heads and --head-size"),
    (("--users", "3", "--tokens-each", "5", *SHAPE, "--bytes-per-token", "3"), "not both"),
    (("--users", "3", "--tokens-each", "5", *SHAPE, "--dtype", "int4"), "found 'int4', wanted float32"),
])
def test_what_does_not_fit_together_is_refused(asked: tuple[str, ...], said: str) -> None:
    assert said in refusal(kvdock("size", *asked), 2)


@pytest.mark.parametrize(("hit_share", "error", "text"), [
    (None, 0.0, "?"), (0.754, 0.0, "75.4 %"), (0.754, 0.012, "75.4 % ± 1.2 %"),
])
def test_a_share_is_shown_with_its_error(hit_share: float | None, error: float, text: str) -> None:
    assert share_in_words(CurvePoint(factor=1.0, pool_bytes=1, hit_share=hit_share, error=error)) == text
