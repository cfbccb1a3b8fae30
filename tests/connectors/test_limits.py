"""Limits on what is loaded, in the connector's settings, and the statistics of chunks."""

from __future__ import annotations

from typing import Any

import pytest
from api_helpers import ServerProcess, eventually
from connector_helpers import CHUNK, PER_CHUNK, Rig, tokens_of

from kvdock.client.client import Client
from kvdock.connectors.chunk_statistics import ChunkStatistics
from kvdock.connectors.cost import LoadLimits
from kvdock.connectors.errors import SettingError
from kvdock.connectors.interface import Miss


@pytest.mark.parametrize(
    ("limits", "local", "hit"),
    [({}, 0, 4), ({"max_load_tokens": 2 * CHUNK}, 0, 2), ({"max_load_tokens": 2 * CHUNK}, CHUNK, 3),
     ({"max_load_tokens": 2 * CHUNK - 1}, 0, 1), ({"max_load_tokens": 0}, 0, 0), ({"max_load_share": 0.5}, 0, 2),
     ({"max_load_tokens": CHUNK, "max_load_share": 0.5}, 0, 1), ({"max_load_share": 0.0}, CHUNK, 1)],
)
def test_a_limit_caps_what_is_loaded(server: ServerProcess, limits: dict[str, Any], local: int, hit: int) -> None:
    prompt = tokens_of(11, 4)
    with Rig(server.unix, salt="limit", **limits) as rig:
        blocks = list(range(4 * PER_CHUNK))
        rig.store("w", prompt, blocks)
        assert rig.lookup("r", prompt, local) == hit * CHUNK
        if hit * CHUNK > local:
            done = rig.load("r", blocks[: hit * PER_CHUNK], local, hit * CHUNK)
            assert done.valid_tokens == hit * CHUNK
        rig.connector.finished("r")


def test_a_load_below_the_minimum_is_declined_and_its_lease_given_up(server: ServerProcess) -> None:
    prompt, longer = tokens_of(12, 2), tokens_of(12, 2) + tokens_of(13, 1)
    with Rig(server.unix, salt="minimum", min_load_tokens=2 * CHUNK) as rig, Client(server.unix) as client:
        rig.store("w", prompt, list(range(2 * PER_CHUNK)))
        assert rig.lookup("r", prompt) == 2 * CHUNK
        rig.connector.finished("r")
        assert [rig.lookup("s", prompt, CHUNK) for _ in range(3)] == [CHUNK] * 3
        eventually(lambda: client.status().leases == 0)
        rig.store("w", longer, list(range(3 * PER_CHUNK)))
        assert rig.connector.lookup("s", longer, CHUNK) == Miss(), "it was declined"
        rig.connector.finished("s")
        assert rig.lookup("s", longer, CHUNK) == 3 * CHUNK, "after `finished` it is asked anew"
        rig.connector.finished("s")


@pytest.mark.parametrize(
    ("settings", "named"),
    [({"min_load_tokens": -1}, "min_load_tokens"), ({"max_load_share": 1.5}, "1.5"),
     ({"max_load_tokens": 10, "min_load_tokens": 20}, "min_load_tokens=20")],
)
def test_wrong_limits_are_refused_by_name(settings: dict[str, Any], named: str) -> None:
    with pytest.raises(SettingError, match=named):
        LoadLimits(**settings)


def test_a_connector_counts_chunks_when_it_is_asked_to(server: ServerProcess) -> None:
    prompt, blocks = tokens_of(14, 3), list(range(3 * PER_CHUNK))
    with Rig(server.unix, salt="counted", chunk_statistics=True) as rig:
        rig.store("w", prompt, blocks)
        for request in ("a", "b"):
            assert rig.lookup(request, prompt) == 3 * CHUNK
        assert rig.load("b", blocks, 0, 3 * CHUNK).valid_tokens == 3 * CHUNK
        assert rig.connector.statistics is not None
        totals = rig.connector.statistics.totals
        assert (totals.looked_up, totals.hit, totals.loaded) == (6, 6, 3)
        for request in ("a", "b"):
            rig.connector.finished(request)


def test_chunks_are_counted_once_a_request_and_by_what_came_of_them() -> None:
    counted = ChunkStatistics(4)
    tokens = list(range(12))
    for request, found in (("a", 0), ("b", 8), ("c", 8), ("d", 8)):
        for _ in range(3):
            counted.looked_up(request, tokens, found)
    counted.load_begun("b", 0, 8)
    counted.load_begun("c", 4, 8)
    counted.load_begun("d", 0, 8)
    counted.load_failed("d", 4)
    counted.load_failed("d", 0)  # another rank has even less
    assert [(u.end_tokens, u.looked_up, u.hit, u.loaded) for u in counted.top()] == [
        (4, 4, 3, 1), (8, 4, 3, 2), (12, 4, 0, 0)
    ]
    assert (counted.totals.looked_up, counted.totals.hit, counted.totals.loaded) == (12, 6, 3)
    text = counted.summary(2).splitlines()
    assert text[0] == "chunks: 12 looked up, 6 hit, 3 loaded; 3 remembered, 0 forgotten"
    assert len(text) == 4


def test_what_was_not_seen_for_longest_is_forgotten() -> None:
    counted = ChunkStatistics(4, max_chunks=2)
    for number in (1, 2, 1, 3):
        counted.looked_up(f"r{number}", [number] * 4, 0)
        counted.finished(f"r{number}")
    assert sorted(use.looked_up for use in counted.top()) == [1, 2]
    assert (counted.forgotten, counted.totals.looked_up) == (1, 4)
