"""The `kvdock` command: its subcommands with their options and help, and how a command ends.

Each subcommand imports what it needs when it runs, so that `--help` and completion load neither rich, the server nor
torch. A failure that a person can repair is one sentence on standard error; kvdock/cli/errors.py lists the exit
statuses.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from importlib.metadata import version
from importlib.util import find_spec
from typing import Annotated, Any, Literal, NoReturn

import msgspec
import typer

from kvdock.api.errors import SettingsError, StartupError
from kvdock.cli.errors import (
    DONE,
    FAILED,
    INTERRUPTED,
    WRONG,
    CommandError,
    ctrl_c_waits,
    problem_of_command,
    wants_json,
)
from kvdock.cli.help import (
    AsJson,
    Command,
    Group,
    Keys,
    ListAll,
    ListLimit,
    Namespace,
    Server,
    TokensFile,
    Yes,
    console,
    parse_duration,
    parse_moment,
)
from kvdock.cli.printable import printable
from kvdock.cli.refusals import sentence_of
from kvdock.cli.serve import config, config_get, config_set, serve
from kvdock.cli.streams import OutputLost, open_standard_streams
from kvdock.cli.tiers import tiers, tiers_clear
from kvdock.cli.tokens import TOKEN_COMMANDS, token
from kvdock.protocol.cores import prevent_core_dumps
from kvdock.protocol.errors import ApiError, ServerUnavailable
from kvdock.protocol.readable import is_unicode

Preset = Literal["smollm2", "small", "tiny", "tiny-hybrid2", "tiny-hybrid3", "tiny-mha", "tiny-mla"]
"""The trained model, and the names of engine.config.PRESETS, which cannot be imported here without torch."""


def _count(meaning: str) -> Any:
    """An option for a number of things."""
    return typer.Option(min=0, metavar="N", help=meaning, show_default=False)


def status(
    server: Server = "",
    everything: Annotated[bool, typer.Option(
        "--all", help="Also list the engines, all reasons, and every counter with its meaning, zeros included.",
    )] = False,
    model: Annotated[str, typer.Option(
        "--model", metavar="MODEL", help="Only the hits and the engines of this model, on all days that are kept.",
        show_default=False,
    )] = "",
    as_json: AsJson = False,
) -> None:
    """Show whether the server is up and helps.

    First the share of prompt tokens that were loaded, that engines had themselves, and that they computed: in the last
    minute, in the whole history, and since the start; then by source and reason. Then the pool, the engines and the
    lower tiers. Then the counters that are not zero. `--json` prints all of it.
    """
    from kvdock.cli.status import show_model, show_status

    if model:
        show_model(server, model, everything=everything, as_json=as_json, console=console())
    else:
        show_status(server, everything=everything, as_json=as_json, console=console())


def top(
    server: Server = "",
    interval_s: Annotated[float, typer.Option(
        "--interval", min=0.2, max=3600.0, metavar="SECONDS", help="Seconds between two updates.",
    )] = 1.0,
    once: Annotated[bool, typer.Option("--once", help="Print one picture and exit.")] = False,
    as_json: Annotated[bool, typer.Option(
        "--json", help="Print one JSON object per interval, each on a line of its own; with --once a single one.",
    )] = False,
) -> None:
    """Watch the server: hits, pool, engines, requests.

    `q` or Ctrl-C ends it. If the server is lost, the last picture stays, and `top` tries again every interval. If
    standard output is not a terminal, one picture is printed. The figures of an engine count from when it attached.
    """
    from kvdock.cli.top import show_top

    show_top(server, interval_s=interval_s, once=once, as_json=as_json, console=console())


def doctor(
    server: Server = "",
    config: Annotated[str | None, typer.Option(
        "--config", metavar="FILE", help="TOML file of settings. [KVDOCK_CONFIG]", show_default=False,
    )] = None,
    adopt: Annotated[bool, typer.Option(
        "--adopt", help="Only check whether this release could take over the pool of the server at the socket. Run it "
        "before an upgrade, with the new release, as the server's user.",
    )] = False,
    as_json: AsJson = False,
) -> int:
    """Check this machine, the settings, the tiers and the server.

    Each line is OK, a note or a problem, with advice where there is any. The exit status is 1 if there is a problem.
    """
    from kvdock.cli.doctor import doctor as examine

    return examine(os.environ, server=server, config=config, adopt=adopt, as_json=as_json, console=console())


def lookup(
    namespace: Namespace = "", keys: Keys = None, tokens_file: TokensFile = "", server: Server = "",
    as_json: AsJson = False,
) -> None:
    """Show how many tokens of a prompt are stored. Takes no lease.

    --namespace may be omitted if the server has exactly one.
    """
    from kvdock.cli.client import Prompt
    from kvdock.cli.explain import show_lookup

    show_lookup(server, Prompt(namespace, keys or [], tokens_file), as_json=as_json, console=console())


def explain(
    request: Annotated[str, typer.Argument(metavar="ID", help="The request's id, as its engine names it.")],
    session: Annotated[str, typer.Option(
        "--session", metavar="SESSION", help="The engine's session, if several engines use the id.", show_default=False,
    )] = "",
    server: Server = "",
    as_json: AsJson = False,
) -> None:
    """Explain why a recent request hit or missed.

    Shows what its lookups found, where the stored prefix ends and why, what loading cost, and how the engine reports
    that the request ended.
    """
    from kvdock.cli.explain import show_explanation

    show_explanation(server, request=request, session=session, as_json=as_json, console=console())


def events(
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on with new events; Ctrl-C ends it.")] = False,
    kinds: Annotated[str, typer.Option(
        "--kinds", metavar="KIND,…", help="Only these kinds: attached, left, dead, evicted, ….", show_default=False,
    )] = "",
    since: Annotated[str, typer.Option(
        "--since", metavar="TIME", help="Only those since then: 2026-11-25T02:00, or -2h for two hours ago.",
        show_default=False,
    )] = "",
    limit: Annotated[int | None, typer.Option(
        "--limit", min=1, metavar="N", help="Only the last N; with --follow, of those before now.", show_default=False,
    )] = None,
    server: Server = "",
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object per event, each on a line.")] = False,
) -> None:
    """Show the latest events of the server.

    With --follow, when the server ends, the command waits for the next server at the same address and goes on.
    """
    moment = parse_moment("--since", since)
    from kvdock.cli.explain import WantedEvents, show_events

    show_events(server, WantedEvents(kinds, moment, limit), follow=follow, as_json=as_json)


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
    search: Annotated[str, typer.Option(
        metavar="TEXT", help="Only prefixes with TEXT in a label, in the model or tenant, or at the start of a key.",
    )] = "",
    unfold: Annotated[int, typer.Option(
        min=0, max=8, metavar="N", help="Levels of branches to list below each prefix.",
    )] = 0,
) -> None:
    """List what is cached: by model and tenant, then by prefix.

    A prefix is listed up to where its chunks fork, with the branches that go on from there. Prefixes that lookups
    found most often come first. The counts may be some seconds old.
    """
    from kvdock.cli.lists import show_cached

    show_cached(server, limit=limit, search=search, unfold=unfold, as_json=as_json, console=console())


def history(
    over: Annotated[Literal["minutes", "hours", "days"] | None, typer.Option(
        "--over", help="5 minutes in seconds, half a day in minutes, or two weeks in half-hours; by default hours, or "
        "the finest that reaches back to --from.", show_default=False,
    )] = None,
    since: Annotated[str, typer.Option(
        "--from", metavar="TIME", help="From then on: 2026-11-25T02:00, or -2h for two hours ago.", show_default=False,
    )] = "",
    until: Annotated[str, typer.Option(
        "--to", metavar="TIME", help="Until then, written in the same way.", show_default=False,
    )] = "",
    step: Annotated[str, typer.Option(
        "--step", metavar="DURATION", help="The time of each row: 30s, 15min, 2h.", show_default=False,
    )] = "",
    server: Server = "", as_json: AsJson = False,
) -> None:
    """Show how the server did over the last minutes, hours or days.

    Prints rows of means, each over its part of the time: at most 24 rows, or one for each --step. If a server leaves
    its pool to the next one, the next one continues hours and days.
    """
    moments = parse_moment("--from", since), parse_moment("--to", until)
    step_s = parse_duration("--step", step) if step else None
    from kvdock.cli.history import Wanted, show_past

    show_past(server, Wanted(over, *moments, step_s), as_json=as_json, console=console())


def saved(
    days: Annotated[int, typer.Option(
        "--days", min=1, metavar="N", help="The last N days on which requests ended.",
    )] = 7,
    everything: ListAll = False,
    server: Server = "",
    as_json: AsJson = False,
) -> None:
    """Show by day what loading saved, and from where prompts came.

    A row for each day, tenant and model: the tokens of prompts, how many of them the engines' own caches had, were
    loaded and were computed, and the time that loading saved. A negative time: computing would have been quicker. The
    days are kept with the pool: the next server of the pool goes on with them.
    """
    from kvdock.cli.history import show_saved

    show_saved(server, days=None if everything else days, as_json=as_json, console=console())


def requests(
    begins: Annotated[str, typer.Argument(
        metavar="ID", help="A request's id, or the first characters of it.", show_default=False,
    )] = "",
    server: Server = "",
    as_json: AsJson = False,
    limit: ListLimit = 100,
    everything: ListAll = False,
) -> None:
    """List the last lookups and stores, newest first.

    Once its engine has reported that a request ended, the row shows how many of the prompt's tokens the engine's own
    cache had, were loaded and were computed, and why. A request that ended without a lookup has the kind `ended`.
    """
    from kvdock.cli.lists import show_requests

    show_requests(
        server, begins=begins, limit=None if everything else limit, as_json=as_json, console=console()
    )


def size(
    users: Annotated[int | None, typer.Option(
        min=1, metavar="N", help="Users, or conversations, whose prompts the pool is to keep.", show_default=False,
    )] = None,
    tokens_each: Annotated[int | None, typer.Option(
        min=1, metavar="N", help="Tokens of each user's longest prompt, without the shared ones.", show_default=False,
    )] = None,
    shared_tokens: Annotated[int, typer.Option(
        min=0, metavar="N", help="Tokens with which all prompts begin, such as a system prompt.",
    )] = 0,
    new_tokens: Annotated[int, typer.Option(
        min=0, metavar="N", help="Tokens at the end of each prompt that no earlier prompt had.",
    )] = 0,
    bytes_per_token: Annotated[int | None, typer.Option(
        min=1, metavar="BYTES", help="Bytes of KV per token, in all layers and ranks.", show_default=False,
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
    """Show how much memory the pool should have.

    Asks a running server which share of the tokens pools of other sizes would have found. With --users and
    --tokens-each it computes, by a formula, the memory for the prompts of all users instead.
    """
    from kvdock.cli.size import Model, Users, show_size

    if (users is None) != (tokens_each is None):
        raise CommandError("the formula needs both --users and --tokens-each", WRONG)
    sized_for = None
    if users is not None and tokens_each is not None:
        sized_for = Users(users, tokens_each, shared_tokens, new_tokens)
    show_size(
        server, model=Model(bytes_per_token, layers, kv_heads, head_size, dtype), users=sized_for, as_json=as_json,
        console=console(),
    )


def bench(
    server: Server = "",
    as_json: AsJson = False,
    rounds: Annotated[int, typer.Option(min=10, metavar="N", help="Lookups of each size.")] = 300,
    mib: Annotated[int, typer.Option(
        min=1, metavar="MIB", help="MiB of synthetic KV to store and load, in chunks of 2 MiB."
    )] = 64,
    threads: Annotated[int, typer.Option(min=1, max=64, metavar="N", help="Threads that copy, at most 64.")] = 2,
) -> None:
    """Measure a running server; takes seconds.

    Times lookups, and times stores and loads of synthetic KV beside plain memcpy. It deletes what it stored at the
    end; in a full pool it evicts the oldest chunks. The server's own figures do not include the benchmark.
    """
    from kvdock.cli.bench import run_bench

    run_bench(server, rounds=rounds, mib=mib, threads=threads, as_json=as_json, console=console())


def demo(
    port: Annotated[int, typer.Option(
        min=0, max=65535, metavar="PORT", help="TCP port of the server; 0: any free port."
    )] = 7410,
    as_json: Annotated[bool, typer.Option("--json", help="Print the figures as one JSON object and exit.")] = False,
    preset: Annotated[Preset, typer.Option(
        help="The engines' model: a small real one, or one of seeded weights, whose text means nothing."
    )] = "smollm2",
    turns: Annotated[int | None, typer.Option(
        min=1, metavar="N", help="Questions to ask; by default they go on until Ctrl-C, with --json they are 4.",
        show_default=False,
    )] = None,
    pool_bytes: Annotated[str, typer.Option(metavar="SIZE", help="Size of the server's pool.")] = "1GiB",
) -> int:
    """Run a server and two small engines that share it.

    The engines answer questions about a text in turn, and a third engine without kvdock shows what that saves. Prints
    the address of the status page. Ctrl-C ends it.
    """
    # The engines are separate processes, so a missing package is reported here, before any of them starts.
    missing = [name for name in ("torch", "numpy") if find_spec(name) is None]
    if missing:
        advice = "pip install 'kvdock[engine]'"
        raise CommandError(f"the demo's engines need {' and '.join(missing)}: {advice}", FAILED)
    with ctrl_c_waits():
        from kvdock.cli.demo import demo as run_demo

    return run_demo(port=port, as_json=as_json, preset=preset, turns=turns, pool_bytes=pool_bytes)


ConnectorSettings = Annotated[list[str] | None, typer.Argument(
    metavar="NAME=VALUE", help="Settings of kvdock in the engine, such as lookup_wait_s=0.01.", show_default=False,
)]


def vllm_args(server: Server = "", as_json: AsJson = False, settings: ConnectorSettings = None) -> None:
    """Print what `vllm serve` needs to use the server.

    Start vLLM with `vllm serve MODEL $(kvdock vllm-args)`, without quotation marks. The server's address is printed
    if an engine would not find the server by itself. A setting that the connector does not have is refused here.
    """
    from kvdock.cli.engine_args import show, vllm_args as arguments

    show(arguments(server, settings or []), "vLLM", server, as_json=as_json)


def sglang_args(
    server: Server = "",
    page_size: Annotated[int, typer.Option("--page-size", metavar="N", help="Tokens of a page: 64, 128 or 256.")] = 64,
    as_json: AsJson = False,
    settings: ConnectorSettings = None,
) -> None:
    """Print what `sglang serve` needs to use the server.

    Start SGLang with `sglang serve --model-path MODEL $(kvdock sglang-args)`, without quotation marks. The server's
    address is printed if an engine would not find the server by itself. A setting that the linker does not have is
    refused here.
    """
    from kvdock.cli.engine_args import sglang_args as arguments, show

    show(arguments(server, page_size, settings or []), "SGLang", server, as_json=as_json)


def keep(
    namespace: Namespace = "",
    keys: Keys = None,
    tokens_file: TokensFile = "",
    lasts: Annotated[str, typer.Option(
        "--for", metavar="DURATION", help="How long from now, as 90s, 15min, 12h or 7d; at most a year.",
    )] = "1h",
    end: Annotated[bool, typer.Option("--end", help="Stop keeping it.")] = False,
    name: Annotated[str, typer.Option(metavar="NAME", help="A label for it in `kvdock cached` and on the page.")] = "",
    server: Server = "",
    as_json: AsJson = False,
) -> None:
    """Keep a prompt from being evicted for a while.

    Its stored chunks stay when the pool needs memory. `kvdock clear`, `kvdock evict` with this prompt, and a full
    quota of the tenant still remove them. Kept chunks can fill the pool; then engines store nothing more. The command
    fails if no chunk of the prompt is stored.
    """
    from kvdock.cli.admin import keep as keep_prompt
    from kvdock.cli.client import Prompt

    duration_s = 0.0 if end else parse_duration("--for", lasts)
    keep_prompt(
        server, Prompt(namespace, keys or [], tokens_file), duration_s=duration_s, name=name, as_json=as_json,
        console=console(),
    )


def evict(
    namespace: Namespace = "",
    keys: Keys = None,
    tokens_file: TokensFile = "",
    bytes_text: Annotated[str, typer.Option(
        "--bytes", metavar="SIZE", help="Evict this much, the least valuable chunks first.", show_default=False,
    )] = "",
    free_text: Annotated[str, typer.Option(
        "--free", metavar="SIZE", help="Evict the least valuable chunks until this much is free.",
        show_default=False,
    )] = "",
    yes: Yes = False,
    server: Server = "",
    as_json: AsJson = False,
) -> None:
    """Evict a prompt, or the least valuable chunks.

    By size, chunks are evicted in the order in which the pool itself evicts them; chunks that engines hold or write,
    and kept chunks, stay. A named prompt is evicted whether it is kept or not; engines that are loading it finish.
    """
    from kvdock.cli.admin import evict as evict_chunks
    from kvdock.cli.client import Prompt

    evict_chunks(
        server, Prompt(namespace, keys or [], tokens_file), bytes_text=bytes_text, free_text=free_text, yes=yes,
        as_json=as_json, console=console(),
    )


def clear(
    namespace: Namespace = "",
    tenant: Annotated[str | None, typer.Option(
        "--tenant", metavar="TENANT", help="Clear all namespaces of this tenant; '' is the server's own user.",
        show_default=False,
    )] = None,
    everything: Annotated[bool, typer.Option("--all", help="Clear all namespaces.")] = False,
    yes: Yes = False,
    server: Server = "",
    as_json: AsJson = False,
) -> None:
    """Remove all stored chunks, or one namespace's, or one tenant's.

    Engines that are loading a chunk finish first; then its memory is freed. A token of a tenant clears that tenant's
    alone. The command fails if there is no such namespace, or if the tenant has none.
    """
    from kvdock.cli.admin import ToClear, clear_cache

    clear_cache(
        server, ToClear(namespace, tenant, everything), yes=yes, as_json=as_json, console=console()
    )


def drain(
    wait: Annotated[bool, typer.Option(
        "--wait", help="Return when no lease and no reservation is open any more; Ctrl-C ends the wait alone.",
    )] = False,
    server: Server = "",
    as_json: AsJson = False,
) -> None:
    """Give out nothing new, and let engines finish what they have.

    Lookups find nothing and stores get no memory, so engines go on and compute; /readyz says `draining`. What is stored
    stays. It lasts until `kvdock undrain`, or until the server ends.
    """
    from kvdock.cli.admin import drain_server

    drain_server(server, wait=wait, as_json=as_json, console=console())


def undrain(server: Server = "", as_json: AsJson = False) -> None:
    """Serve again after `kvdock drain`."""
    from kvdock.cli.admin import undrain_server

    undrain_server(server, as_json=as_json, console=console())


def quota(
    tenant: Annotated[str | None, typer.Argument(
        metavar="TENANT", help="A tenant of the access file; '' is the server's own user. Without it, all are shown.",
        show_default=False,
    )] = None,
    bytes_text: Annotated[str, typer.Option(
        "--bytes", metavar="SIZE", help="Bytes that it may store, as 8GiB, or as 50% of the pool.", show_default=False,
    )] = "",
    chunks: Annotated[int | None, _count("Chunks that it may store.")] = None,
    namespaces: Annotated[int | None, _count("Namespaces with sessions or chunks.")] = None,
    sessions_: Annotated[int | None, typer.Option(
        "--sessions", min=0, metavar="N", help="Sessions of engines.", show_default=False,
    )] = None,
    members: Annotated[int | None, _count("Processes of all its sessions.")] = None,
    grants: Annotated[int | None, _count("Leases and reservations that may be open.")] = None,
    default: Annotated[bool, typer.Option(
        "--default", help="Give back the quota of the access file, or else the default of the settings.",
    )] = False,
    server: Server = "",
    as_json: AsJson = False,
) -> None:
    """Show what tenants use and may use, or change it.

    With limits, they replace the tenant's quota: what is not named has no limit. It counts at once, and is kept with
    the pool over restarts of the server, until the access file names another one. A tenant above its quota loses its
    own least valuable chunks.
    """
    from kvdock.cli.admin import change_quota, show_quotas
    from kvdock.protocol.admin_schemas import AskedQuota

    limits = {
        "chunks": chunks, "namespaces": namespaces, "sessions": sessions_, "members": members, "grants": grants,
    }
    given = {name: count for name, count in limits.items() if count is not None}
    asked = AskedQuota(bytes=bytes_text or None, **given) if bytes_text or given else None
    if (asked is not None) + default > 1 or (tenant is None and (asked is not None or default)):
        raise CommandError("quota needs a tenant, and either limits or --default", WRONG)
    if tenant is None or not (asked is not None or default):
        show_quotas(server, tenant, as_json=as_json, console=console())
    else:
        change_quota(server, tenant, asked, as_json=as_json, console=console())


def acknowledge(server: Server = "", as_json: AsJson = False) -> None:
    """End the findings about dead engines and damaged chunks.

    What has happened so far is no longer at the top of `kvdock status`. What happens later is.
    """
    from kvdock.cli.admin import acknowledge_findings

    acknowledge_findings(server, as_json=as_json, console=console())


# ------------------------------------------------------------------ the program


EPILOG = "Exit status: 0 success; 1 failure; 2 usage error; 130 interrupted by Ctrl-C."
GROUPS = {
    "Run": (serve, vllm_args, sglang_args, demo, doctor, bench),
    "Look": (status, top, history, saved, requests, explain, events, sessions, cached, leases, lookup, size),
    "Change": (keep, evict, clear, quota, drain, undrain, acknowledge),
}
"""The commands in the groups of `--help`; `config` and `token` are added to the last group."""


app = typer.Typer(
    cls=Group, pretty_exceptions_enable=False, rich_markup_mode=None, epilog=EPILOG,
    context_settings={"help_option_names": ["-h", "--help"]},
    help="The KV-cache server that every LLM inference engine on a machine shares.",
)
for group, members in GROUPS.items():
    for command in members:
        app.command(
            command.__name__.replace("_", "-"), cls=Command, epilog=EPILOG, rich_help_panel=group,
        )(command)
settings = typer.Typer(cls=Group, rich_markup_mode=None, epilog=EPILOG)
settings.callback(invoke_without_command=True)(config)
settings.command("get", cls=Command, epilog=EPILOG)(config_get)
settings.command("set", cls=Command, epilog=EPILOG)(config_set)
app.add_typer(settings, name="config", rich_help_panel="Change")
tokens = typer.Typer(cls=Group, rich_markup_mode=None, epilog=EPILOG, no_args_is_help=True)
tokens.callback()(token)
for name, command in TOKEN_COMMANDS.items():
    tokens.command(name, cls=Command, epilog=EPILOG)(command)
app.add_typer(tokens, name="token", rich_help_panel="Change")
lower = typer.Typer(cls=Group, rich_markup_mode=None, epilog=EPILOG)
lower.callback(invoke_without_command=True)(tiers)
lower.command("clear", cls=Command, epilog=EPILOG)(tiers_clear)
app.add_typer(lower, name="tiers", rich_help_panel="Look")


@app.callback(invoke_without_command=True)
def root(
    context: typer.Context,
    show_version: Annotated[bool, typer.Option("--version", help="Print the version and exit.")] = False,
) -> None:
    if show_version:
        typer.echo(f"kvdock {version('kvdock')}")
        raise typer.Exit
    if context.invoked_subcommand != serve.__name__:  # which takes it itself, once it can
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGHUP])
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())


@cache
def program(*, shell_is_named: bool) -> Callable[..., Any]:
    """What typer makes of `app`."""
    if shell_is_named:
        # By default typer detects the calling shell; with this variable it takes the shell as an argument.
        os.environ["_TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION"] = "1"
    return typer.main.get_command(app)


def main() -> None:
    open_standard_streams()
    try:
        try:
            _run()
        finally:
            sys.stdout.flush()
    except OutputLost as error:
        if error.is_unread:
            _end_unread()
        typer.echo(f"kvdock: standard output cannot be written: {error.why}", err=True)
        sys.exit(FAILED)


def _end_unread() -> NoReturn:
    """Ends as other programs do whose reader has closed their output: by SIGPIPE, which Python ignores."""
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGPIPE])
    signal.raise_signal(signal.SIGPIPE)
    raise AssertionError("SIGPIPE ends this process")


def _run() -> None:
    """Runs the command. Ends by SystemExit; raises OutputLost."""
    try:
        prevent_core_dumps()
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGINT])
        if strange := [text for text in sys.argv if not is_unicode(text)]:
            raise CommandError(f"wanted arguments in UTF-8, found {strange[0]!r}", WRONG)
        run = program(shell_is_named=_names_a_shell(sys.argv[1:]))
        result = run(prog_name="kvdock", standalone_mode=False)
        if result == INTERRUPTED:  # typer has caught the KeyboardInterrupt
            raise KeyboardInterrupt
        sys.exit(result if isinstance(result, int) else DONE)
    except typer.TyperException as error:
        _fail(error, sentence_of(error), getattr(error, "exit_code", WRONG))
    except CommandError as error:
        _fail(error, str(error), error.exit_code)
    except SettingsError as error:
        _fail(error, str(error), WRONG)
    except (StartupError, ApiError, ServerUnavailable) as error:
        _fail(error, str(error), FAILED)
    except (KeyboardInterrupt, typer.Abort) as error:
        signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])  # a second Ctrl-C must not interrupt the exit
        with suppress(OutputLost):
            _say(error, "stopped", INTERRUPTED)
            sys.stdout.flush()
        os._exit(INTERRUPTED)  # after a KeyboardInterrupt within exec(), Python would exit with another status


def _names_a_shell(arguments: list[str]) -> bool:
    """Whether the arguments are `--show-completion SHELL` or `--install-completion SHELL`."""
    asked = {"--show-completion", "--install-completion"}
    return len(arguments) == 2 and arguments[0] in asked and not arguments[1].startswith("-")


def _fail(error: BaseException, sentence: str, exit_status: int) -> None:
    _say(error, sentence, exit_status)
    sys.exit(exit_status)


def _say(error: BaseException, sentence: str, exit_status: int) -> None:
    """Prints the sentence on standard error and, with `--json`, the problem on standard output."""
    sentence = "\n".join(map(printable, sentence.split("\n")))  # it may quote names that engines chose
    typer.echo(f"kvdock: {sentence}", err=True)
    if wants_json(sys.argv[1:]):
        typer.echo(msgspec.json.encode(problem_of_command(error, sentence, exit_status)))
