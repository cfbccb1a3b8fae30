"""The bytes of a pool's lock file: byte 0 is its server's, and each member draws one of its own.

The lock file lies beside the segments (`objects.lock_path`): whoever can map the pool can prove that it
lives, also from another container that shares the directory, and the pool id alone leads to it. It
appears complete, with byte 0 already taken, and is removed last. So:

    no lock file                      nobody serves this pool
    lock file, byte 0 free            its server is dead: adopt it (PoolLock.adopt) or remove it
    lock file, byte 0 held            live; nothing here touches it

Its first page says, for whoever finds it, at which address the pool was served; its time of last change is
when its server last said that it lives.
"""

from __future__ import annotations

from typing import Final

LOCK_FILE_BYTES: Final = 4096
SERVER_OFFSET: Final = 0
MEMBER_OFFSETS: Final = (LOCK_FILE_BYTES, 1 << 62)
"""Members draw from this half-open range: a collision is as likely as a forged lottery ticket."""
