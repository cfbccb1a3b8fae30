"""The `kvdock` command for tests: run to its end, or serving on a socket of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import forks

from kvdock.cli.errors import CommandProblem

KVDOCK = (sys.executable, "-m", "kvdock")
SMALL = ("--pool-bytes", "16MiB", "--table-records", "1024", "--table-grants", "64", "--port", "0")
TIMEOUT_S = 60


def clean_environ(**more: str) -> dict[str, str]:
    """This process's, without settings of whoever runs the tests."""
    return {**{name: text for name, text in os.environ.items() if not name.startswith("KVDOCK_")}, **more}


def kvdock(*args: str, stdin: str | None = None, **environ: str) -> subprocess.CompletedProcess[str]:
    """A command that ends by itself."""
    environ = clean_environ(**{"COLUMNS": "200", **environ})
    return forks.run_kvdock(*args, environ=environ, stdin=stdin or "", timeout_s=TIMEOUT_S)


def become(uid: int) -> None:
    """This process becomes the user's, which may be unable to read the interpreter's files: imports come first."""
    import encodings.idna  # noqa: F401  # a name of a host is encoded with it

    import uvicorn.lifespan.on
    import uvicorn.loops.uvloop  # noqa: F401  # the server takes its event loop from it

    os.setuid(uid)


def refusal(done: subprocess.CompletedProcess[str], exit_code: int) -> str:
    """The one sentence on stderr. On stdout the same as a problem, if JSON was asked for; else nothing."""
    lines = done.stderr.splitlines()
    assert done.returncode == exit_code and len(lines) == 1 and lines[0].startswith("kvdock: "), (done, exit_code)
    if "--json" in done.args:
        problem = json.loads(done.stdout)
        assert set(problem) == set(CommandProblem.__struct_fields__) and problem["title"] and problem["code"]
        assert (problem["detail"], problem["exit_status"]) == (lines[0].removeprefix("kvdock: "), exit_code)
    else:
        assert done.stdout == ""
    return lines[0]


@contextmanager
def kvdock_serve(folder: Path, *flags: str, log: Path | None = None) -> Iterator[subprocess.Popen[str]]:
    """`kvdock serve` on a socket in `folder`. `log`: a file for its stderr."""
    command = [*KVDOCK, "serve", *SMALL, "--socket-path", str(folder / "kvdock.sock"), *flags]
    with ExitStack() as files:
        stderr = subprocess.PIPE if log is None else files.enter_context(log.open("w"))
        process = files.enter_context(
            subprocess.Popen(command, env=clean_environ(), stdout=subprocess.PIPE, stderr=stderr, text=True)
        )
        try:
            yield process
        finally:
            if process.poll() is None:
                process.kill()


def complaints(stderr: str) -> list[str]:
    """Lines of a server's stderr, but for its news, and that it removed what other tests' killed servers had left."""
    usual = (" INFO kvdock.events: ", "a server that is gone had left its pool")
    return [line for line in stderr.splitlines() if not any(text in line for text in usual)]


def first_line(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().rstrip("\n")
