"""`kvdock config`: settings from flags, environment, file and defaults, and the messages for wrong ones."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
from cli_helpers import KVDOCK, SMALL, TIMEOUT_S, clean_environ, first_line, kvdock, refusal

from kvdock.api.errors import SettingsError
from kvdock.api.settings import Settings, effective
from kvdock.client.client import Client


def settings_of(done: subprocess.CompletedProcess[str]) -> dict[str, dict[str, Any]]:
    assert (done.returncode, done.stderr) == (0, "")
    found: dict[str, dict[str, Any]] = json.loads(done.stdout)["settings"]
    return found


def written(folder: Path, text: str) -> str:
    path = folder / "kvdock.toml"
    path.write_text(text)
    return str(path)


def test_each_source_wins_over_those_below_it_and_is_named(tmp_path: Path) -> None:
    file = written(tmp_path, '# sizes\npool_bytes = "64MiB"\nport = 7001\nheartbeat_s = 1.5\nhost = "::1"\n')
    environ = {"KVDOCK_PORT": "7002", "KVDOCK_HOST": "localhost"}
    found = settings_of(kvdock("config", "--json", "--config", file, "--host", "127.0.0.1", **environ))
    assert list(found) == list(Settings.__struct_fields__)
    assert found["host"] == {"value": "127.0.0.1", "source": "flag", "where": "--host"}
    assert found["port"] == {"value": 7002, "source": "environment", "where": "KVDOCK_PORT"}
    assert found["pool_bytes"] == {"value": 64 << 20, "source": "file", "where": f"{file}, line 2"}
    assert found["heartbeat_s"] == {"value": 1.5, "source": "file", "where": f"{file}, line 4"}
    assert found["low_water"] == {"value": 0.005, "source": "default", "where": ""}


def test_the_file_is_named_by_a_variable_and_a_flag_names_another(tmp_path: Path) -> None:
    one, two = tmp_path / "one.toml", tmp_path / "two.toml"
    one.write_text("port = 7001\n")
    two.write_text("port = 7002\n")
    assert settings_of(kvdock("config", "--json", KVDOCK_CONFIG=str(one)))["port"]["value"] == 7001
    done = kvdock("config", "--json", "--config", str(two), KVDOCK_CONFIG=str(one))
    assert settings_of(done)["port"]["value"] == 7002


def test_the_table_says_the_same_in_words(tmp_path: Path) -> None:
    done = kvdock("config", "--config", written(tmp_path, 'pool_bytes = "64MiB"\n'), "--port", "0")
    rows = {line.split()[0]: line.split(maxsplit=1)[1].rstrip() for line in done.stdout.splitlines()}
    assert rows["pool_bytes"].split(maxsplit=1) == ["64MiB", f"file: {tmp_path}/kvdock.toml, line 1"]
    assert rows["port"].split(maxsplit=1) == ["0", "flag: --port"]
    assert rows["heartbeat_s"].split() == ["2.0", "default"]


def test_serve_reads_the_file_and_status_finds_it_by_the_same_variable(tmp_path: Path) -> None:
    socket_path = tmp_path / "s.sock"
    small = {"pool_bytes": '"16MiB"', "table_records": 1024, "table_grants": 64, "port": 0}
    text = "".join(f"{name} = {value}\n" for name, value in small.items())
    environ = {"KVDOCK_CONFIG": written(tmp_path, f'{text}socket_path = "{socket_path}"\n')}
    with subprocess.Popen(
        [*KVDOCK, "serve"], env=clean_environ(**environ), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        try:
            assert str(socket_path) in first_line(process)
            with Client(f"unix:{socket_path}") as client:
                assert client.status().pool.limit_bytes == 16 << 20
            assert kvdock("status", "--json", **environ).returncode == 0
        finally:
            process.terminate()
            process.communicate(timeout=TIMEOUT_S)


@pytest.mark.parametrize(("text", "said"), [
    ("port = 1\n\npool_byts = 5\n", "unknown settings: pool_byts (meant pool_bytes?) ({file}, line 3)"),
    ("port = 70000\n", "port=70000 ({file}, line 1)"),
    ("# a\nport = true\n", "port=True ({file}, line 2): wanted a number or text"),
    ('pool_bytes = "4 gigs"\n', "pool_bytes='4 gigs' ({file}, line 1)"),
    ('on_exit = "stay"\n', "wanted remove or keep; found on_exit='stay' ({file}, line 1)"),
    ("port = 1\n[serve]\nport = 2\n", "{file}, line 2: 'serve' wanted a plain value, found a table or list"),
    ("port = \n", "{file} is no TOML: Invalid value (at line 1, column 8)"),
    ("port = 1\nport = 2\n", "{file} is no TOML"),
])
def test_what_is_wrong_in_a_file_is_named_with_its_line(tmp_path: Path, text: str, said: str) -> None:
    file = written(tmp_path, text)
    with pytest.raises(SettingsError) as error:
        effective({}, config=file)
    assert said.format(file=file) in str(error.value)


@pytest.mark.parametrize("command", ["config", "serve", "doctor"])
def test_each_command_that_reads_a_file_refuses_a_wrong_one(tmp_path: Path, command: str) -> None:
    file = written(tmp_path, "port = 70000\n")
    done = kvdock(command, "--config", file)
    assert done.returncode == (1 if command == "doctor" else 2)
    assert f"port=70000 ({file}, line 1)" in " ".join((done.stdout + done.stderr).split())


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    nowhere = str(tmp_path / "nowhere.toml")
    assert f"settings file {nowhere}: " in refusal(kvdock("config", KVDOCK_CONFIG=nowhere), 2)


def test_a_wrong_variable_or_flag_is_named_as_it_was_given() -> None:
    for flags, environ, said in (
        ({}, {"KVDOCK_PORT": "x"}, r"port='x' \(KVDOCK_PORT\)"),
        ({"port": "y"}, {"KVDOCK_PORT": "x"}, r"port='y' \(--port\)"),
        ({}, {"KVDOCK_POOL_BYTE": "1"}, r"pool_byte \(meant pool_bytes\?\) \(KVDOCK_POOL_BYTE\)"),
        ({}, {"KVDOCK_POOL": "1"}, r"pool \(meant pool_bytes\?\) \(KVDOCK_POOL\); `kvdock serve --help` lists all"),
    ):
        with pytest.raises(SettingsError, match=said):
            effective(environ, flags=flags)


def test_config_takes_every_flag_of_serve() -> None:
    assert settings_of(kvdock("config", "--json", *SMALL))["table_records"]["source"] == "flag"
