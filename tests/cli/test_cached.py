"""`kvdock cached` and `kvdock history`: what fills the pool, and how the server did."""

from __future__ import annotations

import json
import re

from api_helpers import ServerProcess, attach, eventually, keys
from cli_helpers import kvdock
from server_fixtures import fresh_server

from kvdock.client.client import Client
from kvdock.protocol.outcomes import Copied, Outcome

server = fresh_server()


def said(server: ServerProcess, *words: str) -> str:
    done = kvdock(*words, "--server", server.unix, COLUMNS="140")
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_an_empty_pool_caches_nothing(server: ServerProcess) -> None:
    assert said(server, "cached").strip() == "nothing is cached"


def test_what_is_cached_is_listed_by_model_and_by_prefix(server: ServerProcess, client: Client) -> None:
    large, small = attach(client, model="large one"), attach(client, model="small\x1b[31m one")
    large.store(keys(6, "a"))
    small.store(keys(2, "b"))
    for number in range(3):
        small.release(small.lookup(keys(2, "b"), f"r{number}").lease, 0)
    assert "asked for 96 tok" in said(server, "cached").splitlines()[2], "it has not reported what it loaded"
    small.heartbeat(outcomes=[Outcome(request="r1", prompt_tokens=32, found_tokens=32, loaded_tokens=32)])
    lines = said(server, "cached").splitlines()
    assert lines[1].startswith("large one ") and " 96.0 KiB " in lines[1] and " 6 " in lines[1]
    assert "small�[31m one" in lines[2] and "100 %" in lines[2] and "ago" in lines[2]
    first, second = lines[5:7]
    assert first.startswith(keys(2, "b")[0][:12]) and "3 times" in first and " 32.0 KiB " in first
    assert second.startswith(keys(6, "a")[0][:12]) and "0 times" in second
    assert said(server, "cached", "--limit", "1").splitlines()[-1] == "… and 1 prefix more: --limit N"
    shown = json.loads(said(server, "cached", "--json"))
    assert [one["chunks"] for one in shown["namespaces"]] == [6, 2]
    assert [one["uses"] for one in shown["prefixes"]["prefixes"]] == [3, 0]
    large.close()
    small.close()


def test_prefixes_unfold_at_their_forks_and_are_searched_for(server: ServerProcess, client: Client) -> None:
    engine = attach(client)
    system, branches = keys(3, "system"), [keys(2, f"branch {number}") for number in range(10)]
    for branch in branches:
        engine.store([*system, *branch])
    engine.store(keys(1, "other"))
    space = ("--namespace", engine.attached.namespace, "--server", server.unix)
    kept = kvdock("keep", *space, "--keys", ",".join(system), "--name", "support bot")
    assert kept.returncode == 0
    lines = said(server, "cached").splitlines()
    assert re.split(r"  +", lines[3]) == [
        "prefix", "label", "model", "namespace", "used", "shared", "cached", "branches", "stored", "last used"
    ]
    row = next(line for line in lines if line.startswith(system[0][:12]))
    assert "  support bot (kept)  " in row and " 48 tok " in row and " 368.0 KiB " in row and "10 of 320.0 KiB" in row
    found = said(server, "cached", "--search", "SUPPORT", "--unfold", "1").splitlines()
    assert re.split(r"  +", found[1])[:-2] == re.split(r"  +", row)[:-2], "but for the ages"
    assert len(found) == 1 + 1 + 8 + 1, "heads, the prefix, some branches, how many more"
    firsts = {branch[0][:12] for branch in branches}
    assert all(line.startswith("└ ") and line[2:14] in firsts for line in found[2:10])
    assert found[10].strip() == "└ 2 more"
    assert said(server, "cached", "--search", "none has this").strip() == (
        "no cached prefix has none has this in a label, model, tenant or key"
    )
    shown = json.loads(said(server, "cached", "--search", "support", "--unfold", "2", "--json"))
    (place,) = shown["unfolded"]
    assert place == f"{engine.attached.namespace} {system[-1]}" and len(shown["unfolded"][place]["prefixes"]) == 8
    engine.close()


def test_history_has_rows_of_means(server: ServerProcess, client: Client) -> None:
    assert said(server, "history", "--over", "days").strip() == (
        "there are no measurements yet: the first comes after 30 min 0 s"
    )
    engine = attach(client)
    engine.store(keys(2))
    engine.lookup([*keys(2), *keys(2, "new")])
    engine.heartbeat(outcomes=[
        Outcome(request="r", prompt_tokens=64, local_tokens=16, found_tokens=32, loaded_tokens=16)
    ])

    def measured() -> bool:
        return any(values for one in client.stats().series if one.name == "loaded_share" for values in one.values)

    eventually(measured)
    lines = said(server, "history", "--over", "minutes").splitlines()
    assert re.split(r"  +", lines[0]) == [
        "from", "prompt tokens", "own cache", "loaded", "computed", "tokens asked for", "bytes loaded", "bytes stored",
        "cached", "chunks evicted",
    ]
    assert 2 <= len(lines) <= 25
    assert any(re.search(r"/s +25 % +25 % +50 % ", line) for line in lines)
    assert json.loads(said(server, "history", "--over", "minutes", "--json"))["interval_s"] == 0.1
    engine.close()


def test_status_says_what_was_saved_and_how_fast_engines_copy(server: ServerProcess, client: Client) -> None:
    engine = attach(client, label="engine A")
    engine.store(keys(2))
    engine.heartbeat(
        outcomes=[Outcome(request="r", prompt_tokens=40, loaded_tokens=32, load_us=500_000, prefill_tokens_per_s=16.0)],
        copied=Copied(load_bytes=3 << 30, load_us=1_000_000, ceiling_bytes_per_s=4 << 30),
    )
    text = said(server, "status")
    assert re.search(r"^saved +1\.5 s of computing$", text, re.MULTILINE)
    assert "3.0 GiB/s while an engine loads, 75 % of the speed of plain copies" in text
    assert "the oldest chunk was unused for" in text
    assert "the cached chunks are removed; `kvdock serve --takeover` replaces the server and keeps them" in text
    assert "3.0 GiB/s, 75 % of plain" in said(server, "top", "--once")
    engine.heartbeat(outcomes=[
        Outcome(request="r2", prompt_tokens=40, loaded_tokens=16, load_us=4_000_000, prefill_tokens_per_s=16.0)
    ])
    text = said(server, "status")
    first, second = re.split(r"\n✗ ", text.partition("\n\n")[0])
    assert first.startswith("kvdock is up and costs time: ")
    assert first.split()[-7:] == ["Loads", "took", "1.5", "s", "longer", "than", "computing."]
    assert second == (
        "In the last hour, loads of engine A took 1.5 s longer than computing the same tokens would have. → kvdock top"
    )
    assert re.search(r"^saved +loads took 1\.5 s longer than computing would have$", text, re.MULTILINE)
    assert "\x1b[31mkvdock is up and costs time: " in kvdock("status", "--server", server.unix, FORCE_COLOR="1").stdout
    assert re.search(r"^saved +loads took 1\.5 s longer", said(server, "top", "--once"), re.MULTILINE)
    engine.close()


def test_status_says_that_a_kept_pool_stays() -> None:
    with ServerProcess(on_exit="keep") as server, Client(server.unix) as client:
        engine = attach(client)
        assert "at its end" not in said(server, "status"), "nothing is cached yet"
        engine.store(keys(1))
        assert "the cached chunks stay for the next server at its socket" in said(server, "status")
        engine.close()
        server.stop(2)
