"""`kvdock doctor`: checks the machine, the settings and the server. Starts nothing, needs no GPU.

Each check gives one Finding: `ok`, `note` (works, could be better) or `problem` (the server would not start or not
serve). Only problems make the exit status 1. kvdock/cli/doctor_machine.py checks the machine, this module kvdock
itself.
"""

from __future__ import annotations

import socket
import sys
from collections.abc import Mapping
from importlib.metadata import version

from rich.console import Console
from rich.table import Table
from rich.text import Text

from kvdock import _core
from kvdock.api.access.access_file import digest_of, read
from kvdock.api.errors import AccessFileError, SettingsError
from kvdock.api.pool.lock import server_alive
from kvdock.api.settings import Settings, effective
from kvdock.cli.doctor_machine import Finding, Machine, machine_findings
from kvdock.cli.operator import TIMEOUT_S, print_json
from kvdock.cli.outcome import DONE, FAILED
from kvdock.cli.screen import say
from kvdock.cli.words import duration, printable, size
from kvdock.client.client import Client
from kvdock.datapath.tuning import Calibration, cached_tunings
from kvdock.protocol.access_token import TOKEN_FILE_VARIABLE, read_token
from kvdock.protocol.errors import ApiError, ServerUnavailable
from kvdock.protocol.private_file import PrivateFileError
from kvdock.shm.errors import ForeignObject
from kvdock.shm.objects import foreign_objects, pool_objects

_STYLES = {"ok": "green", "note": "yellow", "problem": "bold red"}


def doctor(
    environ: Mapping[str, str], *, config: str | None, as_json: bool, console: Console, machine: Machine | None = None
) -> int:
    """Prints the findings; returns the exit status."""
    findings = examine(environ, config=config, machine=machine or Machine())
    problems = any(finding.level == "problem" for finding in findings)
    if as_json:
        print_json(console, {"ok": not problems, "checks": findings})
    else:
        say(console, _table(findings))
    return FAILED if problems else DONE


def examine(environ: Mapping[str, str], *, config: str | None, machine: Machine) -> list[Finding]:
    settings, settings_finding = _settings(environ, config)
    token = _token(environ)
    server = _server(settings, token)
    findings = [_versions(), settings_finding, server, _access(settings, token), *_extension()]
    wanted_bytes = settings.pool_bytes + _core.Table.region_bytes(settings.table_records, settings.table_grants)
    # A running server has its pool already: no memory for another is needed.
    findings += machine_findings(machine, 0 if server.level == "ok" else wanted_bytes)
    findings.append(_stale_pools(machine))
    return findings


def _versions() -> Finding:
    return Finding("kvdock", "ok", f"{version('kvdock')} on Python {sys.version.split()[0]}")


def _settings(environ: Mapping[str, str], config: str | None) -> tuple[Settings, Finding]:
    """The settings that a server started here would use; the defaults when they are wrong."""
    try:
        found = effective(environ, config=config)
    except SettingsError as error:
        advice = "correct it; `kvdock config` shows all settings"
        return Settings(), Finding("settings", "problem", str(error), advice)
    given = [f"{name} ({origin.where})" for name, origin in found.origins.items() if origin.source != "default"]
    return found.settings, Finding("settings", "ok", ", ".join(given) or "all at their defaults")


def _token(environ: Mapping[str, str]) -> str | PrivateFileError:
    """The access token that commands would use, '' for none, or why it cannot be used."""
    try:
        return read_token(environ.get(TOKEN_FILE_VARIABLE, ""))
    except PrivateFileError as error:
        return error


def _access(settings: Settings, token: str | PrivateFileError) -> Finding:
    """Who may call a server that is started here, and the token of commands."""
    if isinstance(token, PrivateFileError):
        return Finding("access", "problem", f"{TOKEN_FILE_VARIABLE}: {token}", "docs/security.md describes the file")
    if not settings.access_file:
        return Finding("access", "ok", "no access file is set: this user and root only, and probes over TCP")
    try:
        tokens = read(settings.access_file)
    except AccessFileError as error:
        return Finding("access", "problem", str(error), "a server with it does not start: docs/security.md")
    said = f"access tokens in {settings.access_file}: {len(tokens)}"
    if token and digest_of(token.encode()) not in tokens:
        return Finding("access", "problem", f"{said}, that of {TOKEN_FILE_VARIABLE} is none of them")
    return Finding("access", "ok", said)


def _server(settings: Settings, token: str | PrivateFileError) -> Finding:
    address = f"unix:{settings.socket_path}"
    try:
        with Client(address, timeout_s=TIMEOUT_S, access_token=token if isinstance(token, str) else "") as client:
            status = client.status()
    except ServerUnavailable as error:
        if _listens(settings.socket_path):
            return Finding("server", "problem", f"it listens at {error}", "it is stopped or hangs: look at its log")
        return Finding("server", "note", f"none answers at {error}", "start one with `kvdock serve`")
    except ApiError as error:
        if error.code == "unauthenticated":
            advice = f"the token of {TOKEN_FILE_VARIABLE} is none of this server's"
            return Finding("server", "note", f"at {address}: {error}", advice)
        return Finding("server", "problem", f"at {address}: {error}", "use the client of the server's release")
    said = f"{status.version} at {address}, up {duration(status.uptime_s)}"
    if status.status != "ok":
        reasons = ", ".join(status.reasons)
        return Finding("server", "problem", f"{said}, not ready: {reasons}", "docs/runbook.md explains each reason")
    if damaged := status.counters["mismatches"]:
        advice = "no wrong token was served; if the number rises, check the machine's memory: docs/runbook.md"
        return Finding("server", "note", f"{said}; chunks that did not match their checksum: {damaged}", advice)
    return Finding("server", "ok", said)


def _listens(socket_path: str) -> bool:
    """Whether a process listens there, even a stopped one: the kernel accepts connections for it."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(TIMEOUT_S)
        try:
            probe.connect(socket_path)
        except OSError:
            return False
        return True


# --------------------------------------------------------------------------- the extension


def _extension() -> list[Finding]:
    paths = _core.cpu_paths()
    plain = "" if paths[0] != "scalar" else "there is no vectorised copy for this processor: copies are slow"
    build = Finding("extension", "note" if plain else "ok", f"CPU copy by {', '.join(paths)}", plain)
    return [build, _kernels(_core.cuda_kernels(), _core.cuda_unavailable()), _calibrations(cached_tunings())]


def _kernels(compiled_for: list[str], unavailable: str) -> Finding:
    """`unavailable`: why the kernels cannot run here, "" when they can."""
    if not compiled_for:
        return Finding("GPU kernels", "note", "none in this build: CPU copy only", "for GPUs: build it where nvcc is")
    said = f"for {', '.join(compiled_for)}"
    return Finding("GPU kernels", "note" if unavailable else "ok", f"{said}; {unavailable}" if unavailable else said)


def _calibrations(known: list[Calibration]) -> Finding:
    """How this user's engines copy with GPUs: what they measured at their first start."""
    if not known:
        return Finding("GPU copies", "ok", "not measured yet: an engine does so once for each GPU and layout")
    return Finding("GPU copies", "ok", "; ".join(calibration.describe() for calibration in known))


# --------------------------------------------------------------------------- pools left behind


def _stale_pools(machine: Machine) -> Finding:
    if not machine.shm_dir.is_dir():
        return Finding("pools", "ok", "none")
    live, stale, stale_bytes = 0, 0, 0
    foreign = len(foreign_objects(machine.shm_dir))
    for pool_id, names in pool_objects(machine.shm_dir).items():
        try:
            if server_alive(pool_id, machine.shm_dir):
                live += 1
                continue
        except (OSError, ForeignObject):  # it has changed meanwhile
            continue
        stale += 1
        stale_bytes += sum(_size_bytes(machine, name) for name in names)
    said = f"{live} in use" + (f", {foreign} objects that are not ours alone" if foreign else "")
    if stale:
        return Finding(
            "pools", "note", f"{said}, {stale} left by servers that have ended: {size(stale_bytes)}",
            "the next `kvdock serve` at its socket takes a pool over; others of this user remove it after five minutes",
        )
    return Finding("pools", "ok", f"{said}, none left behind")


def _size_bytes(machine: Machine, name: str) -> int:
    try:
        return (machine.shm_dir / name).stat().st_blocks * 512
    except FileNotFoundError:
        return 0  # removed while we looked


def _table(findings: list[Finding]) -> Table:
    table = Table(show_header=False, box=None, pad_edge=False)
    for finding in findings:
        said = Text(printable(finding.found), overflow="fold")
        if finding.advice:
            said.append(f"\n→ {printable(finding.advice)}", style="italic")
        level = "OK" if finding.level == "ok" else finding.level
        table.add_row(Text(level, style=_STYLES[finding.level]), Text(finding.check, style="bold"), said)
    return table
