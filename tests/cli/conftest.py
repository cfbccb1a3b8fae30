"""Commands are forked from the process that forks servers, so it must have imported what they import."""

from __future__ import annotations

import forks

for module in ("admin", "doctor", "explain", "hits", "lists", "size", "status", "top"):
    forks.preload(f"kvdock.cli.{module}")
for module in ("rich._emoji_codes", "typer._adapters", "typer._click.decorators", "tests.support.program_made"):
    forks.preload(module)
