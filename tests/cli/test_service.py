"""Commands against a server that runs as a service: another user's, at the shipped socket, with settings of others."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
from api_helpers import ServerProcess
from cli_helpers import SMALL, become, clean_environ, kvdock, kvdock_serve, refusal

from kvdock.cli import client as cli_client
from kvdock.cli.client import default_address, reached
from kvdock.client.client import Client
from kvdock.client.events import read_events
from kvdock.client.transport import Address
from kvdock.protocol.access import SERVICE_SOCKET
from kvdock.protocol.admin_schemas import PatchConfig
from kvdock.protocol.errors import ServerUnavailable

pytestmark = pytest.mark.security

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can be another user")
SERVICE_UID = 7410


class ServiceProcess(ServerProcess):
    before = staticmethod(partial(become, SERVICE_UID))


@pytest.fixture
def made_by_root() -> Iterator[Path]:
    """A folder that root has made for the service's user, as systemd does."""
    top = Path(tempfile.mkdtemp(prefix="kvdock-test-"))
    top.chmod(0o755)
    folder = top / "run"
    folder.mkdir(mode=0o700)
    os.chown(folder, SERVICE_UID, SERVICE_UID)
    yield folder
    shutil.rmtree(top)


@needs_root
def test_root_operates_the_server_of_a_service_user(made_by_root: Path) -> None:
    socket_path = str(made_by_root / "kvdock.sock")
    with ServiceProcess(socket_path=socket_path, access_file="") as server:
        assert Path(socket_path).stat().st_uid == SERVICE_UID
        done = kvdock("status", KVDOCK_SOCKET_PATH=socket_path)
        assert (done.returncode, done.stderr) == (0, "")
        with reached(server.unix) as client:
            assert client.configure(PatchConfig(session_cap=0.5)).limits.session_cap == 0.5
        assert {"ready"} <= {one.event["kind"] for one in read_events(Address.parse(server.unix, trusts_service=True))}
        with Client(server.unix) as engine, pytest.raises(ServerUnavailable, match="wanted 0 or root"):
            engine.status()
        said = refusal(kvdock("bench", KVDOCK_SOCKET_PATH=socket_path), 1)
        assert "maps the pool, as engines do; " in said and f"set KVDOCK_TRUSTED_UID={SERVICE_UID}" in said
        few = ("bench", "--rounds", "10", "--mib", "2")
        done = kvdock(*few, KVDOCK_SOCKET_PATH=socket_path, KVDOCK_TRUSTED_UID=str(SERVICE_UID))
        assert done.returncode == 0, done.stderr


@needs_root
@pytest.mark.parametrize("how", ["in a folder that its user made", "in a folder that others may write to"])
def test_root_does_not_believe_a_server_where_anybody_may_have_put_it(made_by_root: Path, how: str) -> None:
    socket_path = str(made_by_root / "kvdock.sock")
    with ServiceProcess(socket_path=socket_path, access_file=""):
        (made_by_root.parent if "its user made" in how else made_by_root).chmod(0o1777)
        said = refusal(kvdock("status", KVDOCK_SOCKET_PATH=socket_path), 1)
    assert f"found user {SERVICE_UID}, wanted 0 or root" in said


def test_commands_find_the_shipped_socket_unless_another_is_set(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
) -> None:
    shipped, own = tmp_path / "shipped.sock", tmp_path / "kvdock.sock"
    monkeypatch.setattr(cli_client, "SERVICE_SOCKET", str(shipped))
    for name in set(os.environ) - set(clean_environ()):
        monkeypatch.delenv(name)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    assert default_address() == f"unix:{own}", "there is no service"
    shipped.touch()
    assert default_address() == f"unix:{shipped}"
    own.touch()
    assert default_address() == f"unix:{own}", "this user's own server comes first"
    own.unlink()
    monkeypatch.setenv("KVDOCK_SOCKET_PATH", "/elsewhere")
    assert default_address() == "unix:/elsewhere"
    monkeypatch.setenv("KVDOCK_ADDRESS", "localhost:7410")
    assert default_address() == "localhost:7410"


@needs_root
def test_a_user_who_may_not_see_the_services_socket_hears_whose_it_is(made_by_root: Path) -> None:
    """And not that there is no server: it would start a second one."""
    program = (
        "import os, sys; from pathlib import Path\n"
        "from kvdock.cli import client; from kvdock.cli.errors import CommandError\n"
        "import encodings.idna, socket\n"
        f"client.SERVICE_SOCKET = {str(made_by_root / 'kvdock.sock')!r}\n"
        "os.setuid(7411)\n"
        "try:\n"
        "    with client.reached('') as server: server.status()\n"
        "except CommandError as error: print(error)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], env=clean_environ(XDG_RUNTIME_DIR=str(made_by_root.parent)),
        capture_output=True, text=True, timeout=60,
    )
    assert f"{made_by_root}/kvdock.sock: [Errno 13] Permission denied; it is another user's: run this as" in done.stdout


def test_the_shipped_files_put_the_socket_where_commands_look() -> None:
    root = Path(__file__).parents[2]
    for name in ("Dockerfile", "docs/examples/kvdock.service", "docs/examples/kvdock-daemonset.yaml"):
        assert SERVICE_SOCKET in (root / name).read_text(), name


def test_unknown_variables_stop_no_command_that_only_asks(tmp_path: Path) -> None:
    with ServerProcess() as server:
        environ = {"KVDOCK_SOCKET_PATH": server.unix.removeprefix("unix:"), "KVDOCK_POOL_BYTS": "x"}
        done = kvdock("status", **environ)
        hint = "pool_byts (meant pool_bytes?) (KVDOCK_POOL_BYTS)"
        said = f"kvdock: ignored, as no setting of kvdock has this name: {hint}\n"
        assert (done.returncode, done.stderr) == (0, said)
        done = kvdock("doctor", **environ)
        assert (done.returncode, done.stderr) == (1, "") and f"at {server.unix}, up" in done.stdout
        assert "unknown settings: pool_byts" in done.stdout, "a server would not start with it"
    said = refusal(kvdock("serve", KVDOCK_SOCKET_PATH=str(tmp_path / "s"), KVDOCK_POOL_BYTS="x"), 2)
    assert "unknown settings: pool_byts (meant pool_bytes?) (KVDOCK_POOL_BYTS)" in said


@pytest.mark.parametrize("wrong", [
    {"KVDOCK_PORT": "tcp://10.0.0.1:7410"}, {"KVDOCK_POOL_BYTES": "abc"}, {"KVDOCK_LOG_LEVEL": "noise"},
    {"KVDOCK_HOST": "0.0.0.0"}, {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://[::1"},
], ids=lambda wrong: next(iter(wrong)))
def test_a_wrong_setting_stops_no_command_that_does_not_need_it(wrong: dict[str, str]) -> None:
    """As Kubernetes sets KVDOCK_PORT in all pods of a namespace that has a service `kvdock`."""
    with ServerProcess() as server:
        done = kvdock("status", KVDOCK_SOCKET_PATH=server.unix.removeprefix("unix:"), **wrong)
        assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize(("flags", "said"), [
    (("--redis-url", "redis://[::1"), "the URL of the tier redis: found one that cannot be read, wanted SCHEME://"),
    (("--redis-url", "127.0.0.1:6379"), "the tier redis cannot be used: "),
    (("--objects-url", "s3://"), "the tier objects cannot be used: s3: found no name of a bucket"),
    (("--objects-url", "s3://bucket"), "the tier objects cannot be used: s3: found no credentials in the environment"),
    (("--mooncake-url", "mooncake://"), "the tier mooncake cannot be used: "),
    (("--tier-urls", "cellar=cellar://a"), "the tier cellar cannot be used: found no entry point 'cellar'"),
    (("--disk-path", "/tmp/kvdock-none", "--disk-bytes", "1MiB"), "the tier disk cannot be used: found a limit of"),
])
def test_a_malformed_tier_ends_the_start_with_one_sentence(
    tmp_path: Path, flags: tuple[str, ...], said: str
) -> None:
    done = kvdock("serve", *SMALL, "--socket-path", str(tmp_path / "kvdock.sock"), *flags)
    assert refusal(done, 2).startswith(f"kvdock: {said}")


def test_the_packages_of_stores_stay_out_of_the_server() -> None:
    program = (
        "import sys; from kvdock.api.settings import Settings; from kvdock.cli.serve import check_tiers\n"
        "check_tiers(Settings(redis_url='redis://127.0.0.1:1'))\n"
        "print([name for name in sys.modules if name == 'redis' or name.startswith('kvdock.tiers')])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (0, "[]\n"), done.stderr


def test_a_package_that_is_missing_ends_the_start_with_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "redis.py").write_text("raise ImportError('No module named redis')")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(tmp_path))
        with kvdock_serve(tmp_path, "--redis-url", "redis://127.0.0.1:1") as process:
            out, err = process.communicate(timeout=60)
    assert (process.returncode, out) == (1, "")
    assert err == (
        "kvdock: the tier redis cannot be used: redis-py is not installed (No module named redis): "
        "pip install 'kvdock[redis]'\n"
    )
