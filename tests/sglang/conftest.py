"""What tests of the SGLang linker need: a server, and tiny models."""

from __future__ import annotations

from engine_fixtures import models, pytest_collection_modifyitems, server, spare

__all__ = ["models", "pytest_collection_modifyitems", "server", "spare"]
