"""What typer makes of the program, once, in the process that commands under test are forked from."""

from __future__ import annotations

from kvdock.cli.main import program

program(shell_is_named=False)
