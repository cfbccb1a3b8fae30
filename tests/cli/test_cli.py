"""The `kvdock` command as people use it: real processes, their exit status, and what they print."""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from api_helpers import NOBODYS, ServerProcess, attach, eventually, keys, raw
from cli_helpers import KVDOCK, SMALL, TIMEOUT_S, clean_environ, complaints, first_line, kvdock, kvdock_serve, refusal
from typer.testing import CliRunner

from kvdock._core import Table
from kvdock.api.settings import Settings
from kvdock.cli.help import COMPUTED_DEFAULTS, MEANINGS, default_text
from kvdock.cli.main import app
from kvdock.cli.render import duration, printable, size
from kvdock.client.client import Client
from kvdock.protocol.readable import exact_bytes
from kvdock.shm.objects import pool_objects


@pytest.fixture
def serving(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    with kvdock_serve(tmp_path) as process:
        yield process


# --------------------------------------------------------------------------- serve


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_serve_says_where_it_is_and_a_signal_removes_its_pool(
    serving: subprocess.Popen[str], tmp_path: Path, number: signal.Signals
) -> None:
    unix = f"unix:{tmp_path}/kvdock.sock"
    ready = r"kvdock is ready: engines at (\S+), HTTP at (http://127\.0\.0\.1:\d+) \(status page (\S+)\)"
    said = re.fullmatch(ready, first_line(serving))
    assert said and said[1] == unix and said[3] == said[2] + "/"
    for address in (said[1], said[2]):
        assert raw(address, "GET", "/livez", None, NOBODYS)[0] == 200
    status, headers, page = raw(said[2], "GET", "/", None, NOBODYS)
    assert status == 200 and headers["content-type"].startswith("text/html") and b"kvdock" in page
    with Client(unix) as client:
        pool = int(client.segments().pool_id, 16)
        assert client.status().pool.limit_bytes == 16 << 20
    assert pool in pool_objects()
    serving.send_signal(number)
    out, err = serving.communicate(timeout=TIMEOUT_S)
    assert (serving.returncode, out, complaints(err)) == (0, "", [])
    assert pool not in pool_objects()
    assert not (tmp_path / "kvdock.sock").exists()


def tables_of(size_bytes: int) -> set[str]:
    found = set()
    for path in Path("/dev/shm").glob("kvdock-*-table"):
        with suppress(FileNotFoundError):  # another test's has just gone
            if path.stat().st_size == size_bytes:
                found.add(path.name)
    return found


@pytest.mark.parametrize("delay_s", [0.0, 0.02, 0.05])
def test_a_signal_while_it_starts_leaves_nothing_behind(tmp_path: Path, delay_s: float) -> None:
    # Other tests' pools may come and go meanwhile, and a killed run's stay: a table of this size that was not there
    # before is this server's. Five grants more always give another size; fewer may be lost in rounding.
    grants, socket = 1000 + 5 * (os.getpid() % 1000), tmp_path / "kvdock.sock"
    table_bytes = Table.region_bytes(1024, grants)
    assert table_bytes != Table.region_bytes(1024, grants + 5)
    before = tables_of(table_bytes)
    command = [*KVDOCK, "serve", *SMALL, "--socket-path", str(socket), "--table-grants", str(grants)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        eventually(lambda: socket.exists() or process.poll() is not None)
        time.sleep(delay_s)
        process.terminate()
        _, err = process.communicate(timeout=TIMEOUT_S)
    assert process.returncode == 0 and "Traceback" not in err
    assert not socket.exists()
    assert tables_of(table_bytes) <= before


def test_flags_win_over_the_environment_and_both_over_defaults(tmp_path: Path) -> None:
    environ = {"KVDOCK_POOL_BYTES": "1MiB", "KVDOCK_PORT": "nowhere", "KVDOCK_SOCKET_PATH": str(tmp_path / "s")}
    assert "port='nowhere'" in refusal(kvdock("serve", **environ), 2)
    assert "pool_bytes=1" in refusal(kvdock("serve", "--port", "0", "--pool-bytes", "1", **environ), 2)


@pytest.mark.parametrize(("args", "found"), [
    (["serve", "--prot", "1"], "--prot"),
    (["serve", "--port", "seventy"], "port='seventy'"),
    (["serve", "--pool-bytes", "4 gigs"], "'4 gigs'"),
    (["serve", "--pool-bytes", "1MiB", "--segment-bytes", "2MiB"], "segment_bytes=2MiB"),
    (["swerve"], "swerve"),
    (["status", "--server", "localhost"], "'localhost'"),
    (["demo", "--turns", "0"], "--turns"),
])
def test_a_wrong_word_is_refused_by_name(args: list[str], found: str) -> None:
    assert found in refusal(kvdock(*args), 2)


def test_an_unknown_variable_is_refused_by_name(tmp_path: Path) -> None:
    assert "pool_byte" in refusal(kvdock("serve", KVDOCK_POOL_BYTE="1GiB"), 2)


def test_an_address_in_use_is_one_sentence(server: ServerProcess, tmp_path: Path) -> None:
    port = server.http.rpartition(":")[2]
    in_use = refusal(kvdock("serve", *SMALL[:-1], port, "--socket-path", str(tmp_path / "s")), 1)
    assert f"port {port} on 127.0.0.1 is in use" in in_use
    socket_path = server.unix.removeprefix("unix:")
    assert "another server answers" in refusal(kvdock("serve", *SMALL, "--socket-path", socket_path), 1)


def test_every_setting_has_a_flag_a_meaning_and_its_default() -> None:
    fields = Settings.__struct_fields__
    assert tuple(MEANINGS) == fields
    assert set(COMPUTED_DEFAULTS) == {"socket_path", "prefault_threads", "traces_endpoint"}
    text = kvdock("serve", "--help").stdout
    for name in fields:
        assert f"--{name.replace('_', '-')} " in text
        assert f"KVDOCK_{name.upper()}]" in text.replace("\n", " ")
    assert default_text("pool_bytes") == "4GiB" and default_text("low_water") == "0.005"


# --------------------------------------------------------------------------- status


def test_status_shows_what_the_server_holds_and_for_whom(server: ServerProcess, client: Client) -> None:
    engine = attach(client, label="left \x1b[31mengine")
    try:
        engine.store(keys(2, "cli"))
        assert engine.lookup(keys(2, "cli")).lease
        done = kvdock("status", "--server", server.unix)
    finally:
        engine.close()
    assert (done.returncode, done.stderr) == (0, "")
    assert "32.0 KiB in 2 chunks" in done.stdout
    assert "32.0 KiB by 1 lease and 0 reservations" in done.stdout
    assert "left �[31mengine" in done.stdout and "\x1b" not in done.stdout


def test_status_asks_where_serve_listens_by_default(server: ServerProcess) -> None:
    for environ in (
        {"KVDOCK_SOCKET_PATH": server.unix.removeprefix("unix:")},
        {"KVDOCK_SOCKET_PATH": "/nobody", "KVDOCK_ADDRESS": server.unix, "KVDOCK_VLLM_COPY_THREADS": "4"},
    ):
        done = kvdock("status", "--json", **environ)
        assert json.loads(done.stdout)["pool_id"] == f"{server.pool_id:016x}"


@pytest.mark.parametrize("arguments", [[], ["--json"]])
def test_status_without_a_server_fails_and_says_how_to_start_one(tmp_path: Path, arguments: list[str]) -> None:
    nobody = f"unix:{tmp_path}/nobody.sock"
    sentence = refusal(kvdock("status", *arguments, "--server", nobody), 1)
    assert f"no server answers at {nobody}" in sentence and "kvdock serve" in sentence


# --------------------------------------------------------------------------- the rest

COMMANDS = ("serve", "status", "saved", "doctor", "lookup", "clear", "sessions", "leases", "bench", "demo", "config")
SHELLS = ("bash", "zsh", "fish", "powershell")


def test_each_command_has_help_that_names_the_exit_statuses() -> None:
    for command in COMMANDS:
        done = CliRunner().invoke(app, [command, "--help"], prog_name="kvdock")
        assert done.exit_code == 0 and "130 interrupted by Ctrl-C" in " ".join(done.stdout.split()), done.stdout
        assert CliRunner().invoke(app, [command, "-h"], prog_name="kvdock").stdout == done.stdout


@pytest.mark.parametrize("shell", SHELLS)
def test_completion_is_shown_for_a_shell_by_name(shell: str) -> None:
    done = kvdock("--show-completion", shell)
    assert (done.returncode, done.stderr) == (0, "")
    assert "_KVDOCK_COMPLETE" in done.stdout and f"complete_{shell}" in done.stdout


def test_completion_finds_the_shell_that_asks() -> None:
    program = f"{shlex.join(KVDOCK)} --show-completion; true"
    done = subprocess.run(["bash", "-c", program], env=clean_environ(), capture_output=True, text=True)
    assert "_KVDOCK_COMPLETE=complete_bash" in done.stdout, done.stderr


@pytest.mark.parametrize(("words", "wanted"), [
    ("kvdock se", {"serve", "sessions"}), ("kvdock doctor --j", {"--json"}), ("kvdock serve --on-", {"--on-exit"}),
    ("kvdock config set po", {"pool_bytes="}), ("kvdock config se", {"set"}),
    ("kvdock config set tier_keep=", {"tier_keep=shared", "tier_keep=always"}),
])
def test_completion_completes_commands_and_flags(words: str, wanted: set[str]) -> None:
    at = str(len(words.split()) - 1)
    done = kvdock(_KVDOCK_COMPLETE="complete_bash", COMP_WORDS=words, COMP_CWORD=at)
    assert set(done.stdout.split()) == wanted, done.stderr


def test_version_is_the_packages_however_the_program_is_started() -> None:
    beside = str(Path(sys.executable).with_name("kvdock"))
    for program in ([beside], [sys.executable, "-m", "kvdock"]):
        done = subprocess.run([*program, "--version"], env=clean_environ(), capture_output=True, text=True)
        assert (done.returncode, done.stdout) == (0, "kvdock 0.1.0\n"), (program, done.stderr)


def test_help_names_every_command() -> None:
    for arguments in ([], ["--help"], ["-h"]):
        done = kvdock(*arguments)
        assert done.returncode == 0
        assert all(f"\n  {command} " in done.stdout for command in COMMANDS)


def test_the_demo_without_torch_says_what_to_install() -> None:
    program = "import sys; sys.modules['torch'] = None; import kvdock.cli.main as m; m.main()"
    command = [sys.executable, "-c", program, "demo", "--json", "--port", "0"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S)
    assert "need torch: pip install 'kvdock[engine]'" in refusal(done, 1)


@pytest.mark.parametrize(("size_bytes", "text", "exact"), [
    (0, "0 B", "0"), (1000, "1000 B", "1000"), (1536, "1.5 KiB", "1536"), (8 << 20, "8.0 MiB", "8MiB"),
    (5 << 40, "5.0 TiB", "5TiB"),
])
def test_sizes_in_words(size_bytes: int, text: str, exact: str) -> None:
    assert (size(size_bytes), exact_bytes(size_bytes)) == (text, exact)


@pytest.mark.parametrize(("seconds", "text"), [
    (0.4, "0 s"), (61, "1 min 1 s"), (3725, "1 h 2 min"), (90000, "1 d 1 h"), (86400, "1 d 0 s"),
])
def test_durations_in_words(seconds: float, text: str) -> None:
    assert duration(seconds) == text


def test_control_characters_of_a_label_never_reach_the_terminal() -> None:
    assert printable("a\x1b]0;b\x07\n\u202e") == "a�]0;b���"


UNSEEN = (
    *range(0x20), *range(0x7F, 0xA0), 0xAD, 0x34F, 0x61C, 0x115F, 0x1160, 0x17B4, 0x17B5, *range(0x180B, 0x1810),
    *range(0x200B, 0x2010), *range(0x2028, 0x202F), *range(0x2060, 0x2070), 0x2800, 0x3000, 0x3164,
    *range(0xFE00, 0xFE10), 0xFEFF, 0xFFA0, 0xD800, 0xE0041, 0xE0100,
)


def test_no_invisible_character_and_none_that_turns_the_text_is_shown() -> None:
    assert [hex(code) for code in UNSEEN if printable(f"a{chr(code)}b") != "a�b"] == []


def test_names_in_any_script_stay_as_they_are() -> None:
    text = "Qwen3 é ß Ж א ع 中 한 🚀 ~"
    assert printable(text) == text
