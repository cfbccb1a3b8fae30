"""Prints the shape of the code: its largest constructor and class, its size, and imports that lead nowhere or round.

    python -m tests.house.shape           for people
    python -m tests.house.shape --json    one JSON object

What counts as a class with state, tests/support/shapes.py says. Product is everything but tests, bench, docs, examples
and pins; lines are those of code files (Python, C++, CUDA, JavaScript, CSS) that are committed or would be.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping
from pathlib import Path, PurePosixPath

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "support"))

from graphs import circles, import_graph, include_graph, unresolved  # found only by the path above
from shapes import Shape, shapes  # likewise
from sources import sources  # likewise
from tidy_rules import CODE, NATIVE  # likewise

NO_PRODUCT = frozenset({"tests", "bench", "docs", "examples", "pins"})
Files = Mapping[PurePosixPath, str]


def product(files: Files) -> dict[PurePosixPath, str]:
    """Its code files."""
    return {path: text for path, text in files.items() if path.suffix in CODE and path.parts[0] not in NO_PRODUCT}


def measured(files: Files) -> dict[str, object]:
    ours = product(files)
    found = shapes(ours)
    native = {path: text for path, text in ours.items() if path.parts[0] == "csrc" and path.suffix in NATIVE}
    python = {path: text for path, text in ours.items() if path.suffix == ".py" and path.parts[0] == "kvdock"}
    arguments = max(found, key=lambda shape: shape.arguments)
    attributes = max(found, key=lambda shape: shape.attributes)
    return {
        "max_constructor_args": _worst(arguments, arguments.arguments),
        "max_attributes": _worst(attributes, attributes.attributes),
        "python_files": sum(path.suffix == ".py" for path in ours),
        "product_lines": _lines(ours),
        "test_lines": _lines({
            path: text for path, text in files.items() if path.suffix in CODE and path.parts[0] == "tests"
        }),
        "unresolved_imports": len(unresolved(files)),
        "circles": len(circles(import_graph(python))) + len(circles(include_graph(native))),
    }


def _worst(shape: Shape, count: int) -> dict[str, object]:
    return {"count": count, "class": shape.name, "where": f"{shape.path}:{shape.line}"}


def _lines(files: Files) -> int:
    """As wc counts them."""
    return sum(text.count("\n") for text in files.values())


def main() -> None:
    parser = argparse.ArgumentParser("python -m tests.house.shape", description=__doc__)
    parser.add_argument("--json", action="store_true")
    found = measured(sources())
    if parser.parse_args().json:
        print(json.dumps(found))
        return
    for name, value in found.items():
        print(f"{name:22} {' '.join(map(str, value.values())) if isinstance(value, dict) else value}")


if __name__ == "__main__":
    main()
