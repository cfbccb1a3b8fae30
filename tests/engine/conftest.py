"""The ranks of engines are forked by the process that forks servers, so it must have imported what they need."""

from __future__ import annotations

import forks

import kvdock.engine.process_group  # noqa: F401  # which sets what is preloaded, so it comes first

forks.preload("kvdock.engine.rank")
