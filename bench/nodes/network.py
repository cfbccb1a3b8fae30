"""Nodes on one machine: network namespaces on a bridge, each with a /dev/shm of its own.

The store runs in the namespace that has the bridge, HUB. Nothing of it can be reached from outside of the namespaces.
It needs the right to make namespaces and to mount: `missing()` says what is lacking.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

ROOT = Path(__file__).parents[2]
HUB = "10.77.0.1"
START_S, END_S = 30.0, 10.0


def run(*arguments: str) -> None:
    """Raises RuntimeError with what the program said."""
    done = subprocess.run(arguments, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(arguments)}: {done.stderr.strip()}")


def missing() -> str:
    """Why there can be no nodes here; "": nothing is lacking."""
    for program in ("ip", "unshare", "mount"):
        if shutil.which(program) is None:
            return f"{program} is not installed"
    name = f"kvdock-{os.getpid()}-try"
    try:
        run("ip", "netns", "add", name)
    except RuntimeError as error:
        return f"network namespaces cannot be made: {error}"
    try:
        run("ip", "-n", name, "link", "add", "br0", "type", "bridge")
        run("ip", "netns", "exec", name, "unshare", "-m", "mount", "-t", "tmpfs", "tmpfs", "/dev/shm")
    except RuntimeError as error:
        return f"bridges, or a /dev/shm of their own, cannot be made: {error}"
    finally:
        run("ip", "netns", "del", name)
    return ""


class Network:
    """A hub and `count` nodes. Made by network()."""

    def __init__(self, count: int) -> None:
        self._prefix = f"kvdock-{os.getpid()}"
        self.hub = f"{self._prefix}-hub"
        self.nodes = [f"{self._prefix}-{at}" for at in range(count)]

    def make(self, stack: ExitStack) -> None:
        for name in (self.hub, *self.nodes):
            run("ip", "netns", "add", name)
            stack.callback(run, "ip", "netns", "del", name)
            run("ip", "-n", name, "link", "set", "lo", "up")
        run("ip", "-n", self.hub, "link", "add", "br0", "type", "bridge")
        run("ip", "-n", self.hub, "addr", "add", f"{HUB}/24", "dev", "br0")
        run("ip", "-n", self.hub, "link", "set", "br0", "up")
        for at, name in enumerate(self.nodes):
            run("ip", "-n", self.hub, "link", "add", f"to{at}", "type", "veth", "peer", "name", "eth0", "netns", name)
            run("ip", "-n", self.hub, "link", "set", f"to{at}", "master", "br0")
            run("ip", "-n", name, "addr", "add", f"10.77.0.{10 + at}/24", "dev", "eth0")
            run("ip", "-n", name, "link", "set", "eth0", "up")
            self.link(at, is_up=True)

    def link(self, at: int, *, is_up: bool) -> None:
        """Joins the node to the others, or parts it from them."""
        run("ip", "-n", self.hub, "link", "set", f"to{at}", "up" if is_up else "down")

    def popen(
        self, namespace: str, *arguments: str, log: Path, has_own_shm: bool = False
    ) -> subprocess.Popen[str]:
        """`log`: gets what it writes to stderr."""
        own: Sequence[str] = ()
        if has_own_shm:
            own = ("unshare", "-m", "sh", "-c", 'mount -t tmpfs tmpfs /dev/shm && exec "$@"', "sh")
        with log.open("ab") as errors:
            return subprocess.Popen(
                ["ip", "netns", "exec", namespace, *own, *arguments], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                stderr=errors, text=True, cwd=ROOT,
            )


    def wait_for(self, namespace: str, port: int) -> None:
        """Until somebody listens there."""
        until_s = time.monotonic() + START_S
        wanted = ("ip", "netns", "exec", namespace, "grep", "-qi", f":{port:04X} 00000000:0000 0A", "/proc/net/tcp")
        while subprocess.run(wanted, check=False).returncode:
            if time.monotonic() > until_s:
                raise RuntimeError(f"nobody listens at port {port} of {namespace}")
            time.sleep(0.05)


def end(process: subprocess.Popen[str]) -> None:
    """Kills it, whatever it does."""
    process.kill()
    process.wait(END_S)
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            pipe.close()


@contextmanager
def network(count: int) -> Iterator[Network]:
    with ExitStack() as stack:
        made = Network(count)
        made.make(stack)
        yield made
