"""What a whole engine on the CPU loads is what it would compute, bit for bit, on one rank and on several.

A loaded run is compared with a local hit of the same length, never with a cold run: other chunks of prefill change the
last bits by themselves.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from api_helpers import ServerProcess
from engines import MARK, Engine
from stories import LOADS, Load
from whole_engines import NOTHING, PROMPTS, comes_back

from kvdock.client.client import Client

pytestmark = [MARK, pytest.mark.timeout(600)]


@pytest.mark.same_tokens
@pytest.mark.parametrize("load", LOADS)
def test_what_is_loaded_computes_as_a_local_hit_bit_for_bit(
    load: Load, models: dict[str, Path], server: ServerProcess
) -> None:
    """An engine's own, and another's."""
    with Engine(models[load.kind], server.unix, **load.how) as first:
        assert first.generate(PROMPTS)[1] == NOTHING
        local = first.generate(PROMPTS)
        assert local[1] == load.hits
        first.drain()
        assert comes_back(first) == local
        if load.reader is not None:
            with Engine(models[load.kind], server.unix, **load.reader) as second:
                found = second.generate(PROMPTS)
                assert found == local if load.reads_the_same else found[1] == load.hits
                assert second.generate(PROMPTS) == found, "what was loaded is in its own cache"
        with Client(server.unix) as client:
            spaces = client.namespaces().namespaces
        assert [(len(space.manifest.groups), space.manifest.writers) for space in spaces] == [load.shape]


def test_engines_of_other_weights_share_nothing(models: dict[str, Path], server: ServerProcess) -> None:
    others = {"extra": {"weights_digest": "others"}}
    with Engine(models["llama"], server.unix) as first, Engine(models["llama"], server.unix, **others) as second:
        first.generate(PROMPTS)
        first.drain()
        assert second.generate(PROMPTS)[1] == NOTHING
