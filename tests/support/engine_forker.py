"""What a program that forks whole engines is made of. It needs no package: engines have environments of their own.

Such a program has imported its engine before it forks, because the import takes longer than most of what engines do.
A message at its socket is the JSON of whole_engines.WholeEngine with four descriptors: what becomes the engine's stdin,
stdout and stderr, and where its process id and in the end its exit status are written.
"""

from __future__ import annotations

import gc
import json
import os
import signal
import socket
import sys
from collections.abc import Callable
from typing import Any, NoReturn

Said = dict[str, Any]


def fork_engines(socket_fd: int, serve: Callable[[Said], None]) -> None:
    """Runs `serve` in a process of its own for each message, until the other end of the socket is closed."""
    gc.freeze()  # engines collect garbage: not this program's modules, whose memory they share until they touch it
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody asks how a fork below ended
    with socket.socket(fileno=socket_fd) as asked:
        while True:
            message, fds, _, _ = socket.recv_fds(asked, 1 << 20, 4)
            if not message:
                return
            if os.fork() == 0:
                asked.close()
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                _run_engine(serve, json.loads(message), *fds)
            for fd in fds:
                os.close(fd)


def _run_engine(
    serve: Callable[[Said], None], said: Said, stdin: int, stdout: int, stderr: int, status: int
) -> NoReturn:
    """This process waits for the engine's, which is another one."""
    pid = os.fork()
    if pid == 0:
        os.setpgid(0, 0)  # what kills the engine kills its processes
        os.close(status)
        for number, fd in enumerate((stdin, stdout, stderr)):
            os.dup2(fd, number)
            os.close(fd)
        serve(said)
        sys.stdout.flush()
        os._exit(0)  # to take a whole engine apart takes seconds
    for fd in (stdin, stdout, stderr):
        os.close(fd)
    with os.fdopen(status, "w") as news:
        print(pid, file=news, flush=True)
        print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), file=news, flush=True)
    os._exit(0)


def answers() -> Callable[[Any], None]:
    """What writes answers to stdout, a line each. What libraries print there goes to stderr from now on."""
    to = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    return lambda answer: print(json.dumps(answer), file=to, flush=True)


def carry_out(answer: Callable[[Said], None], jobs: object) -> None:
    """Jobs come as JSON lines: {"do": the name of a method of `jobs`, and its arguments}. It returns the answer."""
    for line in sys.stdin:
        job = json.loads(line)
        answer(getattr(jobs, job.pop("do"))(**job))
