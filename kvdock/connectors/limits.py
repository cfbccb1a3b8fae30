"""What an operator allows requests to load.

A limit shortens the prefix that is looked up, never the answer: the parts of a window are leased for one length, so an
answer that is cut afterwards could not be loaded.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvdock.connectors.errors import SettingError

UNLIMITED = 1 << 30


@dataclass(frozen=True)
class LoadLimits:
    """SettingError for a value out of its range."""

    max_load_tokens: int = UNLIMITED
    """The most tokens that one load may have."""
    max_load_share: float = 1.0
    """The largest share of a request's tokens that one load may have."""
    min_load_tokens: int = 0
    """A smaller load is declined, because computing its tokens is cheaper."""

    def __post_init__(self) -> None:
        low = self.min_load_tokens
        _require(low >= 0, "min_load_tokens", low, "at least 0")
        _require(
            self.max_load_tokens >= low, "max_load_tokens", self.max_load_tokens, f"at least min_load_tokens={low}"
        )
        _require(0.0 <= self.max_load_share <= 1.0, "max_load_share", self.max_load_share, "0.0 to 1.0")

    def shortened(self, tokens: Sequence[int], local_tokens: int) -> Sequence[int]:
        """The prefix of `tokens` that may be looked up."""
        end = local_tokens + min(int(len(tokens) * self.max_load_share), self.max_load_tokens)
        return tokens[:end] if end < len(tokens) else tokens


def _require(ok: bool, name: str, found: object, wanted: str) -> None:
    if not ok:
        raise SettingError(f"{name}: found {found!r}, wanted {wanted}")
