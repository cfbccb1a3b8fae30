"""The options and the help of all commands but `serve` and `config`.

Each command imports what it needs when it runs, so that `--help` and completion load neither rich nor the server.
"""

from __future__ import annotations

import os
from importlib.util import find_spec
from typing import Annotated, Literal

import typer

from kvdock.cli.errors import FAILED, WRONG, CommandError, ctrl_c_waits
from kvdock.cli.help import (
    AsJson,
    Keys,
    ListAll,
    ListLimit,
    Namespace,
    Server,
    TokensFile,
    Yes,
    console,
    parse_duration,
)

Preset = Literal["small", "tiny", "tiny-hybrid2", "tiny-hybrid3", "tiny-mha", "tiny-mla"]
"""engine.config.PRESETS, without importing torch for it."""


def status(
    server: Server = "",
    everything: Annotated[bool, typer.Option(
        "--all", help="Also every counter with its meaning, zeros included, and the engines.",
    )] = False,
    as_json: AsJson = False,
) -> None:
    """Show whether the server is up and helps.

    First the hit rate and rates of the last minute, of the whole history and since the start; then the pool, the
    engines and lower tiers; then what has been counted, without zeros. `--json` has all of it.
    """
    from kvdock.cli.status import show_status

    show_status(server, everything=everything, as_json=as_json, console=console())


def top(
    server: Server = "",
    interval_s: Annotated[float, typer.Option(
        "--interval", min=0.2, max=3600.0, metavar="SECONDS", help="How often the picture is drawn anew.",
    )] = 1.0,
    once: Annotated[bool, typer.Option("--once", help="One picture, and end.")] = False,
    as_json: Annotated[bool, typer.Option(
        "--json", help="One JSON object per interval, each on a line of its own; with --once a single one.",
    )] = False,
) -> None:
    """Watch the server: hit rate, pool, engines, requests.

    `q` or Ctrl-C ends it. If the server is lost, the last picture stays, and the server is asked again every interval.
    Where standard output is no terminal, one picture is printed. What is said of an engine counts since it attached.
    """
    from kvdock.cli.top import show_top

    show_top(server, interval_s=interval_s, once=once, as_json=as_json, console=console())


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

    return examine(os.environ, config=config, as_json=as_json, console=console())


def lookup(
    namespace: Namespace = "", keys: Keys = None, tokens_file: TokensFile = "", server: Server = "",
    as_json: AsJson = False,
) -> None:
    """Show how many tokens of a prompt are stored. Takes no lease.

    --namespace may be left out if the server has exactly one.
    """
    from kvdock.cli.explain import show_lookup
    from kvdock.cli.prompts import Prompt

    show_lookup(server, Prompt(namespace, keys or [], tokens_file), as_json=as_json, console=console())


def explain(
    request: Annotated[str, typer.Argument(metavar="ID", help="The request's id, as its engine names it.")],
    session: Annotated[str, typer.Option(
        "--session", metavar="SESSION", help="Whose request, where several engines use the id.", show_default=False,
    )] = "",
    server: Server = "",
    as_json: AsJson = False,
) -> None:
    """Say why a recent request hit or missed.

    What its lookups asked for, where the prefix ends and why, what loading took, and what its engine told of it.
    """
    from kvdock.cli.explain import show_explanation

    show_explanation(server, request=request, session=session, as_json=as_json, console=console())


def events(
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on with what comes; Ctrl-C ends it.")] = False,
    kinds: Annotated[str, typer.Option(
        "--kinds", metavar="KIND,…", help="Only these: attached, left, dead, evicted and others.", show_default=False,
    )] = "",
    server: Server = "",
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object per event, each on a line.")] = False,
) -> None:
    """Show what has happened in the server lately.

    With --follow it waits for a server that ends, and goes on with the next one at the same address.
    """
    from kvdock.cli.explain import show_events

    show_events(server, kinds=kinds, follow=follow, as_json=as_json)


def sessions(
    server: Server = "", as_json: AsJson = False, limit: ListLimit = 100, everything: ListAll = False
) -> None:
    """List the attached engines and what they hold."""
    from kvdock.cli.lists import show_sessions

    show_sessions(server, limit=None if everything else limit, as_json=as_json, console=console())


def leases(
    server: Server = "", as_json: AsJson = False, limit: ListLimit = 100, everything: ListAll = False
) -> None:
    """List open leases and reservations, oldest first."""
    from kvdock.cli.lists import show_leases

    show_leases(server, limit=None if everything else limit, as_json=as_json, console=console())


def cached(
    server: Server = "", as_json: AsJson = False,
    limit: Annotated[int, typer.Option(min=1, max=256, metavar="N", help="Prefixes to list, at most 256.")] = 20,
) -> None:
    """List what is cached: by model and tenant, then by prefix.

    Prefixes that lookups found most often come first. The server counts its chunks at most once in some seconds.
    """
    from kvdock.cli.lists import show_cached

    show_cached(server, limit=limit, as_json=as_json, console=console())


def history(
    over: Annotated[Literal["minutes", "hours", "days"], typer.Option(
        "--over", help="5 minutes by the second, half a day by the minute, or two weeks by the half-hour.",
    )] = "hours",
    server: Server = "", as_json: AsJson = False,
) -> None:
    """Show how the server did over the last minutes, hours or days.

    At most 24 rows, each the mean over a part of the time. Hours and days outlive a server that leaves its pool to the
    next one.
    """
    from kvdock.cli.lists import show_past

    show_past(server, over=over, as_json=as_json, console=console())


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
        server, begins=begins, limit=None if everything else limit, as_json=as_json, console=console()
    )


def size(
    users: Annotated[int | None, typer.Option(
        min=1, metavar="N", help="Users, or sessions, whose prompts are to stay.", show_default=False,
    )] = None,
    tokens_each: Annotated[int | None, typer.Option(
        min=1, metavar="N", help="Tokens of each user's longest prompt, without what all share.", show_default=False,
    )] = None,
    shared_tokens: Annotated[int, typer.Option(
        min=0, metavar="N", help="Tokens with which all prompts begin, as of a system prompt.",
    )] = 0,
    new_tokens: Annotated[int, typer.Option(
        min=0, metavar="N", help="Tokens at the end of each prompt that were never computed before.",
    )] = 0,
    bytes_per_token: Annotated[int | None, typer.Option(
        min=1, metavar="BYTES", help="KV of one token, all layers and ranks.", show_default=False,
    )] = None,
    layers: Annotated[int | None, typer.Option(min=1, metavar="N", help="Or: layers …", show_default=False)] = None,
    kv_heads: Annotated[int | None, typer.Option(min=1, metavar="N", help="… KV heads …", show_default=False)] = None,
    head_size: Annotated[int | None, typer.Option(
        min=1, metavar="N", help="… and their size.", show_default=False,
    )] = None,
    dtype: Annotated[str, typer.Option(metavar="DTYPE", help="float32, bfloat16, float16 or fp8.")] = "bfloat16",
    server: Server = "",
    as_json: AsJson = False,
) -> None:
    """Say how much memory the pool should have.

    By what a running server has seen: the share of tokens that pools of other sizes would find. Or, with --users and
    --tokens-each, by a formula: room for the prompts of all users.
    """
    from kvdock.cli.size import Model, Users, show_size

    if (users is None) != (tokens_each is None):
        raise CommandError("the formula needs both --users and --tokens-each", WRONG)
    who = None
    if users is not None and tokens_each is not None:
        who = Users(users, tokens_each, shared_tokens, new_tokens)
    show_size(
        server, model=Model(bytes_per_token, layers, kv_heads, head_size, dtype), users=who, as_json=as_json,
        console=console(),
    )


def bench(
    server: Server = "",
    as_json: AsJson = False,
    rounds: Annotated[int, typer.Option(min=10, metavar="N", help="Lookups of each size.")] = 300,
    mib: Annotated[int, typer.Option(min=1, metavar="MIB", help="MiB of synthetic KV to store and load.")] = 64,
    threads: Annotated[int, typer.Option(min=1, max=64, metavar="N", help="Threads that copy, at most 64.")] = 2,
) -> None:
    """Measure a running server; takes seconds.

    Times lookups, and stores and loads of synthetic KV beside plain memcpy. What it stores is deleted at the end; in
    a full pool it evicts the oldest chunks. The server's own figures leave the benchmark out.
    """
    from kvdock.cli.bench import run_bench

    run_bench(server, rounds=rounds, mib=mib, threads=threads, as_json=as_json, console=console())


def demo(
    port: Annotated[int, typer.Option(
        min=0, max=65535, metavar="PORT", help="TCP port of the server; 0: any free port."
    )] = 7410,
    as_json: Annotated[bool, typer.Option("--json", help="Print the figures as one JSON object, and end.")] = False,
    preset: Annotated[Preset, typer.Option(help="Size of the engines' model.")] = "small",
    turns: Annotated[int, typer.Option(min=1, metavar="N", help="Questions to ask.")] = 4,
    pool_bytes: Annotated[str, typer.Option(metavar="SIZE", help="Size of the server's pool.")] = "1GiB",
) -> int:
    """Run a server and two small engines that share it.

    It says where the status page is, and ends with Ctrl-C.
    """
    # The engines are processes of their own: a missing package is reported here, before anything starts.
    missing = [name for name in ("torch", "numpy") if find_spec(name) is None]
    if missing:
        advice = "in a checkout, pip install '.[engine]'"
        raise CommandError(f"the demo's engines need {' and '.join(missing)}: {advice}", FAILED)
    with ctrl_c_waits():
        from kvdock.cli.demo import demo as run_demo

    return run_demo(port=port, as_json=as_json, preset=preset, turns=turns, pool_bytes=pool_bytes)


def keep(
    namespace: Namespace = "",
    keys: Keys = None,
    tokens_file: TokensFile = "",
    lasts: Annotated[str, typer.Option(
        "--for", metavar="DURATION", help="How long, as 90s, 15min, 12h or 7d, from now on; at most a year.",
    )] = "1h",
    end: Annotated[bool, typer.Option("--end", help="Keep it no longer.")] = False,
    server: Server = "",
    as_json: AsJson = False,
) -> None:
    """Keep a prompt from being evicted for a while.

    Its stored chunks stay when room is needed. Clearing, evicting it by name and a tenant's full quota still remove
    them. Kept chunks can fill the pool: then engines store nothing more. It fails if nothing of the prompt is stored.
    """
    from kvdock.cli.admin import keep as keep_prompt
    from kvdock.cli.prompts import Prompt

    duration_s = 0.0 if end else parse_duration("--for", lasts)
    keep_prompt(
        server, Prompt(namespace, keys or [], tokens_file), duration_s=duration_s, as_json=as_json, console=console()
    )


def evict(
    namespace: Namespace = "",
    keys: Keys = None,
    tokens_file: TokensFile = "",
    bytes_text: Annotated[str, typer.Option(
        "--bytes", metavar="SIZE", help="Evict so much of what is worth least.", show_default=False,
    )] = "",
    free_text: Annotated[str, typer.Option(
        "--free", metavar="SIZE", help="Evict what is worth least until so much of the pool is free.",
        show_default=False,
    )] = "",
    yes: Yes = False,
    server: Server = "",
    as_json: AsJson = False,
) -> None:
    """Evict a prompt, or what is worth least.

    By size, chunks go in the order in which the pool itself makes room; what engines hold or write stays, and so does
    what is kept. A prompt that is named goes, kept or not; engines that are loading it finish.
    """
    from kvdock.cli.admin import evict as evict_chunks
    from kvdock.cli.prompts import Prompt

    evict_chunks(
        server, Prompt(namespace, keys or [], tokens_file), bytes_text=bytes_text, free_text=free_text, yes=yes,
        as_json=as_json, console=console(),
    )


def clear(
    namespace: Namespace = "",
    everything: Annotated[bool, typer.Option("--all", help="Clear all namespaces.")] = False,
    yes: Yes = False,
    server: Server = "",
    as_json: AsJson = False,
) -> None:
    """Remove all stored chunks, or one namespace's.

    Engines that are loading a chunk finish; its memory is freed afterwards.
    """
    from kvdock.cli.admin import clear_cache

    clear_cache(server, namespace=namespace, everything=everything, yes=yes, as_json=as_json, console=console())


def access_token(
    name: Annotated[str, typer.Argument(metavar="NAME", help="Whose it is; the server's log names it.")],
    access_file: Annotated[str, typer.Option(
        "--access-file", metavar="FILE", help="The server's; made if it is missing. [KVDOCK_ACCESS_FILE]",
        show_default=False,
    )] = "",
    scopes: Annotated[list[str], typer.Option(
        "--scope", metavar="health|read|engine|admin", help="What it may do; may be given several times.",
    )] = ["read"],  # noqa: B006  # typer shows it as the default, and nothing changes it
    tenant: Annotated[str, typer.Option(
        "--tenant", metavar="TENANT", help="Whose sessions and chunks it uses; the server's own if left out.",
        show_default=False,
    )] = "",
    as_json: AsJson = False,
) -> None:
    """Make an access token and print it, once.

    The server's access file gets its name, digest and scopes; a running server notices. Keep what is printed in a file
    with mode 0600 and name that in KVDOCK_ACCESS_TOKEN_FILE, or give it to the status page when it asks.
    """
    from kvdock.api.access.access_file import add_token
    from kvdock.api.errors import AccessFileError
    from kvdock.api.settings import effective
    from kvdock.cli.operator import print_json
    from kvdock.protocol.calls import INCLUDED

    path = access_file or effective(os.environ).settings.access_file
    if not path:
        raise CommandError("name the server's access file: --access-file FILE", WRONG)
    if wrong := [scope for scope in scopes if scope not in INCLUDED]:
        raise CommandError(f"--scope: found {wrong[0]!r}, wanted {', '.join(INCLUDED)}", WRONG)
    try:
        token = add_token(path, name, scopes, tenant)
    except AccessFileError as error:
        raise CommandError(f"{error}; it stays as it was", WRONG) from error
    if as_json:
        made = {"name": name, "scopes": scopes, "tenant": tenant, "access_file": path, "access_token": token}
        print_json(console(), made)
    else:
        typer.echo(token)
