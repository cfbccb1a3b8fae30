"""The runbook knows every reason and every metric of a live server; the deployment examples fit the code."""

from __future__ import annotations

import ast
import inspect
import re
import shlex
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import typer
import yaml  # type: ignore[import-untyped]  # it ships no types
from api_helpers import ServerProcess, attach, http_connection, keys, raw
from cli_helpers import kvdock
from paths import ROOT
from prometheus_client.parser import text_string_to_metric_families

from kvdock.api.http.guard import allowed_hosts
from kvdock.api.settings import CONFIG_VARIABLE, ENV_PREFIX, Settings, effective
from kvdock.api.views import probes
from kvdock.api.views.reports import Reports
from kvdock.cli.main import app
from kvdock.client.client import Client
from kvdock.protocol.errors import CODES

RUNBOOK = (ROOT / "docs/runbook.md").read_text()
EXAMPLES = ROOT / "docs/examples"


def rows(heading: str) -> list[list[str]]:
    """Cells of the table under a heading of the runbook, without its head."""
    section = RUNBOOK.split(f"\n## {heading}\n", 1)[1].split("\n## ", 1)[0]
    found = re.findall(r"^\| (.+) \|$", section.replace("| |", "|  |"), re.MULTILINE)
    return [[cell.strip() for cell in row.split(" | ")] for row in found][1:]


def metric_names(address: str) -> set[str]:
    families = text_string_to_metric_families(raw(address, "GET", "/metrics")[2].decode())
    return {f"{family.name}_total" if family.type == "counter" else family.name for family in families}


def sentences(source: str) -> set[str]:
    """The fixed beginnings of sentences that are made when they are needed."""
    beginnings = (node.values[0] for node in ast.walk(ast.parse(source)) if isinstance(node, ast.JoinedStr))
    found = {str(piece.value) for piece in beginnings if isinstance(piece, ast.Constant)}
    return {text for text in found if " " in text}  # a format like `.0f` is no sentence


def test_every_metric_of_a_live_server_is_in_the_runbook_and_no_other() -> None:
    with ServerProcess() as server, Client(server.unix) as client:
        engine = attach(client)
        engine.store(keys(1))
        assert engine.lookup(keys(1)).lease
        live = metric_names(server.http)
        engine.close()
    documented = [re.findall(r"`(\w+)`", row[0])[0] for row in rows("Metrics")]
    assert len(live) > 30 and sorted(documented) == sorted(live)


def test_every_reason_is_in_the_runbook() -> None:
    fixed = {value for name, value in vars(probes).items() if name.isupper() and isinstance(value, str)}
    made = sentences(inspect.getsource(probes)) | sentences(textwrap.dedent(inspect.getsource(Reports.status)))
    assert len(fixed) >= 5 and len(made) == 4
    documented = [row[0].strip("`") for row in rows("Not ready")]
    assert fixed <= set(documented)
    for beginning in made:
        assert any(reason.startswith(beginning + "…") for reason in documented), beginning
    assert len(documented) == len(fixed) + len(made)


def test_codes_of_the_runbook_are_codes_of_the_server() -> None:
    named = {code for row in rows("Errors") for code in re.findall(r"`(\w+)`", row[0])}
    assert named and named <= set(CODES)


def test_commands_flags_and_variables_of_all_pages_exist() -> None:
    commands = typer.main.get_group(app).commands
    flags = {name: {word for one in command.params for word in one.opts} for name, command in commands.items()}
    variables = {CONFIG_VARIABLE, *(f"{ENV_PREFIX}{name.upper()}" for name in Settings.__struct_fields__)}
    pages = [ROOT / "README.md", ROOT / "Dockerfile", *EXAMPLES.iterdir(), *(ROOT / "docs").glob("*.md")]
    seen = 0
    for page in pages:
        text = page.read_text()
        for command, words in re.findall(r"\bkvdock ([a-z]+)((?: [^\s`|;]+)*)", text):
            asked = {word.partition("=")[0] for word in words.split() if word.startswith("--")}
            assert not asked or asked <= flags[command] | {"--help"}, (page.name, command, words)
            seen += len(asked)
        unknown = set(re.findall(rf"\b{ENV_PREFIX}[A-Z_]+", text)) - variables
        assert not unknown, (page.name, unknown)
    assert seen >= 6
    named = set(re.findall(r"`--([a-z-]+)[ =`]", (ROOT / "docs/deploy.md").read_text()))
    docker = {"ipc", "user", "shm-size", "memory"}
    assert {"drain-s", "on-exit"} <= named <= docker | {word[2:] for word in flags["serve"]}, named


# --------------------------------------------------------------------------- examples


def image_environ() -> dict[str, str]:
    """KVDOCK_ variables of the image."""
    return dict(re.findall(r"\b(KVDOCK_\w+)=(\S+)", (ROOT / "Dockerfile").read_text().split("\nFROM ")[-1]))


def daemonset() -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load((EXAMPLES / "kvdock-daemonset.yaml").read_text())["spec"]["template"]["spec"]
    return found


def test_the_daemonsets_flags_and_probes_fit_the_image() -> None:
    spec, container = daemonset(), daemonset()["containers"][0]
    flags = container["args"]
    done = kvdock("config", "--json", *flags, **image_environ())
    assert done.returncode == 0, done.stderr
    names = [name.removeprefix("--").replace("-", "_") for name in flags[::2]]
    chosen = dict(zip(names, flags[1::2], strict=True))
    settings = effective(image_environ(), flags=chosen).settings
    hosts = allowed_hosts(settings)
    assert settings.host == "0.0.0.0" and hosts is not None
    assert container["ports"][0]["containerPort"] == settings.port
    assert spec["terminationGracePeriodSeconds"] > settings.drain_s + 1
    assert Path(settings.socket_path).parent in {Path(mount["mountPath"]) for mount in container["volumeMounts"]}
    with ServerProcess(allowed_hosts=image_environ()["KVDOCK_ALLOWED_HOSTS"]) as server:
        for kind in ("startupProbe", "readinessProbe", "livenessProbe"):
            probe = container[kind]["httpGet"]
            headers = {header["name"]: header["value"] for header in probe["httpHeaders"]}
            assert headers["Host"] in hosts
            assert status_of(server.http, probe["path"], headers) == 200
            assert status_of(server.http, probe["path"], {"Host": "10.1.2.3:7410"}) == 421


def status_of(address: str, path: str, headers: dict[str, str]) -> int:
    connection = http_connection(address)
    try:
        connection.request("GET", path, headers=headers)
        return connection.getresponse().status
    finally:
        connection.close()


def test_the_units_settings_and_command_are_right() -> None:
    lines = [line for line in (EXAMPLES / "kvdock.service").read_text().splitlines() if not line.startswith("#")]
    pairs = [line.partition("=")[::2] for line in lines if "=" in line]
    environ = dict(value.split("=", 1) for name, value in pairs if name == "Environment")
    settings = effective(environ).settings
    unit = dict(pairs)
    assert settings.pool_bytes == 64 << 30 and settings.socket_path.startswith("/run/kvdock/")
    assert int(unit["TimeoutStopSec"]) > settings.drain_s + 1
    program, *words = shlex.split(unit["ExecStart"])
    assert program.endswith("/kvdock") and kvdock(*words, "--help").returncode == 0


def test_the_deployment_pages_say_what_the_defaults_are() -> None:
    text = (ROOT / "docs/deploy.md").read_text()
    assert f"`--drain-s` ({Settings().drain_s:g} s)" in text
    program = "from kvdock._core import Table; print(round(Table.region_bytes(1 << 17, 1 << 13) / 2**20))"
    mib = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout.strip()
    assert f"{mib} MiB for the default of {Settings().table_records} chunks" in text
    assert f"its table ({mib} MiB)" in (ROOT / "Dockerfile").read_text()
