"""`--help`: commands and options in groups, examples that are true, 80 columns; and `--json` when a command fails."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import typer
from api_helpers import ServerProcess
from cli_helpers import SMALL, TIMEOUT_S, first_line, kvdock, kvdock_serve, refusal
from typer.testing import CliRunner

from kvdock.api.settings import Settings, choices_of
from kvdock.cli.help import EXAMPLES, SETTING_GROUPS
from kvdock.cli.main import app
from kvdock.cli.serve import metavar_of
from kvdock.protocol.errors import CODES

TOP = typer.main.get_group(app)


def paths() -> Iterator[str]:
    """Every command, with its subcommands."""
    for name, command in TOP.commands.items():
        yield name
        yield from (f"{name} {inner}" for inner in getattr(command, "commands", {}))


def help_of(path: str) -> str:
    done = CliRunner().invoke(app, [*path.split(), "--help"], prog_name="kvdock", env={"COLUMNS": "80"})
    assert done.exit_code == 0
    return done.stdout


def sections(text: str) -> dict[str, list[str]]:
    """The lines under each heading."""
    found: dict[str, list[str]] = {}
    for line in text.splitlines():
        if line and not line.startswith(" ") and line.endswith(":"):
            found[line.removesuffix(":")] = under = []
        elif found and line.startswith("  "):
            under.append(line)
    return found


def test_commands_are_in_groups_with_a_whole_sentence_each() -> None:
    shown = sections(help_of(""))
    assert {"Run", "Look", "Change", "Examples"} <= set(shown)
    listed = [line.split()[0] for group in ("Run", "Look", "Change") for line in shown[group]]
    assert sorted(listed) == sorted(TOP.commands)
    assert all(line.endswith(".") and "..." not in line for name in ("Run", "Look", "Change") for line in shown[name])


def test_the_settings_of_serve_are_in_groups_with_their_choices() -> None:
    shown = sections(help_of("serve"))
    assert list(shown) == ["Options", *SETTING_GROUPS, "Common options", "Examples"]
    assert sorted(name for names in SETTING_GROUPS.values() for name in names) == sorted(Settings.__struct_fields__)
    for group, names in SETTING_GROUPS.items():
        flags = [line.split()[0] for line in shown[group] if line.startswith("  --")]
        assert flags == [f"--{name.replace('_', '-')}" for name in names]
    text = help_of("serve")
    for flag in ("--growth demand|ahead", "--eviction adaptive|lru", "--tier-keep shared|always",
                 "--adopt auto|never|require", "--pool-bytes SIZE", "--drain-s SECONDS", "--session-cap SHARE"):
        assert f"  {flag} " in text
    assert "[default: 4GiB]" in text and "(4GiB)" not in text
    assert {metavar_of(name) for name in Settings.__struct_fields__ if not choices_of(name)} == {
        "SIZE", "SECONDS", "SHARE", "N", "URL", "PATH", "FILE", "HOST", "HOSTS", "PORT"
    }


def test_config_repeats_no_flag_of_serve_in_its_help_and_takes_them() -> None:
    assert len(help_of("config").splitlines()) < 45 and "--pool-bytes" not in help_of("config")
    assert json.loads(kvdock("config", "--json", *SMALL).stdout)["settings"]["pool_bytes"]["value"] == 16 << 20


@pytest.mark.parametrize("path", sorted({"", *paths()}))
def test_every_help_fits_80_columns_has_examples_and_json(path: str) -> None:
    text = help_of(path)
    assert not [line for line in text.splitlines() if len(line) > 80]
    assert "Examples" in sections(text) and "130 interrupted" in " ".join(text.split())
    assert path in ("", "token") or "--json" in text


def test_every_example_is_a_command_with_its_flags() -> None:
    assert set(EXAMPLES) == {"", *paths()}
    for path, examples in EXAMPLES.items():
        for line, _ in examples:
            words = shlex.split(re.split(r" (?:\||>|>>) ", line.partition("kvdock ")[2])[0])
            if words[0] == "COMMAND":
                continue
            assert not path or words[: len(path.split())] == path.split(), line
            command = TOP.commands[words[0]]
            inner = getattr(command, "commands", {})
            command = inner.get(words[1], command) if len(words) > 1 else command
            known = {option for param in command.params for option in (*param.opts, "--help")}
            assert {word for word in words if word.startswith("--")} <= known, line


# --------------------------------------------------------------------------- JSON when a command fails


def problem(done: subprocess.CompletedProcess[str], exit_status: int) -> dict[str, object]:
    refusal(done, exit_status)
    found: dict[str, object] = json.loads(done.stdout)
    return found


ASK_NOBODY = {
    "doctor", "demo", "serve", "config", "bench", "vllm-args", "sglang-args",
    *(path for path in paths() if path.startswith("token")),
}


@pytest.mark.parametrize("path", sorted(set(paths()) - ASK_NOBODY))
def test_each_command_that_finds_no_server_prints_a_problem(path: str, tmp_path: Path) -> None:
    needs = {"lookup": ["--keys", "ab" * 32], "keep": ["--keys", "ab" * 32], "evict": ["--bytes", "1MiB", "--yes"],
             "clear": ["--all", "--yes"], "config set": ["session_grants=9"], "top": ["--once"], "explain": ["r-1"],
             "tiers clear": ["--tier", "objects", "--yes"]}
    arguments = [*path.split(), *needs.get(path, []), "--json", "--server", f"unix:{tmp_path}/nobody.sock"]
    found = problem(kvdock(*arguments), 1)
    assert (found["code"], found["title"], found["status"]) == ("no_server", "No server answers", None)


@pytest.mark.parametrize(("arguments", "code"), [
    (["stats", "--json"], "usage"), (["status", "--json", "--nonsense"], "usage"),
    (["leases", "--limit", "0", "--json"], "usage"), (["serve", "--json", "--port", "x"], "wrong_setting"),
    (["config", "--json", "--port", "x"], "wrong_setting"), (["token", "add", "me", "--json"], "usage"),
    (["demo", "--turns", "0", "--json"], "usage"), (["bench", "--rounds", "1", "--json"], "usage"),
])
def test_what_is_asked_for_wrongly_is_a_problem_too(arguments: list[str], code: str) -> None:
    found = problem(kvdock(*arguments), 2)
    assert (found["code"], found["type"], found["exit_status"]) == (code, "about:blank", 2)


def test_a_refusal_of_the_server_keeps_what_the_server_said(server: ServerProcess) -> None:
    found = problem(kvdock("config", "set", "low_water=0.9", "--json", "--server", server.unix), 1)
    assert (found["code"], found["status"], found["type"]) == ("bad_argument", 422, "/docs#bad_argument")
    assert found["title"] == CODES["bad_argument"].title and found["found"] is not None and found["wanted"] is not None
    nobodys = problem(kvdock("sessions", "--json", "--server", server.http), 1)
    assert (nobodys["code"], nobodys["status"]) == ("unauthenticated", 401)
    assert "KVDOCK_ACCESS_TOKEN_FILE" in str(nobodys["detail"])


def test_a_server_that_cannot_start_says_why_as_a_problem(server: ServerProcess) -> None:
    path = server.unix.removeprefix("unix:")
    found = problem(kvdock("serve", "--json", *SMALL, "--socket-path", path), 1)
    assert (found["code"], found["title"]) == ("socket_in_use", "The server cannot start")


def test_serve_says_where_it_serves_as_json(tmp_path: Path) -> None:
    with kvdock_serve(tmp_path, "--json") as process:
        said = json.loads(first_line(process))
        assert said["unix"] == f"unix:{tmp_path}/kvdock.sock" and said["http"].startswith("http://127.0.0.1:")
        status = json.loads(kvdock("status", "--json", "--server", said["http"].removeprefix("http://")).stdout)
        assert status["pool_id"] == said["pool_id"]
        process.terminate()
        assert process.wait(TIMEOUT_S) == 0
