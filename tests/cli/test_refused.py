"""What is wrong in settings, in changes of a running server and in an access file is said in the words of people."""

from __future__ import annotations

import hashlib
import os
import re
import subprocess
from pathlib import Path

import msgspec
import pytest
from cli_helpers import KVDOCK, TIMEOUT_S, clean_environ

from kvdock.api.access.access_file import parse
from kvdock.api.errors import AccessFileError, SettingsError
from kvdock.api.settings import Settings, effective
from kvdock.cli.admin import ANY, LIVE, parse_changes
from kvdock.cli.errors import CommandError

WRONG = ["x", "-1", "1.5", "nan", "1e999", "9" * 30, "٣", ""]
LIBRARY_S_WORDS = re.compile(r"Expected|Invalid|regex|[`$]|Number out|Object")
DIGEST = hashlib.sha256(b"").hexdigest()
ENTRY = f'[[token]]\nname = "a"\nsha256 = "{DIGEST}"\n'
TOKEN = "uSsC7DdyK0_5kCRYlfA_k9U4GT_xH6LvrsGONYE2KDI"


@pytest.mark.parametrize("name", Settings.__struct_fields__)
def test_a_wrong_setting_is_refused_with_what_was_wanted_and_what_was_found(name: str) -> None:
    for text in WRONG:
        try:
            effective({}, flags={name: text})
        except SettingsError as error:
            said = str(error)
            assert not LIBRARY_S_WORDS.search(said) and "wanted" in said and name in said, said


@pytest.mark.parametrize("name", LIVE)
def test_a_wrong_change_is_refused_with_what_was_wanted_and_what_was_found(name: str) -> None:
    refusals = []
    for text in WRONG:
        try:
            parse_changes([f"{name}={text}"], ANY)
        except CommandError as error:
            refusals.append(str(error))
    assert refusals
    for said in refusals:
        assert not LIBRARY_S_WORDS.search(said) and "wanted" in said and "found" in said and name in said, said


@pytest.mark.parametrize("text", ["1e3", "1000.0"])
def test_a_change_of_a_whole_number_is_written_as_one(text: str) -> None:
    with pytest.raises(CommandError, match="session_grants: wanted a whole number without fraction and exponent"):
        parse_changes([f"session_grants={text}"], ANY)
    assert parse_changes(["session_cap=1e-1"], ANY).session_cap == 0.1


@pytest.mark.parametrize(("quotas", "wanted"), [
    ("[]", "tenants: wanted names with values"), ('{"A!": {}}', "wanted a name of at most 64 characters"),
    ('{"a": {"chunks": -1}}', "wanted a whole number >= 0"), ('{"a": {"chunk": 1}}', "wanted no 'chunk'"),
])
def test_wrong_quotas_are_refused_with_what_was_wanted(quotas: str, wanted: str) -> None:
    with pytest.raises(CommandError, match=re.escape(wanted)) as refused:
        parse_changes([f"tenants={quotas}"], ANY)
    assert not LIBRARY_S_WORDS.search(str(refused.value))


@pytest.mark.parametrize(("text", "said"), [
    ("x = 1", "wanted no 'x', which is unknown"), ("token = 5", "token: wanted a list, found '5'"),
    ("token = [5]", "token[0]: wanted names with values, found '5'"), (ENTRY, "token[0]: wanted 'scopes' as well"),
    (f"{ENTRY}scopes = []", "token[0].scopes: wanted a list of length >= 1, found '[]'"),
    (f"{ENTRY}scopes = 'read'", "token[0].scopes: wanted a list, found 'read'"),
    (f"{ENTRY}scopes = ['no']", "token[0].scopes[0]: wanted health or read or engine or admin or peer, found 'no'"),
    (f"{ENTRY}scopes = ['read']\ncaps = {{bytes = -1}}", "token[0].caps.bytes: wanted a size >= 0, found '-1'"),
    (f"{ENTRY}scopes = ['read']\nexpires = 'soon'", "token[0].expires: wanted a date and time with a zone, as"),
    (f"{ENTRY}scopes = ['read']\nexpires = 2026-01-01", "as 2026-11-27T09:00:00Z, found '2026-01-01'"),
    (f"{ENTRY}scopes = ['read']\nexpires = 2026-01-01T00:00:00", "found '2026-01-01 00:00:00'"),
    (ENTRY.replace('"a"', '"a b"') + "scopes = ['read']", "token[0].name: wanted a name of 1 to 64 characters"),
    ("[[token", "is no TOML: "),
])
def test_a_wrong_access_file_is_refused_with_the_place_and_what_was_wanted(text: str, said: str) -> None:
    with pytest.raises(AccessFileError) as refused:
        parse(text, "FILE")
    assert said in str(refused.value)
    assert "TOML" in said or not LIBRARY_S_WORDS.search(str(refused.value))


@pytest.mark.parametrize("name", [field.name for field in msgspec.structs.fields(Settings) if field.type is str])
@pytest.mark.parametrize("text", ["/a\0b", "/a\udcffb"])
def test_text_that_no_path_and_no_answer_can_have_is_refused(name: str, text: str) -> None:
    with pytest.raises(SettingsError, match=f"{name}=.*wanted text in UTF-8 without the character NUL"):
        effective({}, flags={name: text})


def test_paths_of_the_server_are_whole_so_that_others_find_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    found = effective({"KVDOCK_SOCKET_PATH": "k.sock"}, flags={"disk_path": "disk", "disk_bytes": "1GiB"}).settings
    assert (found.socket_path, found.disk_path) == (f"{tmp_path}/k.sock", f"{tmp_path}/disk")
    with pytest.raises(SettingsError, match="socket_path='' wanted the path of a socket"):
        effective({"KVDOCK_SOCKET_PATH": ""})
    strange = tmp_path / os.fsdecode(b"\xff")
    strange.mkdir()
    monkeypatch.chdir(strange)
    with pytest.raises(SettingsError, match="wanted one in UTF-8"):
        effective({"KVDOCK_SOCKET_PATH": "k.sock"})


def test_an_argument_that_is_no_text_is_refused() -> None:
    done = subprocess.run(
        [*KVDOCK, "config", "set", b"tenants=\xff"], env=clean_environ(), timeout=TIMEOUT_S, capture_output=True
    )
    assert done.returncode == 2
    assert done.stderr == b"kvdock: wanted arguments in UTF-8, found 'tenants=\\udcff'\n"


@pytest.mark.parametrize(
    ("command", "said"),
    [
        ("top --interval 0", "--interval: wanted a number >= 0.2, found '0'"),
        ("top --interval x", "--interval: wanted a number, found 'x'"),
        ("top --interval nan", "--interval: wanted a number <= 3600, found 'nan'"),
        ("requests --limit 1.5", "--limit: wanted a whole number, found '1.5'"),
        ("cached --limit 257", "--limit: wanted a number <= 256, found '257'"),
        ("history --over years", "--over: wanted one of 'minutes', 'hours', 'days', found 'years'"),
    ],
)
def test_an_option_that_is_refused_is_named_with_what_was_wanted_and_found(command: str, said: str) -> None:
    done = subprocess.run(
        [*KVDOCK, *command.split()], env=clean_environ(), timeout=TIMEOUT_S, capture_output=True, text=True
    )
    assert (done.returncode, done.stderr) == (2, f"kvdock: {said}\n")


@pytest.mark.security
def test_a_token_in_the_place_of_its_digest_is_not_shown() -> None:
    with pytest.raises(AccessFileError, match="wanted the 64 hex digits of a token's SHA-256") as refused:
        parse(ENTRY.replace(DIGEST, TOKEN) + "scopes = ['read']", "FILE")
    assert TOKEN not in str(refused.value)
