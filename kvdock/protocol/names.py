"""Names that people and programs choose for others to read."""

from __future__ import annotations

import re
from typing import Annotated, Final

import msgspec

UNSEEN = re.compile(
    "[\u034f\u115f\u1160\u17b4\u17b5\u180b-\u180f\u2800\u3164\ufe00-\ufe0f\uffa0\U000e0100-\U000e01ef]"
)
"""Characters that Python calls printable, and that show nothing, or a blank: fillers, joiners and variation selectors.
"""
MAX_LABEL: Final = 64
"""The most characters of the label of a prefix."""
PrefixLabel = Annotated[str, msgspec.Meta(min_length=1, max_length=MAX_LABEL)]


def is_label(text: object) -> bool:
    """Whether a prefix may have that label: 1 to MAX_LABEL characters that can all be seen, with no space at an end. So
    no label looks like another one."""
    return (
        isinstance(text, str) and 1 <= len(text) <= MAX_LABEL and text == text.strip() and text.isprintable()
        and UNSEEN.search(text) is None
    )
