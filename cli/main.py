"""The `kvdock` command. Each command imports what it needs when it runs: `--help` loads no server, no torch.

Every failure that a person can do something about is one sentence on stderr. Exit status: 0 done,
1 it could not be done, 2 it was asked for wrongly.
"""

from __future__ import annotations

import sys
from importlib.metadata import version
from importlib.util import find_spec
from typing import Annotated

import typer

from kvdock.api.errors import ApiError, ServerUnavailable, SettingsError, StartupError
from kvdock.cli.serve import serve

app = typer.Typer(
    add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None,
    help="The KV-cache server that every LLM inference engine on a machine shares.",
)
app.command()(serve)


@app.callback(invoke_without_command=True)
def root(
    context: typer.Context,
    show_version: Annotated[bool, typer.Option("--version", help="Print the version and leave.")] = False,
) -> None:
    if show_version:
        typer.echo(f"kvdock {version('kvdock')}")
        raise typer.Exit
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())


@app.command()
def status(
    server: Annotated[
        str, typer.Option(metavar="ADDRESS", help="unix:/path or http://host:port; else this user's socket.")
    ] = "",
    as_json: Annotated[bool, typer.Option("--json", help="The server's answer as it is.")] = False,
) -> None:
    """What the server holds, and for whom."""
    from rich.console import Console

    from kvdock.cli.status import default_address, show_status

    address = server or default_address()
    try:
        show_status(address, as_json=as_json, console=Console())
    except ValueError as error:
        raise Refused(str(error), 2) from error
    except ServerUnavailable as error:
        raise Refused(f"no server answers at {error}; start one with `kvdock serve`", 1) from error


@app.command()
def demo(
    port: Annotated[int, typer.Option(help="TCP port of the server; 0 lets the system choose.")] = 7410,
    as_json: Annotated[bool, typer.Option("--json", help="Figures as one JSON object; ends by itself.")] = False,
    preset: Annotated[str, typer.Option(help="Size of the engines' model.")] = "small",
    turns: Annotated[int, typer.Option(min=1, help="Questions to ask.")] = 4,
    pool: Annotated[str, typer.Option(help="Size of the server's pool.")] = "1GiB",
) -> int:
    """A server, two small engines that share it, and the status page."""
    # The engines are processes of their own: what they lack is said here, before anything starts.
    missing = [name for name in ("torch", "numpy") if find_spec(name) is None]
    if missing:
        raise Refused(f"the demo's engines need {' and '.join(missing)}: pip install 'kvdock[engine]'", 1)
    from kvdock.cli.demo import demo as run_demo

    return run_demo(port=port, as_json=as_json, preset=preset, turns=turns, pool=pool)


class Refused(Exception):
    """One sentence for the person at the terminal, and the exit status."""

    def __init__(self, sentence: str, exit_code: int) -> None:
        super().__init__(sentence)
        self.exit_code = exit_code


def main() -> None:
    try:
        result = app(prog_name="kvdock", standalone_mode=False)
        sys.exit(result if isinstance(result, int) else 0)
    except typer.TyperException as error:
        _fail(error.format_message(), getattr(error, "exit_code", 2))
    except Refused as error:
        _fail(str(error), error.exit_code)
    except SettingsError as error:
        _fail(str(error), 2)
    except (StartupError, ApiError, ServerUnavailable) as error:
        _fail(str(error), 1)


def _fail(sentence: str, exit_code: int) -> None:
    typer.echo(f"kvdock: {sentence}", err=True)
    sys.exit(exit_code)


if __name__ == "__main__":
    main()
