"""The manual knows every reason and every metric of a live server; the deployment examples fit the code."""

from __future__ import annotations

import ast
import inspect
import json
import os
import re
import shlex
import subprocess
import sys
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml  # type: ignore[import-untyped]  # it ships no types
from api_helpers import MIB, ServerProcess, attach, eventually, http_connection, keys, raw
from cli_helpers import kvdock
from paths import ROOT
from prometheus_client.parser import text_string_to_metric_families

from kvdock.api.reports import degraded, status
from kvdock.api.settings import ENV_PREFIX, OTHER_VARIABLES, Settings, effective
from kvdock.cli.main import app
from kvdock.client.client import Client
from kvdock.connectors.vllm.setup import Settings as ConnectorSettings
from kvdock.protocol.access import CONNECTOR_PREFIX
from kvdock.protocol.errors import CODES
from kvdock.protocol.outcomes import Outcome

OPERATE = ROOT / "docs/operate"
EXAMPLES = ROOT / "docs/examples"
OF_BUILDS = {"KVDOCK_CUDA", "KVDOCK_PYTHONS"}


def rows(heading: str) -> list[list[str]]:
    """Cells of the table under a heading of the page on servers that are not ready, without its head."""
    section = (OPERATE / "not_ready.md").read_text().split(f"\n## {heading}\n", 1)[1].split("\n## ", 1)[0]
    found = re.findall(r"^\| (.+) \|$", section.replace("| |", "|  |"), re.MULTILINE)
    return [[cell.strip() for cell in row.split(" | ")] for row in found][1:]


def documented_metrics() -> list[str]:
    pages = "\n".join(page.read_text() for page in sorted(OPERATE.glob("metrics*.md")))
    first = re.findall(r"^\| (`(?:kvdock_|process_)[^|]*) \|", pages, re.MULTILINE)
    return [name for cell in first for name in re.findall(r"`(\w+)`", cell)]


def metric_names(address: str) -> set[str]:
    families = text_string_to_metric_families(raw(address, "GET", "/metrics")[2].decode())
    return {f"{family.name}_total" if family.type == "counter" else family.name for family in families}


def sentences(source: str) -> set[str]:
    """The constant beginnings of sentences that the server composes."""
    beginnings = (node.values[0] for node in ast.walk(ast.parse(source)) if isinstance(node, ast.JoinedStr))
    found = {str(piece.value) for piece in beginnings if isinstance(piece, ast.Constant)}
    return {text for text in found if " " in text}  # a format like `.0f` is no sentence


def test_every_metric_of_a_live_server_is_in_the_manual_and_no_other(tmp_path: Path) -> None:
    tier = {"disk_path": str(tmp_path / "disk"), "disk_bytes": 64 * MIB}
    with ServerProcess(**tier) as server, Client(server.unix) as client:
        engine = attach(client)
        engine.store(keys(1))
        assert engine.lookup(keys(1)).lease
        engine.heartbeat(outcomes=[Outcome(request="r", prompt_tokens=40, load_us=1, prefill_tokens_per_s=1.0)])
        live = metric_names(server.http)
        engine.close()
    assert len(live) > 30 and sorted(documented_metrics()) == sorted(live)


def test_every_reason_is_in_the_manual() -> None:
    constants = {value for name, value in vars(degraded).items() if name.isupper() and isinstance(value, str)}
    fixed = {value.replace("{}", "…") for value in constants}
    made = sentences(inspect.getsource(status)) | sentences(inspect.getsource(degraded))
    assert len(fixed) >= 14 and len(made) == 3
    documented = [row[0].strip("`").removesuffix(": …") for row in rows("Not ready")]
    assert fixed <= set(documented)
    for beginning in made:
        assert any(reason.startswith(beginning + "…") for reason in documented), beginning
    assert len(documented) == len(fixed) + len(made)


def test_codes_of_the_manual_are_codes_of_the_server() -> None:
    named = {code for row in rows("Errors") for code in re.findall(r"`(\w+)`", row[0])}
    assert named and named <= set(CODES)


def test_commands_flags_and_variables_of_all_pages_exist() -> None:
    commands = typer.main.get_group(app).commands
    flags = {
        name: {word for one in (command, *getattr(command, "commands", {}).values()) for param in one.params
               for word in param.opts}
        for name, command in commands.items()
    }
    variables = {*OTHER_VARIABLES, *(f"{ENV_PREFIX}{name.upper()}" for name in Settings.__struct_fields__)}
    variables |= {CONNECTOR_PREFIX, *(f"{CONNECTOR_PREFIX}{field.name.upper()}" for field in fields(ConnectorSettings))}
    pages = [ROOT / "README.md", ROOT / "Dockerfile", *EXAMPLES.iterdir(), *(ROOT / "docs").rglob("*.md")]
    seen = 0
    for page in pages:
        text = page.read_text()
        for command, words in re.findall(r"\bkvdock ([a-z]+)((?: [^\s`|;]+)*)", text):
            asked = {word.partition("=")[0] for word in words.split() if word.startswith("--")}
            assert not asked or asked <= flags[command] | {"--help"}, (page.name, command, words)
            seen += len(asked)
        unknown = set(re.findall(rf"\b{ENV_PREFIX}[A-Z_]+", text)) - variables - OF_BUILDS
        assert not unknown, (page.name, unknown)
    assert seen >= 6
    named = set(re.findall(r"`--([a-z-]+)[ =`]", (ROOT / "docs/operate/deploy.md").read_text()))
    docker = {"ipc", "user", "shm-size", "memory"}
    assert {"drain-s", "on-exit"} <= named <= docker | {word[2:] for word in flags["serve"]}, named


# --------------------------------------------------------------------------- examples


def image_environ() -> dict[str, str]:
    """KVDOCK_ variables of the image."""
    return dict(re.findall(r"\b(KVDOCK_\w+)=(\S+)", (ROOT / "Dockerfile").read_text().split("\nFROM ")[-1]))


def cluster() -> dict[str, dict[str, Any]]:
    """The objects of the Kubernetes example, by kind."""
    return {found["kind"]: found for found in yaml.safe_load_all((EXAMPLES / "kvdock-daemonset.yaml").read_text())}


def daemonset() -> dict[str, Any]:
    found: dict[str, Any] = cluster()["DaemonSet"]["spec"]["template"]["spec"]
    return found


def test_the_daemonsets_flags_and_probes_fit_the_image(tmp_path: Path) -> None:
    """Probes and scrapers send the pod's address as host name, which only the pod knows."""
    spec, container = daemonset(), daemonset()["containers"][0]
    access = tmp_path / "access.toml"
    access.write_text(cluster()["Secret"]["stringData"]["access.toml"])
    access.chmod(0o440)
    flags = [str(access) if word == "/etc/kvdock/access.toml" else word for word in container["args"]]
    environ = image_environ() | {each["name"]: each["value"].replace("$(POD_IP)", "10.1.2.3")
                                 for each in container["env"] if "value" in each}
    done = kvdock("config", "--json", *flags, **environ)
    assert done.returncode == 0, done.stderr
    names = [name.removeprefix("--").replace("-", "_") for name in flags[::2]]
    settings = effective(environ, flags=dict(zip(names, flags[1::2], strict=True))).settings
    assert settings.host == "0.0.0.0"
    assert container["ports"][0]["containerPort"] == settings.port
    assert spec["terminationGracePeriodSeconds"] > settings.drain_s + 1
    assert Path(settings.socket_path).parent in {Path(mount["mountPath"]) for mount in container["volumeMounts"]}
    with ServerProcess(allowed_hosts=settings.allowed_hosts, access_file=settings.access_file) as server:
        probes = [container[kind]["exec"]["command"] for kind in ("startupProbe", "readinessProbe", "livenessProbe")]
        for python, *arguments in probes:
            assert python == "python" and settings.socket_path in arguments[-1]
            command = [sys.executable, *[one.replace(settings.socket_path, server.settings["socket_path"])
                                         for one in arguments]]  # fmt: skip
            assert subprocess.run(command, timeout=30).returncode == 0
            assert subprocess.run([*command[:-1], command[-1].replace("z HTTP", "zz HTTP")], timeout=30).returncode == 1
        assert status_of(server.http, "/metrics", {"Host": "10.1.2.3:7410"}) == 200
        assert status_of(server.http, "/metrics", {"Host": "10.9.9.9:7410"}) == 421
        assert status_of(server.http, "/v1/sessions", {"Host": "10.1.2.3:7410"}) in (401, 403)


def test_the_daemonsets_first_container_makes_the_folders_that_the_server_writes_to(tmp_path: Path) -> None:
    spec = daemonset()
    paths = {volume["name"]: volume["hostPath"]["path"] for volume in spec["volumes"] if "hostPath" in volume}
    server, first = spec["containers"][0], spec["initContainers"][0]
    flags = dict(zip(server["args"][::2], server["args"][1::2], strict=True))
    assert paths.pop("shm") == "/dev/shm"
    assert paths["run"] == str(Path(flags["--socket-path"]).parent)
    mounts = [{"name": name, "mountPath": path} for name, path in paths.items()]
    assert [mount for mount in mounts if mount not in server["volumeMounts"]] == [], "at the same places as on the node"
    assert [mount for mount in mounts if mount not in first["volumeMounts"]] == []
    made = [word for word in first["command"] if word.startswith("/")]
    assert set(made) == set(paths.values())
    user, group = str(spec["securityContext"]["runAsUser"]), str(spec["securityContext"]["runAsGroup"])
    assert (first["command"][3], first["command"][5]) == (user, group)
    mine = {user: str(os.getuid())} | {path: f"{tmp_path}{path}" for path in made}
    command = [mine.get(word, word) for word in first["command"]]
    command[5] = str(os.getgid())
    subprocess.run(command, check=True)
    folder = Path(f"{tmp_path}{paths['disk']}")
    assert folder.stat().st_mode & 0o777 == 0o700
    with ServerProcess(disk_path=str(folder), disk_bytes=64 * MIB) as running, Client(running.unix) as client:
        eventually(lambda: [(tier.name, tier.state) for tier in client.status().tiers] == [("disk", "open")], 60.0)


@pytest.mark.security
def test_the_daemonset_asks_for_no_more_than_it_needs() -> None:
    """Pod Security's level "restricted", except for host paths and the container that creates the socket's folder."""
    spec = daemonset()
    pod, server, first = spec["securityContext"], spec["containers"][0], spec["initContainers"][0]["securityContext"]
    assert pod["runAsNonRoot"] and pod["runAsUser"] and pod["seccompProfile"] == {"type": "RuntimeDefault"}
    assert pod["fsGroup"] == pod["runAsGroup"]
    assert (spec["automountServiceAccountToken"], spec["enableServiceLinks"]) == (False, False)
    assert not {"hostNetwork", "hostPID", "hostIPC"} & set(spec)
    for context in (server["securityContext"], first):
        assert (context["allowPrivilegeEscalation"], context["readOnlyRootFilesystem"]) == (False, True)
        assert context["capabilities"]["drop"] == ["ALL"]
    assert set(server["securityContext"]) == {"allowPrivilegeEscalation", "readOnlyRootFilesystem", "capabilities"}
    assert "add" not in server["securityContext"]["capabilities"]
    assert first["capabilities"]["add"] == ["CHOWN", "FOWNER"]
    assert {kind for volume in spec["volumes"] for kind in volume if kind != "name"} == {"hostPath", "secret"}
    network = cluster()["NetworkPolicy"]["spec"]
    assert network["podSelector"] == cluster()["DaemonSet"]["spec"]["selector"]
    assert network["policyTypes"] == ["Ingress", "Egress"] and "egress" not in network
    assert [port["port"] for port in network["ingress"][0]["ports"]] == [server["ports"][0]["containerPort"]]


@pytest.mark.security
def test_the_image_is_healthy_while_its_server_answers_at_the_socket() -> None:
    text = (ROOT / "Dockerfile").read_text()
    found = re.search(r"^HEALTHCHECK .*?CMD (.*?[^\\])\n(?=[A-Z])", text, re.MULTILINE | re.DOTALL)
    assert found is not None
    python, *arguments = json.loads(found[1].replace("\\\n", ""))
    assert python == "python"
    check = [sys.executable, *arguments]
    with ServerProcess() as server:
        environ = {**os.environ, "KVDOCK_SOCKET_PATH": server.unix.removeprefix("unix:")}
        assert subprocess.run(check, env=environ).returncode == 0
    assert subprocess.run(check, env=environ, stderr=subprocess.DEVNULL).returncode != 0


@pytest.mark.security
def test_the_image_runs_as_a_user_that_is_not_root_and_has_no_compiler() -> None:
    final = (ROOT / "Dockerfile").read_text().split("\nFROM ")[-1]
    assert re.findall(r"^USER (\d+)$", final, re.MULTILINE) == re.findall(r"useradd --uid (\d+)", final) != ["0"]
    assert "apt-get" not in final and "pip install" not in final


def status_of(address: str, path: str, headers: dict[str, str]) -> int:
    connection = http_connection(address)
    try:
        connection.request("GET", path, headers=headers)
        return connection.getresponse().status
    finally:
        connection.close()


def unit() -> list[tuple[str, str]]:
    """Names and values of the systemd unit, in order."""
    lines = [line for line in (EXAMPLES / "kvdock.service").read_text().splitlines() if not line.startswith("#")]
    return [(name, value) for name, equals, value in (line.partition("=") for line in lines) if equals]


def test_the_units_settings_and_command_are_right() -> None:
    environ = dict(value.split("=", 1) for name, value in unit() if name == "Environment")
    settings = effective(environ).settings
    once = dict(unit())
    assert settings.pool_bytes == 64 << 30 and settings.socket_path.startswith("/run/kvdock/")
    assert int(once["TimeoutStopSec"]) > settings.drain_s + 1
    assert settings.on_exit == "keep" and once["RuntimeDirectoryPreserve"] == "yes", "restarts keep the cache"
    assert (once["Type"], once["NotifyAccess"]) == ("notify", "main")
    assert once["ExecReload"] == "kill -HUP $MAINPID" and once["StateDirectory"] == "kvdock"
    program, *words = shlex.split(once["ExecStart"])
    assert program.endswith("/kvdock") and kvdock(*words, "--help").returncode == 0


@pytest.mark.security
def test_the_unit_takes_away_what_the_server_does_not_need_and_shares_memory() -> None:
    once = dict(unit())
    wanted = (
        "LockPersonality MemoryDenyWriteExecute NoNewPrivileges PrivateDevices PrivateTmp ProtectClock "
        "ProtectControlGroups ProtectHome ProtectHostname ProtectKernelLogs ProtectKernelModules "
        "ProtectKernelTunables RestrictNamespaces RestrictRealtime RestrictSUIDSGID"
    )
    assert [name for name in wanted.split() if once.get(name) != "yes"] == []
    assert (once["ProtectSystem"], once["CapabilityBoundingSet"], once["AmbientCapabilities"]) == ("strict", "", "")
    assert once["RestrictAddressFamilies"] == "AF_UNIX AF_INET AF_INET6"
    calls = [value for name, value in unit() if name == "SystemCallFilter"]
    assert calls == ["@system-service", "~@privileged @resources"]
    assert not {"PrivateIPC", "PrivateUsers", "PrivateNetwork", "RootDirectory", "DynamicUser"} & set(once)


def test_the_deployment_pages_say_what_the_defaults_are() -> None:
    text = (ROOT / "docs/operate/deploy.md").read_text()
    assert f"`--drain-s` ({Settings().drain_s:g} s)" in text
    program = "from kvdock._core import Table; print(round(Table.region_bytes(1 << 17, 1 << 13) / 2**20))"
    mib = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout.strip()
    assert f"{mib} MiB for the default of {Settings().table_records} chunks" in text
    assert f"its table ({mib} MiB)" in (ROOT / "Dockerfile").read_text()
