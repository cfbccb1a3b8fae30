"""What typer has refused on a command line, in people's words: the option, what was wanted, and what was found."""

from __future__ import annotations

import typer

from kvdock.protocol.refused import wanted_of


def sentence_of(error: typer.TyperException) -> str:
    """Where a value was refused, this leaves out the words of pydantic, which checks values for typer."""
    errors = getattr(error.__cause__, "errors", None)  # of pydantic's ValidationError, which is not imported for this
    if not isinstance(error, typer.BadParameter) or error.param is None or errors is None:
        return error.format_message()
    (first, *_) = errors()
    if not (wanted := wanted_of(first)):
        return error.format_message()
    return f"{error.param.get_error_hint().replace(chr(39), '')}: wanted {wanted}, found {str(first['input'])!r}"
