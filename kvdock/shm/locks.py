"""The bytes of a pool's lock file: byte 0 is locked by the pool's server, and one byte by each member.

The lock file is beside the segments (`objects.lock_path`). So every process that can map the pool finds the file by the
pool id alone, and can prove that it is alive, even from another container that shares the directory. The file appears
complete, with byte 0 already locked, and is removed last. So:

    no lock file                      no server serves this pool
    lock file, byte 0 free            its server is dead: adopt the pool (kvdock/api/pool/lock.py) or remove it
    lock file, byte 0 locked          its server is alive: leave the pool alone

The file's first page holds the address at which the pool was served, and the pool's secret. The file's modification
time is when its server was last known to be alive.
"""

from __future__ import annotations

from typing import Final

LOCK_FILE_BYTES: Final = 4096
SECRET_BYTES: Final = 32
"""The length of the secret: random bytes at the end of that page, which only the pool's user can read. Session ids are
made from them."""
SERVER_OFFSET: Final = 0
MEMBER_OFFSETS: Final = (LOCK_FILE_BYTES, 1 << 62)
"""Members draw the offset of their byte at random from this half-open range, which is so long that two members hardly
ever draw the same."""
