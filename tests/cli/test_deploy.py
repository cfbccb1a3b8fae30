"""The shipped ways to deploy: unit, image, DaemonSet, chart and Compose file. Their settings exist and keep the cache
over a restart; the chart and the Compose file fit the images, the server and the alerts."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml  # type: ignore[import-untyped]  # it ships no types
from api_helpers import NOBODYS, ServerProcess, attach, keys, raw
from paths import ROOT

from kvdock import __version__
from kvdock.api.settings import Settings, effective
from kvdock.client.client import Client
from kvdock.connectors.vllm.setup import Settings as ConnectorSettings
from kvdock.protocol.admin_schemas import ClearCache
from kvdock.protocol.schemas import Lookup

CHART = ROOT / "charts/kvdock"
HELM = ROOT / ".venv-deploy/bin/helm"
needs_helm = pytest.mark.skipif(not HELM.exists(), reason="`make deploy-check` has not installed helm")
OF_THE_MACHINE = {
    "pool_bytes", "socket_path", "host", "port", "access_file", "allowed_hosts", "disk_path", "disk_bytes",
}
"""Settings that a test on this machine cannot take over from a file."""


def image_environ() -> dict[str, str]:
    text = (ROOT / "Dockerfile").read_text().split("\nFROM ")[-1]
    return dict(re.findall(r"\b(KVDOCK_\w+)=(\S+)", text))


@cache
def rendered(*values: str) -> list[dict[str, Any]]:
    sets = [word for value in values for word in ("--set", value)]
    command = [str(HELM), "template", "kvdock", str(CHART), "--namespace", "kvdock", *sets]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return [one for one in yaml.safe_load_all(done.stdout) if one is not None]


def of_kind(kind: str, *values: str) -> dict[str, Any]:
    found, = (one for one in rendered(*values) if one["kind"] == kind)
    return found


def chart_pod(*values: str) -> dict[str, Any]:
    found: dict[str, Any] = of_kind("DaemonSet", *values)["spec"]["template"]["spec"]
    return found


def environ_of(container: dict[str, Any]) -> dict[str, str]:
    return {one["name"]: one["value"] for one in container["env"] if "value" in one}


def interpolated(text: str, environ: dict[str, str]) -> str:
    """As Compose does it."""
    return re.sub(r"\$\{(\w+):[-?]([^}]*)\}", lambda match: environ.get(match[1], match[2]), text)


def compose() -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load(interpolated((ROOT / "examples/compose.yaml").read_text(), {}))["services"]
    return found


def of_unit() -> Settings:
    lines = re.findall(r"^Environment=(\w+)=(.*)$", (ROOT / "docs/examples/kvdock.service").read_text(), re.MULTILINE)
    return effective(dict(lines)).settings


def example_pod() -> dict[str, Any]:
    objects = yaml.safe_load_all((ROOT / "docs/examples/kvdock-daemonset.yaml").read_text())
    found, = (one["spec"]["template"]["spec"] for one in objects if one["kind"] == "DaemonSet")
    pod: dict[str, Any] = found
    return pod


def of_daemonset() -> Settings:
    container = example_pod()["containers"][0]
    names = [name.removeprefix("--").replace("-", "_") for name in container["args"][::2]]
    flags = dict(zip(names, container["args"][1::2], strict=True))
    return effective(image_environ() | environ_of(container), flags=flags).settings


def of_image() -> Settings:
    return effective(image_environ()).settings


def of_compose() -> Settings:
    return effective(image_environ() | compose()["kvdock"]["environment"]).settings


def of_chart() -> Settings:
    environ = environ_of(chart_pod()["containers"][0])
    return effective(image_environ() | environ).settings


SHIPPED = [of_unit, of_image, of_daemonset, of_compose, pytest.param(of_chart, marks=needs_helm)]


@pytest.mark.parametrize("shipped", SHIPPED)
def test_a_restart_of_what_is_shipped_keeps_the_cache(shipped: Any, tmp_path: Path) -> None:
    """`effective` refuses a setting that does not exist."""
    settings = shipped()
    assert settings.on_exit == "keep" and settings.adopt != "never"
    assert settings.socket_path == "/run/kvdock/kvdock.sock"
    others = {name: value for name in Settings.__struct_fields__ if name not in OF_THE_MACHINE
              and (value := getattr(settings, name)) != getattr(Settings(), name)}
    others["socket_path"] = str(tmp_path / "kvdock.sock")
    with ServerProcess(**others) as first:
        with Client(first.unix) as client:
            engine = attach(client)
            engine.store(keys(3))
            space = engine.attached.namespace
        assert first.stop() == 0
        with ServerProcess(**others) as second, Client(second.unix) as client:
            assert second.pool_id == first.pool_id
            assert client.lookup(Lookup(namespace=space, keys=keys(3))).hit_tokens == 3 * 16
            client.clear(ClearCache())
    with ServerProcess(socket_path=str(tmp_path / "kvdock.sock"), on_exit="remove"):
        pass


# --------------------------------------------------------------------------- the chart


@needs_helm
def test_the_charts_settings_are_the_servers() -> None:
    given = {"table_records": 262144, "session_cap": 0.25, "drain_s": 7.5}
    pod = chart_pod("disk.enabled=true", *(f"settings.{name}={value}" for name, value in given.items()))
    environ = environ_of(pod["containers"][0])
    found = effective(image_environ() | environ).settings
    assert found.pool_bytes == 64 << 30 and {name: getattr(found, name) for name in given} == given
    assert (found.disk_path, found.host, found.port) == ("/var/lib/kvdock", "0.0.0.0", 7410)
    assert pod["terminationGracePeriodSeconds"] > found.drain_s + 10
    schema = json.loads((CHART / "values.schema.json").read_text())["properties"]["settings"]
    own = {name.removeprefix("KVDOCK_").lower() for name in environ} - {*given, "pool_bytes", "on_exit"}
    assert set(schema["propertyNames"]["enum"]) == set(Settings.__struct_fields__) - own - {"port"}


@needs_helm
def test_the_charts_image_is_this_version_by_tag_or_digest() -> None:
    assert yaml.safe_load((CHART / "Chart.yaml").read_text())["appVersion"] == __version__
    assert chart_pod()["containers"][0]["image"] == f"kvdock:{__version__}"
    digest = f"sha256:{'0' * 64}"
    pod = chart_pod("image.repository=registry.example/kvdock", f"image.digest={digest}")
    images = {one["image"] for one in (*pod["containers"], *pod["initContainers"])}
    assert images == {f"registry.example/kvdock@{digest}"}


@needs_helm
def test_the_charts_probes_ask_a_live_server(tmp_path: Path) -> None:
    container = chart_pod()["containers"][0]
    with ServerProcess(socket_path=str(tmp_path / "kvdock.sock")):
        for kind in ("startupProbe", "readinessProbe", "livenessProbe"):
            python, *arguments = container[kind]["exec"]["command"]
            assert python == "python"
            arguments[-1] = arguments[-1].replace("/run/kvdock", str(tmp_path))
            assert subprocess.run([sys.executable, *arguments], timeout=30).returncode == 0, kind
            arguments[-1] = arguments[-1].replace("z HTTP", "zz HTTP")
            assert subprocess.run([sys.executable, *arguments], timeout=30).returncode == 1, kind


@needs_helm
@pytest.mark.security
def test_the_chart_asks_for_no_more_than_the_daemonset_of_the_examples() -> None:
    """That one is held to the level "restricted" by tests/cli/test_runbook.py."""
    pod, example = chart_pod("disk.enabled=true"), example_pod()
    same = ("automountServiceAccountToken", "enableServiceLinks")
    assert [pod[name] for name in same] == [example[name] for name in same]
    assert not {"hostNetwork", "hostPID", "hostIPC"} & set(pod)
    ids = dict.fromkeys(("runAsUser", "runAsGroup", "fsGroup"), image_user())
    assert pod["securityContext"] == example["securityContext"] | ids
    for kind in ("containers", "initContainers"):
        assert pod[kind][0]["securityContext"] == example[kind][0]["securityContext"]
        assert pod[kind][0]["volumeMounts"] == example[kind][0]["volumeMounts"]
    assert pod["volumes"][:-1] == example["volumes"][:-1]
    assert pod["volumes"][-1]["secret"]["defaultMode"] == 0o440
    assert of_kind("NetworkPolicy")["spec"]["policyTypes"] == ["Ingress", "Egress"]
    assert "egress" not in of_kind("NetworkPolicy")["spec"]


@needs_helm
def test_a_server_starts_with_the_charts_access_file_and_answers_the_monitoring_alone(tmp_path: Path) -> None:
    access = tmp_path / "access.toml"
    access.write_text(of_kind("Secret")["stringData"]["access.toml"])
    access.chmod(0o440)
    environ = environ_of(chart_pod()["containers"][0])
    hosts = environ["KVDOCK_ALLOWED_HOSTS"].replace("$(POD_IP)", "10.1.2.3")
    with ServerProcess(access_file=str(access), allowed_hosts=hosts) as server:
        assert raw(server.http, "GET", "/metrics", headers={**NOBODYS, "Host": "10.1.2.3:7410"})[0] == 200
        assert raw(server.http, "GET", "/v1/sessions", headers=NOBODYS)[0] in (401, 403)


@needs_helm
def test_the_charts_alerts_are_the_examples_for_the_job_that_its_monitor_names() -> None:
    values = ("podMonitor.enabled=true", "prometheusRule.enabled=true")
    rules, monitor = of_kind("PrometheusRule", *values)["spec"], of_kind("PodMonitor", *values)["spec"]
    assert rules == yaml.safe_load((ROOT / "examples/monitoring/alerts.yml").read_text())
    template = of_kind("DaemonSet", *values)["spec"]["template"]
    jobs = set(re.findall(r'job="(\w+)"', json.dumps(rules).replace("\\", "")))
    assert jobs == {template["metadata"]["labels"][monitor["jobLabel"]]}
    assert monitor["selector"]["matchLabels"].items() <= template["metadata"]["labels"].items()
    ports = {port["name"] for port in template["spec"]["containers"][0]["ports"]}
    assert {one["port"] for one in monitor["podMetricsEndpoints"]} <= ports


# --------------------------------------------------------------------------- engines beside the server


def image_user() -> int:
    user, = re.findall(r"^USER (\d+)$", (ROOT / "Dockerfile").read_text(), re.MULTILINE)
    return int(user)


def vllm_environ() -> dict[str, str]:
    last = (ROOT / "examples/vllm.Dockerfile").read_text().split("\nENV ")[-1]
    return dict(re.findall(r"\b(KVDOCK_\w+)=(\S+)", last))


def kv_transfer_config(words: list[str]) -> dict[str, Any]:
    text, = (word.partition("=")[2] for word in words if word.startswith("--kv-transfer-config="))
    found: dict[str, Any] = json.loads(text)
    return found


def test_composes_engine_trusts_composes_server_and_shares_what_it_needs() -> None:
    server, engine = compose()["kvdock"], compose()["vllm"]
    settings = ConnectorSettings.load({}, vllm_environ())
    assert settings.trusted_uid == image_user()
    assert settings.address == f"unix:{of_compose().socket_path}"
    assert server["ipc"] == engine["ipc"] == "host", "/dev/shm outlives the server's container"
    mounted = [dict(reversed(volume.split(":")) for volume in one["volumes"]) for one in (server, engine)]
    folder = str(Path(of_compose().socket_path).parent)
    assert mounted[0][folder] == mounted[1][folder]
    assert engine["depends_on"] == {"kvdock": {"condition": "service_healthy"}}
    assert kv_transfer_config(engine["command"]) == {"kv_connector": "KvdockConnector", "kv_role": "kv_both"}
    assert int(server["stop_grace_period"].removesuffix("s")) > of_compose().drain_s + 10
    assert server["image"].endswith(f":{__version__}") and engine["image"].endswith(f":{__version__}")


@needs_helm
def test_the_charts_engine_trusts_the_charts_server_and_shares_what_it_needs() -> None:
    values = ("engine.enabled=true", "user=10001", "socketFolder=/run/other")
    server, engine = chart_pod(*values), of_kind("Deployment", *values)["spec"]["template"]["spec"]
    container = engine["containers"][0]
    settings = ConnectorSettings.load({}, environ_of(container))
    environ = environ_of(server["containers"][0])
    assert settings.trusted_uid == server["securityContext"]["runAsUser"] == 10001
    assert settings.address == f"unix:{environ['KVDOCK_SOCKET_PATH']}"
    assert kv_transfer_config(container["args"]) == {"kv_connector": "KvdockConnector", "kv_role": "kv_both"}
    for path in ("/dev/shm", "/run/other"):
        places: set[str] = set()
        for pod, one in ((server, server["containers"][0]), (engine, container)):
            name, = (mount["name"] for mount in one["volumeMounts"] if mount["mountPath"] == path)
            places.update(volume["hostPath"]["path"] for volume in pod["volumes"] if volume["name"] == name)
        assert places == {path}
