"""`kvdock doctor`: checks the machine, the settings, the server and how its cache does. It starts no server and needs
no GPU.

A check returns findings: `ok`, `note` (works, but could be better) or `problem` (the server would not start, or does
not serve). The exit status is 1 if there is a problem. The checks change nothing. The paths that they read are
arguments, so that tests can describe other machines.
"""

from __future__ import annotations

import os
import re
import resource
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Literal
from urllib.parse import urlsplit

from rich.console import Console
from rich.table import Table
from rich.text import Text

from kvdock import __version__, _core
from kvdock._core import TableError
from kvdock.api.access.access_file import digest_of, read
from kvdock.api.errors import AccessFileError, OtherFormat, SettingsError
from kvdock.api.pool.adopt import check_format, crash_of
from kvdock.api.pool.capacity import Capacity
from kvdock.api.pool.lock import pools_at, server_alive
from kvdock.api.settings import Effective, Settings, effective
from kvdock.cli.client import TIMEOUT_S, print_json, remedy, socket_of
from kvdock.cli.errors import DONE, FAILED
from kvdock.cli.render import duration, printable, say, size
from kvdock.cli.serve import tiers_of
from kvdock.cli.status import state_in_words
from kvdock.client.client import Client
from kvdock.connectors.packing import models_that_do_not_pack
from kvdock.datapath.pack_rates import PackRates, kept_pack_rates
from kvdock.datapath.tuning import Calibration, cached_tunings
from kvdock.protocol.access import ADDRESS_VARIABLE, TOKEN_FILE_VARIABLE, PrivateFileError, read_token, trusted_uid_in
from kvdock.protocol.errors import ApiError, ServerUnavailable
from kvdock.protocol.reports import REMEDIES, Verdict
from kvdock.shm.errors import ForeignObject, ShmError
from kvdock.shm.objects import foreign_objects, gives_huge_pages, pool_objects
from kvdock.tiers.mover.opening import try_to_open

_STYLES = {"ok": "green", "note": "yellow", "problem": "bold red"}


def doctor(
    environ: Mapping[str, str], *, server: str, config: str | None, adopt: bool, as_json: bool, console: Console,
) -> int:
    """Prints the findings; returns the exit status. `server`: as in examine(). `adopt`: only whether this release could
    take over the pool at the socket."""
    if adopt:
        findings = _adoption(socket_of(_settings(environ, config)[0]))
    else:
        findings = examine(environ, server=server, config=config, machine=Machine())
    problems = any(finding.level == "problem" for finding in findings)
    if as_json:
        print_json(console, {"ok": not problems, "checks": findings})
    else:
        say(console, _table(findings))
    return FAILED if problems else DONE


def examine(
    environ: Mapping[str, str], *, server: str = "", config: str | None, machine: Machine
) -> list[Finding]:
    """`server`: the address of the server to judge; empty: the one that commands use in that environment."""
    found, settings_finding = _settings(environ, config)
    settings, token = found.settings, _token(environ)
    named = server or environ.get(ADDRESS_VARIABLE, "")
    server_finding, verdict = _server(named or f"unix:{socket_of(found)}", token, environ, is_named=bool(named))
    is_here = server_finding.level == "ok"
    findings = [_versions(), settings_finding, server_finding, *_cache(verdict), _access(settings, token)]
    findings += [*_endpoints(settings, is_here=is_here), *_tiers(settings, is_here=is_here), *_extension()]
    wanted_bytes = settings.pool_bytes + _core.Table.region_bytes(settings.table_records, settings.table_grants)
    # A running server has allocated its pool already, so no more memory is needed.
    findings += machine_findings(machine, 0 if is_here else wanted_bytes)
    findings.append(_stale_pools(machine))
    return findings


def _versions() -> Finding:
    server, text = version("kvdock"), f"{__version__} on Python {sys.version.split()[0]}"
    if server != __version__:
        found = f"kvdock {server} with kvdock-engine {text}"
        return Finding("kvdock", "problem", found, f"pip install kvdock=={server} kvdock-engine=={server}")
    return Finding("kvdock", "ok", text)


def _settings(environ: Mapping[str, str], config: str | None) -> tuple[Effective, Finding]:
    """The settings that a server started here would use, without unknown ones; the defaults when they are wrong."""
    try:
        found = effective(environ, config=config)
    except SettingsError as error:
        finding = Finding("settings", "problem", str(error), "correct it; `kvdock config` shows all settings")
        with suppress(SettingsError):
            return effective(environ, config=config, on_unknown=lambda sentence: None), finding
        return Effective(Settings(), {}), finding
    given = [f"{name} ({origin.where})" for name, origin in found.origins.items() if origin.source != "default"]
    return found, Finding("settings", "ok", ", ".join(given) or "all at their defaults")


def _token(environ: Mapping[str, str]) -> str | PrivateFileError:
    """The access token that commands would use, '' for none, or why it cannot be used."""
    try:
        return read_token(environ.get(TOKEN_FILE_VARIABLE, ""))
    except PrivateFileError as error:
        return error


def _access(settings: Settings, token: str | PrivateFileError) -> Finding:
    """Who may call a server that is started here, and the access token of commands."""
    if isinstance(token, PrivateFileError):
        text = f"{TOKEN_FILE_VARIABLE}: {token}"
        return Finding("access", "problem", text, "docs/operate/security.md describes the file")
    if not settings.access_file:
        return Finding("access", "ok", "no access file is set: this user and root only, and probes over TCP")
    try:
        tokens = read(settings.access_file)
    except AccessFileError as error:
        return Finding("access", "problem", str(error), "a server does not start with it: see docs/operate/security.md")
    text = f"access tokens in {settings.access_file}: {len(tokens)}"
    if token and digest_of(token.encode()) not in tokens:
        return Finding("access", "problem", f"{text}; the token of {TOKEN_FILE_VARIABLE} is not among them")
    return Finding("access", "ok", text)


def _server(
    address: str, token: str | PrivateFileError, environ: Mapping[str, str], *, is_named: bool
) -> tuple[Finding, Verdict | None]:
    """Whether the server answers, and its verdict if it does. `is_named`: somebody has named its address, so it should
    be there."""
    try:
        sent = token if isinstance(token, str) else ""
        uid = trusted_uid_in(environ)
        with Client(
            address, timeout_s=TIMEOUT_S, access_token=sent, trusts_service=True, trusted_uid=uid
        ) as client:
            status, verdict = client.status(), client.verdict()
    except ValueError as error:
        return Finding("server", "problem", str(error), f"correct --server or {ADDRESS_VARIABLE}"), None
    except ServerUnavailable as error:
        if _listens(address.removeprefix("unix:")):
            advice = "it is another user's, stopped, or hangs: see its log"
            return Finding("server", "problem", f"it listens at {error}", advice), None
        level: Level = "problem" if is_named else "note"
        return Finding("server", level, f"none answers at {error}", remedy(error)), None
    except ApiError as error:
        if error.code == "unauthenticated":
            advice = f"this server does not know the token of {TOKEN_FILE_VARIABLE}"
            return Finding("server", "note", f"at {address}: {error}", advice), None
        advice = "use the client of the server's release"
        return Finding("server", "problem", f"at {address}: {error}", advice), None
    text = f"{status.version} at {address}, up {duration(status.uptime_s)}"
    if status.degraded:
        text += f", {state_in_words(status)}"
        is_ready = status.status != "not ready"
        advice = "docs/operate/not_ready.md explains each reason"
        return Finding("server", "note" if is_ready else "problem", text, advice), verdict if is_ready else None
    return Finding("server", "ok", text), verdict


def _cache(verdict: Verdict | None) -> list[Finding]:
    """How a running cache does, by its own verdict."""
    if verdict is None:
        return []
    if not verdict.findings:
        return [Finding("cache", "ok", printable(verdict.headline))]
    return [
        Finding("cache", "problem" if one.severity == "bad" else "note", printable(one.text), _beyond(one.remedy))
        for one in verdict.findings
    ]


def _beyond(remedy: str) -> str:
    """A remedy that is not this command itself."""
    return "`kvdock tiers` shows the whole error" if remedy == REMEDIES["tier_off"] else f"`{remedy}`"


def _listens(socket_path: str) -> bool:
    """Whether a process listens there; the kernel accepts connections even for a stopped one."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(TIMEOUT_S)
        try:
            probe.connect(socket_path)
        except OSError:
            return False
        return True


def _endpoints(settings: Settings, *, is_here: bool) -> list[Finding]:
    """The addresses that a server would listen at, and those that it would send to. `is_here`: it runs."""
    findings = []
    if settings.port and not is_here:
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((settings.host, settings.port))
            except OSError as error:
                findings.append(Finding(
                    "port", "problem", f"{settings.host}:{settings.port}: {error.strerror}",
                    "end what listens there, or serve with another --port",
                ))
    if "traces" in settings.observers:
        collector = urlsplit(settings.traces_endpoint)
        try:
            port = collector.port or (443 if collector.scheme == "https" else 80)
            socket.create_connection((collector.hostname or "", port), TIMEOUT_S).close()
        except (OSError, ValueError) as error:
            findings.append(Finding(
                "traces", "note", f"no collector answers at {settings.traces_endpoint}: {error}",
                "start it, or correct traces_endpoint; spans are dropped meanwhile",
            ))
    return findings


def _tiers(settings: Settings, *, is_here: bool) -> list[Finding]:
    """Opens each lower tier of the settings once, unless a server that runs has opened them: its verdict names those
    that are off."""
    if is_here or not settings.has_tiers:
        return []
    return [
        Finding(f"tier {name}", "problem" if why else "ok", why or "it opens",
                "a server starts without it, and tries again: docs/operate/tiers.md" if why else "")
        for name, why in try_to_open(tiers_of(settings)).items()
    ]


# --------------------------------------------------------------------------- the extension


def _extension() -> list[Finding]:
    paths = _core.cpu_paths()
    plain = "" if paths[0] != "scalar" else "there is no vectorised copy for this processor, so copies are slow"
    build = Finding("extension", "note" if plain else "ok", f"CPU copy by {', '.join(paths)}", plain)
    return [
        build, _kernels(_core.cuda_kernels(), _core.cuda_unavailable()), _calibrations(cached_tunings()),
        _packing(kept_pack_rates(), models_that_do_not_pack()),
    ]


_NO_KERNELS = (
    "for engines on GPUs install the wheel of kvdock-engine, which has them, or build it where nvcc is (CUDA_HOME), "
    "with KVDOCK_CUDA=require and pip's --no-cache-dir"
)


def _kernels(compiled_for: list[str], unavailable: str) -> Finding:
    """`unavailable`: why the kernels cannot run here, "" when they can."""
    if not compiled_for:
        return Finding("GPU kernels", "note", "none: this kvdock-engine was built without nvcc", _NO_KERNELS)
    text = f"for {', '.join(compiled_for)}"
    if not unavailable:
        return Finding("GPU kernels", "ok", text)
    why = unavailable.removeprefix("CUDA: ").partition(", wanted")[0]  # the server wants no GPU
    return Finding("GPU kernels", "note", f"{text}; no engine can run them here: {why}")


def _calibrations(known: list[Calibration]) -> Finding:
    """The tuning that this user's engines measured for their GPUs when they first started."""
    if not known:
        return Finding("GPU copies", "ok", "not measured yet: an engine measures them once for each GPU and layout")
    return Finding("GPU copies", "ok", "; ".join(calibration.describe() for calibration in known))


def _packing(known: list[PackRates], not_packed: list[str]) -> Finding:
    """What `pack: auto` of this user's engines follows."""
    text = "; ".join(f"{'pays' if rates.pays else 'does not pay'}: {rates.describe()}" for rates in known)
    text = text or "not measured yet: the first engine with bf16 KV measures what it costs"
    if not not_packed:
        return Finding("packing", "ok", text)
    return Finding(
        "packing", "note", f"{text}; models whose KV does not pack: {', '.join(not_packed)}",
        "auto leaves these models unpacked; the connector's setting `pack` stands above it",
    )


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
        except (OSError, ForeignObject):  # it was changed or removed meanwhile
            continue
        stale += 1
        stale_bytes += sum(_size_bytes(machine, name) for name in names)
    text = f"{live} in use" + (f", {foreign} objects that are not this user's alone" if foreign else "")
    if stale:
        return Finding(
            "pools", "note", f"{text}, {stale} left by servers that have ended: {size(stale_bytes)}",
            "the next `kvdock serve` at its socket takes a pool over; other servers of this user remove it later",
        )
    return Finding("pools", "ok", f"{text}, none left behind")


def _adoption(socket_path: str) -> list[Finding]:
    """Whether this release could take over the pools of the server at that socket, which may run."""
    found = []
    for pool_id in pools_at(str(Path(socket_path).absolute())):
        name = f"pool {pool_id:016x}"
        try:
            check_format(pool_id)
            crash = crash_of(pool_id)
        except OtherFormat as error:
            advice = "this release does not start with it: keep the release that made it, or serve with --adopt=never"
            found.append(Finding("adoption", "problem", f"{name}: {error}", advice))
        except (OSError, ValueError, TableError, ShmError) as error:
            found.append(Finding("adoption", "problem", f"{name}: {error}", "a server would start with an empty pool"))
        else:
            if crash:
                text = f"{name}: the server that had taken it over before crashed ({crash})"
                found.append(Finding("adoption", "problem", text, "a server would start with an empty pool"))
                continue
            found.append(Finding("adoption", "ok", f"{name}: this release reads its format, and would take it over"))
    if not found:
        text = "its lock file is empty or names no socket, so no server takes it over"
        advice = "a server would start with an empty pool"
        found = [Finding("adoption", "problem", f"pool {one:016x}: {text}", advice) for one in pools_at("")]
    if not found and (owner := _owner_of(socket_path)) != os.geteuid():
        text = f"{socket_path} is of user {owner}, whose pools user {os.geteuid()} cannot judge"
        return [Finding("adoption", "problem", text, "run this as the server's user")]
    return found or [Finding("adoption", "note", f"no server of this user has a pool at {socket_path}")]


def _owner_of(socket_path: str) -> int:
    """The user of the server that has, or had, its socket there: of the socket, or else of its folder. This user if
    there is neither."""
    for path in (Path(socket_path), Path(socket_path).parent):
        with suppress(OSError):
            return path.stat().st_uid
    return os.geteuid()


def _size_bytes(machine: Machine, name: str) -> int:
    try:
        return (machine.shm_dir / name).stat().st_blocks * 512
    except FileNotFoundError:
        return 0  # removed while we looked


def _table(findings: list[Finding]) -> Table:
    table = Table(show_header=False, box=None, pad_edge=False)
    for finding in findings:
        text = Text(printable(finding.found), overflow="fold")
        if finding.advice:
            text.append(f"\n→ {printable(finding.advice)}", style="italic")
        level = "OK" if finding.level == "ok" else finding.level
        table.add_row(Text(level, style=_STYLES[finding.level]), Text(finding.check, style="bold"), text)
    return table


LEAST_OPEN_FILES = 4096
PROBE_TIMEOUT_S = 15.0

Level = Literal["ok", "note", "problem"]


@dataclass(frozen=True)
class Finding:
    check: str
    level: Level
    found: str
    advice: str = ""
    """What to do about it; empty: nothing."""


@dataclass(frozen=True)
class Machine:
    """The paths to check; by default those of the running system."""

    shm_dir: Path = Path("/dev/shm")
    proc: Path = Path("/proc")
    sys: Path = Path("/sys")
    programs: str | None = None
    """Search path for nvidia-smi and nvcc; None: the environment's."""
    nvcc_places: tuple[Path, ...] = (Path("/usr/local/cuda/bin/nvcc"),)


def machine_findings(machine: Machine, wanted_bytes: int) -> Iterator[Finding]:
    """`wanted_bytes`: the shared memory that a server started now would need at most."""
    yield from _memory(machine, wanted_bytes)
    yield _huge_pages(machine)
    yield _open_files(*resource.getrlimit(resource.RLIMIT_NOFILE))
    yield _locked_memory(resource.getrlimit(resource.RLIMIT_MEMLOCK)[0])
    yield _gpu(machine)
    yield _nvcc(machine)


# --------------------------------------------------------------------------- memory


def _memory(machine: Machine, wanted_bytes: int) -> Iterator[Finding]:
    """Shared memory, then the control groups: the server checks the same limits before it starts."""
    if not machine.shm_dir.is_dir():
        yield Finding(
            "shared memory", "problem", f"{machine.shm_dir} does not exist",
            f"mount -t tmpfs -o size=… tmpfs {machine.shm_dir}; in a container: --ipc host, or mount the host's",
        )
        return
    if not os.access(machine.shm_dir, os.W_OK):
        yield Finding(
            "shared memory", "problem", f"{machine.shm_dir} cannot be written", "mount it so that this user may write"
        )
        return
    capacity = Capacity(machine.shm_dir, machine.proc / "self/cgroup", machine.sys / "fs/cgroup")
    (_, free_bytes), *groups = capacity.limits()
    total_bytes = shutil.disk_usage(machine.shm_dir).total
    text = f"{size(free_bytes)} free of {size(total_bytes)} in {machine.shm_dir}"
    kind = _file_system(machine)
    if free_bytes < wanted_bytes:
        yield Finding(
            "shared memory", "problem", f"{text}, {size(wanted_bytes)} needed for pool_bytes and the chunk table",
            "serve with a smaller --pool-bytes, or give more: docker run --shm-size, or "
            f"mount -o remount,size=… {machine.shm_dir}",
        )
    elif (available_bytes := _available_bytes(machine)) is not None and available_bytes < wanted_bytes:
        yield Finding(
            "shared memory", "note", f"{text}, but the machine has only {size(available_bytes)} of memory available",
            f"a full pool needs {size(wanted_bytes)}: use a smaller --pool-bytes, or the machine will swap",
        )
    elif kind not in ("tmpfs", ""):
        yield Finding("shared memory", "note", f"{text}, on {kind}", "use a tmpfs: this may write to a disk")
    else:
        yield Finding("shared memory", "ok", text)
    yield _control_group(groups, wanted_bytes)


def _control_group(groups: list[tuple[str, int]], wanted_bytes: int) -> Finding:
    if not groups:
        return Finding("control group", "ok", "no memory limit")
    where, free_bytes = min(groups, key=lambda group: group[1])
    text = f"{size(free_bytes)} left in {where.removeprefix('control group ')}"
    if free_bytes >= wanted_bytes:
        return Finding("control group", "ok", text)
    return Finding(
        "control group", "problem", f"{text}, {size(wanted_bytes)} needed for pool_bytes and the chunk table",
        "raise the limit (docker --memory, Kubernetes resources.limits.memory, systemd MemoryMax), or serve with a "
        "smaller --pool-bytes",
    )


def _available_bytes(machine: Machine) -> int | None:
    """Memory that programs can use without swapping; None if unknown."""
    found = re.search(r"^MemAvailable:\s+(\d+) kB$", _text(machine.proc / "meminfo"), re.MULTILINE)
    return int(found[1]) * 1024 if found else None


def _file_system(machine: Machine) -> str:
    """The type of the file system mounted there; '' if unknown."""
    for line in reversed(_text(machine.proc / "mounts").splitlines()):
        fields = line.split(" ")
        if len(fields) > 2 and fields[1] == str(machine.shm_dir):
            return fields[2]
    return ""


def _huge_pages(machine: Machine) -> Finding:
    path = machine.sys / "kernel/mm/transparent_hugepage/shmem_enabled"
    chosen = re.search(r"\[(\w+)\]", _text(path))
    if gives_huge_pages(machine.shm_dir):
        return Finding("huge pages", "ok", "the kernel gives them for shared memory")
    if chosen is None:
        return Finding("huge pages", "note", f"{path} does not exist, so shared memory has small pages")
    if chosen[1] in ("never", "deny"):
        return Finding(
            "huge pages", "note", f"{chosen[1]} for shared memory, and a try got none",
            f"for faster copies: Linux 6.1, or echo advise > {path} (as root)",
        )
    return Finding("huge pages", "ok", f"{chosen[1]} for shared memory")


# --------------------------------------------------------------------------- ulimits


def _open_files(soft: int, hard: int) -> Finding:
    if soft == resource.RLIM_INFINITY or soft >= LEAST_OPEN_FILES:
        return Finding("open files", "ok", f"{_limit(soft)} (ulimit -n)")
    return Finding(
        "open files", "note", f"{soft}, at most {_limit(hard)} (ulimit -n)",
        f"for many engines: ulimit -n {LEAST_OPEN_FILES}, or systemd LimitNOFILE={LEAST_OPEN_FILES}",
    )


def _locked_memory(soft: int) -> Finding:
    if soft == resource.RLIM_INFINITY:
        return Finding("locked memory", "ok", "unlimited (ulimit -l)")
    return Finding(
        "locked memory", "note", f"{size(soft)} (ulimit -l); the server locks none",
        "engines that page-lock the pool for a GPU may need more: ulimit -l unlimited, docker --ulimit memlock=-1, "
        "systemd LimitMEMLOCK=infinity",
    )


def _limit(value: int) -> str:
    return "unlimited" if value == resource.RLIM_INFINITY else str(value)


# --------------------------------------------------------------------------- GPU


def _gpu(machine: Machine) -> Finding:
    driver = re.search(r"Kernel Module.*?\s(\d+\.[\d.]+)", _text(machine.proc / "driver/nvidia/version"))
    program = shutil.which("nvidia-smi", path=machine.programs)
    if program is None:
        if driver is None:
            return Finding("GPU", "note", "none: engines on this machine copy with the CPU")
        return Finding("GPU", "note", f"driver {driver[1]}, but no nvidia-smi to list the GPUs")
    query = [program, "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader"]
    answered, text = _run(query)
    if not answered:
        return Finding("GPU", "note", f"nvidia-smi failed: {text}", "engines copy with the CPU until the driver works")
    return Finding("GPU", "ok", "; ".join(text.splitlines()))


def _nvcc(machine: Machine) -> Finding:
    found = shutil.which("nvcc", path=machine.programs)
    program = found or next((str(place) for place in machine.nvcc_places if place.is_file()), None)
    if program is None:
        return Finding("nvcc", "note", "none: needed only to build GPU kernels")
    answered, text = _run([program, "--version"])
    release = re.search(r"release ([\d.]+)", text)
    if not answered or release is None:
        return Finding("nvcc", "note", f"{program} does not print its version: {text[-80:]}")
    return Finding("nvcc", "ok", f"{release[1]} at {program}")


def _run(command: list[str]) -> tuple[bool, str]:
    """Whether the command succeeded, and its output."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=PROBE_TIMEOUT_S, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return False, str(error)
    return done.returncode == 0, (done.stdout.strip() or done.stderr.strip())


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""
