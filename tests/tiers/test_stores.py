"""Stores are found by entry points: kvdock's own ones and those of other packages."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from functools import partial
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path

import pytest
from api_helpers import ServerProcess, eventually
from mover_steps import use
from paths import ROOT
from tier_engine import CHUNK_TOKENS, TierEngine, manifest
from tier_server import PART, SETTINGS, is_served, stored_and_gone

from kvdock.api.tiers.process import PROGRAM
from kvdock.protocol.mover_schemas import MoverConfig
from kvdock.tiers.mover import opening
from kvdock.tiers.mover.opening import find_store
from kvdock.tiers.tier import Deadline, Store, Tier, TierError, TierUrlError

pytestmark = [pytest.mark.tiers, pytest.mark.timeout(120)]

OWN = ["mooncake", "objects", "peers", "redis"]
PACKAGE = '''
from pathlib import Path
from urllib.parse import urlsplit

from kvdock.tiers.disk.tier import DiskTier
from kvdock.tiers.tier import Deadline, Store


class ShelfTier(DiskTier):
    name = "shelf"


def open_tier(url: str, deadline: Deadline) -> ShelfTier:
    return ShelfTier.open(Path(urlsplit(url).path), 256 << 20)


STORE = Store(open_tier)


def open_later(url: str, deadline: Deadline) -> ShelfTier:
    if not Path(urlsplit(url).path).is_dir():
        raise KeyError("no shelf")
    tier = open_tier(url, deadline)
    tier.name = "shelf_later"
    return tier


LATER = Store(open_later)
'''


@pytest.fixture
def package(tmp_path: Path) -> Path:
    """A folder with a package of another project, as pip installs it. `shelf` is a store; the others are broken."""
    folder = tmp_path / "packages"
    metadata = folder / "shelves-1.0.dist-info"
    metadata.mkdir(parents=True)
    (folder / "shelves.py").write_text(PACKAGE)
    (folder / "shelves_old.py").write_text("import a_module_that_is_not_there\n")
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: shelves\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text(
        "[kvdock.tiers]\nshelf = shelves:STORE\nmisnamed = shelves:STORE\nuntyped = shelves:open_tier\n"
        "old = shelves_old:STORE\nshelf_later = shelves:LATER\n"
    )
    return folder


@pytest.fixture
def importable(package: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.syspath_prepend(str(package))
    yield
    sys.modules.pop("shelves", None)


class WithPackage(ServerProcess):
    """A server with a mover that finds the packages in this folder."""

    def __init__(self, packages: Path, **settings: object) -> None:
        path = os.pathsep.join(filter(None, (str(packages), os.environ.get("PYTHONPATH", ""))))
        self.before = partial(use, PROGRAM, {"PYTHONPATH": path})
        super().__init__(**settings)


def settings(tmp_path: Path, names: str) -> dict[str, object]:
    without_disk = {name: value for name, value in SETTINGS.items() if name != "disk_bytes"}
    return {**without_disk, "tier_urls": " ".join(f"{name}=file://{tmp_path}/{name}" for name in names.split())}


def test_what_a_store_of_another_package_keeps_comes_back(package: Path, tmp_path: Path) -> None:
    with WithPackage(package, **settings(tmp_path, "shelf")) as server:
        engine = TierEngine(server.unix, manifest(PART))
        is_served(server, 1)
        keys = stored_and_gone(engine, 8)
        found = engine.awaited(keys)
        assert found.hit_tokens == 8 * CHUNK_TOKENS
        engine.read(keys, found)
        engine.release(found)
        assert [(one.name, one.state) for one in engine.client.status().tiers] == [("shelf", "open")]
        engine.close()


def test_a_store_that_no_package_has_is_off_and_the_status_says_why(tmp_path: Path) -> None:
    with ServerProcess(**settings(tmp_path, "shelf")) as server:
        engine = TierEngine(server.unix, manifest(PART))
        eventually(lambda: [one.why for one in engine.client.status().tiers] == [opening.WRONG_SETTING], 30.0)
        (tier,) = engine.client.status().tiers
        assert tier.state == "off" and "'shelf'" in tier.error and ", ".join(OWN) in tier.error
        engine.close()


@pytest.mark.usefixtures("importable")
def test_a_tier_has_the_name_of_its_entry_point(tmp_path: Path) -> None:
    tier = opening._open_store("shelf", f"file://{tmp_path}/store")
    tier.close(Deadline(5.0))
    with pytest.raises(TierUrlError, match="found a tier named 'shelf', wanted 'misnamed'"):
        opening._open_store("misnamed", f"file://{tmp_path}/store")
    opening._open_store("shelf", f"file://{tmp_path}/store").close(Deadline(5.0))  # the folder is not in use any more


@pytest.mark.usefixtures("importable")
@pytest.mark.parametrize(("name", "why", "error"), [
    ("objects", opening.WRONG_SETTING, "wanted file:///PATH of a folder that exists"),
    ("shelf_later", opening.UNOPENED, "KeyError: 'no shelf'"),
])
def test_a_tier_that_cannot_be_opened_for_whatever_reason_is_tried_again(
    name: str, why: str, error: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As after the mover was restarted while a folder is not mounted."""
    monkeypatch.setattr(opening, "WRONG_S", 0.05)
    monkeypatch.setattr(opening, "RETRY_S", 0.05)
    folder = tmp_path / "mounted"
    config = MoverConfig(address="", instance_prefix="", stores={name: folder.as_uri()})
    assert error in opening.try_to_open(config)[name]
    tiers = opening.OpeningTiers(config, None)
    eventually(lambda: tiers.unopened[name][0] == why and error in tiers.unopened[name][1])
    folder.mkdir()
    opened: list[Tier] = []

    def is_opened() -> bool:
        opened.extend(tiers.take_opened())
        return bool(opened)

    eventually(is_opened)
    tiers.close()
    opened[0].close(Deadline(5.0))
    assert not tiers.unopened


@pytest.mark.usefixtures("importable")
def test_an_entry_point_that_names_no_store_is_refused() -> None:
    with pytest.raises(TierUrlError, match=r"found function at shelves:open_tier, wanted a kvdock\.tiers\.tier\.Store"):
        find_store("untyped")
    with pytest.raises(TierError, match=r"old: shelves_old:STORE cannot be imported: .*a_module_that_is_not_there"):
        find_store("old")


def test_own_stores_are_found_in_a_checkout_that_is_only_on_the_path(monkeypatch: pytest.MonkeyPatch) -> None:
    without_metadata = [path for path in sys.path if "site-packages" not in path]
    monkeypatch.setattr(sys, "path", without_metadata)
    assert not any(entry_points(group=opening.GROUP)), "the metadata of an installation is still found"
    for name in OWN:
        assert isinstance(find_store(name), Store)


def test_own_stores_are_those_of_the_project_file() -> None:
    assert Path(opening.__file__).is_relative_to(ROOT)
    own = opening._in_checkout()
    assert sorted(one.name for one in own) == OWN and all(isinstance(one, EntryPoint) for one in own)
