"""Fixtures shared by tests that talk to a server."""

from __future__ import annotations

import gc
import os
import shutil
import signal
import tempfile
from collections.abc import Iterator

import pytest
from api_helpers import ServerProcess

from kvdock.client.client import Client

for ignored in (signal.SIGHUP, signal.SIGINT):  # in a run under nohup, or in a script's background
    if signal.getsignal(ignored) is signal.SIG_IGN:
        # Servers under test would inherit that it is ignored; a handler ends with exec, and lets this process live on.
        signal.signal(ignored, lambda number, frame: None)


def pytest_configure(config: pytest.Config) -> None:
    """Tests see no server and no measurements of the user who runs them, and leave none."""
    if hasattr(config, "workerinput"):
        return  # its environment is that of the process that started it
    folder = tempfile.mkdtemp(prefix="kvdock-tests-")
    os.environ.update(XDG_CACHE_HOME=folder, XDG_RUNTIME_DIR=folder)
    config.add_cleanup(lambda: shutil.rmtree(folder, ignore_errors=True))


@pytest.fixture(scope="module", autouse=True)
def nothing_to_collect() -> None:
    """What other modules left to the garbage collector would go in the midst of a test that counts descriptors."""
    gc.collect()


@pytest.fixture(scope="module")
def server() -> Iterator[ServerProcess]:
    """One small server for a module's tests; its shared memory is gone when it has stopped."""
    with ServerProcess() as process:
        assert process.shared_memory()
        yield process
        assert process.stop() == 0, process.log_text()
        assert process.shared_memory() == []


@pytest.fixture
def client(server: ServerProcess) -> Iterator[Client]:
    with Client(server.unix) as connected:
        yield connected
