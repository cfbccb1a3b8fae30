"""`kvdock doctor` on this machine, and on simulated machines that consist of files."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import stat
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from adoption_helpers import of_another_release
from api_helpers import ServerProcess, attach, keys
from cli_helpers import TIMEOUT_S, clean_environ, kvdock
from frozen import frozen

from kvdock._core import Table, cpu_paths, cuda_kernels
from kvdock.api.access.access_file import add_token
from kvdock.api.settings import Settings
from kvdock.cli.doctor import Finding, Machine, _kernels, examine
from kvdock.client.client import Client
from kvdock.datapath import pack_rates
from kvdock.datapath.cuda import CopyTuning
from kvdock.datapath.tuning import Calibration, Geometry, save_calibration
from kvdock.protocol.outcomes import Outcome
from kvdock.protocol.schemas import ReportMismatch
from kvdock.shm.objects import gives_huge_pages, lock_path

CHECKS = {"kvdock", "settings", "server", "access", "extension", "GPU kernels", "GPU copies", "shared memory",
          "control group", "huge pages", "open files", "locked memory", "GPU", "nvcc", "packing", "pools"}
MIB = 1 << 20
SMALL = {"KVDOCK_POOL_BYTES": "16MiB", "KVDOCK_PORT": "0"}


def checks_of(done: subprocess.CompletedProcess[str], exit_code: int) -> dict[str, dict[str, Any]]:
    assert (done.returncode, done.stderr) == (exit_code, ""), done.stdout + done.stderr
    answer = json.loads(done.stdout)
    assert answer["ok"] == (exit_code == 0)
    return {check["check"]: check for check in answer["checks"]}


def examined(machine: Machine, tmp_path: Path, **environ: str) -> dict[str, Finding]:
    environ = {"KVDOCK_SOCKET_PATH": str(tmp_path / "s.sock"), **SMALL, **environ}
    return {finding.check: finding for finding in examine(environ, config=None, machine=machine)}


def machine_of(root: Path, files: dict[str, str]) -> Machine:
    """A machine whose /proc and /sys have these files, with this machine's shared memory and no programs."""
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    (root / "bin").mkdir(exist_ok=True)
    return Machine(proc=root / "proc", sys=root / "sys", programs=str(root / "bin"), nvcc_places=())


def program(root: Path, name: str, script: str) -> None:
    path = root / "bin" / name
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)


# --------------------------------------------------------------------------- this machine


def test_every_check_is_made_and_a_small_pool_has_no_problem_here(tmp_path: Path) -> None:
    found = checks_of(kvdock("doctor", "--json", KVDOCK_SOCKET_PATH=str(tmp_path / "s"), **SMALL), 0)
    assert set(found) == CHECKS
    assert all(check["level"] in ("ok", "note") for check in found.values())
    assert found["server"]["level"] == "note" and "kvdock serve" in found["server"]["advice"]
    assert ", ".join(cuda_kernels()) in found["GPU kernels"]["found"]
    assert found["extension"]["found"] == f"CPU copy by {', '.join(cpu_paths())}"
    assert "/dev/shm" in found["shared memory"]["found"]
    assert "KVDOCK_POOL_BYTES" in found["settings"]["found"]


def test_the_words_say_ok_note_or_problem_and_what_to_do(tmp_path: Path) -> None:
    done = kvdock("doctor", KVDOCK_SOCKET_PATH=str(tmp_path / "s"), KVDOCK_POOL_BYTES="3TiB")
    assert (done.returncode, done.stderr) == (1, "")
    lines = done.stdout.splitlines()
    assert any(line.startswith("OK ") for line in lines)
    assert any(line.startswith("note ") and "none answers at" in line for line in lines)
    at = next(at for at, line in enumerate(lines) if line.startswith("problem ") and "shared memory" in line)
    assert "3.0 TiB needed" in lines[at] and "--pool-bytes" in lines[at + 1]


def test_it_needs_no_torch(tmp_path: Path) -> None:
    blocked = "import sys; sys.modules['torch'] = sys.modules['numpy'] = None; import kvdock.cli.main as m; m.main()"
    done = subprocess.run(
        [sys.executable, "-c", blocked, "doctor", "--json"], capture_output=True, text=True, timeout=TIMEOUT_S,
        env=clean_environ(KVDOCK_SOCKET_PATH=str(tmp_path / "s"), **SMALL),
    )
    assert set(checks_of(done, 0)) == CHECKS


def test_wrong_settings_are_a_problem_and_not_the_end_of_the_examination(tmp_path: Path) -> None:
    wrong = {"KVDOCK_SOCKET_PATH": str(tmp_path / "s"), "KVDOCK_PORT": "0", "KVDOCK_POOL_BYTE": "1GiB"}
    found = checks_of(kvdock("doctor", "--json", **wrong), 1)
    assert found["settings"]["level"] == "problem" and "pool_byte" in found["settings"]["found"]
    assert set(found) == CHECKS


def test_a_server_that_answers_needs_no_memory_for_another_pool(server: ServerProcess, tmp_path: Path) -> None:
    environ = {"KVDOCK_SOCKET_PATH": server.unix.removeprefix("unix:"), "KVDOCK_POOL_BYTES": "3TiB"}
    found = checks_of(kvdock("doctor", "--json", **environ), 0)
    assert found["server"]["level"] == found["shared memory"]["level"] == "ok"
    assert "1 in use" in found["pools"]["found"] or int(found["pools"]["found"].split()[0]) > 1


def test_it_judges_the_server_that_commands_use(server: ServerProcess, tmp_path: Path) -> None:
    elsewhere = {"KVDOCK_SOCKET_PATH": str(tmp_path / "s"), **SMALL}
    with Client(server.unix) as client:
        engine = attach(client, label="engine A")
        engine.heartbeat(outcomes=[Outcome(
            request="r", prompt_tokens=100, loaded_tokens=90, load_us=9_000_000, prefill_tokens_per_s=1000.0
        )])
        for found in (
            checks_of(kvdock("doctor", "--json", "--server", server.unix, **elsewhere), 1),
            checks_of(kvdock("doctor", "--json", KVDOCK_ADDRESS=server.unix, **elsewhere), 1),
        ):
            assert found["server"]["level"] == "ok" and server.unix in found["server"]["found"]
            assert found["cache"]["level"] == "problem" and "longer than computing" in found["cache"]["found"]
            assert found["cache"]["advice"] == "`kvdock top`"
        engine.close()


def test_a_named_server_that_does_not_answer_is_a_problem(tmp_path: Path) -> None:
    for named in ({"KVDOCK_ADDRESS": f"unix:{tmp_path}/none"}, {"KVDOCK_ADDRESS": "no address:x"}):
        found = checks_of(kvdock("doctor", "--json", KVDOCK_SOCKET_PATH=str(tmp_path / "s"), **SMALL, **named), 1)
        assert found["server"]["level"] == "problem"


def test_each_lower_tier_is_opened_once(tmp_path: Path) -> None:
    environ = {"KVDOCK_DISK_BYTES": "64MiB", "KVDOCK_SOCKET_PATH": str(tmp_path / "s"), **SMALL}
    found = checks_of(kvdock("doctor", "--json", KVDOCK_DISK_PATH=str(tmp_path / "disk"), **environ), 0)
    assert (found["tier disk"]["level"], found["tier disk"]["found"]) == ("ok", "it opens")
    found = checks_of(kvdock("doctor", "--json", KVDOCK_DISK_PATH="/proc/nope", **environ), 1)
    assert found["tier disk"]["level"] == "problem" and "/proc/nope" in found["tier disk"]["found"]
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port = taken.getsockname()[1]
        dead = {"KVDOCK_REDIS_URL": f"redis://127.0.0.1:{port}", "KVDOCK_SOCKET_PATH": str(tmp_path / "s"), **SMALL}
        found = checks_of(kvdock("doctor", "--json", **dead), 1)
    assert found["tier redis"]["level"] == "problem"


def test_addresses_that_are_taken_or_that_nobody_answers_at_are_named(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        environ = {"KVDOCK_SOCKET_PATH": str(tmp_path / "s"), **SMALL, "KVDOCK_PORT": str(port)}
        found = checks_of(kvdock("doctor", "--json", **environ), 1)
    assert found["port"]["level"] == "problem" and str(port) in found["port"]["found"]
    environ |= {"KVDOCK_OBSERVE": "traces", "KVDOCK_TRACES_ENDPOINT": f"http://127.0.0.1:{port}"}
    found = checks_of(kvdock("doctor", "--json", **environ), 0)
    assert found["traces"]["level"] == "note" and "port" not in found


def test_access_files_are_read_as_the_server_and_commands_would(tmp_path: Path) -> None:
    file, token = tmp_path / "access.toml", tmp_path / "token"
    assert examined(Machine(), tmp_path)["access"].level == "ok"
    secret = add_token(str(file), "team", ["read"])
    token.write_text(secret)
    token.chmod(0o600)
    both = {"KVDOCK_ACCESS_FILE": str(file), "KVDOCK_ACCESS_TOKEN_FILE": str(token)}
    found = examined(Machine(), tmp_path, **both)["access"]
    assert (found.level, found.found) == ("ok", f"access tokens in {file}: 1")
    token.write_text(secret[:-1])
    assert "is not among them" in examined(Machine(), tmp_path, **both)["access"].found
    token.chmod(0o644)
    found = examined(Machine(), tmp_path, **both)["access"]
    assert found.level == "problem" and "chmod 600" in found.found
    token.chmod(0o600)
    file.chmod(0o644)
    found = examined(Machine(), tmp_path, **both)["access"]
    assert found.level == "problem" and "chmod 600" in found.found


def test_a_server_that_is_stopped_is_a_problem_and_none_is_not(server: ServerProcess, tmp_path: Path) -> None:
    with frozen(server.process):
        found = checks_of(kvdock("doctor", "--json", KVDOCK_SOCKET_PATH=server.unix.removeprefix("unix:"), **SMALL), 1)
    assert found["server"]["level"] == "problem" and "it listens at" in found["server"]["found"]
    assert "stopped" in found["server"]["advice"]


def test_chunks_that_did_not_match_are_a_problem_until_somebody_has_seen_them(tmp_path: Path) -> None:
    with ServerProcess() as server, Client(server.unix) as client:
        engine = attach(client)
        engine.store(keys(1))
        lease = str(engine.lookup(keys(1)).lease)
        client.mismatch(ReportMismatch(session=engine.session, lease=lease, chunks=[0]))
        environ = {"KVDOCK_SOCKET_PATH": server.unix.removeprefix("unix:")}
        found = examined(Machine(), tmp_path, **environ)["cache"]
        assert found.level == "problem" and "other bytes than were stored" in found.found
        client.acknowledge()
        assert examined(Machine(), tmp_path, **environ)["cache"].level == "ok"
        engine.close()


def test_doctor_shows_how_gpu_copies_were_calibrated(tmp_path: Path) -> None:
    found = checks_of(kvdock("doctor", "--json", XDG_CACHE_HOME=str(tmp_path), **SMALL), 0)["GPU copies"]
    assert found["level"] == "ok" and found["found"].startswith("not measured yet")
    (tmp_path / "kvdock").mkdir()
    geometry, tuning = Geometry(64, 4096, 1, 16), CopyTuning()
    known = Calibration("NVIDIA H200", "ab" * 16, 13000, geometry, tuning, 0.4, 0.991, 0.982, 55e9)
    save_calibration(tmp_path / "kvdock/copy-1.json", known)
    found = checks_of(kvdock("doctor", "--json", XDG_CACHE_HOME=str(tmp_path), **SMALL), 0)["GPU copies"]
    assert found["found"] == known.describe() and "load 99.1 %" in found["found"]


def test_doctor_shows_whether_packing_pays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = checks_of(kvdock("doctor", "--json", XDG_CACHE_HOME=str(tmp_path), **SMALL), 0)["packing"]
    assert found["level"] == "ok" and found["found"].startswith("not measured yet")
    monkeypatch.setattr(pack_rates, "measured", lambda gpu: pack_rates.PackRates("avx2", 0.4, 0.3))
    pack_rates.pack_rates(cache_dir=tmp_path / "kvdock")
    (tmp_path / "kvdock/raw-1.json").write_text('{"model": "llama", "parts": 64, "raw": 50}')
    found = checks_of(kvdock("doctor", "--json", XDG_CACHE_HOME=str(tmp_path), **SMALL), 0)["packing"]
    assert found["level"] == "note"
    assert found["found"].startswith("pays: packed loads by avx2 at 0.40 of the rate of raw ones")
    assert found["found"].endswith("models whose KV does not pack: llama (50 of 64 parts)")


def test_gpu_kernels_say_what_they_were_compiled_for_and_why_they_cannot_run() -> None:
    assert _kernels([], "no driver").level == "note" and "built without nvcc" in _kernels([], "no driver").found
    why = "no engine can run them here: no driver"
    assert _kernels(["sm_90"], "CUDA: no driver, wanted one: x") == Finding("GPU kernels", "note", f"for sm_90; {why}")
    assert _kernels(["sm_80", "sm_90"], "") == Finding("GPU kernels", "ok", "for sm_80, sm_90")


def pools_of(found: Finding) -> tuple[int, int]:
    """(pools in use, pools left behind); killed test runs may have left some."""
    counted = re.search(r"^(\d+) in use.*, (\d+|none) left", found.found)
    assert counted is not None, found.found
    return int(counted[1]), 0 if counted[2] == "none" else int(counted[2])


@pytest.mark.alone
def test_a_pool_whose_server_was_killed_is_noted_until_the_next_server_has_it(tmp_path: Path) -> None:
    with ServerProcess() as dead:
        in_use, left = pools_of(examined(Machine(), tmp_path)["pools"])
        dead.stop(signal.SIGKILL)
        found = examined(Machine(), tmp_path)["pools"]
        assert pools_of(found) == (in_use - 1, left + 1)
        assert found.level == "note" and "kvdock serve" in found.advice
        with ServerProcess(socket_path=dead.settings["socket_path"]):
            now_in_use, now_left = pools_of(examined(Machine(), tmp_path)["pools"])
            assert now_in_use == in_use and now_left <= left, "so the advice is right"
        assert dead.shared_memory() == []


# --------------------------------------------------------------------------- other machines


def test_a_machine_without_gpu_driver_and_nvcc_is_no_problem(tmp_path: Path) -> None:
    found = examined(machine_of(tmp_path, {}), tmp_path)
    assert {found[check].level for check in ("GPU", "nvcc")} == {"note"}
    assert found["GPU"].found.startswith("none") and found["nvcc"].found.startswith("none")


def test_gpu_driver_and_nvcc_are_named(tmp_path: Path) -> None:
    machine = machine_of(tmp_path, {})
    program(tmp_path, "nvidia-smi", "echo 'Some GPU, 80000 MiB, 570.1'")
    program(tmp_path, "nvcc", "echo 'Cuda compilation tools, release 12.9, V12.9.1'")
    found = examined(machine, tmp_path)
    assert found["GPU"] == Finding("GPU", "ok", "Some GPU, 80000 MiB, 570.1")
    assert found["nvcc"] == Finding("nvcc", "ok", f"12.9 at {tmp_path}/bin/nvcc")


def test_a_driver_that_does_not_work_is_a_note_with_its_words(tmp_path: Path) -> None:
    text = "NVRM version: NVIDIA UNIX x86_64 Kernel Module  570.133.20  Sun\n"
    machine = machine_of(tmp_path, {"proc/driver/nvidia/version": text})
    assert "driver 570.133.20" in examined(machine, tmp_path)["GPU"].found
    program(tmp_path, "nvidia-smi", "echo 'Driver/library version mismatch' >&2; exit 18")
    found = examined(machine, tmp_path)["GPU"]
    assert found.level == "note" and "version mismatch" in found.found


@pytest.mark.parametrize(("chosen", "level"), [
    ("always within_size [advise] never deny force", "ok"), ("always within_size advise [never] deny force", "note"),
])
def test_huge_pages_of_shared_memory(tmp_path: Path, chosen: str, level: str) -> None:
    machine = machine_of(tmp_path, {"sys/kernel/mm/transparent_hugepage/shmem_enabled": chosen})
    without = replace(machine, shm_dir=tmp_path)  # no file system in memory
    found = examined(without, tmp_path)["huge pages"]
    assert found.level == level and bool(found.advice) == (level == "note")
    assert (examined(machine, tmp_path)["huge pages"].level == "ok") == (gives_huge_pages() or level == "ok")


@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize(("left_mib", "level"), [(8, "problem"), (100, "ok")])
def test_a_control_group_with_too_little_left_is_a_problem(
    tmp_path: Path, version: int, left_mib: int, level: str
) -> None:
    names = ("memory.max", "memory.current") if version == 2 else ("memory.limit_in_bytes", "memory.usage_in_bytes")
    folder = "sys/fs/cgroup/pod" if version == 2 else "sys/fs/cgroup/memory/pod"
    machine = machine_of(tmp_path, {
        "proc/self/cgroup": "0::/pod\n" if version == 2 else "4:memory:/pod\n",
        f"{folder}/{names[0]}": str((50 + left_mib) * MIB), f"{folder}/{names[1]}": str(50 * MIB),
    })
    found = examined(machine, tmp_path, KVDOCK_TABLE_RECORDS="1024")["control group"]
    assert found.level == level and f"{left_mib}.0 MiB left" in found.found and folder in found.found
    assert bool(found.advice) == (level == "problem")


def test_the_table_counts_as_well_as_the_pool(tmp_path: Path) -> None:
    table_bytes = Table.region_bytes(Settings().table_records, Settings().table_grants)
    limit = {"proc/self/cgroup": "0::/pod\n", "sys/fs/cgroup/pod/memory.current": "0\n"}
    for spare, level in ((0, "ok"), (-1, "problem")):
        limit["sys/fs/cgroup/pod/memory.max"] = str(16 * MIB + table_bytes + spare)
        assert examined(machine_of(tmp_path, limit), tmp_path)["control group"].level == level


def test_shared_memory_that_is_missing_is_a_problem_and_memory_that_is_short_a_note(tmp_path: Path) -> None:
    found = examined(Machine(shm_dir=tmp_path / "nowhere"), tmp_path)
    assert found["shared memory"].level == "problem" and "does not exist" in found["shared memory"].found
    locked = Path("/proc/sys")  # a folder that not even root may write
    assert "cannot be written" in examined(Machine(shm_dir=locked), tmp_path)["shared memory"].found
    short = machine_of(tmp_path, {"proc/meminfo": "MemTotal: 9 kB\nMemAvailable:    1024 kB\n"})
    found = examined(short, tmp_path)
    assert found["shared memory"].level == "note" and "only 1.0 MiB of memory" in found["shared memory"].found


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can make a folder of another user")
@pytest.mark.parametrize("is_up", [True, False])
def test_adopt_does_not_pass_for_a_user_who_cannot_judge_the_pool(tmp_path: Path, is_up: bool) -> None:
    """As when root asks for the service's user, whose socket's folder is there with and without a server."""
    path = tmp_path / "kvdock.sock"
    if is_up:
        path.touch()
    os.chown(path if is_up else tmp_path, 7410, 7410)
    found = checks_of(kvdock("doctor", "--adopt", "--json", KVDOCK_SOCKET_PATH=str(path)), 1)["adoption"]
    assert found["found"] == f"{path} is of user 7410, whose pools user 0 cannot judge"


def test_adopt_tells_before_an_upgrade_whether_the_pool_can_be_taken_over(tmp_path: Path) -> None:
    path = str(tmp_path / "kvdock.sock")
    done = kvdock("doctor", "--adopt", KVDOCK_SOCKET_PATH=path)
    assert (done.returncode, done.stdout) == (0, f"note  adoption  no server of this user has a pool at {path}\n")
    with ServerProcess(socket_path=path) as server:
        name = f"pool {server.pool_id:016x}"
        done = kvdock("doctor", "--adopt", KVDOCK_SOCKET_PATH=path)
        assert (done.returncode, done.stderr) == (0, "") and f"OK  adoption  {name}: this release reads" in done.stdout
        with of_another_release(server):
            done = kvdock("doctor", "--adopt", "--json", KVDOCK_SOCKET_PATH=path)
        found = checks_of(done, 1)["adoption"]
        assert found["level"] == "problem" and "--adopt=never" in found["advice"]
        assert f"{name}: " in found["found"] and "found format 999, this release reads" in found["found"]


def test_adopt_says_that_a_pool_is_there_whose_lock_file_was_emptied(tmp_path: Path) -> None:
    path = str(tmp_path / "kvdock.sock")
    with ServerProcess(socket_path=path) as server:
        lock = lock_path(server.pool_id)
        content = lock.read_bytes()
        os.truncate(lock, 0)
        done = kvdock("doctor", "--adopt", "--json", KVDOCK_SOCKET_PATH=path)
        with lock.open("r+b") as file:
            file.write(content)
        said = f"pool {server.pool_id:016x}: its lock file is empty or names no socket, so no server takes it over"
        # Pools of servers that other tests have just killed may be there, too.
        assert said in [one["found"] for one in json.loads(done.stdout)["checks"]] and done.returncode == 1
