"""The pages of docs/: short enough to be read to the end, all of them on the site, and the reference says something of
each name."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import PurePosixPath

import pytest
from sources import sources

MOST_WORDS = 2_000
DOCS = PurePosixPath("docs")
PAGES = sorted(path for path in sources() if path.parts[0] == "docs" and path.suffix == ".md")
REFERENCE = [page for page in PAGES if page.parent.name == "reference"]


def too_long(text: str) -> bool:
    return len(text.split()) > MOST_WORDS


def in_navigation(site: str) -> list[str]:
    return re.findall(r"^ +- (?:[^:\n]+: )?([\w./-]+\.md)$", site.partition("\nnav:\n")[2], re.MULTILINE)


def unexplained(tree: ast.Module | ast.ClassDef, inside: str = "") -> Iterator[str]:
    """Public classes, functions and methods without a docstring."""
    for node in tree.body:
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) and not node.name.startswith("_"):
            if ast.get_docstring(node) is None:
                yield inside + node.name
            if isinstance(node, ast.ClassDef):
                yield from unexplained(node, f"{inside}{node.name}.")


def module_of(dotted: str) -> tuple[str, str]:
    """The text of the module that a name of the reference is in, and what of it is meant; "": all."""
    path = PurePosixPath(*dotted.split("."))
    if (module := path.with_suffix(".py")) in sources():
        return sources()[module], ""
    return sources()[path.parent.with_suffix(".py")], path.name


def test_a_page_has_at_most_2000_words() -> None:
    long = {str(page): len(sources()[page].split()) for page in PAGES if too_long(sources()[page])}
    assert long == {}, "split these by what a reader wants"


def test_the_navigation_of_the_site_has_every_page_once() -> None:
    found = in_navigation(sources()[PurePosixPath("mkdocs.yml")])
    assert sorted(found) == [str(page.relative_to(DOCS)) for page in PAGES]


def test_a_page_that_is_too_long_or_not_in_the_navigation_is_found() -> None:
    assert too_long("word " * 2_001) and not too_long("word " * 2_000)
    site = "x: 1\nnav:\n  - index.md\n  - Start:\n      - a b: start/x.md\n"
    assert in_navigation(site) == ["index.md", "start/x.md"]


@pytest.mark.parametrize("page", REFERENCE, ids=str)
def test_the_reference_explains_each_name_that_it_lists(page: PurePosixPath) -> None:
    names = re.findall(r"^::: (.+)$", sources()[page], re.MULTILINE)
    assert names
    for name in names:
        text, only = module_of(name)
        lacking = [one for one in unexplained(ast.parse(text)) if not only or one.split(".")[0] == only]
        assert lacking == [], name


def test_a_name_without_an_explanation_is_found() -> None:
    text = 'class A:\n    """x"""\n    def b(self): ...\n    def _c(self): ...\ndef d(): ...\n'
    assert list(unexplained(ast.parse(text))) == ["A.b", "d"]
