"""What an engine that computes prompts (--disaggregation-mode prefill) tells the one that decodes, beside what SGLang
tells it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


def tell_of_failed_loads(reqs: Sequence[Any]) -> None:
    """The loads of `reqs` have failed, so SGLang ends them before it sends their KV. It does not tell the engine that
    decodes, which would wait for the KV for five minutes (SGLANG_DISAGGREGATION_WAITING_TIMEOUT)."""
    for req in reqs:
        sender = getattr(req, "disagg_kv_sender", None)  # None in an engine that also decodes
        conclude = getattr(getattr(sender, "kv_mgr", None), "conclude_failure", None)
        if conclude is not None:
            conclude(bootstrap_room=req.bootstrap_room, failure_reason="a load of the external linker has failed")
