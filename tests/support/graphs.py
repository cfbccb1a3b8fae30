"""Which module imports or includes which, the circles among them, and imports that lead nowhere."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping, Set
from functools import cache
from pathlib import PurePosixPath

from sources import nodes

Graph = Mapping[str, Set[str]]


def imports(source: str, package: str) -> Iterator[tuple[int, str]]:
    """(line, dotted name) of everything a module imports; `from a import b` names both a and a.b."""
    around = package.split(".")
    for line, level, name in _imported(source):
        yield line, ".".join([*around[: len(around) - level + 1], name]) if level else name


@cache
def _imported(source: str) -> tuple[tuple[int, int, str], ...]:
    """(line, leading dots, name) of what a module imports."""
    found = list[tuple[int, int, str]]()
    for node in nodes(source):
        if isinstance(node, ast.Import):
            found += [(node.lineno, 0, alias.name) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = (f"{node.module}.{alias.name}" if node.module else alias.name for alias in node.names)
            found += [(node.lineno, node.level, name) for name in names]
        elif isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Constant):
            called = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            if called in ("import_module", "__import__"):
                found.append((node.lineno, 0, str(node.args[0].value)))
    return tuple(found)


def import_graph(files: Mapping[PurePosixPath, str]) -> Graph:
    """Each module of kvdock with the modules it imports, under TYPE_CHECKING and inside functions too."""
    modules = {".".join(path.with_suffix("").parts): path for path in files if path.suffix == ".py"}
    modules = {name.removesuffix(".__init__"): path for name, path in modules.items()}
    graph: dict[str, set[str]] = {}
    for name, path in modules.items():
        package = name if path.name == "__init__.py" else name.rpartition(".")[0]
        graph[name] = set()
        for _, imported in imports(files[path], package):
            graph[name] |= {one for one in (imported, imported.rpartition(".")[0]) if one in modules and one != name}
    return graph


def include_graph(files: Mapping[PurePosixPath, str]) -> Graph:
    """Each file of csrc with the headers of ours that it includes, all by their paths below csrc."""
    graph: dict[str, set[str]] = {}
    for path, text in files.items():
        beside = path.relative_to("csrc").parent
        included = re.findall(r'^#include "([^"]+)"', text, re.MULTILINE)
        graph[str(path.relative_to("csrc"))] = {
            str(beside / name) if path.parent / name in files else name for name in included
        }
    return graph


def circle(graph: Graph) -> list[str]:
    """Some way along the arrows that ends where it began; empty when there is none."""
    left_for_good: set[str] = set()

    def walk(node: str, way: list[str]) -> list[str]:
        if node in way:
            return [*way[way.index(node) :], node]
        if node in left_for_good:
            return []
        for following in sorted(graph[node]):
            if found := walk(following, [*way, node]):
                return found
        left_for_good.add(node)
        return []

    return next((found for node in graph if (found := walk(node, []))), [])


def circles(graph: Graph) -> list[list[str]]:
    """Circles that have no module in common, as many as it takes for the rest to have none."""
    found, rest = list[list[str]](), dict(graph)
    while way := circle(rest):
        found.append(way)
        rest = {node: followed - set(way) for node, followed in rest.items() if node not in way}
    return found


EXTENSION = "kvdock._core"


def bound(files: Mapping[PurePosixPath, str]) -> set[str]:
    """The names that csrc/bind/ gives to what the extension holds."""
    texts = (text for path, text in files.items() if path.is_relative_to("csrc/bind"))
    return {name for text in texts for name in re.findall(r'"(\w+)"', text)}


def unresolved(files: Mapping[PurePosixPath, str]) -> list[str]:
    """Imports of kvdock, of `files` by their paths from the root, that lead to no file there."""
    in_extension = bound(files)

    def leads(name: str) -> bool:
        """To a module, to a package, or to what one of them or the extension holds by that name."""
        owner, _, held = name.rpartition(".")
        if EXTENSION in (name, owner):
            return name == EXTENSION or held in in_extension
        path = PurePosixPath(*name.split("."))
        if path.with_suffix(".py") in files or path / "__init__.py" in files:
            return True
        return any(held in files.get(one, "") for one in (path.parent.with_suffix(".py"), path.parent / "__init__.py"))

    return [
        f"{path}:{line}: {name}" for path, text in files.items() if path.suffix == ".py"
        for line, name in imports(text, ".".join(path.parent.parts)) if name.startswith("kvdock.") and not leads(name)
    ]
