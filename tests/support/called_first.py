"""Makes each call of a server for the first time in a process of its own, and prints what Python made for it in the
event loop's thread: a JSON list of calls with what each of them had made."""

from __future__ import annotations

import asyncio
import json
import sys
from types import FrameType
from typing import Any

from app_rig import Rig, ask, opened

from bench.floods.bodies import calls_of
from kvdock.api.build import api_document
from kvdock.api.http.first_calls import prepare_loop

MADE = {
    ("importlib._bootstrap>", "_load_unlocked"): "imports a module",
    ("_compiler.py", "compile"): "compiles a pattern",
    ("inspect.py", "findsource"): "reads a source",
    ("inspect.py", "_signature_from_callable"): "looks at a signature",
    ("typing.py", "get_type_hints"): "reads type hints",
    ("mimetypes.py", "init"): "reads the list of media types",
}
"""By the end of the name of Python's file, and the function."""
PAGES = (
    "GET /", "GET /docs", "GET /docs.css", "GET /openapi.json", "GET /manual/", "GET /manual/operate/not_ready.md",
    "GET /static/app.js", "GET /v1/nothing", "PUT /v1/status", "GET /v1/sessions?limit=0", "GET /v1/status?x=1",
)
"""Calls that the document does not have, and refused ones."""


def calls(rig: Rig) -> list[str]:
    ids = {"session": rig.session, "lease": "0" * 16, "reservation": "0" * 16, "member": "m", "request": "z"}
    # Sessions end last.
    known = sorted(calls_of(api_document()), key=lambda call: call.method == "DELETE")
    return [*(f"{call.method} {call.target(ids)}" for call in known), *PAGES]


def made_for(rig: Rig, call: str) -> set[str]:
    found = set[str]()

    def entered(frame: FrameType, event: str, _: Any) -> None:
        if event == "call":
            for (file, function), what in MADE.items():
                if frame.f_code.co_name == function and frame.f_code.co_filename.endswith(file):
                    found.add(what)

    async def made() -> None:
        method, path = call.split(" ")
        sys.setprofile(entered)
        try:
            await ask(rig.app, method, path, None if method in ("GET", "DELETE") else {})
        finally:
            sys.setprofile(None)

    asyncio.run(made())
    return found


def main() -> None:
    with opened() as rig:
        asyncio.run(prepare_loop())
        print(json.dumps([[call, sorted(made)] for call in calls(rig) if (made := made_for(rig, call))]))


if __name__ == "__main__":
    main()
