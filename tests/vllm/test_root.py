"""vLLM as its own image runs it, by root, beside a server of another user, as the server's image runs that."""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path

import pytest
from api_helpers import ServerProcess
from cli_helpers import become
from engines import Engine
from whole_engines import HITS, PROMPTS

pytestmark = [pytest.mark.vllm, pytest.mark.security, pytest.mark.timeout(400)]

SERVICE_UID = 7410


class ServiceProcess(ServerProcess):
    before = staticmethod(partial(become, SERVICE_UID))


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can be another user")
def test_instances_of_root_share_through_the_server_of_the_user_that_they_name(models: dict[str, Path]) -> None:
    # In a folder of its own user's; ServerProcess makes one that is this user's.
    with ServiceProcess(socket_path=f"/tmp/kvdock-test-root-{os.getpid()}/kvdock.sock", access_file="") as server:
        with Engine(models["llama"], server.unix, extra={"trusted_uid": SERVICE_UID}) as first:
            first.generate(PROMPTS)
            first.do("drain")
            assert first.close() == 0, first.log_text()
        with Engine(models["llama"], server.unix, extra={"trusted_uid": SERVICE_UID}) as second:
            assert second.generate(PROMPTS)[1] == HITS
            assert second.close() == 0, second.log_text()
    Path(server.unix.removeprefix("unix:")).parent.rmdir()
