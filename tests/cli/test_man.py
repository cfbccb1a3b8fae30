"""The man page: made from the commands' help, whole, and without warnings of groff."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator
from typing import Any

import pytest
import typer.main
from paths import ROOT

from kvdock.cli.help import EXAMPLES
from kvdock.cli.main import app
from kvdock.cli.man import page

COMMITTED = ROOT / "man/kvdock.1"
GROFF = shutil.which("groff")


def commands(group: Any, above: str = "kvdock") -> Iterator[tuple[str, Any]]:
    yield above, group
    for name, command in getattr(group, "commands", {}).items():
        yield from commands(command, f"{above} {name}")


def shown(groff: str) -> str:
    """The page as a reader sees it, without bold and underlined characters."""
    command = [groff, "-man", "-Tascii", "-P-cbou", str(COMMITTED)]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def test_the_committed_page_is_what_the_commands_say() -> None:
    assert COMMITTED.read_text() == page(), "run `make man`"


@pytest.mark.parametrize(("path", "command"), list(commands(typer.main.get_command(app))), ids=str)
def test_it_names_every_command_with_every_option_and_example(path: str, command: Any) -> None:
    text = COMMITTED.read_text()
    heading = ".SH OPTIONS\n" if path == "kvdock" else f".SS {path} [".replace("-", "\\-")
    assert text.count(heading) == 1
    section = text.partition(heading)[2]
    section = section[: section.index("\n.S")]
    for param in (one for one in command.params if not getattr(one, "hidden", False)):
        named = param.opts if param.param_type_name == "option" else [param.metavar or param.name.upper()]
        for name in named:
            assert name.replace("-", "\\-") in section, name
    examples = text.partition(".SH EXAMPLES\n")[2] if path == "kvdock" else section
    for line, _ in EXAMPLES[path.removeprefix("kvdock").strip()]:
        assert line.replace("-", "\\-").replace("'", "\\(aq") in examples, line


def test_groff_reads_it_without_a_warning_and_shows_what_can_be_copied() -> None:
    if GROFF is None:
        return
    for encoding in ("utf8", "ascii"):
        command = [GROFF, "-man", f"-T{encoding}", "-ww", "-z", str(COMMITTED)]
        checked = subprocess.run(command, capture_output=True, text=True)
        assert (checked.returncode, checked.stdout, checked.stderr) == (0, "", "")
    text = shown(GROFF)
    assert "kvdock config set 'tenants={\"a\": {\"sessions\": 4}}'" in text
    assert "kvdock events --since -1h --limit 20" in text and "NAME kvdock - the KV" in " ".join(text.split())
