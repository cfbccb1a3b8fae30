"""/manual: the pages of docs/ as HTML, so that a server explains itself on a machine without the internet.

A heading's anchor is as elsewhere; a table's row that begins with code has that code as its anchor, so a metric or an
error can be linked to. Links that lead out of docs/ are text: what they lead to is not served.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from html import escape
from pathlib import Path

from markdown_it import MarkdownIt
from markdown_it.token import Token

_MARKDOWN = MarkdownIt("commonmark", {"html": False}).enable("table")
_ELSEWHERE = re.compile(r"(\.\./|images/)")
_SUFFIX = ".md"
FOLDER = Path(__file__).parents[2] / "docs"
"""In a checkout, a link to docs/."""


def page_names() -> dict[str, Path]:
    """Every page by its path below docs/."""
    return dict(_pages(FOLDER, ""))


def _pages(folder: Path, above: str) -> Iterable[tuple[str, Path]]:
    for entry in folder.iterdir():
        if entry.is_dir():
            yield from _pages(entry, f"{above}{entry.name}/")
        elif entry.name.endswith(_SUFFIX):
            yield above + entry.name, entry


def manual_page(name: str, text: str) -> str:
    """`name`: the page's path below docs/."""
    tokens = _MARKDOWN.parse(text)
    for at, token in enumerate(tokens):
        if token.type == "heading_open":
            token.attrSet("id", _anchor(tokens[at + 1].content))
        elif token.type == "tr_open" and (code := _leading_code(tokens[at + 2])):
            token.attrSet("id", code)
        elif token.type == "inline":
            _unlink(token.children or [])
    title = next((tokens[at + 1].content for at, token in enumerate(tokens) if token.type == "heading_open"), name)
    up = "../" * (name.count("/") + 1)
    others = {"Status page": up, "Runbook": f"{up}manual/runbook.md", "API": f"{up}docs"}
    links = " · ".join(f'<a href="{href}">{words}</a>' for words, href in others.items())
    body = _MARKDOWN.renderer.render(tokens, _MARKDOWN.options, {})
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        f'<title>kvdock: {escape(title)}</title><link rel="stylesheet" href="{up}docs.css"></head>'
        f"<body><p>{links}</p>{body}</body></html>"
    )


def _anchor(heading: str) -> str:
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


def _leading_code(cell: Token) -> str:
    """`cell`: the content of a row's first cell."""
    first, *others = cell.children or [cell]
    return first.content if first.type == "code_inline" and not others else ""


def _unlink(children: list[Token]) -> None:
    """Links that nothing here answers become plain text."""
    for token in children:
        href = str(token.attrGet("href") or "")
        if token.type == "link_open" and _ELSEWHERE.match(href):
            token.attrs.pop("href")
