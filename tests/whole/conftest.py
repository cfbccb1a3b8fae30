"""What stories need that vLLM and SGLang tell alike: each runs once with either (`engines`, by the import path)."""

from __future__ import annotations

from engine_fixtures import models, pytest_collection_modifyitems, server, spare

__all__ = ["models", "pytest_collection_modifyitems", "server", "spare"]
