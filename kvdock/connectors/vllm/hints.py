"""Where a vLLM request has its options for kvdock and its hints (kvdock/connectors/hints.py)."""

from __future__ import annotations

from typing import Any

from kvdock.connectors.hints import Asked, asked_in


def said_by(request: Any) -> tuple[object, object]:
    """The request's `kv_transfer_params` and its `kv_hints`, which older versions of vLLM do not have."""
    return getattr(request, "kv_transfer_params", None), getattr(request, "kv_hints", None)


def asked_by(request: Any) -> Asked:
    """The options of a request."""
    return asked_in(said_by(request)[0])
