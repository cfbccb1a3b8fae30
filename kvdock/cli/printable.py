"""Names from other programs, as a terminal may show them. Without rich, so that messages of errors are made quickly."""

from __future__ import annotations

import re

_UNSEEN = re.compile(
    "[\u034f\u115f\u1160\u17b4\u17b5\u180b-\u180f\u2800\u3164\ufe00-\ufe0f\uffa0\U000e0100-\U000e01ef]"
)
"""Characters that Python calls printable, and that show nothing, or a blank: fillers, joiners and variation selectors.
"""


def printable(text: str) -> str:
    """Replaces control characters, invisible ones, and those that change the direction of the text: engines choose
    their labels, and a label must neither control the terminal nor look like another one."""
    return _UNSEEN.sub("�", "".join(char if char.isprintable() else "�" for char in text))
