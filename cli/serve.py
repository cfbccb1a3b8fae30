"""`kvdock serve` and `kvdock config`: the server in this process, and the settings it would have.

The flags are made from the Settings struct, so a new setting has its flag, its KVDOCK_… variable and its default
without a line here. When the server ends, its pool is removed, unless `--on-exit=keep` or another server takes it over.
"""

from __future__ import annotations

import inspect
import os
import signal
from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated

import typer

from kvdock.api.errors import StartupError
from kvdock.api.log import set_up
from kvdock.api.settings import ENV_PREFIX, Settings, effective
from kvdock.cli.meanings import MEANINGS, default_text
from kvdock.cli.outcome import ctrl_c_waits

if TYPE_CHECKING:
    from kvdock.api.server import Addresses

LEAVING_S = 10.0
"""How long a server that was asked to leave may take, beyond draining."""


def serve(config: str | None, takeover: bool, **flags: str | None) -> None:
    """Serve KV memory to the engines of this machine.

    Every flag can also be set in the environment (--pool-bytes as KVDOCK_POOL_BYTES) or in a TOML file (as
    `pool_bytes = "8GiB"`). Sizes may be written 512MiB or 4GiB. Flags win over the environment, which wins over
    the file.

    Ctrl-C ends the server at once. SIGTERM, or closing the terminal, drains it first: it refuses new work and waits up
    to --drain-s for open leases and reservations. Its exit status is 0 in both cases. After SIGHUP it reads settings
    and access tokens again.
    """
    def read() -> Settings:
        return effective(os.environ, config=config, flags=flags).settings

    settings = read()
    set_up(settings.log_level, settings.log_format)
    with ctrl_c_waits():  # half a second, which --help does not need
        from kvdock.api.server import Server, ending_signals

    if takeover:
        make_room(settings)

    announced = False

    def announce(addresses: Addresses) -> None:
        nonlocal announced
        announced = True
        typer.echo(ready_line(addresses))

    server = Server(settings, announce, read)
    for number in ending_signals():  # for its start and its clean-up; in between it has its own
        signal.signal(number, lambda *_: server.stop())
    server.run()
    if not announced:
        typer.echo("stopped before it was ready", err=True)


def make_room(settings: Settings) -> None:
    """Asks the server at the socket, if there is one, to end and leave its pool to this one."""
    from kvdock.api.pool.handover import ask_to_leave

    if settings.adopt == "never":
        raise StartupError("not_adoptable", "--takeover keeps the pool, --adopt=never removes it: choose one")
    pid = ask_to_leave(settings.socket_path, patience_s=settings.drain_s + LEAVING_S)
    if pid:
        typer.echo(f"process {pid} has left its pool at {settings.socket_path}", err=True)


def config(config: str | None, as_json: bool, **flags: str | None) -> None:
    """Show every setting and its source.

    These are the settings that `kvdock serve` would use with the same flags, environment and file. Flags win over the
    environment, which wins over the file.
    """
    from rich.console import Console

    from kvdock.cli.config import show_config

    show_config(effective(os.environ, config=config, flags=flags), as_json=as_json, console=Console())


def ready_line(addresses: Addresses) -> str:
    return f"kvdock is ready: engines at {addresses.unix}, HTTP at {addresses.http} (status page {addresses.http}/)"


_METAVARS = {
    "s": "SECONDS", "water": "SHARE", "cap": "SHARE", "threads": "N", "records": "N", "grants": "N", "heartbeats": "N",
    "values": "N", "requests": "N", "connections": "N", "growth": "demand|ahead",
    "adopt": "auto|never|require", "exit": "remove|keep",
}
"""By the last word of a setting's name, where that word in capitals would not say what to write."""


def _setting(name: str) -> inspect.Parameter:
    option = typer.Option(
        f"--{name.replace('_', '-')}",
        help=f"{MEANINGS.get(name, '')} [{ENV_PREFIX}{name.upper()}]",
        show_default=default_text(name) or False,
        metavar=_METAVARS.get(last := name.rpartition("_")[2], last.upper()),
    )
    return _parameter(name, None, Annotated[str | None, option])


def _parameter(name: str, default: object, annotation: object) -> inspect.Parameter:
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)


_CONFIG = _parameter("config", None, Annotated[str | None, typer.Option(
    "--config", metavar="FILE", help="TOML file of settings. [KVDOCK_CONFIG]", show_default=False,
)])
_TAKEOVER = _parameter("takeover", False, Annotated[bool, typer.Option(
    "--takeover", help="Ask the server at the socket to end, and take over its pool.",
)])
_AS_JSON = _parameter("as_json", False, Annotated[bool, typer.Option("--json", help="Print one JSON object.")])


def _give_flags(command: Callable[..., None], *others: inspect.Parameter) -> None:
    """Typer reads a function's signature: the command gets one parameter per setting."""
    parameters = [*(_setting(name) for name in Settings.__struct_fields__), *others]
    vars(command)["__signature__"] = inspect.Signature(parameters)
    command.__annotations__.clear()
    command.__annotations__.update({parameter.name: parameter.annotation for parameter in parameters})


_give_flags(serve, _CONFIG, _TAKEOVER)
_give_flags(config, _CONFIG, _AS_JSON)
