"""Copies that fail: the load is a miss, the store is aborted, and neither holds anything at the server."""

from __future__ import annotations

import logging

import pytest
from api_helpers import ServerProcess, eventually
from connector_helpers import CHUNK, Rig, tokens_of

from kvdock.client.client import Client
from kvdock.shm.objects import unlink


def test_a_segment_that_cannot_be_mapped_fails_its_copies_and_nothing_else(caplog: pytest.LogCaptureFixture) -> None:
    with ServerProcess() as server, Client(server.unix) as client, Rig(server.unix) as rig:
        tokens = tokens_of(7, 4)
        rig.store("w", tokens, range(16))
        hit = rig.lookup("r", tokens)
        assert hit == 4 * CHUNK
        for known in rig.attachment.segments.segments:
            rig.attachment.segments.detach(known.id)
            unlink(known.name)

        def held() -> tuple[int, int, int]:
            status = client.status()
            return status.leases, status.reservations, status.chunks.reserved

        assert rig.load("r", range(64, 80), 0, hit).valid_tokens == 0
        rig.store("v", tokens_of(8, 4), range(16, 32))
        eventually(lambda: held() == (0, 0, 0))
        assert not [record for record in caplog.records if record.levelno > logging.WARNING]
        assert rig.attachment is not None, "the session goes on"
