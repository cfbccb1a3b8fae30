"""What FastAPI and Python's own modules would make at the first call of a route, in that call's turn of the event loop:
it is made before there is a call, or not at all.

tests/api/test_first_calls.py looks for more of it in the first call of each route.
"""

from __future__ import annotations

import mimetypes
import os
from collections.abc import Iterable

import anyio
import fastapi.routing
from fastapi.routing import APIRoute
from starlette.routing import BaseRoute

_ANY_CALL = {"type": "http", "method": "GET", "path": "/", "root_path": "", "path_params": {}, "headers": []}


def prepare(routes: Iterable[BaseRoute]) -> None:
    """Before the app serves."""
    for route in routes:
        route.matches(_ANY_CALL)  # FastAPI makes its handlers, which takes 10 ms for all
        if isinstance(route, APIRoute):
            _name_no_place(route)
    mimetypes.guess_type("index.html")  # Python reads the machine's list of them


def _name_no_place(route: APIRoute) -> None:
    """FastAPI would read the source of the route's function, which takes 1 to 3 ms, to name its place in an error that
    no caller and no log shows. It remembers places by function: this one is remembered as unknown."""
    places = getattr(fastapi.routing, "_endpoint_context_cache", None)
    if places is not None:
        places.setdefault(id(route.dependant.call), {})


async def prepare_loop() -> None:
    """In the event loop, before it is said to serve."""
    async with await anyio.open_file(os.devnull):  # imports what streams and files need, which takes 50 ms
        pass
