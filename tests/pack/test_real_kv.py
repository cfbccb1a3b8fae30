"""The KV of a real model: what packing is for."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import pytest

from bench.pack import ratio_of
from bench.real_kv import parts_of, smollm2
from kvdock.engine.trained import PACKAGE


@pytest.mark.skipif(find_spec(PACKAGE) is None, reason="`make setup` could not install the model")
def test_real_kv_packs_by_more_than_1_38_and_comes_back_bit_for_bit() -> None:
    planes, unlikely = next(smollm2(Path()))
    assert unlikely < 1e4, "the forward pass does not know the text's next token"
    found = ratio_of(parts_of(planes))
    assert found.raw_bytes / found.stored_bytes >= 1.38
    assert found.parts >= 3 and found.raw_parts == 0
