"""`kvdock access-token` adds to an access file, and all users that could read the file still can."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from kvdock.api.access.access_file import add_token, digest_of, read
from kvdock.api.errors import AccessFileError

pytestmark = pytest.mark.security

GROUP = 7410


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
    add_token(str(link), "team-a", ["read"])
    found = path.stat()
    assert (found.st_uid, found.st_gid, stat.S_IMODE(found.st_mode)) == (*owner, 0o640)
    assert link.is_symlink() and len(read(str(path))) == 1


def test_what_would_be_wrong_leaves_the_file_as_it_was(tmp_path: Path) -> None:
    path = tmp_path / "access.toml"
    add_token(str(path), "one", ["read"])
    before = path.read_bytes()
    for name, scopes, tenant in (("one", ["read"], ""), ("two", ["root"], ""), ("two", ["read"], "Team A")):
        with pytest.raises(AccessFileError):
            add_token(str(path), name, scopes, tenant)
    assert path.read_bytes() == before and list(tmp_path.iterdir()) == [path]
