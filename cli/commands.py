"""The options and the help of the commands that ask a running server or this machine.

Each command imports what it needs when it runs, so that `--help` and completion load neither rich nor the server.
"""

from __future__ import annotations

import os
from importlib.util import find_spec
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from kvdock.cli.outcome import FAILED, WRONG, CommandError, ctrl_c_waits

if TYPE_CHECKING:
    from rich.console import Console

Preset = Literal["small", "tiny", "tiny-hybrid2", "tiny-hybrid3", "tiny-mha", "tiny-mla"]
"""engine.config.PRESETS, without importing torch for it."""

Server = Annotated[str, typer.Option(
    "--server", metavar="ADDRESS", show_default=False,
    help="unix:/path or http://host:port; by default this user's socket. A server that wants an access token gets the "
    "one in the file that KVDOCK_ACCESS_TOKEN_FILE names.",
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


def requests(
    begins: Annotated[str, typer.Argument(
        metavar="ID", help="A request's id, or how it begins.", show_default=False,
    )] = "",
    server: Server = "",
    as_json: AsJson = False,
    limit: ListLimit = 100,
    everything: ListAll = False,
) -> None:
    """List the last lookups and stores, newest first.

    A request that has ended shows what became of it, once its engine has told it with a heartbeat: how many tokens its
    own cache had, how many were loaded, and why not more. Those that looked up nothing here are of the kind `ended`.
    """
    from kvdock.cli.lists import show_requests

    show_requests(
        server, begins=begins, limit=None if everything else limit, as_json=as_json, console=_console()
    )


def access_token(
    name: Annotated[str, typer.Argument(metavar="NAME", help="Whose it is; the server's log names it.")],
    access_file: Annotated[str, typer.Option(
        "--access-file", metavar="FILE", help="The server's; made if it is missing. [KVDOCK_ACCESS_FILE]",
        show_default=False,
    )] = "",
    scopes: Annotated[list[str], typer.Option(
        "--scope", metavar="SCOPE", help="What it may do: health, read, engine or admin; may be given several times.",
    )] = ["read"],  # noqa: B006  # typer shows it as the default, and nothing changes it
    tenant: Annotated[str, typer.Option(
        "--tenant", metavar="TENANT", help="Whose sessions and chunks it uses; the server's own if left out.",
        show_default=False,
    )] = "",
) -> None:
    """Make an access token and print it, once.

    The server's access file gets its name, digest and scopes; a running server notices. Keep what is printed in a file
    with mode 0600 and name that in KVDOCK_ACCESS_TOKEN_FILE, or give it to the status page when it asks.
    """
    from kvdock.api.access.issue import add_token
    from kvdock.api.errors import AccessFileError
    from kvdock.api.settings import effective
    from kvdock.protocol.calls import INCLUDED

    path = access_file or effective(os.environ).settings.access_file
    if not path:
        raise CommandError("name the server's access file: --access-file FILE", WRONG)
    if wrong := [scope for scope in scopes if scope not in INCLUDED]:
        raise CommandError(f"--scope: found {wrong[0]!r}, wanted {', '.join(INCLUDED)}", WRONG)
    try:
        typer.echo(add_token(path, name, scopes, tenant))
    except AccessFileError as error:
        raise CommandError(f"{error}; it stays as it was", WRONG) from error


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
