"""What the site (mkdocs.yml) does to pages of docs/, so that their Markdown reads the same in a checkout.

A link out of docs/ leads to the repository's page of that file, which must be there. A table's row that begins with
code has that code as its anchor, as in the manual that a server shows (kvdock/api/http/pages.py). A page that would
fetch anything from another host ends the build. Only `mike deploy` makes a choice of versions, for only there are some.
"""

from __future__ import annotations

import os
import posixpath
import re
from pathlib import Path
from typing import Any

_LINK = re.compile(r"\]\((\.\./[^)\s]+)\)")
_ROW = re.compile(r"<tr>\n<td>(?=<code>([^<]+)</code></td>)")
_FOREIGN = re.compile(
    r"""<(?:script|img|iframe)\b[^>]*\ssrc=["']?(?:https?:)?//|<link\b[^>]*stylesheet[^>]*\shref=["']?(?:https?:)?//"""
)
_ROOT = Path(__file__).parent.parent


def on_config(config: Any, **_: object) -> None:
    if "MIKE_DOCS_VERSION" not in os.environ:  # else each page would ask its host for versions.json, which is not there
        del config["extra"]["version"]


def on_page_markdown(markdown: str, page: Any, config: Any, **_: object) -> str:
    def outward(match: re.Match[str]) -> str:
        path, _, anchor = match[1].partition("#")
        target = posixpath.normpath(posixpath.join("docs", posixpath.dirname(page.file.src_uri), path))
        of_the_site = target.startswith("docs/") and not target.startswith("docs/examples/")
        if of_the_site or not (_ROOT / target).exists():
            return match[0]  # MkDocs judges it
        return f"]({config['extra']['repository']}/blob/main/{target}{'#' + anchor if anchor else ''})"

    return _LINK.sub(outward, markdown)


def on_page_content(html: str, **_: object) -> str:
    return _ROW.sub(lambda match: f'<tr id="{match[1]}">\n<td>', html)


def on_post_page(output: str, page: Any, **_: object) -> str:
    if match := _FOREIGN.search(output):
        raise SystemExit(f"{page.file.src_uri} fetches from another host: {output[match.start() : match.end() + 60]}")
    return output
