"""The pages by which a server explains itself, as plain HTML without scripts or outside resources.

/docs is the OpenAPI document: every call with its parameters, body and answers, every struct with its fields, and every
error code. The anchor of an error is its code, and a problem's `type` points to it.

/manual has the pages of docs/, and its examples as they are; /manual/ is the page that begins them, with a list of all.
Headings have anchors; a table's row that begins with code has that code as its anchor, so a metric or an error can be
linked to. Links that lead out of docs/ become text, because their targets are not served; so do pictures, which no
wheel has, and what only the site fills in (mkdocs.yml) is left out.
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Iterable, Iterator, Mapping
from html import escape
from pathlib import Path
from typing import Any

from markdown_it import MarkdownIt
from markdown_it.token import Token

from kvdock.protocol.errors import CODES

STYLE = """
:root{color-scheme:light dark}
body{font:16px/1.5 system-ui,sans-serif;max-width:60rem;margin:2rem auto;padding:0 1rem}
code,pre{font:14px/1.5 ui-monospace,monospace}
summary{cursor:pointer;padding:.3rem 0}
table{border-collapse:collapse;width:100%;margin:.5rem 0 1rem}
th,td{text-align:left;vertical-align:top;padding:.25rem .6rem .25rem 0;border-bottom:1px solid #8884}
section{margin:0 0 1rem}
pre{overflow-x:auto;background:#8881;padding:.5rem}
@media(max-width:60rem){table{display:block;overflow-x:auto}:not(pre)>code,h1,h2,h3{overflow-wrap:anywhere}}
.method{display:inline-block;min-width:4.5rem;font-weight:600}
"""

_LINKS = (
    '<p><a href="openapi.json">openapi.json</a> · <a href="#structs">Structs</a> · '
    '<a href="#errors">Errors</a> · <a href="manual/">Manual</a> · <a href=".">Status page</a></p>'
)
_ERRORS_INTRO = (
    "<p>One shape: problem details (RFC 9457) with <code>code</code>, <code>found</code> and <code>wanted</code>.</p>"
)


def docs_page(schema: dict[str, Any]) -> str:
    info = schema["info"]
    parts = [
        '<!doctype html><html lang="en"><head><meta charset="utf-8">',
        '<meta name="viewport" content="width=device-width,initial-scale=1">',
        f"<title>{escape(info['title'])}: API</title><link rel=\"stylesheet\" href=\"docs.css\"></head><body>",
        f"<h1>{escape(info['title'])} {escape(info['version'])}</h1><p>{escape(info.get('description', ''))}</p>",
        _LINKS,
        "<h2>Calls</h2>", *_calls(schema),
        '<h2 id="structs">Structs</h2>', *_structs(schema),
        '<h2 id="errors">Errors</h2>', _ERRORS_INTRO, *_errors(),
        "</body></html>",
    ]
    return "\n".join(parts)


def _calls(schema: dict[str, Any]) -> Iterator[str]:
    for path, methods in schema["paths"].items():
        for method, call in methods.items():
            yield (
                f'<details><summary><code><span class="method">{method.upper()}</span> {escape(path)}</code> '
                f"{escape(call['summary'])}</summary>"
            )
            for paragraph in (*call["description"].split("\n\n"), f"Scope: `{call['x-scope']}`."):
                yield f"<p>{_code_spans(paragraph)}</p>"
            for sample in call["x-codeSamples"]:
                yield f"<pre>{escape(sample['source'])}</pre>"
            rows = [(f"{item['name']} ({item['in']})", _kind(item["schema"])) for item in call.get("parameters", [])]
            if "requestBody" in call:
                rows.append(("body", _content(call["requestBody"])))
            for status, reply in call["responses"].items():
                rows.append((status, f"{_content(reply)} {_code_spans(reply['description'])}"))
            yield from _table(rows)
            yield "</details>"


def _structs(schema: dict[str, Any]) -> Iterator[str]:
    for name, struct in sorted(schema["components"]["schemas"].items()):
        yield f'<section id="struct-{escape(name)}"><h3><code>{escape(name)}</code></h3>'
        yield f"<p>{escape(struct.get('description', ''))}</p>"
        required = set(struct.get("required", []))
        rows = [
            (field if field in required else f"{field} (optional)", _kind(kind))
            for field, kind in struct.get("properties", {}).items()
        ] + [(str(index), _kind(kind)) for index, kind in enumerate(struct.get("prefixItems", []))]
        yield from _table(rows)
        yield "</section>"


def _errors() -> Iterator[str]:
    yield "<table><thead><tr><th>code</th><th>status</th><th>meaning</th></tr></thead><tbody>"
    for code, (status, title) in CODES.items():
        yield f'<tr id="{code}"><td><code>{code}</code></td><td>{status}</td><td>{escape(title)}</td></tr>'
    yield "</tbody></table>"


def _table(rows: list[tuple[str, str]]) -> Iterator[str]:
    yield "<table><tbody>"
    for name, html in rows:
        yield f"<tr><th><code>{escape(name)}</code></th><td>{html}</td></tr>"
    yield "</tbody></table>"


def _content(body: dict[str, Any]) -> str:
    return " ".join(_kind(content["schema"]) for content in body.get("content", {}).values())


def _kind(schema: dict[str, Any]) -> str:
    """The HTML for a type, with links to structs."""
    if "$ref" in schema:
        name = escape(schema["$ref"].rpartition("/")[2])
        return f'<a href="#struct-{name}"><code>{name}</code></a>'
    for choice in ("anyOf", "oneOf"):
        if choice in schema:
            return " or ".join(_kind(item) for item in schema[choice])
    if "enum" in schema:
        return " or ".join(f"<code>{escape(repr(item))}</code>" for item in schema["enum"])
    if schema.get("type") == "array":
        return f"list of {_kind(schema.get('items') or {})}"
    limits = [f"{name} {schema[name]}" for name in ("minimum", "maximum", "pattern", "default") if name in schema]
    return escape(" ".join([str(schema.get("type", "any")), *([f"({', '.join(limits)})"] if limits else [])]))


def _code_spans(text: str) -> str:
    """Escaped text with `code` in backticks marked up, and error codes linked to their table."""
    pieces = [escape(piece) for piece in text.split("`")]
    pieces[1::2] = [
        f'<a href="#{piece}"><code>{piece}</code></a>' if piece in CODES else f"<code>{piece}</code>"
        for piece in pieces[1::2]
    ]
    return "".join(pieces)


_MARKDOWN = MarkdownIt("commonmark", {"html": False}).enable("table")
_INDEX = "index.md"
_SUFFIX = ".md"
_EXAMPLES = "examples/"
_FILLED_IN = re.compile(r"^::: .*$", re.MULTILINE)
FOLDER = Path(__file__).parents[2] / "docs"
"""In a checkout, a link to docs/."""


def page_names() -> dict[str, Path]:
    """What the manual serves, by its path below docs/: every page, and the examples."""
    return dict(_pages(FOLDER, ""))


def _pages(folder: Path, above: str) -> Iterable[tuple[str, Path]]:
    for entry in folder.iterdir():
        if entry.is_dir():
            yield from _pages(entry, f"{above}{entry.name}/")
        elif entry.name.endswith(_SUFFIX) or above == _EXAMPLES:
            yield above + entry.name, entry


def manual_page(name: str, served: Mapping[str, Path]) -> str:
    """`name`: the page's path below docs/, which is one of `served`."""
    text = _FILLED_IN.sub("", served[name].read_text(encoding="utf-8"))
    tokens = _MARKDOWN.parse(text + (_contents(served) if name == _INDEX else ""))
    for at, token in enumerate(tokens):
        if token.type == "heading_open":
            token.attrSet("id", _anchor(tokens[at + 1].content))
        elif token.type == "tr_open" and (code := _leading_code(tokens[at + 2])):
            token.attrSet("id", code)
        elif token.type == "inline":
            _unlink(token.children or [], name, served)
    title = next((tokens[at + 1].content for at, token in enumerate(tokens) if token.type == "heading_open"), name)
    up = "../" * (name.count("/") + 1)
    others = {"Status page": up, "Manual": f"{up}manual/", "API": f"{up}docs"}
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


def _contents(served: Mapping[str, Path]) -> str:
    """All pages by folder, in Markdown."""
    lines = ["\n## All pages\n"]
    for name, path in sorted(served.items()):
        title = path.read_text(encoding="utf-8").partition("\n")[0].removeprefix("# ")
        lines += [f"- [{title}]({name})"] if name.endswith(_SUFFIX) else []
    return "\n".join(lines)


def _unlink(children: list[Token], name: str, served: Mapping[str, Path]) -> None:
    """Turns links to files that this server does not serve, and pictures, into plain text."""
    for token in children:
        href = str(token.attrGet("href") or "").partition("#")[0]
        target = posixpath.normpath(posixpath.join(posixpath.dirname(name), href))
        if token.type == "link_open" and href and ":" not in href and target not in served:
            token.attrs.pop("href")
        elif token.type == "image":
            token.type, token.tag, token.content = "text", "", f"[picture: {token.content}]"
