"""Where the checkout is, and the programs that tests run as processes of their own."""

from __future__ import annotations

from pathlib import Path
from typing import Final

SUPPORT: Final = Path(__file__).parent
ROOT: Final = SUPPORT.parent.parent
