"""Copies that fail: the load is a miss, the store is aborted, and the session goes on."""

from __future__ import annotations

from api_helpers import ServerProcess
from connector_helpers import CHUNK, Rig, tokens_of

from kvdock.shm.objects import unlink


def test_a_segment_that_cannot_be_mapped_fails_its_copies_and_nothing_else() -> None:
    with ServerProcess() as server, Rig(server.unix) as rig:
        tokens = tokens_of(7, 4)
        rig.store("w", tokens, range(16))
        hit = rig.lookup("r", tokens)
        assert hit == 4 * CHUNK
        for known in rig.attachment.segments.segments:
            rig.attachment.segments.detach(known.id)
            unlink(known.name)
        assert rig.load("r", range(64, 80), 0, hit).valid_tokens == 0
        other = tokens_of(8, 4)
        rig.store("w", other, range(16, 32))
        assert rig.lookup("s", other) == 0, "the store was aborted"
        assert rig.attachment is not None, "the session goes on"
