"""The version of the HTTP API, and how client and server agree on it.

The server names its version on every answer. A request may name the version it was written for; one the
server does not speak is refused before anything is done. A request that names none gets the server's own.
"""

from __future__ import annotations

API_VERSION = 1
VERSION_HEADER = "Kvdock-Api"
SUPPORTED_VERSIONS = (API_VERSION,)


def supported(header: str) -> bool:
    """Whether a request with this header value can be answered; leading zeros and signs are no version."""
    return header in {str(version) for version in SUPPORTED_VERSIONS}
