"""The `kvdock` command: its parts, and how it ends. `--help` loads no server, no torch.

Every failure that a person can do something about is one sentence on stderr; outcome.py lists the exit statuses.
"""

from __future__ import annotations

import os
import signal
import sys
from importlib.metadata import version
from typing import Annotated

import typer

from kvdock.api.errors import SettingsError, StartupError
from kvdock.cli import commands
from kvdock.cli.outcome import DONE, FAILED, INTERRUPTED, WRONG, Refused
from kvdock.cli.serve import config, serve
from kvdock.protocol.errors import ApiError, ServerUnavailable

EPILOG = "Exit status: 0 done; 1 it could not be done; 2 it was asked for wrongly; 130 stopped by Ctrl-C."

app = typer.Typer(
    pretty_exceptions_enable=False, rich_markup_mode=None, epilog=EPILOG,
    help="The KV-cache server that every LLM inference engine on a machine shares.",
)
for command in (
    serve, commands.status, commands.doctor, commands.lookup, commands.clear, commands.sessions, commands.leases,
    commands.bench, commands.demo, config,
):
    app.command(command.__name__, epilog=EPILOG)(command)


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


def main() -> None:
    if _names_a_shell(sys.argv[1:]):
        # By itself typer looks which shell has called; with this it takes the shell as an argument.
        os.environ["_TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION"] = "1"
    try:
        result = app(prog_name="kvdock", standalone_mode=False)
        if result == INTERRUPTED:  # typer has caught the KeyboardInterrupt
            raise KeyboardInterrupt
        sys.exit(result if isinstance(result, int) else DONE)
    except typer.TyperException as error:
        _fail(error.format_message(), getattr(error, "exit_code", WRONG))
    except Refused as error:
        _fail(str(error), error.exit_code)
    except SettingsError as error:
        _fail(str(error), WRONG)
    except (StartupError, ApiError, ServerUnavailable) as error:
        _fail(str(error), FAILED)
    except (KeyboardInterrupt, typer.Abort):
        signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])  # people press it again
        typer.echo("kvdock: stopped", err=True)
        sys.stdout.flush()
        os._exit(INTERRUPTED)  # after a KeyboardInterrupt within exec(), Python's own end has another status


def _names_a_shell(arguments: list[str]) -> bool:
    """`--show-completion bash`, where `--show-completion` alone would do too."""
    asked = {"--show-completion", "--install-completion"}
    return len(arguments) == 2 and arguments[0] in asked and not arguments[1].startswith("-")


def _fail(sentence: str, exit_code: int) -> None:
    typer.echo(f"kvdock: {sentence}", err=True)
    sys.exit(exit_code)
