"""The commands that ask a running server or this machine, as typer sees them: options, one line of help, a call.

Each imports what it needs when it runs, so that `--help` and completion load neither rich nor the server.
"""

from __future__ import annotations

import os
from importlib.util import find_spec
from typing import Annotated, Literal

import typer

from kvdock.cli.outcome import FAILED, Refused

Preset = Literal["small", "tiny", "tiny-hybrid2", "tiny-hybrid3", "tiny-mha", "tiny-mla"]
"""engine.config.PRESETS, without importing torch for it."""

Server = Annotated[str, typer.Option(
    "--server", metavar="ADDRESS", help="unix:/path or http://host:port; else this user's socket.", show_default=False,
)]
AsJson = Annotated[bool, typer.Option("--json", help="One JSON object on standard output.")]
ListLimit = Annotated[int, typer.Option("--limit", min=1, help="Show at most so many.")]
ListAll = Annotated[bool, typer.Option("--all", help="Show all.")]
Namespace = Annotated[str, typer.Option(
    "--namespace", metavar="HEX", help="The namespace, or how it starts.", show_default=False,
)]


def status(server: Server = "", as_json: AsJson = False) -> None:
    """What the server holds, and for whom."""
    from rich.console import Console

    from kvdock.cli.status import show_status

    show_status(server, as_json=as_json, console=Console())


def doctor(
    config: Annotated[str | None, typer.Option(
        "--config", metavar="FILE", help="TOML file of settings. [KVDOCK_CONFIG]", show_default=False,
    )] = None,
    as_json: AsJson = False,
) -> int:
    """What on this machine helps or hinders kvdock.

    Each line is OK, a note or a problem, and says what to do. Ends with 1 if there is a problem.
    """
    from rich.console import Console

    from kvdock.cli.doctor import doctor as examine

    return examine(os.environ, config=config, as_json=as_json, console=Console())


def lookup(
    namespace: Namespace = "",
    keys: Annotated[list[str] | None, typer.Option(
        "--keys", metavar="HEX", help="Chunk keys of 64 hex digits, in order; comma-separated or repeated.",
        show_default=False,
    )] = None,
    tokens_file: Annotated[str, typer.Option(
        "--tokens-file", metavar="FILE", help="Token ids: a JSON list, or numbers; - is standard input.",
        show_default=False,
    )] = "",
    server: Server = "",
    as_json: AsJson = False,
) -> None:
    """How long a prefix the pool could serve. Holds nothing.

    Without --namespace it is the only one there is.
    """
    from rich.console import Console

    from kvdock.cli.lookup import show_lookup

    show_lookup(
        server, namespace=namespace, keys=keys or [], tokens_file=tokens_file, as_json=as_json, console=Console()
    )


def clear(
    namespace: Namespace = "",
    everything: Annotated[bool, typer.Option("--all", help="All namespaces.")] = False,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
    server: Server = "",
    as_json: AsJson = False,
) -> None:
    """Take stored chunks out of use.

    What engines are reading stays theirs until they are done.
    """
    from rich.console import Console

    from kvdock.cli.clear import clear_cache

    clear_cache(server, namespace=namespace, everything=everything, yes=yes, as_json=as_json, console=Console())


def sessions(
    server: Server = "", as_json: AsJson = False, limit: ListLimit = 100, everything: ListAll = False
) -> None:
    """Engines that are attached, and what they hold."""
    from rich.console import Console

    from kvdock.cli.lists import show_sessions

    show_sessions(server, limit=None if everything else limit, as_json=as_json, console=Console())


def leases(
    server: Server = "", as_json: AsJson = False, limit: ListLimit = 100, everything: ListAll = False
) -> None:
    """Open leases and reservations, oldest first."""
    from rich.console import Console

    from kvdock.cli.lists import show_leases

    show_leases(server, limit=None if everything else limit, as_json=as_json, console=Console())


def bench(
    server: Server = "",
    as_json: AsJson = False,
    rounds: Annotated[int, typer.Option(min=10, help="Lookups of each size.")] = 300,
    mib: Annotated[int, typer.Option(min=1, help="MiB of synthetic KV to store and load.")] = 64,
    threads: Annotated[int, typer.Option(min=1, max=64, help="Threads that copy.")] = 2,
) -> None:
    """Measure a running server, in seconds.

    Round trips of lookups, and a store and a load of synthetic KV beside plain memcpy. What it stores is deleted
    at the end. In a pool that is full it takes the place of the oldest chunks.
    """
    from rich.console import Console

    from kvdock.cli.bench import run_bench

    run_bench(server, rounds=rounds, mib=mib, threads=threads, as_json=as_json, console=Console())


def demo(
    port: Annotated[int, typer.Option(
        min=0, max=65535, help="TCP port of the server; 0 lets the system choose."
    )] = 7410,
    as_json: Annotated[bool, typer.Option("--json", help="Figures as one JSON object; ends by itself.")] = False,
    preset: Annotated[Preset, typer.Option(help="Size of the engines' model.")] = "small",
    turns: Annotated[int, typer.Option(min=1, help="Questions to ask.")] = 4,
    pool_bytes: Annotated[str, typer.Option(metavar="BYTES", help="Size of the server's pool.")] = "1GiB",
) -> int:
    """A server, two small engines that share it, and the status page."""
    # The engines are processes of their own: what they lack is said here, before anything starts.
    missing = [name for name in ("torch", "numpy") if find_spec(name) is None]
    if missing:
        advice = "in a checkout, pip install '.[engine]'"
        raise Refused(f"the demo's engines need {' and '.join(missing)}: {advice}", FAILED)
    from kvdock.cli.demo import demo as run_demo

    return run_demo(port=port, as_json=as_json, preset=preset, turns=turns, pool_bytes=pool_bytes)
