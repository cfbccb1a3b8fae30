"""The options and the help of the commands that change a running server, or who may call it."""

from __future__ import annotations

import os
from typing import Annotated

import typer

from kvdock.cli.options import AsJson, Keys, Namespace, Server, TokensFile, Yes, console, parse_duration
from kvdock.cli.outcome import WRONG, CommandError


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
    from kvdock.cli.change import keep as keep_prompt
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
    from kvdock.cli.change import evict as evict_chunks
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
    from kvdock.cli.change import clear_cache

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
    from kvdock.api.access.issue import add_token
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
