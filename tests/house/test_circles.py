"""No import circle in Python and no include circle in csrc, whose includes point down only."""

from __future__ import annotations

from pathlib import PurePosixPath

import pytest
from graphs import circle, import_graph, include_graph
from sources import sources

BELOW = {
    "base": {"base"},
    "segment": {"base", "segment"},
    "table": {"base", "segment", "table"},
    "curve": {"base", "table", "curve"},
    "pack": {"base", "pack"},
    "copy": {"base", "pack", "copy"},
    "cuda": {"base", "pack", "copy", "cuda"},
    "bind": {"base", "segment", "table", "curve", "pack", "copy", "cuda", "bind"},
}
"""The rooms of csrc that each of them may include."""
NATIVE = (".cpp", ".h", ".cu")
NOT_KVDOCK = ("tests", "csrc")


def test_no_python_module_imports_itself_by_way_of_others() -> None:
    graph = import_graph({
        path: text for path, text in sources().items() if path.suffix == ".py" and path.parts[0] not in NOT_KVDOCK
    })
    assert "kvdock.connectors.lookups" in graph["kvdock.connectors.scheduler"]
    assert circle(graph) == []


def test_no_header_includes_itself_by_way_of_others() -> None:
    graph = include_graph(native())
    assert "table/grants.h" in graph["table/table.h"]
    assert circle(graph) == []


def test_includes_point_down() -> None:
    found = ups(native())
    assert found == []


def native() -> dict[PurePosixPath, str]:
    return {path: text for path, text in sources().items() if path.parts[0] == "csrc" and path.suffix in NATIVE}


def ups(files: dict[PurePosixPath, str]) -> list[str]:
    return [
        f"{user} includes {used}" for user, all_used in include_graph(files).items() for used in sorted(all_used)
        if used.partition("/")[0] not in BELOW[user.partition("/")[0]]
    ]


def test_an_include_that_points_up_is_found() -> None:
    files = {"csrc/base/x.h": '#include "copy/y.h"', "csrc/copy/y.h": "", "csrc/bind/z.cpp": '#include "copy/y.h"'}
    assert ups({PurePosixPath(name): text for name, text in files.items()}) == ["base/x.h includes copy/y.h"]


@pytest.mark.parametrize(("files", "way"), [
    ({"csrc/a/x.h": '#include "a/y.h"', "csrc/a/y.h": '#include "a/x.h"'}, ["a/x.h", "a/y.h", "a/x.h"]),
    ({"csrc/a/x.cpp": '#include "a/x.h"\n#include "a/y.h"', "csrc/a/x.h": "", "csrc/a/y.h": '#include "a/x.h"'}, []),
])
def test_a_circle_of_headers_is_found(files: dict[str, str], way: list[str]) -> None:
    assert circle(include_graph({PurePosixPath(name): text for name, text in files.items()})) == way


@pytest.mark.parametrize(("files", "way"), [
    ({"kvdock/a.py": "def f():\n    from kvdock import b", "kvdock/b.py": "import kvdock.c",
      "kvdock/c.py": "if TYPE_CHECKING:\n    from .a import A"}, ["kvdock.a", "kvdock.b", "kvdock.c", "kvdock.a"]),
    ({"x/__init__.py": "from x.a import A", "x/a.py": "import x"}, ["x", "x.a", "x"]),
    ({"kvdock/a.py": "from kvdock.b import B", "kvdock/b.py": "from kvdock.c import a", "kvdock/c.py": ""}, []),
])
def test_a_circle_of_modules_is_found(files: dict[str, str], way: list[str]) -> None:
    assert circle(import_graph({PurePosixPath(name): text for name, text in files.items()})) == way
