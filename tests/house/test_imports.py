"""Imports point down only: cli → engine → connectors → client → protocol, connectors → datapath → shm → _core, and
api → protocol, shm, _core. `api` and `client` never import each other, nor do `api` and `datapath`.

Each room lists what it may import of kvdock and what it must never import of others. Imports inside
functions and under TYPE_CHECKING count too: a room that names a higher one depends on it.
"""

from __future__ import annotations

import ast
import json
import re
import subprocess
import sys
from pathlib import PurePosixPath
from typing import NamedTuple

import pytest
from graphs import imports, unresolved
from paths import ROOT
from sources import sources


class Room(NamedTuple):
    may: tuple[str, ...]
    """Modules and rooms of kvdock."""
    never: tuple[str, ...] = ()
    """Top-level packages."""


ENGINE_SIDE = ("_core", "shm", "protocol", "client", "datapath")
ROOMS = {
    "shm": Room(may=("_core", "shm"), never=("torch", "numpy", "fastapi", "uvicorn")),
    "protocol": Room(may=("_core", "protocol"), never=("torch", "numpy", "fastapi", "uvicorn")),
    "client": Room(may=("protocol", "client"), never=("torch", "numpy", "fastapi", "uvicorn")),
    "datapath": Room(may=("_core", "shm", "datapath"), never=("torch", "fastapi", "uvicorn")),
    "tiers": Room(
        may=(*ENGINE_SIDE, "connectors.errors", "connectors.session", "tiers"),
        never=("torch", "numpy", "fastapi", "uvicorn"),
    ),
    "api": Room(may=("_core", "shm", "protocol", "api"), never=("torch", "numpy")),
    "api/access": Room(
        may=("protocol", "api.access", "api.errors", "api.sizes.parse_bytes", "api.toml"),
        never=("fastapi", "starlette"),
    ),
    "api/pool": Room(
        may=("_core", "shm", "protocol", "api.pool", "api.clock", "api.settings", "api.errors", "api.turns"),
        never=("fastapi", "starlette"),
    ),
    "api/record": Room(
        may=("_core", "protocol", "api.access", "api.pool", "api.record", "api.clock", "api.turns", "api.convert",
             "api.settings"),
        never=("fastapi", "starlette"),
    ),
    "api/feeds": Room(
        may=("_core.Table", "protocol", "api.feeds", "api.record.journal", "api.record.timings.GrantTimes",
             "api.background", "api.errors", "api.log", "api.settings", "api.turns"),
        never=("fastapi", "starlette"),
    ),
    "api/reports": Room(
        may=("_core", "protocol", "api.access", "api.pool", "api.reports", "api.clock", "api.turns", "api.convert",
             "api.settings",
             # Of the records only values: what writes them is behind kvdock/api/reports/recorded.py.
             "api.record.counters.Counted", "api.record.counters.Counters", "api.record.labels.Chunk",
             "api.record.beginnings.Alike", "api.record.beginnings.Held", "api.record.requests.Detail",
             "api.record.timings.Buckets", "api.record.timings.RouteTimes", "api.record.troubles.Trouble",
             "api.record.troubles.MOST_TROUBLES",
             "api.record.hits.Whose"),
        never=("fastapi", "starlette"),
    ),
    "api/http": Room(
        may=("_core", "protocol", "api.access", "api.feeds", "api.http", "api.pool", "api.record.timings.Meter",
             "api.reports", "api.admin", "api.convert", "api.errors", "api.log", "api.service", "api.settings",
             "api.tokens", "api.turns"),
        never=("torch", "numpy"),
    ),
    "connectors": Room(may=(*ENGINE_SIDE, "connectors"), never=("fastapi", "uvicorn")),
    "engine": Room(may=(*ENGINE_SIDE, "connectors", "engine"), never=("fastapi", "uvicorn")),
    "cli": Room(may=(
        *ENGINE_SIDE, "api", "connectors", "engine", "cli", "web", "tiers.mover.opening.check_settings",
        "tiers.mover.opening.try_to_open", "tiers.tier.NotInstalled",
    )),
    "web": Room(may=(), never=("torch", "numpy", "fastapi")),
    "bench": Room(may=(*ENGINE_SIDE, "api", "connectors", "engine", "tiers", "bench")),
}


def breaches(room: str, source: str) -> list[str]:
    rule = ROOMS[room]
    found = []
    for line, name in imports(source, f"kvdock.{room}"):
        if name == "kvdock" or name.startswith("kvdock."):
            inside = name.removeprefix("kvdock").removeprefix(".")
            if not any(inside == allowed or inside.startswith(f"{allowed}.") for allowed in (*rule.may, "__version__")):
                # `from kvdock.api import schemas` names api.schemas; `from kvdock import api` names all of api.
                found.append(f"{line}: {room} imports {name}")
        elif name.partition(".")[0] in rule.never:
            found.append(f"{line}: {room} imports {name}")
    return found


@pytest.mark.parametrize("room", ROOMS)
def test_imports_point_down_from(room: str) -> None:
    modules = sorted((ROOT / ("" if room == "bench" else "kvdock") / room).rglob("*.py"))
    assert modules
    found = [f"{path.relative_to(ROOT)}:{breach}" for path in modules for breach in breaches(room, path.read_text())]
    assert not found, "\n".join(["", *found])


@pytest.mark.parametrize(("room", "source"), [
    ("shm", "from kvdock.datapath import segments"),
    ("shm", "from kvdock.protocol.errors import ApiError"),
    ("protocol", "from kvdock.client.client import Client"),
    ("protocol", "from kvdock.shm import objects"),
    ("client", "from kvdock.api.settings import Settings"),
    ("client", "from kvdock import _core"),
    ("datapath", "from kvdock.client.client import Client"),
    ("datapath", "from kvdock import api"),
    ("datapath", "from kvdock.api.pool import segments"),
    ("datapath", "def f():\n    import torch"),
    ("datapath", "import importlib\nimportlib.import_module('torch.cuda')"),
    ("tiers", "from kvdock.api.settings import Settings"),
    ("api", "from kvdock.client.client import Client"),
    ("api", "from kvdock.datapath.segments import AttachedSegments"),
    ("api", "import kvdock.connectors.engine_connector"),
    ("api", "if TYPE_CHECKING:\n    from kvdock.engine.engine import Engine"),
    ("api", "from ..engine import engine"),
    ("api", "import numpy as np"),
    ("api/reports", "from kvdock.api.record.tally import Tally"),
    ("api/reports", "from kvdock.api.record import requests"),
    ("api/reports", "from kvdock.api.record.requests import RecentRequests"),
    ("api/reports", "from kvdock.api.feeds.feeds import Feeds"),
    ("api/reports", "from kvdock.api.admin import Admin"),
    ("api/reports", "from kvdock.api.tiers.mover_client import MoverClient"),
    ("api/record", "from kvdock.api.reports.lists import Lists"),
    ("api/feeds", "from kvdock.api.record.tally import Tally"),
    ("connectors", "from kvdock.api.service import CacheService"),
    ("connectors", "from kvdock.api import service"),
    ("connectors", "import kvdock.api"),
    ("engine", "from kvdock.cli.main import main"),
    ("engine", "from kvdock.api.settings import Settings"),
    ("web", "from kvdock import _core"),
    ("bench", "from kvdock.cli import main"),
])
def test_an_import_that_points_up_is_found(room: str, source: str) -> None:
    assert len(breaches(room, source)) == 1


@pytest.mark.parametrize(("room", "source"), [
    ("shm", "from kvdock import _core\nfrom kvdock.shm.errors import AttachError"),
    ("client", "from kvdock.protocol import calls, schemas as s"),
    ("datapath", "from kvdock import _core\nfrom kvdock.shm import objects\nimport numpy"),
    ("api", "from kvdock.protocol.keys import chunk_keys\nfrom . import service\nfrom .service import CacheService"),
    ("connectors", "from kvdock.client import client\nfrom kvdock.protocol.schemas import Part\nimport torch"),
    ("engine", "from kvdock.connectors.interface import Connector\nfrom kvdock._core import checksum"),
    ("cli", "from kvdock.api.server import run\nfrom kvdock.engine.engine import Engine"),
])
def test_an_import_that_points_down_is_allowed(room: str, source: str) -> None:
    assert breaches(room, source) == []


READS = {
    "table": {"can_evict", "chunks_in", "free_bytes", "grant", "grants", "members", "members_named",
              "most_holding", "namespaces", "namespaces_in_use", "reuse", "sessions", "stats", "tenants"},
    "pool": {"can_grow", "missing", "segments", "view"},
    "registry": {"listed", "namespace", "namespaces", "of_table_id", "sessions", "space_of"},
    "names": {"name"},
    "quotas": {"views"},
    "drain": set(),
}
"""Methods that reports call, by the name of the object: none of them changes anything."""


def writes(source: str) -> list[str]:
    """Calls of other methods of those objects, and assignments to their attributes."""
    found = []
    for node in ast.walk(ast.parse(source)):
        used = node.func if isinstance(node, ast.Call) else node
        if not isinstance(used, ast.Attribute) or not isinstance(used.value, ast.Attribute | ast.Name):
            continue
        owner = (used.value.attr if isinstance(used.value, ast.Attribute) else used.value.id).strip("_")
        is_call, is_assigned = used is not node, not isinstance(used.ctx, ast.Load)
        if owner in READS and (is_assigned or (is_call and used.attr not in READS[owner])):
            found.append(f"{used.lineno}: {owner}.{used.attr}")
    return found


def test_reports_only_read() -> None:
    found = [
        f"{path.name}:{write}" for path in sorted((ROOT / "kvdock/api/reports").glob("*.py"))
        for write in writes(path.read_text())
    ]
    assert not found, "\n".join(["", *found])


@pytest.mark.parametrize(("source", "count"), [
    ("self._table.evict(1, 2)", 1), ("pool.table.clear(3)", 1), ("self._pool.limits = limits", 1),
    ("registry.drop_session(one)", 1), ("self._quotas.put(a, b)", 1), ("self._drain.remove_pool()", 1),
    ("stats = self._pool.table.stats()", 0), ("ready = pool.ready", 0), ("self._pool = sessions.pool", 0),
])
def test_a_write_is_found(source: str, count: int) -> None:
    assert len(writes(source)) == count


def test_every_import_of_kvdock_leads_to_a_file_by_its_path_alone() -> None:
    found = unresolved(sources())
    assert not found, "\n".join(["", *found])


@pytest.mark.parametrize(("text", "count"), [
    ("from kvdock.api.a import A", 0), ("import kvdock.api.a", 0), ("from kvdock.api import a", 0),
    ("from kvdock.api.b import A", 1), ("def f():\n    import kvdock.web", 1), ("from kvdock._core import x", 0),
    ("from kvdock._core import y", 1),
])
def test_an_import_that_leads_nowhere_is_found(text: str, count: int) -> None:
    files = {"kvdock/__init__.py": "", "kvdock/api/__init__.py": "", "kvdock/api/a.py": "class A: ...",
             "csrc/bind/module.cpp": 'm.attr("x") = 1;', "bench/x.py": text}
    assert len(unresolved({PurePosixPath(path): held for path, held in files.items()})) == count


@pytest.mark.parametrize(("module", "absent"), [
    ("kvdock.api.server", {"torch", "numpy"}),
    ("kvdock.client.client", {"torch", "numpy", "fastapi", "starlette", "uvicorn", "pydantic"}),
    ("kvdock.cli.main", {"torch", "numpy", "fastapi", "uvicorn", "rich"}),
])
def test_importing_a_module_leaves_out_what_it_can_do_without(module: str, absent: set[str]) -> None:
    """What really gets loaded, whoever imports it."""
    program = f"import json, sys, {module}\nprint(json.dumps(list(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60)
    loaded = set(json.loads(done.stdout))
    assert module in loaded
    assert not loaded & absent


# --------------------------------------------------------------------------- the page

XML_NAMES = ("http://www.w3.org/2000/svg", "http://www.w3.org/1999/xlink", "http://www.w3.org/1999/xhtml")
_EXTERNAL = re.compile(r"""https?://[^\s"'`)>]+|["'`(=]//[\w.-]+\.\w+[^\s"'`)>]*|url\(\s*["']?//[^)]*""")


def external_urls(text: str) -> list[str]:
    """Addresses of other machines; names of XML languages are fetched by nobody."""
    return [url for url in _EXTERNAL.findall(text) if url not in XML_NAMES]


def test_the_page_loads_nothing_from_elsewhere() -> None:
    files = [path for path in (ROOT / "kvdock/web").rglob("*") if path.suffix in (".html", ".js", ".css", ".svg")]
    assert files
    found = {path.name: urls for path in files if (urls := external_urls(path.read_text()))}
    assert found == {}


def test_an_external_url_is_found() -> None:
    assert external_urls('<script src="https://example.org/x.js">') == ["https://example.org/x.js"]
    assert len(external_urls('import("//cdn.example.org/x.js")')) == 1
    assert external_urls('xmlns="http://www.w3.org/2000/svg" // a comment') == []
