"""An engine of root beside the server of another user, as in vLLM's own image: it uses the pool only if a setting names
that user."""

from __future__ import annotations

import logging
import os
import secrets
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
from api_helpers import ServerProcess
from cli_helpers import become, kvdock, refusal
from connector_helpers import CHUNK, engine_over, kvdock_of
from engine_helpers import prompt, run_one, sampling

from kvdock.connectors.errors import NotSupportedError
from kvdock.connectors.sglang.setup import Settings as SglangSettings
from kvdock.connectors.vllm.setup import Settings as VllmSettings
from kvdock.shm import objects as shm
from kvdock.shm.errors import ForeignObject
from kvdock.shm.segment import map_checked

pytestmark = pytest.mark.security

SERVICE_UID, STRANGER = 7410, 64_999
REMEDY = f"found user {SERVICE_UID}, wanted 0 or root; if that is kvdock's user, set KVDOCK_TRUSTED_UID={SERVICE_UID}"
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can be another user")


class ServiceProcess(ServerProcess):
    before = staticmethod(partial(become, SERVICE_UID))


@pytest.fixture(scope="module")
def service() -> Iterator[ServerProcess]:
    """In a folder of its own user's, so that commands of root do not trust it without the setting either."""
    socket_path = f"/tmp/kvdock-test-{secrets.token_hex(4)}/kvdock.sock"
    with ServiceProcess(socket_path=socket_path, access_file="") as server:
        yield server
    Path(socket_path).parent.rmdir()


@needs_root
def test_engines_of_root_share_kv_through_the_server_of_the_user_that_they_name(service: ServerProcess) -> None:
    tokens = prompt(1, 4 * CHUNK)
    storing, loading = (engine_over(service.unix, trusted_uid=SERVICE_UID) for _ in range(2))
    try:
        first = run_one(storing, tokens, sampling(4))
        assert storing.drain(20.0)
        second = run_one(loading, tokens, sampling(4))
        assert loading.drain(20.0)
    finally:
        storing.close()
        loading.close()
    assert first.metrics.loaded_tokens == 0
    assert second.metrics.loaded_tokens == 4 * CHUNK
    assert second.output_tokens == first.output_tokens


@needs_root
@pytest.mark.parametrize("trusted_uid", [-1, STRANGER])
def test_without_the_users_name_an_engine_serves_without_kvdock_and_logs_the_remedy(
    service: ServerProcess, caplog: pytest.LogCaptureFixture, trusted_uid: int
) -> None:
    with caplog.at_level(logging.WARNING, "kvdock.connector"):
        engine = engine_over(service.unix, trusted_uid=trusted_uid)
    try:
        assert kvdock_of(engine).session.attachment is None
        assert run_one(engine, prompt(2, CHUNK), sampling(2)).metrics.loaded_tokens == 0
    finally:
        engine.close()
    said, = (one.getMessage() for one in caplog.records if one.name == "kvdock.connector")
    assert said == (
        f"no kvdock server can be used yet, so every lookup is a miss: {service.unix}: "
        f"the server at {service.unix.removeprefix('unix:')}: {REMEDY}"
    )


@needs_root
def test_commands_of_root_follow_the_same_variable(service: ServerProcess) -> None:
    environ = {"KVDOCK_SOCKET_PATH": service.unix.removeprefix("unix:")}
    assert REMEDY in refusal(kvdock("status", **environ), 1)
    for command in (("status",), ("events",), ("bench", "--json")):
        done = kvdock(*command, **environ, KVDOCK_TRUSTED_UID=str(SERVICE_UID))
        assert (done.returncode, done.stderr) == (0, ""), command
    done = kvdock("doctor", **environ, KVDOCK_TRUSTED_UID=str(SERVICE_UID))
    assert f"at {service.unix}, up" in done.stdout
    said = refusal(kvdock("status", **environ, KVDOCK_TRUSTED_UID="kvdock"), 2)
    assert "KVDOCK_TRUSTED_UID: found 'kvdock', wanted a user id, as a number" in said


@needs_root
def test_only_what_belongs_to_that_user_alone_is_mapped() -> None:
    pool_id = secrets.randbits(64)
    path = shm.SHM_DIR / shm.segment_name(pool_id, 0, 1).removeprefix("/")
    path.write_bytes(bytes(8192))
    try:
        for owner, mode in ((STRANGER, 0o600), (SERVICE_UID, 0o660)):
            os.chown(path, owner, owner)
            path.chmod(mode)
            with pytest.raises(ForeignObject, match=f"wanted -rw------- of user 0 or {SERVICE_UID}, 1 link"):
                map_checked(shm.segment_name(pool_id, 0, 1), pool_id, 0, SERVICE_UID)
    finally:
        path.unlink()


@pytest.mark.parametrize("settings", [VllmSettings, SglangSettings])
def test_the_engines_extra_config_and_the_environment_name_the_user(
    settings: type[VllmSettings] | type[SglangSettings]
) -> None:
    named = {"KVDOCK_TRUSTED_UID": "7410"}
    assert settings.load({}, {}).trusted_uid == -1
    assert settings.load({}, named).trusted_uid == SERVICE_UID
    assert settings.load({"trusted_uid": 10001}, named).trusted_uid == 10001
    with pytest.raises(NotSupportedError, match="KVDOCK_TRUSTED_UID: found 'kvdock', wanted a user id"):
        settings.load({}, {"KVDOCK_TRUSTED_UID": "kvdock"})
    with pytest.raises(NotSupportedError, match="trusted_uid is -2"):
        settings.load({"trusted_uid": -2}, {})
