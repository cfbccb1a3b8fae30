"""The `kvdock` command: its subcommands, and how it ends. `--help` imports neither the server nor torch.

A failure that a person can do something about is one sentence on stderr; cli/outcome.py lists the exit statuses.
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
from kvdock.cli.outcome import DONE, FAILED, INTERRUPTED, WRONG, CommandError
from kvdock.cli.serve import config, serve
from kvdock.protocol.errors import ApiError, ServerUnavailable

EPILOG = "Exit status: 0 success; 1 failure; 2 usage error; 130 interrupted by Ctrl-C."

app = typer.Typer(
    pretty_exceptions_enable=False, rich_markup_mode=None, epilog=EPILOG,
    context_settings={"help_option_names": ["-h", "--help"]},
    help="The KV-cache server that every LLM inference engine on a machine shares.",
)
for command in (
    serve, commands.status, commands.doctor, commands.lookup, commands.clear, commands.sessions, commands.leases,
    commands.requests, commands.access_token, commands.bench, commands.demo, config,
):
    app.command(command.__name__.replace("_", "-"), epilog=EPILOG)(command)


@app.callback(invoke_without_command=True)
def root(
    context: typer.Context,
    show_version: Annotated[bool, typer.Option("--version", help="Print the version and exit.")] = False,
) -> None:
    if show_version:
        typer.echo(f"kvdock {version('kvdock')}")
        raise typer.Exit
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())


def main() -> None:
    if _names_a_shell(sys.argv[1:]):
        # By default typer detects the calling shell; with this variable it takes the shell as an argument.
        os.environ["_TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION"] = "1"
    try:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGINT])
        result = app(prog_name="kvdock", standalone_mode=False)
        if result == INTERRUPTED:  # typer has caught the KeyboardInterrupt
            raise KeyboardInterrupt
        sys.exit(result if isinstance(result, int) else DONE)
    except typer.TyperException as error:
        _fail(error.format_message(), getattr(error, "exit_code", WRONG))
    except CommandError as error:
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
    """Whether the arguments are `--show-completion SHELL` or `--install-completion SHELL`."""
    asked = {"--show-completion", "--install-completion"}
    return len(arguments) == 2 and arguments[0] in asked and not arguments[1].startswith("-")


def _fail(sentence: str, exit_code: int) -> None:
    typer.echo(f"kvdock: {sentence}", err=True)
    sys.exit(exit_code)
