"""pytest plugin: kvdock._core is the extension that KVDOCK_TEST_CORE names. tests/support/sanitize.py uses it."""

from __future__ import annotations

import os

from kill_launch import load_core

load_core(os.environ.pop("KVDOCK_TEST_CORE"))
