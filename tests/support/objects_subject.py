"""Object stores under the conformance suite of tiers: an S3 server in a process of its own, and a folder."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import ClassVar
from urllib.request import Request, urlopen

import pytest
from ports import held_port
from tier_helpers import patient
from tier_subject import ServedSubject, StoreProcess, TierSubject, files_of_64_kib

from kvdock.tiers.record import PartName
from kvdock.tiers.stores.objects import ObjectTier, open_tier
from kvdock.tiers.tier import Tier

BUCKET = "kvdock-test"
AUTHORIZATION = (
    "AWS4-HMAC-SHA256 Credential=me/20260101/us-east-1/s3/aws4_request, SignedHeaders=host, Signature=0"
)
KEYS = {"AWS_ACCESS_KEY_ID": "me", "AWS_SECRET_ACCESS_KEY": "secret", "AWS_REGION": "us-east-1"}


class S3Server(StoreProcess):
    """Keeps objects in its memory: `limit_bytes` of them at most, if that is not 0, and notes beside them, unless
    `with_notes`. `flag`: while this file is there, it takes nothing. `half`: while this one is there, an answer stops
    in its midst."""

    def __init__(self, folder: Path, limit_bytes: int = 0, *, with_notes: bool = False) -> None:
        pytest.importorskip("moto")
        self.port, self.flag, self.half, self._log = held_port(), folder / "full", folder / "half", folder / "log"
        self._limit_bytes, self._with_notes = limit_bytes, with_notes
        self.start()

    @property
    def url(self) -> str:
        return f"s3://{BUCKET}/a/prefix?endpoint=http://127.0.0.1:{self.port}"

    def start(self) -> None:
        program = Path(__file__).with_name("s3_process.py")
        with self._log.open("ab") as log:
            what = (self.port, self.flag, self.half, self._limit_bytes, int(self._with_notes))
            self.process = subprocess.Popen(
                [sys.executable, str(program), *map(str, what)], stdout=subprocess.PIPE, stderr=log
            )
        assert self.process.stdout is not None
        if not self.process.stdout.readline():
            self.kill()
            raise AssertionError(self._log.read_text())
        self.call("PUT", "")

    def call(self, method: str, path: str, data: bytes = b"") -> bytes:
        """One request for the bucket's own URL, or one below. The server looks at no signature, but wants one."""
        request = Request(f"http://127.0.0.1:{self.port}/{BUCKET}{path}", data or None, method=method)
        request.add_header("Authorization", AUTHORIZATION)
        request.add_header("Content-Type", "application/octet-stream")
        with urlopen(request, timeout=30) as answer:
            body: bytes = answer.read()
            return body


@pytest.fixture(scope="module")
def s3_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    """One for the tests of a module, which have it as `server = s3_server`."""
    one = S3Server(tmp_path_factory.mktemp("s3"))
    yield one
    one.kill()


class ObjectsSubject(TierSubject):
    """What both have in common: an object is read, changed and written back."""

    is_shared: ClassVar[bool] = True

    def read(self, name: PartName) -> bytes:
        raise NotImplementedError

    def write(self, name: PartName, data: bytes) -> None:
        raise NotImplementedError

    def flip(self, name: PartName, at: int) -> None:
        data = bytearray(self.read(name))
        data[at] ^= 1
        self.write(name, bytes(data))

    def truncate(self, name: PartName) -> None:
        data = self.read(name)
        self.write(name, data[: len(data) // 2])

    def misplace(self, name: PartName, other: PartName) -> None:
        self.write(name, self.read(other))


class S3Subject(ServedSubject, ObjectsSubject):
    name = "s3"
    server: S3Server

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        pytest.importorskip("obstore")
        self.server = S3Server(folder)

    def reset(self) -> None:
        """Names differ from test to test, so what is there disturbs no other."""

    def open(self) -> Tier:
        with environment(KEYS):
            return open_tier(self.server.url, patient())

    def read(self, name: PartName) -> bytes:
        return self.server.call("GET", f"/a/prefix/{name.text()}")

    def write(self, name: PartName, data: bytes) -> None:
        self.server.call("PUT", f"/a/prefix/{name.text()}", data)

    @contextmanager
    def exhausted(self) -> Iterator[None]:
        self.server.flag.touch()
        try:
            yield
        finally:
            self.server.flag.unlink()


class FolderSubject(ObjectsSubject):
    name = "folder"

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        pytest.importorskip("obstore")

    @property
    def store(self) -> Path:
        return self.folder / "a store"

    def reset(self) -> None:
        shutil.rmtree(self.store, ignore_errors=True)
        self.store.mkdir()

    def open(self) -> Tier:
        return open_tier(self.store.as_uri(), patient())

    def read(self, name: PartName) -> bytes:
        return (self.store / name.text()).read_bytes()

    def write(self, name: PartName, data: bytes) -> None:
        path = self.store / name.text()
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)

    def exhausted(self) -> AbstractContextManager[None]:
        return files_of_64_kib()


@contextmanager
def environment(values: dict[str, str]) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        for name, value in values.items():
            patch.setenv(name, value)
        yield


@contextmanager
def opened(url: str, **variables: str) -> Iterator[ObjectTier]:
    """A tier, with KEYS and these variables in the environment as long as it is open."""
    with environment(KEYS | variables):
        tier = open_tier(url, patient())
        try:
            yield tier
        finally:
            tier.close(patient())
