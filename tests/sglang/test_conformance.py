"""The conformance kit of kvdock/connectors/, run against the linker over SGLang's own pools: attention and latents,
alone and with what an indexer keeps, windows, drafts, states, compressed KV. And what SGLang's own linkers promise, as
far as it can be read from them."""

from __future__ import annotations

from pathlib import Path

import pytest
from api_helpers import ServerProcess
from engines import contract_of

from kvdock.connectors.conformance import CHECKS

pytestmark = [pytest.mark.sglang, pytest.mark.timeout(400)]


def test_the_linker_conforms_over_pools_of_each_kind(models: dict[str, Path], server: ServerProcess) -> None:
    found = contract_of(models["llama"], server.unix)
    failed = {(kind, name): why for kind, checks in found.items() for name, why in checks.items() if why}
    assert not failed, "\n".join(f"{name}: {why}" for name, why in failed.items())
    assert list(found) == [
        "mha", "mla", "sparse", "blocks", "window", "draft", "state", "state and draft", "compressed", "linker",
    ]
    assert len(found.pop("linker")) == 7
    assert all(set(checks) == {check.__name__ for check in CHECKS} for checks in found.values())
