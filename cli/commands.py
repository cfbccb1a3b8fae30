"""The options and the help of the commands that ask a running server or this machine.

Each command imports what it needs when it runs, so that `--help` and completion load neither rich nor the server.
"""

from __future__ import annotations

import os
from importlib.util import find_spec
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from kvdock.cli.outcome import FAILED, CommandError, ctrl_c_waits

if TYPE_CHECKING:
    from rich.console import Console

Preset = Literal["small", "tiny", "tiny-hybrid2", "tiny-hybrid3", "tiny-mha", "tiny-mla"]
"""engine.config.PRESETS, without importing torch for it."""

Server = Annotated[str, typer.Option(
    "--server", metavar="ADDRESS", show_default=False,
    help="unix:/path or http://host:port; by default this user's socket.",
)]
AsJson = Annotated[bool, typer.Option("--json", help="One JSON object on standard output.")]
ListLimit = Annotated[int, typer.Option("--limit", min=1, metavar="N", help="Show at most N.")]
ListAll = Annotated[bool, typer.Option("--all", help="Show all.")]
Namespace = Annotated[str, typer.Option(
    "--namespace", metavar="HEX", help="The namespace, or its first hex digits.", show_default=False,
)]


def _console() -> Console:
    from rich.console import Console

    return Console()


def status(server: Server = "", as_json: AsJson = False) -> None:
    """Show what the server holds, and for which engines."""
    from kvdock.cli.status import show_status

    show_status(server, as_json=as_json, console=_console())


def doctor(
    config: Annotated[str | None, typer.Option(
        "--config", metavar="FILE", help="TOML file of settings. [KVDOCK_CONFIG]", show_default=False,
    )] = None,
    as_json: AsJson = False,
) -> int:
    """Check this machine, the settings and the server.

    Each line is OK, a note or a problem, with what to do about it. The exit status is 1 if there is a problem.
    """
    from kvdock.cli.doctor import doctor as examine

    return examine(os.environ, config=config, as_json=as_json, console=_console())


def lookup(
    namespace: Namespace = "",
    keys: Annotated[list[str] | None, typer.Option(
        "--keys", metavar="HEX", help="Chunk keys of 64 hex digits, in order; separated by commas, or several --keys.",
        show_default=False,
    )] = None,
    tokens_file: Annotated[str, typer.Option(
        "--tokens-file", metavar="FILE", help="File of token ids: a JSON list, or numbers; - is standard input.",
        show_default=False,
    )] = "",
    server: Server = "",
    as_json: AsJson = False,
) -> None:
    """Show how many tokens of a prompt are stored. Takes no lease.

    --namespace may be left out if the server has exactly one.
    """
    from kvdock.cli.lookup import show_lookup

    show_lookup(
        server, namespace=namespace, keys=keys or [], tokens_file=tokens_file, as_json=as_json, console=_console()
    )


def clear(
    namespace: Namespace = "",
    everything: Annotated[bool, typer.Option("--all", help="Clear all namespaces.")] = False,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask for confirmation.")] = False,
    server: Server = "",
    as_json: AsJson = False,
) -> None:
    """Remove stored chunks.

    Engines that are loading a chunk finish; its memory is freed afterwards.
    """
    from kvdock.cli.clear import clear_cache

    clear_cache(server, namespace=namespace, everything=everything, yes=yes, as_json=as_json, console=_console())


def sessions(
    server: Server = "", as_json: AsJson = False, limit: ListLimit = 100, everything: ListAll = False
) -> None:
    """List the attached engines and what they hold."""
    from kvdock.cli.lists import show_sessions

    show_sessions(server, limit=None if everything else limit, as_json=as_json, console=_console())


def leases(
    server: Server = "", as_json: AsJson = False, limit: ListLimit = 100, everything: ListAll = False
) -> None:
    """List open leases and reservations, oldest first."""
    from kvdock.cli.lists import show_leases

    show_leases(server, limit=None if everything else limit, as_json=as_json, console=_console())


def bench(
    server: Server = "",
    as_json: AsJson = False,
    rounds: Annotated[int, typer.Option(min=10, metavar="N", help="Lookups of each size.")] = 300,
    mib: Annotated[int, typer.Option(min=1, metavar="MIB", help="MiB of synthetic KV to store and load.")] = 64,
    threads: Annotated[int, typer.Option(min=1, max=64, metavar="N", help="Threads that copy, at most 64.")] = 2,
) -> None:
    """Measure a running server; takes seconds.

    Times lookups, and stores and loads of synthetic KV beside plain memcpy. What it stores is deleted at the end; in
    a full pool it evicts the oldest chunks. The server's counters include the benchmark.
    """
    from kvdock.cli.bench import run_bench

    run_bench(server, rounds=rounds, mib=mib, threads=threads, as_json=as_json, console=_console())


def demo(
    port: Annotated[int, typer.Option(
        min=0, max=65535, metavar="PORT", help="TCP port of the server; 0: any free port."
    )] = 7410,
    as_json: Annotated[bool, typer.Option("--json", help="Print the figures as one JSON object, and end.")] = False,
    preset: Annotated[Preset, typer.Option(help="Size of the engines' model.")] = "small",
    turns: Annotated[int, typer.Option(min=1, metavar="N", help="Questions to ask.")] = 4,
    pool_bytes: Annotated[str, typer.Option(metavar="BYTES", help="Size of the server's pool.")] = "1GiB",
) -> int:
    """Run a server, two small engines that share it, and the status page."""
    # The engines are processes of their own: a missing package is reported here, before anything starts.
    missing = [name for name in ("torch", "numpy") if find_spec(name) is None]
    if missing:
        advice = "in a checkout, pip install '.[engine]'"
        raise CommandError(f"the demo's engines need {' and '.join(missing)}: {advice}", FAILED)
    with ctrl_c_waits():
        from kvdock.cli.demo import demo as run_demo

    return run_demo(port=port, as_json=as_json, preset=preset, turns=turns, pool_bytes=pool_bytes)
