"""Where a user's server is, for whoever was not told."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Final

ADDRESS_VARIABLE: Final = "KVDOCK_ADDRESS"
"""Names the server for commands and connectors: unix:/path or http://host:port."""
SOCKET_VARIABLE: Final = "KVDOCK_SOCKET_PATH"
"""The server's own setting, which commands and connectors follow."""
CONNECTOR_PREFIX: Final = "KVDOCK_VLLM_"
"""Settings of vLLM's connector have variables that begin so, and none of the server's does."""


def default_socket_path(environ: Mapping[str, str], run_user: Path = Path("/run/user")) -> str:
    """The default socket of one user's server and engines: in the folder that the system made for the user, whether the
    environment names it or not, else in one under /tmp, which the server makes."""
    for folder in (environ.get("XDG_RUNTIME_DIR", ""), run_user / str(os.getuid())):
        if folder and Path(folder).is_dir():
            return str(Path(folder) / "kvdock.sock")
    return f"/tmp/kvdock-{os.getuid()}/kvdock.sock"


def default_address(environ: Mapping[str, str]) -> str:
    """The address of the server that the environment names, else of this user's, at its default socket."""
    socket_path = environ.get(SOCKET_VARIABLE) or default_socket_path(environ)
    return environ.get(ADDRESS_VARIABLE) or f"unix:{socket_path}"
