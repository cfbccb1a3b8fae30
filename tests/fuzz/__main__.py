"""Fuzzes one target under atheris, which looks for inputs that reach new code, until it is stopped.

    pip install atheris
    python -m tests.fuzz bodies -max_total_time=300      a target of tests/fuzz/targets.py, options of libFuzzer

New inputs go to build/fuzz/TARGET. A defect ends it with a traceback and a file `crash-…` there: mend the code, and
keep its bytes in hex in tests/fuzz/corpus/. Memory is limited to 1 GiB (-rss_limit_mb).
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from pathlib import Path
from types import FunctionType

import atheris  # type: ignore[import-not-found,import-untyped,unused-ignore]  # an optional tool

from . import targets

WATCHED = ("kvdock.", "uvicorn.protocols.", "tests.fuzz.")


def functions() -> Iterator[FunctionType]:
    """Those whose branches count as new code. Atheris' own import hook does not see modules of an editable install."""
    for name, module in list(sys.modules.items()):
        if name.startswith(WATCHED):
            for thing in vars(module).values():
                for found in [thing, *(vars(thing).values() if isinstance(thing, type) else ())]:
                    if isinstance(found, FunctionType) and found.__module__ == name:
                        yield found


def main() -> None:
    name = sys.argv[1] if len(sys.argv) > 1 else ""
    if name not in targets.TARGETS:
        sys.exit(f"target found {name!r}, wanted one of {', '.join(targets.TARGETS)}")
    logging.disable()
    for function in functions():
        atheris.instrument_func(function)
    found = Path("build/fuzz") / name
    found.mkdir(parents=True, exist_ok=True)
    options = ["-rss_limit_mb=1024", "-timeout=10", f"-artifact_prefix={found}/", *sys.argv[2:]]
    for number, data in enumerate(targets.corpus(name)):
        (found / f"kept-{number}").write_bytes(data)
    atheris.Setup([sys.argv[0], *options, str(found)], targets.TARGETS[name])
    atheris.Fuzz()


main()
