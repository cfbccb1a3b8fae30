"""Nodes on this machine that read each other's pools, each with one server."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

from api_helpers import MIB, ServerProcess, access_file, eventually
from ports import held_port
from tier_engine import TierEngine, manifest

from kvdock.api.access.access_file import entry

PART = 256 << 10
TOKEN = "peer-" + "p" * 40
SETTINGS = {"heartbeat_s": 0.2, "missed_heartbeats": 1000, "watch_s": 0.05, "settle_s": 0.2, "pool_bytes": 16 * MIB,
            "segment_bytes": 16 * MIB}


class PeerNode:
    """A server that shares its pool, and an engine. `url`: of its setting, for the node itself."""

    def __init__(self, folder: Path, port: int, others: list[int], entries: Sequence[str], **settings: object) -> None:
        """`entries`: more of the access file."""
        folder.mkdir()
        token_file = folder / "token"
        token_file.touch(0o600)
        token_file.write_text(TOKEN)
        servers = ",".join(f"127.0.0.1:{other}" for other in others)
        self.url = f"peers://{servers}?token_file={token_file}&local_host=127.0.0.1&stall_s=1"
        path = access_file(folder, entry("peers", TOKEN, ["peer"], ""), *entries)
        self.server = ServerProcess(**{
            **SETTINGS, "port": port, "peers_url": self.url, "access_file": str(path), **settings,
        })
        self.engine: TierEngine

    def start(self) -> None:
        self.server.wait_ready()
        self.engine = TierEngine(self.server.unix, manifest(PART), f"engine-{self.server.settings['port']}")
        eventually(lambda: self.state == "open", 30.0)

    @property
    def state(self) -> str:
        return next((one.state for one in self.engine.client.status().tiers if one.name == "peers"), "")

    def close(self) -> None:
        self.engine.close()
        self.server.close()


@contextmanager
def nodes(
    folder: Path, count: int, entries: Sequence[str] = (), own: Sequence[dict[str, object]] = (), **settings: object
) -> Iterator[list[PeerNode]]:
    """`own`: settings of each node; empty: there are none."""
    ports = [held_port() for _ in range(count)]
    with ExitStack() as stack:
        made = []
        for at, port in enumerate(ports):
            others = [other for other in ports if other != port]
            of_node = own[at] if own else {}
            made.append(PeerNode(folder / f"node{at}", port, others, entries, **settings, **of_node))
        for node in made:
            node.start()
            stack.callback(node.close)
        yield made
