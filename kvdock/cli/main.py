"""The `kvdock` command: its subcommands, and how it ends. `--help` imports neither the server nor torch.

A failure that a person can do something about is one sentence on stderr; kvdock/cli/errors.py lists the exit statuses.
"""

from __future__ import annotations

import io
import os
import signal
import sys
from importlib.metadata import version
from typing import Annotated

import msgspec
import typer

from kvdock.api.errors import SettingsError, StartupError
from kvdock.cli import commands
from kvdock.cli.errors import (
    DONE,
    FAILED,
    INTERRUPTED,
    WRONG,
    CommandError,
    problem_of_command,
    wants_json,
)
from kvdock.cli.help import Command, Group
from kvdock.cli.serve import config, config_get, config_set, serve
from kvdock.protocol.errors import ApiError, ServerUnavailable

EPILOG = "Exit status: 0 success; 1 failure; 2 usage error; 130 interrupted by Ctrl-C."
GROUPS = {
    "Run": (serve, commands.demo, commands.doctor, commands.bench),
    "Look": (
        commands.status, commands.top, commands.history, commands.requests, commands.explain, commands.events,
        commands.sessions, commands.cached, commands.leases, commands.lookup, commands.size,
    ),
    "Change": (commands.keep, commands.evict, commands.clear, commands.access_token),
}
"""The commands as `--help` groups them; `config` is beside the last ones."""


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
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # a label or a bar that the terminal cannot show ends no command
            stream.reconfigure(errors="replace")
    try:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGINT])
        result = app(prog_name="kvdock", standalone_mode=False)
        if result == INTERRUPTED:  # typer has caught the KeyboardInterrupt
            raise KeyboardInterrupt
        sys.exit(result if isinstance(result, int) else DONE)
    except typer.TyperException as error:
        _fail(error, error.format_message(), getattr(error, "exit_code", WRONG))
    except CommandError as error:
        _fail(error, str(error), error.exit_code)
    except SettingsError as error:
        _fail(error, str(error), WRONG)
    except (StartupError, ApiError, ServerUnavailable) as error:
        _fail(error, str(error), FAILED)
    except BrokenPipeError:  # whoever read the output has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # Python flushes at its end
        sys.exit(FAILED)
    except (KeyboardInterrupt, typer.Abort) as error:
        signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])  # people press it again
        _say(error, "stopped", INTERRUPTED)
        sys.stdout.flush()
        os._exit(INTERRUPTED)  # after a KeyboardInterrupt within exec(), Python's own end has another status


def _names_a_shell(arguments: list[str]) -> bool:
    """Whether the arguments are `--show-completion SHELL` or `--install-completion SHELL`."""
    asked = {"--show-completion", "--install-completion"}
    return len(arguments) == 2 and arguments[0] in asked and not arguments[1].startswith("-")


def _fail(error: BaseException, sentence: str, exit_status: int) -> None:
    _say(error, sentence, exit_status)
    sys.exit(exit_status)


def _say(error: BaseException, sentence: str, exit_status: int) -> None:
    """For people on standard error; for programs that asked for JSON on standard output as well."""
    typer.echo(f"kvdock: {sentence}", err=True)
    if wants_json(sys.argv[1:]):
        typer.echo(msgspec.json.encode(problem_of_command(error, sentence, exit_status)))
