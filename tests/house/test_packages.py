"""Two distributions share the package: what engines need, and the server. Neither may change what an engine's
environment has, and no file is in both."""

from __future__ import annotations

import ast
import re
import sys
import tomllib
from pathlib import Path, PurePosixPath
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from paths import ROOT
from sources import nodes, sources
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

import kvdock
from kvdock.api.errors import StartupError
from kvdock.api.http.connection import INSIDE, check_uvicorn

ENGINE, SERVER = "pyproject.toml", "packages/server/pyproject.toml"
BROUGHT_BY_ENGINES = {"huggingface_hub", "numpy", "opentelemetry", "prometheus_client", "sglang", "torch", "vllm"}
EXTRAS = {"kvdock/client/http_client.py": {"httpx"}}


def project(path: str) -> dict[str, Any]:
    return tomllib.loads((ROOT / path).read_text())


def left_out(path: str) -> list[str]:
    excluded: list[str] = project(path)["tool"]["scikit-build"]["wheel"]["exclude"]
    return excluded


def is_in(path: str, file: PurePosixPath) -> bool:
    """Whether the wheel has a file of kvdock/."""
    forms = [re.escape(entry).replace(r"\*", ".*") + "(/.*)?" for entry in left_out(path)]
    return not any(re.fullmatch(form, f"/{file}") for form in forms)


def test_every_file_is_in_one_distribution() -> None:
    files = [path for path in sources() if path.parts[0] == "kvdock" and path != PurePosixPath("kvdock/docs")]
    assert len(files) > 250
    twice = [path for path in files if is_in(ENGINE, path) == is_in(SERVER, path)]
    assert twice == []
    assert is_in(ENGINE, PurePosixPath("kvdock/__init__.py")) and is_in(SERVER, PurePosixPath("kvdock/__main__.py"))
    assert is_in(SERVER, PurePosixPath("kvdock/docs/api.md")), "the server shows them"


def test_what_engines_install_imports_nothing_of_the_server_and_asks_for_one_package() -> None:
    wanted = {Requirement(line).name.replace("-", "_") for line in project(ENGINE)["project"]["dependencies"]}
    assert wanted == {"msgspec"}
    foreign = []
    for path, text in sources().items():
        if path.suffix != ".py" or path.parts[0] != "kvdock" or not is_in(ENGINE, path):
            continue
        for node in nodes(text):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else \
                [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            for name in names:
                top, *rest = name.split(".")
                own = top == "kvdock" and (not rest or is_in(ENGINE, PurePosixPath("kvdock", rest[0], "x.py")))
                known = wanted | BROUGHT_BY_ENGINES | EXTRAS.get(str(path), set()) | sys.stdlib_module_names
                if not own and top not in known:
                    foreign.append(f"{path}: {name}")
    assert foreign == []


def test_both_have_one_version() -> None:
    assert f"kvdock-engine=={kvdock.__version__}" in project(SERVER)["project"]["dependencies"]
    for path in (ENGINE, SERVER):
        assert project(path)["project"]["dynamic"][0] == "version"


@pytest.mark.parametrize("path", [ENGINE, SERVER])
def test_no_dependency_has_an_upper_bound(path: str) -> None:
    """Else it would be downgraded beside an engine that has a newer one."""
    lines = [line for line in project(path)["project"]["dependencies"] if not line.startswith("kvdock")]
    assert [line for line in lines if {one.operator for one in Requirement(line).specifier} != {">="}] == []


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_an_engines_environment_satisfies_every_dependency_that_it_has(engine: str) -> None:
    pins = dict(re.findall(r"^([a-z0-9.-]+)==([^\s;]+)", (ROOT / f"pins/{engine}.txt").read_text(), re.MULTILINE))
    wanted = [Requirement(line) for path in (ENGINE, SERVER) for line in project(path)["project"]["dependencies"]]
    there = {one.name: pins[canonicalize_name(one.name)] for one in wanted if canonicalize_name(one.name) in pins}
    assert {"uvicorn", "fastapi", "msgspec", "prometheus-client"} <= there.keys()
    changed = [str(one) for one in wanted if one.name in there and not one.specifier.contains(there[one.name])]
    assert changed == []
    new = {one.name for one in wanted} - there.keys() - {"kvdock-engine"}
    expected = (ROOT / "packages/beside.txt").read_text()
    assert f"kvdock beside {engine} changes nothing and adds: {', '.join(sorted(new))}\n" in expected


def test_the_links_of_the_readme_lead_to_the_checkout_where_it_is_published() -> None:
    text = (ROOT / "README.md").read_text() + "![a](docs/images/x.png) [b](#b) [c](https://example.org)"
    for rule in project(SERVER)["tool"]["hatch"]["metadata"]["hooks"]["fancy-pypi-readme"]["substitutions"]:
        text = re.sub(rule["pattern"], rule["replacement"], text)
    links = re.findall(r"\]\(([^)\s]+)\)", text)
    assert len(links) > 10 and [link for link in links if not link.startswith(("https://", "#"))] == []
    assert "![a](https://raw.githubusercontent.com/kvdock/kvdock/main/docs/images/x.png)" in text


def test_the_links_of_the_servers_distribution_lead_into_the_checkout() -> None:
    found = {path.name: (ROOT / "packages/server" / path).resolve() for path in Path(ROOT / "packages/server").iterdir()
             if path.is_symlink()}
    assert found == {name: ROOT / to for name, to in
                     {"kvdock": "kvdock", "man": "man", "README.markdown": "README.md", "LICENSE": "LICENSE"}.items()}


# --------------------------------------------------------------------------- what is checked at the start


def test_a_uvicorn_without_what_is_used_inside_is_refused_in_one_sentence() -> None:
    without = type("Protocol", (), dict.fromkeys(INSIDE[1:]))
    with pytest.raises(StartupError, match=r"^found uvicorn 0\.99\.0, which has no _start_asgi_task inside, wanted "):
        check_uvicorn("0.99.0", without)


def test_a_uvicorn_that_was_not_tried_is_named_once(caplog: pytest.LogCaptureFixture) -> None:
    check_uvicorn("0.99.1", HttpToolsProtocol)
    assert [record.getMessage()[:21] for record in caplog.records] == ["found uvicorn 0.99.1,"]
    caplog.clear()
    check_uvicorn("0.54.0", HttpToolsProtocol)
    assert caplog.records == []
