"""The project's own rules, held by tests: tidy sources, pins within ranges, links that lead somewhere."""

from __future__ import annotations

import re
import subprocess
import tomllib
from collections.abc import Mapping
from pathlib import PurePosixPath

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version
from paths import ROOT
from references import FENCE, anchors
from sources import sources
from tidy_rules import RULES, Rule

from kvdock.api.settings import Settings
from kvdock.cli.help import MEANINGS, default_text
from kvdock.protocol.errors import CODES


def breaches(files: Mapping[PurePosixPath, str]) -> dict[Rule, list[str]]:
    """All rules look at one file after the other."""
    found: dict[Rule, list[str]] = {rule: [] for rule in RULES}
    for path, text in files.items():
        for rule in RULES:
            if rule.applies(path):
                found[rule] += [f"{path}:{line}: {what}" for line, what in rule.check(path, text)]
    return found


def name_of(rule: Rule) -> str:
    return rule.check.__name__


@pytest.fixture(scope="module")
def found() -> dict[Rule, list[str]]:
    return breaches(sources())


@pytest.mark.parametrize("rule", RULES, ids=name_of)
def test_no_file_breaks(rule: Rule, found: dict[Rule, list[str]]) -> None:
    assert any(rule.applies(path) for path in sources())
    assert not found[rule], "\n".join(["", *found[rule]])


ALLOWED = '''"""Says what it is."""
try:
    call()
except Exception:  # the process must not end here: it holds a lock
    value = other()  # type: ignore[no-any-return]  # the library has no types
except BaseException:
    close()
    raise
'''
BROKEN = {
    "long_lines": ("kvdock/x.py", "x = '" + "a" * 120 + "'\n"),
    "untidy_space": ("docs/x.md", "a line \nanother\tone\nno newline"),
    "machine_paths": ("tests/x.py", f'folder = "/{"work"}/main"\nother = "/{"home"}/me/x"\n'),
    "leftovers": ("kvdock/x.py", f"# {'TO' + 'DO'}: later\nprint(1)\nbreakpoint()\n"),
    "headless": ("kvdock/x.py", "x = 1\n"),
    "long_functions": ("kvdock/x.py", "def f():\n" + "    call()\n" * 60),
    "long_native_functions": ("csrc/x.cpp", (
        "namespace k {\nT::T(int a)\n    : a_{a},\n      b_(a) {\n" + "  f();\n" * 55 + "}\n"
        "int g(int a) {\n" + "  if (a) { f(\"}\"); }  // }\n" * 59 + "}\n}\n"
    )),
    "of_docstrings": ("kvdock/x.py", 'x = 1\n"""Of a first load."""\n'),
    "silenced_without_reason": ("kvdock/x.py", f"x = y  # {'type'}: ignore[misc]\nz = 1  # {'no' + 'qa'}: E501\n"),
    "broad_excepts": ("kvdock/x.py", "try:\n    f()\nexcept (OSError, Exception):\n    pass\n"),
}
FINDINGS = {"untidy_space": 3, "machine_paths": 2, "leftovers": 3, "silenced_without_reason": 2}


@pytest.mark.parametrize("rule", RULES, ids=name_of)
def test_each_rule_finds_what_it_is_for_and_nothing_else(rule: Rule) -> None:
    name, text = BROKEN[name_of(rule)]
    assert len(breaches({PurePosixPath(name): text})[rule]) == FINDINGS.get(name_of(rule), 1)
    assert breaches({PurePosixPath("kvdock/x.py"): ALLOWED})[rule] == []


def test_a_header_without_a_comment_is_found() -> None:
    rule = next(rule for rule in RULES if name_of(rule) == "headless")
    assert len(breaches({PurePosixPath("csrc/x.h"): "#pragma once\n"})[rule]) == 1
    assert breaches({PurePosixPath("csrc/x.h"): "// A key.\n#pragma once\n"})[rule] == []


def test_print_is_allowed_where_people_read_it() -> None:
    rule = next(rule for rule in RULES if name_of(rule) == "leftovers")
    assert breaches({PurePosixPath("kvdock/cli/x.py"): "print(1)\n"})[rule] == []
    assert len(breaches({PurePosixPath("kvdock/engine/x.py"): "print(1)\n"})[rule]) == 1


# --------------------------------------------------------------------------- documents


def test_the_readme_opens_with_how_to_run_and_how_to_test() -> None:
    first_screen = "\n".join(sources()[PurePosixPath("README.md")].splitlines()[:40])
    assert "make run" in first_screen and "make test" in first_screen


_LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")


def dead_links(files: dict[PurePosixPath, str]) -> list[str]:
    """Relative links of Markdown pages to files, folders or headings that are not there."""
    folders = {folder for path in files for folder in path.parents}
    dead = []
    for page in (path for path in files if path.suffix == ".md"):
        for link in _LINK.findall(FENCE.sub("", files[page])):
            if re.match(r"[a-z]+:", link):
                continue
            name, _, heading = link.partition("#")
            target = _resolved(page.parent / name) if name else page
            missing = target not in files and target not in folders
            if missing or (heading and heading not in anchors(files.get(target, ""))):
                dead.append(f"{page}: {link}")
    return dead


def _resolved(path: PurePosixPath) -> PurePosixPath:
    parts: list[str] = []
    for part in path.parts:
        if part == ".." and parts:
            parts.pop()
        else:
            parts.append(part)
    return PurePosixPath(*parts)


def test_every_relative_link_leads_somewhere() -> None:
    assert dead_links(sources()) == []


def test_a_dead_link_is_found() -> None:
    page = "[a](b.md) [c](../README.md#how-to-run) [d](gone.md) [e](b.md#nothing) [f](https://example.org) [g](../docs)"
    files = {PurePosixPath(name): text for name, text in {
        "docs/a.md": page, "docs/b.md": "# B\n", "README.md": "## How to run\n"
    }.items()}
    assert dead_links(files) == ["docs/a.md: gone.md", "docs/a.md: b.md#nothing"]


def table_rows(page: str) -> list[list[str]]:
    """Cells of the rows below the rulers of a page's tables, backticks gone from those that are all code."""
    rows = re.findall(r"^\| (.+) \|$", sources()[PurePosixPath(page)], re.MULTILINE)
    return [[re.sub(r"^`([^`]*)`$", r"\1", cell.strip()) for cell in row.split(" | ")] for row in rows][1:]


def test_docs_list_every_error_code_with_its_status_and_title() -> None:
    documented = [row[:3] for row in table_rows("docs/operate/errors.md")]
    assert documented == [[code, str(status), title] for code, (status, title) in CODES.items()]


def test_docs_list_every_setting_with_its_default_and_meaning() -> None:
    wanted = [[name, default_text(name) or "empty", MEANINGS[name]] for name in Settings.__struct_fields__]
    assert table_rows("docs/operate/settings.md") == wanted


# --------------------------------------------------------------------------- dependencies


HASHED = (
    "build", "deploy", "docs", "engine", "helm", "model", "nvcc", "server", "sglang", "test", "tools", "vllm",
    "vllm-versions",
)
APART = ("deploy", "docs", "helm", "nvcc", "tools", "vllm", "vllm-versions", "sglang")
"""Lists with an environment of their own."""


def pins() -> dict[str, Requirement]:
    """By name, of all lists in pins/ that `.venv` has."""
    lines = [line for name in (*HASHED, "torch") if name not in APART for line in pins_in(f"pins/{name}.txt")]
    return {canonicalize_name(pin.name): pin for pin in map(Requirement, lines)}


def pins_in(path: str) -> dict[str, int]:
    """The pins of one list, each with the number of its hashes."""
    text = re.sub(r"\\\n", "", re.sub(r"^#.*\n", "", sources()[PurePosixPath(path)], flags=re.MULTILINE))
    found = {}
    for line in text.splitlines():
        pin, *hashes = re.split(r" +--hash=", line)
        assert all(re.fullmatch(r"sha256:[0-9a-f]{64}", each) for each in hashes), (path, line)
        found[pin] = len(hashes)
    return found


def version_of(pin: Requirement) -> Version:
    exact, = pin.specifier
    assert exact.operator == "==", pin
    return Version(exact.version)


@pytest.mark.security
@pytest.mark.parametrize("name", HASHED)
def test_every_pin_has_hashes(name: str) -> None:
    found = pins_in(f"pins/{name}.txt")
    assert found and [pin for pin, hashes in found.items() if not hashes] == []


@pytest.mark.security
def test_every_other_list_is_named_and_no_list_names_an_index() -> None:
    """PyTorch's build differs by pip's configuration, so it alone has no hash."""
    lists = {path: text for path, text in sources().items() if path.parts[0] == "pins" and path.suffix == ".txt"}
    assert {path.stem for path in lists} == {*HASHED, "torch"}
    assert [path for path, text in lists.items() if "://" in text or "--index" in text] == []
    assert list(pins_in("pins/torch.txt")) == [f"torch=={version_of(pins()['torch'])}"]


@pytest.mark.security
def test_make_and_the_image_install_with_hashes() -> None:
    """Whatever installs a list of pins/, but PyTorch's, demands its hashes."""
    engines = [".venv-vllm-cpu/.deps", ".venv-sglang-cpu/.deps"]
    others = [f".venv-{name}/.deps" for name in ("tools", "nvcc", "deploy", "docs")] + ["build/server/.deps"]
    targets = [".venv/.deps", ".venv/.tests", ".venv/.model", *others, *engines]
    make = subprocess.run(["make", "-nB", *targets], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    steps = re.sub(r"\\\n", "", make + sources()[PurePosixPath("Dockerfile")])
    of_a_list = re.compile(r"pip.* (install|download) .*(pins/| -r )")
    installs = [part for part in re.split(r"&&|\n", steps) if of_a_list.search(part)]
    named = {name for part in installs for name in re.findall(r"pins/([\w-]+)\.txt", part)}
    assert named == {*HASHED, "torch"} - {"vllm-versions"}, "fetch_vllm.py demands the hashes of those"
    assert [part for part in installs if ("--require-hashes" in part) == ("pins/torch.txt" in part)] == []


def test_every_dependency_is_pinned_within_its_range() -> None:
    ranges = []
    for name in ("pyproject.toml", "packages/server/pyproject.toml"):
        project = tomllib.loads(sources()[PurePosixPath(name)])
        lists = [
            project["project"]["dependencies"], project["build-system"]["requires"],
            *project["project"]["optional-dependencies"].values(), project.get("dependency-groups", {}).get("test", []),
        ]
        ranges += [line for lines in lists for line in lines if not line.startswith("kvdock-engine")]
    pinned = pins()
    wrong = [text for text in ranges if not (
        (pin := pinned.get(canonicalize_name((wanted := Requirement(text)).name)))
        and wanted.specifier.contains(version_of(pin))
    )]
    assert wrong == [] and len(ranges) > 40
    assert not {"vllm", "sglang"} & pinned.keys(), "whoever has an engine chose its version"


# --------------------------------------------------------------------------- tests


def test_every_folder_of_tests_is_run() -> None:
    """By `make test`, but for those of engines, which `make test-vllm` and `make test-sglang` run."""
    options = tomllib.loads(sources()[PurePosixPath("pyproject.toml")])["tool"]["pytest"]["ini_options"]
    engines = {PurePosixPath(f"tests/{name}") for name in ("vllm", "sglang", "whole")}
    run = {PurePosixPath(folder) for folder in options["testpaths"]} | engines
    tests = {path for path in sources() if path.parts[0] == "tests" and path.name.startswith("test_")}
    assert {path.parent for path in tests} == run
