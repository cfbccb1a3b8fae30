"""Deliberate breaks of the product, by the room of the broken code; `python -m tests.mutants` runs them."""

from __future__ import annotations

from . import (
    access,
    api,
    census,
    clears,
    cli,
    connectors,
    copy,
    engine,
    mooncake,
    stores,
    table,
    tiers,
    vllm,
    web,
    weights,
)
from .mutant import Mutant

ROOMS: dict[str, tuple[Mutant, ...]] = {
    "table": table.MUTANTS,
    "census": census.MUTANTS,
    "copy": copy.MUTANTS,
    "tiers": tiers.MUTANTS,
    "clears": clears.MUTANTS,
    "api": api.MUTANTS,
    "access": access.MUTANTS,
    "connectors": connectors.MUTANTS,
    "vllm": vllm.MUTANTS,
    "engine": engine.MUTANTS,
    "stores": stores.MUTANTS,
    "mooncake": mooncake.MUTANTS,
    "cli": cli.MUTANTS,
    "web": web.MUTANTS,
    "weights": weights.MUTANTS,
}
