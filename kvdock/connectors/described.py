"""What a model's configuration says of its KV."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

SAYS_NOTHING = ("transformers_version", "auto_map", "custom_pipelines", "max_model_len")
"""Fields of a model's configuration that name how it was saved or where its code came from; and max_model_len, which
some models leave there although they do not use it to compute."""


def described(config: Any) -> Any:
    """A model's configuration without what says nothing: where it lies, who saved it, and whose code it names."""
    if isinstance(config, Mapping):
        return {
            name: described(value) for name, value in config.items()
            if not name.startswith("_") and name not in SAYS_NOTHING
        }
    return [described(item) for item in config] if isinstance(config, list) else config
