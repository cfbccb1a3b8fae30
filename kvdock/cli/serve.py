"""`kvdock serve` and `kvdock config`: the server in this process, the settings that it would have, and the settings of
a running server.

The flags are derived from the Settings struct, so a new setting has its flag, its KVDOCK_… variable and its default
without a change here. When the server ends, its pool is removed, unless `--on-exit=keep` is set or another server takes
the pool over.
"""

from __future__ import annotations

import inspect
import os
import signal
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import msgspec
import typer

from kvdock.api.errors import AccessFileError, SettingsError, StartupError
from kvdock.api.log import set_up
from kvdock.api.settings import ENV_PREFIX, Settings, choices_of, effective
from kvdock.cli.errors import ctrl_c_waits
from kvdock.cli.help import (
    COMMON,
    MEANINGS,
    AsJson,
    Server,
    console,
    default_text,
    group_of,
    in_groups,
)
from kvdock.cli.streams import OutputLost
from kvdock.protocol.admin_schemas import Limits

if TYPE_CHECKING:
    from kvdock.api.server import Addresses
    from kvdock.protocol.mover_schemas import MoverConfig

LEAVING_S = 10.0
"""How long a server that is replaced may take to end, beyond draining."""


def serve(config: str | None, takeover: bool, as_json: bool, **flags: str | None) -> None:
    """Serve KV memory to the engines of this machine.

    Every setting can also be given in the environment (--pool-bytes as KVDOCK_POOL_BYTES) or in a TOML file (as
    `pool_bytes = "8GiB"`). Sizes may be written 512MiB or 4GiB. Flags win over the environment, which wins over
    the file.

    Ctrl-C ends the server at once. SIGTERM, or closing the terminal, drains it first: it refuses new work and waits up
    to --drain-s for open leases and reservations. The exit status is 0 in both cases. On SIGHUP the server reads its
    settings and access tokens again.
    """
    def read() -> Settings:
        return effective(os.environ, config=config, flags=flags).settings

    settings = read()
    set_up(settings.log_level, settings.log_format)
    with ctrl_c_waits():  # takes half a second, which --help does not need
        from kvdock.api.server import Server, ending_signals

        check_tiers(settings)
    if takeover:
        make_room(settings)

    announced = False

    def announce(addresses: Addresses) -> None:
        nonlocal announced
        announced = True
        with suppress(OutputLost):  # its reader has gone, or the disk is full: the server serves all the same
            typer.echo(ready_object(addresses) if as_json else ready_line(addresses))

    server = Server(settings, announce, read)
    for number in ending_signals():  # while it starts and cleans up; in between it has handlers of its own
        signal.signal(number, lambda number, _: server.take_signal(number))
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGHUP])
    server.run()
    if not announced:
        typer.echo("stopped before it was ready", err=True)


def tiers_of(settings: Settings) -> MoverConfig:
    """What the settings say about tiers, for a process that only tries them."""
    from kvdock.protocol.mover_schemas import MoverConfig

    return MoverConfig(
        address="", instance_prefix="", disk_path=settings.disk_path, disk_bytes=settings.disk_bytes,
        stores=settings.store_urls,
    )


def check_tiers(settings: Settings) -> None:
    """Refuses a tier that no later attempt could open. Raises SettingsError for a wrong setting, StartupError for a
    package that is not installed."""
    if not settings.has_tiers:
        return
    from concurrent.futures import ProcessPoolExecutor
    from multiprocessing import get_context

    with ProcessPoolExecutor(1, get_context("fork")) as child:  # the packages of stores stay out of the server
        is_missing, refusal = child.submit(_refusal, tiers_of(settings)).result()
    if is_missing:
        raise StartupError("not_installed", refusal)
    if refusal:
        raise SettingsError(refusal)


def _refusal(config: MoverConfig) -> tuple[bool, str]:
    """Whether a package is missing, and what is wrong; empty: nothing."""
    from kvdock.tiers.mover.opening import check_settings
    from kvdock.tiers.tier import NotInstalled

    try:
        check_settings(config)
    except NotInstalled as error:
        return True, f"the tier {error.tier} cannot be used: {error.why}"
    except ValueError as error:
        return False, str(error)
    return False, ""


def make_room(settings: Settings) -> None:
    """Asks the server at the socket, if there is one, to end and to leave its pool to this one, unless this one could
    not start then. Raises StartupError."""
    from kvdock.api.access.access_file import AccessFile
    from kvdock.api.pool.adopt import ask_to_leave, require_formats

    if settings.adopt == "never":
        raise StartupError("not_adoptable", "--takeover keeps the pool, --adopt=never removes it: choose one")
    require_formats(settings.socket_path)
    try:
        AccessFile(settings.access_file)
    except AccessFileError as error:
        raise StartupError("access_file", str(error)) from error
    pid = ask_to_leave(settings.socket_path, patience_s=settings.drain_s + LEAVING_S)
    if pid:
        typer.echo(f"process {pid} has left its pool at {settings.socket_path}", err=True)


class ConfigOptions(NamedTuple):
    """The options given between `config` and `get` or `set`."""

    server: str = ""
    as_json: bool = False


def config(
    context: typer.Context, server: str, config: str | None, as_json: bool, **flags: str | None
) -> None:
    """Show settings, or change those of a running server.

    Without --server it shows the settings that `kvdock serve` would use with the same flags, environment and file, and
    the source of each; every flag of `kvdock serve` may be given. With --server, as with `kvdock config get`, it shows
    those of the server at that address.
    """
    if context.invoked_subcommand is not None:
        context.obj = ConfigOptions(server, as_json)
        return
    if server:
        config_get(context, server, as_json)
        return
    from kvdock.cli.admin import show_config

    show_config(effective(os.environ, config=config, flags=flags), as_json=as_json, console=console())


def config_get(context: typer.Context, server: Server = "", as_json: AsJson = False) -> None:
    """Show the running server's settings and limits.

    First those that can be changed while the server runs; then those that are fixed until it is restarted.
    """
    from kvdock.cli.admin import show_live_config

    before = context.obj or ConfigOptions()
    show_live_config(server or before.server, as_json=as_json or before.as_json, console=console())


def complete_change(incomplete: str) -> list[str]:
    """Shell completion: `pool` → `pool_bytes=`, `eviction=` → its choices."""
    name, equals, _ = incomplete.partition("=")
    if equals:
        return [f"{name}={choice}" for choice in choices_of(name)]
    return [f"{live}=" for live in Limits.__struct_fields__ if live.startswith(incomplete)]


def config_set(
    context: typer.Context,
    changes: Annotated[list[str], typer.Argument(
        metavar="NAME=VALUE", help="Settings that can be changed live, as `kvdock config get` lists them; `tenants` "
        "takes quotas as JSON.", autocompletion=complete_change,
    )],
    server: Server = "",
    as_json: AsJson = False,
) -> None:
    """Change the running server's limits.

    Makes all the changes, or none. They last until the server ends; quotas are kept with the pool. Sizes may be written
    512MiB or 4GiB. If the pool is made smaller, its memory is freed as engines release it.
    """
    from kvdock.cli.admin import change_live_config

    before = context.obj or ConfigOptions()
    change_live_config(server or before.server, changes, as_json=as_json or before.as_json, console=console())


def ready_line(addresses: Addresses) -> str:
    return f"kvdock is ready: engines at {addresses.unix}, HTTP at {addresses.http} (status page {addresses.http}/)"


def ready_object(addresses: Addresses) -> str:
    """What `serve --json` prints instead of `ready_line`."""
    shown = {"unix": addresses.unix, "http": addresses.http, "pool_id": f"{addresses.pool_id:016x}"}
    return msgspec.json.encode(shown).decode()


_UNIT_METAVARS = {
    "bytes": "SIZE", "s": "SECONDS", "water": "SHARE", "cap": "SHARE", "url": "URL", "path": "PATH", "file": "FILE",
    "host": "HOST", "port": "PORT", "hosts": "HOSTS",
}
"""The units that placeholders show, by the last word of a setting's name."""


def metavar_of(name: str) -> str:
    """The placeholder for a setting's value in `--help`: its choices, or its unit."""
    if choices := choices_of(name):
        return "|".join(choices)
    return _UNIT_METAVARS.get(name.rpartition("_")[2], "N")


def _setting(name: str, *, hidden: bool = False) -> inspect.Parameter:
    option = typer.Option(
        f"--{name.replace('_', '-')}",
        help=f"{MEANINGS.get(name, '')} [{ENV_PREFIX}{name.upper()}]",
        show_default=default_text(name) or False,
        metavar=metavar_of(name),
        rich_help_panel=group_of(name),
        hidden=hidden,
    )
    return _parameter(name, None, Annotated[str | None, option])


def _parameter(
    name: str, default: object, annotation: object, kind: Any = inspect.Parameter.KEYWORD_ONLY
) -> inspect.Parameter:
    return inspect.Parameter(name, kind, default=default, annotation=annotation)


_CONFIG = _parameter("config", None, Annotated[str | None, typer.Option(
    "--config", metavar="FILE", help="TOML file of settings. [KVDOCK_CONFIG]", show_default=False,
)])
_TAKEOVER = _parameter("takeover", False, Annotated[bool, typer.Option(
    "--takeover", help="Ask the server at the socket to end, and take over its pool.",
)])
_SERVE_JSON = _parameter("as_json", False, Annotated[bool, typer.Option(
    "--json", help="Print the addresses as one JSON object; a problem if it cannot start.", rich_help_panel=COMMON,
)])
_AS_JSON = _parameter("as_json", False, AsJson)
_SERVER = _parameter("server", "", Server)
_CONTEXT = _parameter("context", inspect.Parameter.empty, typer.Context)


def _give_flags(command: Callable[..., None], *others: inspect.Parameter, hidden: bool = False) -> None:
    """Gives the command one parameter for each setting, in the signature that typer reads."""
    settings = (_setting(name, hidden=hidden) for name in in_groups(Settings.__struct_fields__))
    parameters = [*others, *settings]
    vars(command)["__signature__"] = inspect.Signature(parameters)
    command.__annotations__.clear()
    command.__annotations__.update({parameter.name: parameter.annotation for parameter in parameters})


_give_flags(serve, _CONFIG, _TAKEOVER, _SERVE_JSON)
_give_flags(config, _CONTEXT, _CONFIG, _SERVER, _AS_JSON, hidden=True)
