"""Whatever a comment, a docstring or a document refers to is there."""

from __future__ import annotations

import re
from pathlib import PurePosixPath

import pytest
import typer.main
from references import RULES, Rule, Tree, breaches
from sources import sources

from kvdock.cli.main import app

HELP = {"--help", "-h"}


@pytest.fixture(scope="module")
def tree() -> Tree:
    group = typer.main.get_command(app)
    assert isinstance(group, typer.core.TyperGroup)
    commands = {"": group, **group.commands}
    for verb, command in group.commands.items():
        commands.update({f"{verb} {name}": one for name, one in getattr(command, "commands", {}).items()})
    return Tree(sources(), {
        verb: frozenset({*HELP, *(option for found in command.params for option in found.opts)})
        for verb, command in commands.items()
    })


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_every_reference_leads_somewhere(rule: Rule, tree: Tree) -> None:
    found = breaches(rule, tree)
    assert not found, "\n".join(["", *found])


GITHUB = re.compile(r"(?:github\.com/kvdock/kvdock/blob|raw\.githubusercontent\.com/kvdock/kvdock)/main/([\w./-]+)")


def test_every_link_to_this_repository_on_github_leads_to_a_file() -> None:
    texts = {path: text for path, text in sources().items() if path.parts[0] != "tests"}
    linked = [(path, name) for path, text in texts.items() for name in GITHUB.findall(text)]
    assert linked and not [link for link in linked if PurePosixPath(link[1]) not in sources()]


FILES = {
    "docs/understand/lifetime_protocol.md": "## Grants\n\n- **I1** A slot has one owner.\n",
    "Makefile": "setup: x\ntest: setup\n",
    "kvdock/api/keeper.py": "class Keeper:\n    def look(self) -> None: ...\n",
    "csrc/table/table.h": "class Table {\n  void check_integrity();\n};\n",
    "bench/copy.py": "",
    "tests/support/helper.py": "",
}
VERBS = {"": frozenset({"--version"}), "serve": frozenset({"--port"}), "token": frozenset({"--help"}),
         "token add": frozenset({"--scope"})}


@pytest.mark.parametrize(("rule", "path", "text", "found"), [
    ("labels", "csrc/x.cpp", "// I1, then I9: W1.\nint I7;\n", ["1: I9", "1: W1"]),
    ("sections", "kvdock/api/x.py", '"""As it says (section 7)."""\n', ["1: section 7"]),
    ("paths", "kvdock/api/x.py", "# keeper.py, gone.py, kvdock/api/keeper.py and kvdock/old/keeper.py\n",
     ["1: gone.py", "1: kvdock/old"]),
    ("paths", "csrc/table/x.cpp", "// table.h, table/table.h and table_store.cpp\n", ["1: table_store.cpp"]),
    ("paths", "tests/api/test_x.py", '"""As helper.py has it.\n\nNot as its_helper.py.\n"""\n', ["3: its_helper.py"]),
    ("paths", "docs/understand/x.md",
     "See docs/understand/lifetime_protocol.md#grants, `kvdock/gone/`, not lifetime_protocol.md#leases.\n",
     ["1: lifetime_protocol.md#leases", "1: kvdock/gone"]),
    ("names", "kvdock/api/x.py", "# check_integrity() and Keeper.look, os.fsync(), but integrity() and Keeper.stare\n",
     ["1: integrity()", "1: Keeper.stare"]),
    ("names", "docs/x.md", "`Keeper.look` (`kvdock/api/keeper.py`), `Looker` (kvdock/api/keeper.py)\n", ["1: Looker"]),
    ("names", "docs/x.md", "kvdock.api.keeper.Keeper, kvdock.api.looker, bench.copy\n", ["1: kvdock.api.looker"]),
    ("commands", "docs/x.md", "`python -m bench.copy`, `python -m bench.paste`, `make test`, `make tests ARGS=-x`\n",
     ["1: python -m bench.paste", "1: make tests"]),
    ("commands", "docs/x.md", "    kvdock serve --port 1 --ports 2\n    kvdock stop\n    make love\n",
     ["1: kvdock serve --ports", "2: kvdock stop", "3: make love"]),
    ("commands", "docs/x.md", "`kvdock token add me --scope read --port 1`\n", ["1: kvdock token add --port"]),
    ("commands", "kvdock/api/x.py", "# `kvdock serve --port` and `kvdock --help`\n", ["1: kvdock  --help"]),
])  # fmt: skip
def test_a_reference_to_what_is_gone_is_found_and_no_other(rule: str, path: str, text: str, found: list[str]) -> None:
    tree = Tree({PurePosixPath(name): held for name, held in {**FILES, path: text}.items()}, VERBS)
    seen = breaches(next(one for one in RULES if one.__name__ == rule), tree)
    assert len(seen) == len(found), seen
    assert all(line.startswith(f"{path}:{want}") for line, want in zip(seen, found, strict=True)), seen
