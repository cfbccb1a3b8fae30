"""Two and four nodes over one store, each in a network namespace with a /dev/shm of its own: what one has stored the
others hit, whatever is killed. With `peers` there is no store: nodes read each other's pools. With `STORE_peers` they
do both, and all ask for one prompt at the same time.

    python -m bench.nodes --json [--nodes 2 4] [--stores redis s3 mooncake folder peers redis_peers s3_peers
        folder_peers] [--chunks 64] [--rounds 3]

Needs root, for namespaces and mounts (bench/nodes/network.py). The first node, A, stores prompts; each other node, such
as B, loads them. Keys begin with the store and the number of nodes:

- hit_share: of the chunks that A has stored, what each other node finds; all nodes ask at once.
- loaded_per_byte: bytes that a node loads for each byte that it wanted.
- received_per_byte: the same, as bytes that came in over the node's network; not for a folder.
- stored_per_byte: bytes that A stores, for each byte that it was given.
- wrong: chunks of which a node was given other bytes than A had stored, in all that follows as well.
- after_kill_of_A, after_kill_of_B, after_kill_of_mover, after_partition, after_kill_of_store: of the chunks, what B
  finds in the end. A's server is killed after it has stored; B's server, its mover, its link and the store while B
  loads. A store that is killed has lost what it had, and the next prompt of A's counts. With peers, A's server is
  killed after all have read the prompt, and what the last node finds counts once its pool is empty, or with two nodes
  B, whose pool is not; A's server, its mover and its link go while B loads, too, in after_kill_of_A_midway,
  after_kill_of_mover_of_A and after_partition_of_A.
- cut_off_wait_s: how long a request at B waited that had TIGHT_S, without its link.

With a store and peers, no pool has the prompt and all nodes ask for it, A too:

- store_reads_per_byte, most_store_reads_per_byte: bytes that all nodes together load from the store, for each byte of
  the prompt: the median of the rounds, and the most.
- hit_share: of the chunks, the least that a node finds.
- after_kill, after_stop: of the chunks, what a node that lives finds in the end, at least: each node in turn is killed,
  or stopped (SIGSTOP) with its mover, while all load.
- stop_wait_s: the longest that a request at the others waited meanwhile; it had TIGHT_S.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any, Protocol

from bench.nodes.network import HUB, Network, end, missing, network
from bench.nodes.node import PART_BYTES, children
from kvdock.api.access.access_file import entry

WAIT_S, TIGHT_S = 10.0, 2.0
ANSWER_S, MEET_S = 150.0, 90.0
MIDWAY_S = 0.02
"""For so long a node loads before something is killed or cut off. Whether the load is midway then is not checked."""
REPORTED_S = 2.0
"""After this long a server knows what its mover has counted."""
REDIS_PORT, MASTER_PORT, MOONCAKE_MIB, PEER_PORT = 6379, 50051, 512, 7410
TOKEN = "bench-" + "p" * 40
POOL_BYTES = 64 << 20
KEYS = {"AWS_ACCESS_KEY_ID": "me", "AWS_SECRET_ACCESS_KEY": "secret", "AWS_REGION": "us-east-1"}


class Store(Protocol):
    """`settings`: of each server that uses it."""

    has_network: bool
    settings: dict[str, Any]

    def restart(self) -> None:
        """Kills it, and starts it again without what it had."""

    def close(self) -> None: ...


class Redis:
    has_network = True

    def __init__(self, net: Network, folder: Path) -> None:
        self._net, self._folder = net, folder
        self.settings = {"redis_url": f"redis://{HUB}:{REDIS_PORT}"}
        self._start()

    def _start(self) -> None:
        self._process = self._net.popen(
            self._net.hub, "redis-server", "--bind", HUB, "--port", str(REDIS_PORT), "--protected-mode", "no", "--save",
            "", "--dir", str(self._folder), log=self._folder / "redis.log",
        )

    def restart(self) -> None:
        self.close()
        self._start()

    def close(self) -> None:
        end(self._process)


class S3:
    has_network = True

    def __init__(self, net: Network, folder: Path) -> None:
        self._net, self._log, self._port = net, folder / "s3.log", 0
        self._start()
        self.settings = {"objects_url": f"s3://bench?endpoint=http://{HUB}:{self._port}"}

    def _start(self) -> None:
        self._process = self._net.popen(
            self._net.hub, sys.executable, "-m", "bench.tiers.far_s3", HUB, str(self._port), log=self._log
        )
        assert self._process.stdout is not None
        self._port = int(self._process.stdout.readline())

    def restart(self) -> None:
        self.close()
        self._start()

    def close(self) -> None:
        end(self._process)


class Mooncake:
    """The master, and a client that has the memory, both at the hub. Nodes read from that client by Mooncake's Transfer
    Engine, over TCP."""

    has_network = True

    def __init__(self, net: Network, folder: Path) -> None:
        found = importlib.util.find_spec("mooncake")
        assert found is not None and found.submodule_search_locations, "main() has looked"
        self._programs = Path(found.submodule_search_locations[0])
        self._net, self._log = net, folder / "mooncake.log"
        self.settings = {"mooncake_url": f"mooncake://{HUB}:{MASTER_PORT}?stall_s=1&master_s=1"}
        self._start()

    def _start(self) -> None:
        self._processes = [self._run(
            "mooncake_master", f"--rpc_address={HUB}", f"--rpc_port={MASTER_PORT}", f"--metrics_host={HUB}",
            "--client_ttl=2", "--eviction_ratio=0", "--eviction_high_watermark_ratio=1", "--logtostderr",
        )]
        self._net.wait_for(self._net.hub, MASTER_PORT)
        self._processes.append(self._run(
            "mooncake_client", f"--host={HUB}", "--metadata_server=P2PHANDSHAKE",
            f"--master_server_address={HUB}:{MASTER_PORT}", f"--global_segment_size={MOONCAKE_MIB} MB",
        ))

    def _run(self, program: str, *arguments: str) -> subprocess.Popen[str]:
        path = self._programs / program
        path.chmod(path.stat().st_mode | 0o100)
        return self._net.popen(self._net.hub, str(path), *arguments, log=self._log)

    def restart(self) -> None:
        self.close()
        self._start()

    def close(self) -> None:
        for process in self._processes:
            end(process)


class Folder:
    has_network = False

    def __init__(self, net: Network, folder: Path) -> None:
        self._folder = folder / "shared"
        self._folder.mkdir()
        self.settings = {"objects_url": f"file://{self._folder}"}

    def restart(self) -> None:
        """It has no process: all that it has is deleted, while nodes write to it."""
        for one in self._folder.iterdir():
            shutil.rmtree(one, ignore_errors=True)

    def close(self) -> None: ...


class Peers:
    """No store, but a token of all nodes, and an access file."""

    has_network = True

    def __init__(self, net: Network, folder: Path) -> None:
        self._token_file, access = folder / "token", folder / "access.toml"
        for path, text in ((self._token_file, TOKEN), (access, entry("peers", TOKEN, ["peer"]))):
            path.touch(0o600)
            path.write_text(text)
        self.settings: dict[str, Any] = {
            "access_file": str(access), "allowed_hosts": "*", "port": PEER_PORT, "tier_keep": "always",
        }
        self._hosts = [f"10.77.0.{10 + at}" for at in range(len(net.nodes))]

    def of_node(self, at: int) -> dict[str, Any]:
        """The settings that are the node's own."""
        others = ",".join(f"{host}:{PEER_PORT}" for host in self._hosts if host != self._hosts[at])
        url = f"peers://{others}?token_file={self._token_file}&local_host={self._hosts[at]}&stall_s=1"
        return {"host": self._hosts[at], "peers_url": url}

    def restart(self) -> None: ...

    def close(self) -> None: ...


class WithPeers:
    """A store that the nodes share, and each other's pools."""

    has_network = True

    def __init__(self, store: Callable[[Network, Path], Store], net: Network, folder: Path) -> None:
        self._store, self._peers = store(net, folder), Peers(net, folder)
        self.settings = self._store.settings | self._peers.settings
        self.of_node, self.restart, self.close = self._peers.of_node, self._store.restart, self._store.close


STORES: dict[str, Callable[[Network, Path], Store]] = {
    "redis": Redis, "s3": S3, "mooncake": Mooncake, "folder": Folder, "peers": Peers,
    "redis_peers": partial(WithPeers, Redis), "s3_peers": partial(WithPeers, S3),
    "folder_peers": partial(WithPeers, Folder),
}


class Remote:
    """A node's process, which does one job at a time."""

    def __init__(self, net: Network, at: int, settings: dict[str, Any], log: Path) -> None:
        self._process = net.popen(
            net.nodes[at], sys.executable, "-m", "bench.nodes.node", json.dumps(settings), log=log, has_own_shm=True
        )
        self.server = 0

    def begin(self, do: str, **job: Any) -> None:
        assert self._process.stdin is not None
        print(json.dumps({"do": do, **job}), file=self._process.stdin, flush=True)

    def answer(self) -> dict[str, Any]:
        stdout = self._process.stdout
        assert stdout is not None
        line = stdout.readline() if select.select([stdout], [], [], ANSWER_S)[0] else ""
        answer: dict[str, Any] = json.loads(line) if line else {"error": "a node does not answer"}
        if "error" in answer and "found" not in answer:
            raise RuntimeError(answer["error"])
        return answer

    def do(self, do: str, **job: Any) -> dict[str, Any]:
        self.begin(do, **job)
        return self.answer()

    def serve(self) -> None:
        self.server = int(self.do("serve")["server"])

    def kill(self, *, mover_only: bool = False) -> None:
        processes = children(self.server) if mover_only else [self.server, *children(self.server)]
        for process in processes:
            os.kill(process, signal.SIGKILL)

    def signal(self, number: int) -> None:
        """To the server and its mover."""
        for process in [self.server, *children(self.server)]:
            os.kill(process, number)

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()  # it then ends its server
        try:
            self._process.wait(10.0)
        finally:
            end(self._process)


class Story:
    """What happens to nodes over one store."""

    def __init__(self, net: Network, nodes: Sequence[Remote], store: Store, chunks: int) -> None:
        self._net, self._nodes, self._store, self._chunks = net, nodes, store, chunks
        self._a, self._b = nodes[0], nodes[1]
        self.wrong, self._numbers = 0, 0

    @property
    def _bytes(self) -> int:
        return self._chunks * PART_BYTES

    def _stored(self) -> str:
        """A prompt that A has stored, and no pool has."""
        self._numbers += 1
        seed = f"prompt-{self._numbers}"
        self._a.do("store", seed=seed, chunks=self._chunks)
        for node in self._nodes:
            node.do("empty")
        return seed

    def _load(self, seed: str, wait_s: float = WAIT_S) -> dict[str, Any]:
        return self._judged(self._b.do("load", seed=seed, chunks=self._chunks, wait_s=wait_s))

    def _judged(self, answer: dict[str, Any]) -> dict[str, Any]:
        self.wrong += answer["wrong"]
        return answer

    def _found(self, seed: str) -> float:
        """In the end, as a share: a tier that has failed rests for some seconds before it is tried again."""
        until_s, found = time.monotonic() + 60.0, 0
        while found < self._chunks and time.monotonic() < until_s:
            found = self._load(seed)["found"]
        return found / self._chunks

    def quiet(self) -> dict[str, list[float]]:
        before = [node.do("counts") for node in self._nodes]
        seed = self._stored()
        others = self._nodes[1:]
        for node in others:
            node.begin("load", seed=seed, chunks=self._chunks, wait_s=WAIT_S)
        found = [self._judged(node.answer())["found"] for node in others]
        time.sleep(REPORTED_S)
        after = [node.do("counts") for node in self._nodes]
        figures = {
            "hit_share": [one / self._chunks for one in found],
            "stored_per_byte": [(after[0]["stored_bytes"] - before[0]["stored_bytes"]) / self._bytes],
            "loaded_per_byte": [
                (late["loaded_bytes"] - early["loaded_bytes"]) / self._bytes
                for early, late in zip(before[1:], after[1:], strict=True)
            ],
        }
        if self._store.has_network:
            figures["received_per_byte"] = [
                (late["received_bytes"] - early["received_bytes"]) / self._bytes
                for early, late in zip(before[1:], after[1:], strict=True)
            ]
        return figures

    def kills(self) -> dict[str, list[float]]:
        figures: dict[str, float] = {}
        seed = self._stored()
        self._a.kill()
        figures["after_kill_of_A"] = self._found(seed)
        self._a.serve()
        seed = self._midway(lambda: self._b.kill(mover_only=True))
        figures["after_kill_of_mover"] = self._found(seed)
        seed = self._midway(self._b.kill)
        self._b.serve()
        figures["after_kill_of_B"] = self._found(seed)
        figures |= self._partition()
        self._midway(self._store.restart)
        self._a.do("empty")
        figures["after_kill_of_store"] = self._found_again()
        return {name: [figure] for name, figure in figures.items()}

    def _midway(self, happens: Callable[[], None]) -> str:
        """While B loads a prompt, this happens. Returns the prompt."""
        seed = self._stored()
        self._b.begin("load", seed=seed, chunks=self._chunks, wait_s=TIGHT_S)
        time.sleep(MIDWAY_S)
        happens()
        self._judged(self._b.answer())
        return seed

    def _partition(self) -> dict[str, float]:
        seed = self._stored()
        if not self._store.has_network:
            return {}
        self._net.link(1, is_up=False)
        cut_off = self._load(seed, TIGHT_S)
        self._net.link(1, is_up=True)
        shares = [self._found(seed)]
        during = self._midway(lambda: self._net.link(1, is_up=False))
        self._net.link(1, is_up=True)
        shares.append(self._found(during))
        return {"cut_off_wait_s": cut_off["took_s"], "after_partition": min(shares)}

    def _found_again(self) -> float:
        """The share of the first prompt that A can store, once the store is back without even the nodes' notes."""
        until_s = time.monotonic() + 90.0
        while time.monotonic() < until_s:
            with suppress(RuntimeError):  # A cannot store yet
                return self._found(self._stored())
        return 0.0


class PeerStory(Story):
    """What happens to nodes without a store: what A has stored stays in its pool."""

    def _stored(self) -> str:
        self._numbers += 1
        seed = f"prompt-{self._numbers}"
        for node in self._nodes:
            node.do("empty")
        self._a.do("store", seed=seed, chunks=self._chunks)
        return seed

    def kills(self) -> dict[str, list[float]]:
        figures: dict[str, float] = {}
        self._midway(self._a.kill)
        self._a.serve()
        figures["after_kill_of_A_midway"] = self._found_again()
        seed = self._midway(lambda: self._a.kill(mover_only=True))
        figures["after_kill_of_mover_of_A"] = self._found(seed)
        seed = self._midway(lambda: self._b.kill(mover_only=True))
        figures["after_kill_of_mover"] = self._found(seed)
        seed = self._midway(self._b.kill)
        self._b.serve()
        figures["after_kill_of_B"] = self._found(seed)
        figures |= self._partition()
        seed = self._midway(lambda: self._net.link(0, is_up=False))
        self._net.link(0, is_up=True)
        figures["after_partition_of_A"] = self._found(seed)
        seed = self._stored()
        for node in self._nodes[1:]:
            self._judged(node.do("load", seed=seed, chunks=self._chunks, wait_s=WAIT_S))
        self._a.kill()
        self._b = self._nodes[-1]
        if len(self._nodes) > 2:
            self._b.do("empty")
        figures["after_kill_of_A"] = self._found(seed)
        return {name: [figure] for name, figure in figures.items()}


class HerdStory(Story):
    """What happens to nodes that share a store and read each other's pools, when all want the same prompt."""

    def meet(self) -> None:
        """Waits until each node has read in the pool of each other one: those that were not there yet when it began
        are not asked for some seconds."""
        for first in self._nodes:
            for other in self._nodes:
                until_s, is_met = time.monotonic() + MEET_S, other is first
                while not is_met:
                    if time.monotonic() > until_s:
                        raise RuntimeError("the nodes do not read each other's pools")
                    self._numbers += 1
                    job = {"seed": f"meets-{self._numbers}", "chunks": 1}
                    first.do("store", **job)
                    before = other.do("counts")["peers_bytes"]
                    self._judged(other.do("load", wait_s=TIGHT_S, **job))
                    time.sleep(REPORTED_S)
                    is_met = other.do("counts")["peers_bytes"] > before

    def quiet(self) -> dict[str, list[float]]:
        seed = self._stored()
        before = [node.do("counts") for node in self._nodes]
        self._begin(seed, WAIT_S)
        found = [self._judged(node.answer())["found"] for node in self._nodes]
        time.sleep(REPORTED_S)
        after = [node.do("counts") for node in self._nodes]
        reads = sum(late["loaded_bytes"] - early["loaded_bytes"] for early, late in zip(before, after, strict=True))
        share = [reads / self._bytes]
        return {
            "store_reads_per_byte": share, "most_store_reads_per_byte": share,
            "hit_share": [one / self._chunks for one in found],
        }

    def _begin(self, seed: str, wait_s: float) -> None:
        for node in self._nodes:
            node.begin("load", seed=seed, chunks=self._chunks, wait_s=wait_s)

    def kills(self) -> dict[str, list[float]]:
        figures: dict[str, list[float]] = {"after_kill": [], "after_stop": [], "stop_wait_s": []}
        for node in self._nodes:
            others = [other for other in self._nodes if other is not node]
            seed = self._stored()
            self._begin(seed, TIGHT_S)
            time.sleep(MIDWAY_S)
            node.kill()
            for one in self._nodes:
                self._judged(one.answer())
            figures["after_kill"] += [self._found_at(other, seed) for other in others]
            node.serve()
            seed = self._stored()
            self._begin(seed, TIGHT_S)
            time.sleep(MIDWAY_S)
            node.signal(signal.SIGSTOP)
            figures["stop_wait_s"] += [self._judged(other.answer())["took_s"] for other in others]
            figures["after_stop"] += [self._found_at(other, seed) for other in others]
            node.signal(signal.SIGCONT)
            self._judged(node.answer())
        return figures

    def _found_at(self, node: Remote, seed: str) -> float:
        self._b = node
        return self._found(seed)


def is_installed(store: str) -> bool:
    if store.startswith("redis") and shutil.which("redis-server") is None:
        return False
    return not store.endswith(("mooncake", "peers")) or importlib.util.find_spec("mooncake") is not None


def measure(name: str, count: int, chunks: int, rounds: int) -> dict[str, float]:
    figures: dict[str, list[float]] = {}
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="kvdock-nodes-")))
        net = stack.enter_context(network(count))
        store = STORES[name](net, folder)
        stack.callback(store.close)
        settings = {
            "pool_bytes": POOL_BYTES, "tier_asks": 1, "session_cap": 1.0, "total_cap": 1.0, "heartbeat_s": 0.2,
            "missed_heartbeats": 1000, **store.settings,
        }
        own = [store.of_node(at) if isinstance(store, (Peers, WithPeers)) else {} for at in range(count)]
        nodes = [Remote(net, at, settings | own[at], folder / f"node{at}.log") for at in range(count)]
        for node in nodes:
            stack.callback(node.close)
        for node in nodes:
            node.serve()
        kinds: dict[type, type[Story]] = {Peers: PeerStory, WithPeers: HerdStory}
        story = kinds.get(type(store), Story)(net, nodes, store, chunks)
        if isinstance(story, HerdStory):
            story.meet()
        for _ in range(rounds):
            for key, values in story.quiet().items():
                figures.setdefault(key, []).extend(values)
        figures |= story.kills()
        figures["wrong"] = [story.wrong]
    worst: dict[str, Callable[[list[float]], float]] = {
        "hit_share": min, "after_kill": min, "after_stop": min, "store_reads_per_byte": median,
    }
    return {f"{name}_{count}_{key}": round(worst.get(key, max)(values), 3) for key, values in figures.items()}


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m bench.nodes", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", action="store_true", help="one JSON object instead of lines")
    parser.add_argument("--nodes", nargs="+", type=int, default=[2, 4])
    parser.add_argument("--stores", nargs="+", choices=STORES, default=list(STORES))
    parser.add_argument("--chunks", type=int, default=64, help="of a prompt, of 64 KiB each (default 64)")
    parser.add_argument("--rounds", type=int, default=3, help="before anything is killed (default 3)")
    chosen = parser.parse_args(arguments)
    if why := missing():
        print(f"bench.nodes: {why}", file=sys.stderr)
        return 1
    os.environ |= KEYS
    figures: dict[str, float] = {}
    for name in chosen.stores:
        if not is_installed(name):
            print(f"bench.nodes: {name} is left out: it is not installed", file=sys.stderr)
            continue
        for count in chosen.nodes:
            figures |= measure(name, count, chosen.chunks, chosen.rounds)
    if chosen.json:
        print(json.dumps(figures))
    else:
        for key, figure in figures.items():
            print(f"{key:32} {figure}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
