"""`kvdock token` changes an access file as a whole or not at all, and all users that could read the file still can."""

from __future__ import annotations

import json
import os
import random
import re
import stat
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from api_helpers import ServerProcess, access_file as access_file_of, eventually, raw
from cli_helpers import kvdock, refusal

from kvdock.api.access import access_file
from kvdock.api.access.access_file import Token, add_token, digest_of, read, revoke_token, rotate_token, tokens_in
from kvdock.api.errors import AccessFileError

pytestmark = pytest.mark.security

GROUP = 7410
NOW = datetime(2026, 11, 27, 9, 0, 0, 250_000, UTC)
HOUR = timedelta(hours=1)
BY_HAND = """# who may call this server
#
# the first team
[[token]]  # by hand
name = "one"
tenant = "a"
sha256 = "{digest}"
scopes = [
  "engine",  # no more
]
[token.caps]
bytes = "8GiB"

# the second team
[[token]]
scopes = ["read"]
name = "two"
expires = 2026-12-24T18:00:00+01:00
sha256 = "{other}"
# the end
"""


def by_hand(folder: Path) -> Path:
    path = folder / "access.toml"
    path.touch(mode=0o600)
    path.write_text(BY_HAND.format(digest="1" * 64, other="2" * 64))
    return path


def named(path: Path, name: str) -> list[Token]:
    return [token for token in tokens_in(str(path)) if token.name == name]


# ------------------------------------------------------------------ the file


def test_a_new_file_is_private_and_has_the_digest_alone(tmp_path: Path) -> None:
    path = tmp_path / "access.toml"
    tokens = [add_token(str(path), name, ["engine"], "a") for name in ("one", "two")]
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert list(read(str(path))) == [digest_of(token.encode()) for token in tokens]
    assert not any(token in path.read_text() for token in tokens)


def test_owner_group_mode_and_links_of_the_file_stay(tmp_path: Path) -> None:
    """The file has the group of a server that reads it, and is named through a link to its folder."""
    path, link = tmp_path / "access.toml", tmp_path / "link.toml"
    path.touch(mode=0o600)
    path.chmod(0o640)
    owner = (os.geteuid(), GROUP if os.geteuid() == 0 else os.getegid())
    os.chown(path, *owner)
    link.symlink_to(path)
    for edit in (
        lambda: add_token(str(link), "team-a", ["read"]),
        lambda: rotate_token(str(link), "team-a", now=NOW, old_until=NOW + HOUR)[0],
        lambda: revoke_token(str(link), "team-a"),
    ):
        edit()
        found = path.stat()
        assert (found.st_uid, found.st_gid, stat.S_IMODE(found.st_mode)) == (*owner, 0o640)
        assert link.is_symlink()
    assert sorted(tmp_path.iterdir()) == [path, link]


def test_what_would_be_wrong_leaves_the_file_as_it_was(tmp_path: Path) -> None:
    path = by_hand(tmp_path)
    before = path.read_bytes()
    for name, scopes, tenant in (("one", ["read"], ""), ("three", ["root"], ""), ("three", ["read"], "Team A")):
        with pytest.raises(AccessFileError):
            add_token(str(path), name, scopes, tenant)  # type: ignore[arg-type]  # a wrong scope is the point
    for name, end in (("three", None), ("one", NOW), ("two", NOW - HOUR)):
        with pytest.raises(AccessFileError):
            rotate_token(str(path), name, now=NOW, old_until=None, expires=end)
    with pytest.raises(AccessFileError, match="wanted one of one, two"):
        revoke_token(str(path), "three")
    path.chmod(0o644)
    with pytest.raises(AccessFileError, match="chmod 600"):
        revoke_token(str(path), "one")
    assert path.read_bytes() == before and list(tmp_path.iterdir()) == [path]


def test_entries_that_no_command_can_change_are_left_to_people(tmp_path: Path) -> None:
    path = by_hand(tmp_path)
    for text, said in (
        ('token = [{name = "one", sha256 = "' + "1" * 64 + '", scopes = ["read"]}]\n', "of its own"),
        ('[[token]]\nname = "one"\n"sha256" = "' + "1" * 64 + '"\nscopes = ["read"]\n', "overwrite"),
    ):
        path.write_text(text)
        with pytest.raises(AccessFileError, match=said):
            rotate_token(str(path), "one", now=NOW, old_until=None)
        assert path.read_text() == text


def test_a_replaced_token_keeps_its_rights_its_quota_and_the_comments(tmp_path: Path) -> None:
    path = by_hand(tmp_path)
    text, made = rotate_token(str(path), "one", now=NOW, old_until=NOW + HOUR)
    fresh, old = named(path, "one")
    assert fresh == made and bytes.fromhex(fresh.sha256) == digest_of(text.encode())
    assert (fresh.tenant, fresh.scopes, fresh.expires) == (old.tenant, old.scopes, None) == ("a", ["engine"], None)
    assert fresh.caps is not None and fresh.caps.bytes == 8 << 30 and old.caps is None
    assert (old.sha256, old.expires) == ("1" * 64, (NOW + HOUR).replace(microsecond=0))
    comments = [line for line in BY_HAND.splitlines() if "#" in line]
    assert [line for line in path.read_text().splitlines() if "#" in line] == comments


def test_replacing_a_token_prolongs_none(tmp_path: Path) -> None:
    """Neither one that was replaced before, nor one with an end date."""
    path = by_hand(tmp_path)
    rotate_token(str(path), "one", now=NOW, old_until=NOW + HOUR)
    rotate_token(str(path), "one", now=NOW, old_until=NOW + 3 * HOUR)
    assert sorted(str(one.expires) for one in named(path, "one")) == [
        "2026-11-27 10:00:00+00:00", "2026-11-27 12:00:00+00:00", "None"
    ]
    rotate_token(str(path), "two", now=NOW, old_until=NOW + timedelta(days=365))
    assert {one.expires for one in named(path, "two")} == {datetime(2026, 12, 24, 17, tzinfo=UTC)}
    rotate_token(str(path), "one", now=NOW + 2 * HOUR, old_until=NOW + 4 * HOUR)
    assert len(named(path, "one")) == 3, "the one that has ended is not removed"
    rotate_token(str(path), "one", now=NOW, old_until=None)
    assert [one.expires for one in named(path, "one")] == [None], "former tokens do not end at once"


def test_edits_in_any_order_leave_what_they_name(tmp_path: Path) -> None:
    draw = random.Random(39)
    path = by_hand(tmp_path)
    known = {"one": {"1" * 64}, "two": {"2" * 64}}
    for number in range(200):
        name, edit = f"t{draw.randrange(6)}", draw.choice(["add", "rotate", "revoke"])
        if (edit == "add") == (name in known):
            continue
        if edit == "add":
            known[name] = {digest_of(add_token(str(path), name, ["read"], created=NOW).encode()).hex()}
        elif edit == "revoke":
            revoke_token(str(path), name)
            del known[name]
        else:
            keeps = draw.random() < 0.5
            text, _ = rotate_token(str(path), name, now=NOW, old_until=NOW + HOUR if keeps else None)
            known[name] = {digest_of(text.encode()).hex()} | (known[name] if keeps else set())
        found = {name: {one.sha256 for one in named(path, name)} for name in known}
        assert found == known and len(tokens_in(str(path))) == sum(map(len, known.values())), (number, edit, name)
    assert "# the first team" in path.read_text() and "# the end" in path.read_text()


def test_edits_at_once_lose_nothing(tmp_path: Path) -> None:
    """The second one is refused, and names the file that keeps it out."""
    path = tmp_path / "access.toml"
    made: list[bytes] = []

    def add(name: str) -> None:
        with suppress(AccessFileError):
            made.append(digest_of(add_token(str(path), name, ["read"]).encode()))

    with ThreadPoolExecutor(8) as threads:
        list(threads.map(add, [f"t{number}" for number in range(64)]))
    assert made and sorted(read(str(path))) == sorted(made)
    before = path.read_bytes()
    fresh = Path(f"{path}.new")
    fresh.touch(mode=0o600)
    said = refusal(kvdock("token", "add", "late", "--access-file", str(path)), 2)
    assert str(fresh) in said and path.read_bytes() == before and fresh.exists()


# ------------------------------------------------------------------ the commands


def test_a_token_is_made_as_json(tmp_path: Path) -> None:
    path = str(tmp_path / "access.toml")
    done = kvdock("token", "add", "me", "--scope", "admin", "--expires", "30d", "--access-file", path, "--json")
    made = json.loads(done.stdout)
    digest = digest_of(made.pop("access_token").encode()).hex()
    end, start = (datetime.fromisoformat(made.pop(key)) for key in ("expires", "created"))
    assert end - start == timedelta(days=30)
    assert made == {
        "name": "me", "tenant": "", "scopes": ["admin"], "is_expired": False, "digest": digest[:12], "access_file": path
    }


@pytest.mark.parametrize(("arguments", "said"), [
    (("add", "me", "--scope", "root"), "found 'root', wanted health, read, engine, admin, peer"),
    (("add", "me", "--expires", "2020-01-01"), "wanted a later time than now"),
    (("add", "me", "--expires", "soon"), "wanted a later time than now"),
    (("add", "me", "--expires", "99999999999d"), "wanted a later time than now"),
    (("rotate", "one", "--grace", "0"), "wanted a duration"),
    (("rotate", "one", "--grace", "99999999999d"), "wanted a shorter time"),
    (("rotate", "three"), "found no token 'three', wanted one of one, two"),
    (("revoke", "three"), "found no token 'three', wanted one of one, two"),
])
def test_a_wrong_command_is_refused_in_one_sentence(tmp_path: Path, arguments: tuple[str, ...], said: str) -> None:
    path = by_hand(tmp_path)
    assert said in refusal(kvdock("token", *arguments, "--access-file", str(path)), 2)
    assert path.read_text() == BY_HAND.format(digest="1" * 64, other="2" * 64)


def test_a_list_shows_ends_and_no_whole_digest(tmp_path: Path) -> None:
    path = by_hand(tmp_path)
    path.write_text(path.read_text().replace("2026-12-24T18:00:00+01:00", "2020-12-24T18:00:00+01:00"))
    lines = kvdock("token", "list", "--access-file", str(path)).stdout.splitlines()
    assert [re.split(r"\s{2,}", line) for line in lines[1:]] == [
        ["one", "a", "engine", "not known", "never", "111111111111…"],
        ["two", "(own user)", "read", "not known", "2020-12-24T17:00:00Z (expired)", "222222222222…"],
    ]
    done = kvdock("token", "list", "--json", KVDOCK_ACCESS_FILE=str(path))
    assert [one["is_expired"] for one in json.loads(done.stdout)["tokens"]] == [False, True]
    assert "1" * 13 not in done.stdout + "".join(lines)


def test_a_running_server_follows_each_command(tmp_path: Path) -> None:
    path = access_file_of(tmp_path)
    with ServerProcess(access_file=str(path), watch_s=0.05) as server:
        def is_known(token: str) -> bool:
            return raw(server.http, "GET", "/v1/sessions", None, {"Authorization": f"Bearer {token}"})[0] == 200

        def run(*arguments: str) -> str:
            done = kvdock("token", *arguments, KVDOCK_ACCESS_FILE=str(path))
            assert (done.returncode, done.stderr) == (0, "")
            return done.stdout.strip()

        first = run("add", "guest")
        eventually(lambda: is_known(first))
        second = run("rotate", "guest", "--grace", "1h")
        eventually(lambda: is_known(second))
        assert is_known(first), "the grace time does not count"
        third = run("rotate", "guest")
        eventually(lambda: is_known(third))
        assert not is_known(first) and not is_known(second)
        assert "1 token of guest" in run("revoke", "guest")
        eventually(lambda: not is_known(third))


def test_the_shell_completes_names_of_tokens(tmp_path: Path) -> None:
    path = by_hand(tmp_path)
    done = kvdock(
        KVDOCK_ACCESS_FILE=str(path), _KVDOCK_COMPLETE="complete_bash", COMP_WORDS="kvdock token rotate t",
        COMP_CWORD="3",
    )
    assert done.stdout.split() == ["two"]


@pytest.mark.parametrize(("name", "said"), [
    ("", r"found drwx.*, wanted a plain file"), ("none/access.toml", r"No such file or directory \(as user \d+\)"),
])
def test_a_path_that_is_no_access_file_is_named_once(tmp_path: Path, name: str, said: str) -> None:
    path = tmp_path / name
    done = kvdock("token", "add", "one", "--access-file", str(path))
    assert re.fullmatch(f"kvdock: access file {path}: {said}; the file was not changed", refusal(done, 2))


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can make files of others")
def test_root_makes_the_file_for_the_user_whose_folder_it_is(tmp_path: Path) -> None:
    """The server's, which could not read a file of root with mode 0600."""
    folder = tmp_path / "of-the-service"
    folder.mkdir(mode=0o700)
    os.chown(folder, GROUP, GROUP)
    add_token(str(folder / "access.toml"), "one", ["read"])
    found = (folder / "access.toml").stat()
    assert (found.st_uid, found.st_gid, stat.S_IMODE(found.st_mode)) == (GROUP, GROUP, 0o600)


def test_a_command_writes_to_no_file_that_is_put_in_the_place_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As the folder's user could do to root."""
    path, victim = by_hand(tmp_path), tmp_path / "victim"
    victim.write_text("as it was")
    victim.chmod(0o644)

    def read_entries(text: str, name: str, change: access_file.Change) -> str:
        (tmp_path / "access.toml.new").unlink()
        (tmp_path / "access.toml.new").symlink_to(victim)
        return changed(text, name, change)

    changed = access_file._changed
    monkeypatch.setattr(access_file, "_changed", read_entries)
    add_token(str(path), "three", ["read"])
    assert victim.read_text() == "as it was" and stat.S_IMODE(victim.stat().st_mode) == 0o644
