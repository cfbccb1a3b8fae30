"""Names from other programs, as a terminal may show them. Without rich, so that messages of errors are made quickly."""

from __future__ import annotations

from kvdock.protocol.wire_types import UNSEEN


def printable(text: str) -> str:
    """Replaces control characters, invisible ones, and those that change the direction of the text: engines choose
    their labels, and a label must neither control the terminal nor look like another one."""
    return UNSEEN.sub("�", "".join(char if char.isprintable() else "�" for char in text))
