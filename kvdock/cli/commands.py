"""The options and the help of the commands that ask a running server or this machine.

Each command imports what it needs when it runs, so that `--help` and completion load neither rich nor the server.
kvdock/cli/commands_change.py has those that change a running server.
"""

from __future__ import annotations

import os
from importlib.util import find_spec
from typing import Annotated, Literal

import typer

from kvdock.cli.options import (
    AsJson,
    Keys,
    ListAll,
    ListLimit,
    Namespace,
    Server,
    TokensFile,
    console,
)
from kvdock.cli.outcome import FAILED, WRONG, CommandError, ctrl_c_waits

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
    from kvdock.cli.lookup import show_lookup
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
    from kvdock.cli.story import show_explanation

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
    from kvdock.cli.story import show_events

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
    from kvdock.cli.cached import show_cached

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
    from kvdock.cli.past import show_past

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
