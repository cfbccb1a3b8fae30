"""`kvdock serve`: the server in this process, one flag per setting.

The flags are made from the Settings struct, so a new setting has its flag, its KVDOCK_… variable and
its default without a line here. Whatever way the server ends, its pool is removed.
"""

from __future__ import annotations

import inspect
import logging
import os
import signal
import threading
from types import FrameType
from typing import TYPE_CHECKING, Annotated

import typer

from kvdock.api.settings import ENV_PREFIX, Settings
from kvdock.cli.meanings import MEANINGS, default_text

if TYPE_CHECKING:
    from kvdock.api.server import Addresses


def serve(verbose: bool, **flags: str | None) -> None:
    """Serve KV memory to the engines of this machine until Ctrl-C or SIGTERM.

    Every flag can also be set in the environment: --pool-bytes is KVDOCK_POOL_BYTES. Sizes may be
    written 512MiB or 4GiB. Flags win.
    """
    logging.basicConfig(
        level=logging.INFO if verbose else logging.WARNING, format="%(asctime)s %(levelname)s %(name)s: %(message)s"
    )
    settings = Settings.from_environ(os.environ, **flags)
    ready = threading.Event()

    def stop_early(number: int, frame: FrameType | None) -> None:
        # Until the server handles signals itself the stack is unwound, which removes what it has made of
        # the pool. Once it has served, it is already doing so: a second signal must not cut that short.
        if not ready.is_set():
            raise KeyboardInterrupt

    def announce(addresses: Addresses) -> None:
        ready.set()
        typer.echo(ready_line(addresses))

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, stop_early)
    from kvdock.api.server import run  # half a second of imports that --help need not wait for

    try:
        run(settings, announce)
    except KeyboardInterrupt:
        typer.echo("stopped before it was ready", err=True)


def ready_line(addresses: Addresses) -> str:
    return f"kvdock is ready: engines at {addresses.unix}, HTTP at {addresses.http} (status page {addresses.http}/)"


def _flag(name: str) -> inspect.Parameter:
    option = typer.Option(
        f"--{name.replace('_', '-')}",
        help=f"{MEANINGS.get(name, '')} [{ENV_PREFIX}{name.upper()}]",
        show_default=default_text(name) or False,
        metavar=name.rpartition("_")[2].upper(),
    )
    return inspect.Parameter(
        name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=Annotated[str | None, option]
    )


def _verbose() -> inspect.Parameter:
    option = typer.Option("--verbose", "-v", help="Log what happens, not only what is wrong.")
    return inspect.Parameter(
        "verbose", inspect.Parameter.KEYWORD_ONLY, default=False, annotation=Annotated[bool, option]
    )


def _describe_flags() -> None:
    """Typer reads a function's signature: `serve` gets one parameter per setting."""
    parameters = [*(_flag(name) for name in Settings.__struct_fields__), _verbose()]
    vars(serve)["__signature__"] = inspect.Signature(parameters)
    serve.__annotations__.clear()
    serve.__annotations__.update({parameter.name: parameter.annotation for parameter in parameters})


_describe_flags()
