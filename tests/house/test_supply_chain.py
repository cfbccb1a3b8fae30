"""What the server is built from: base images by digest, packages without known vulnerabilities, releases that say where
they come from."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import threading
import venv
import zipfile
from collections.abc import Callable, Iterator
from datetime import date, timedelta
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

import pytest
from paths import ROOT
from sources import sources

from kvdock import _core

pytestmark = pytest.mark.security

TOOLS = str(ROOT / ".venv-tools/bin/python")
needs_tools = pytest.mark.skipif(not Path(TOOLS).exists(), reason="`make setup` has not installed the tools")

# --------------------------------------------------------------------------- base images


def unpinned(recipe: str, given: dict[str, str]) -> list[str]:
    """The images of a Dockerfile that no digest names. `given`: the arguments of its build."""
    values = dict(re.findall(r"^ARG (\w+)(?:=(\S+))?$", recipe, re.MULTILINE)) | given
    images = [
        re.sub(r"\$\{(\w+)\}", lambda match: values[match[1]], image)
        for image in re.findall(r"^FROM (?:--\S+ )*(\S+)", recipe, re.MULTILINE)
    ]
    stages = set(re.findall(r"^FROM .* AS (\S+)$", recipe, re.MULTILINE))
    assert images
    return [image for image in images if image not in stages and not re.fullmatch(r".+@sha256:[0-9a-f]{64}", image)]


def recipes() -> dict[str, str]:
    return {str(path): text for path, text in sources().items() if "Dockerfile" in path.name}


def test_every_base_image_has_a_digest_or_demands_one() -> None:
    assert recipes().keys() == {"Dockerfile", "examples/vllm.Dockerfile"}
    assert unpinned(recipes()["Dockerfile"], {}) == []
    assert unpinned(recipes()["examples/vllm.Dockerfile"], {"DIGEST": f"sha256:{'0' * 64}"}) == []
    without = unpinned(recipes()["examples/vllm.Dockerfile"], {})
    assert len(without) == 2 and {image[-1] for image in without} == {"@"}, "no image has such a name"


@pytest.mark.parametrize("recipe", [
    "FROM python:3.11-slim\n", "FROM --platform=linux/amd64 python@sha256:12 AS build\n", "FROM scratch AS a\nFROM b\n",
    "ARG PYTHON=python:3.11\nFROM ${PYTHON}\n",
])  # fmt: skip
def test_an_image_without_digest_is_found(recipe: str) -> None:
    assert unpinned(recipe, {})


@needs_tools
def test_the_bill_names_what_builds_the_extension() -> None:
    """Debian's packages, where Debian has installed it."""
    program = "import json, sys; sys.path.insert(0, sys.argv[1]); import bill; print(json.dumps(bill.built_with()))"
    command = [TOOLS, "-c", program, str(ROOT / "pins")]
    found = json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    assert all(one["scope"] == "excluded" and one["version"] and one["purl"] for one in found)
    if shutil.which("dpkg-query"):
        names = [one["name"] for one in found]
        forms = (r"g\+\+-\d+|clang-\d+", r"binutils.*", r"libstdc\+\+-\d+-dev", r"libgcc-\d+-dev", "libc6-dev")
        assert [form for form in forms if not any(re.fullmatch(form, name) for name in names)] == [], names


@needs_tools
def test_the_bill_of_a_wheel_has_the_same_bytes_each_time_and_names_the_compiler_of_wheels(tmp_path: Path) -> None:
    wheel = tmp_path / "kvdock_engine-0-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.write(_core.__file__, f"kvdock/{Path(_core.__file__).name}")
    venv.create(tmp_path / "env", symlinks=True)
    packages, = (tmp_path / "env/lib").glob("python3*/site-packages")
    for name in ("one", "two", "three"):
        (packages / f"{name}-1.dist-info").mkdir()
        (packages / f"{name}-1.dist-info/METADATA").write_text(f"Metadata-Version: 2.4\nName: {name}\nVersion: 1\n")
    written = []
    for seed in ("1", "2"):
        command = (TOOLS, ROOT / "pins/bill.py", tmp_path / "env/bin/python", wheel, tmp_path / seed)
        subprocess.run([str(word) for word in command], check=True, env={**os.environ, "PYTHONHASHSEED": seed})
        written.append((tmp_path / seed).read_bytes())
    assert written[0] == written[1]
    found = {one["name"]: one for one in json.loads(written[0])["components"]}
    assert {"one", "two", "three", "ziglang", "libc.so.6"} <= found.keys()
    assert "version" not in found["libc.so.6"], "it is any machine's"
    assert not [name for name in found if name.startswith(("g++", "binutils"))]


# --------------------------------------------------------------------------- vulnerabilities

Record = dict[str, Any]


def record(id: str, package: str, fixed: str, *aliases: str) -> Record:
    ranges = [{"type": "ECOSYSTEM", "events": [{"introduced": "0"}, {"fixed": fixed}]}]
    affected = [{"package": {"name": package, "ecosystem": "PyPI"}, "ranges": ranges}]
    return {"id": id, "summary": id, "aliases": list(aliases), "affected": affected}


DJANGO = {("django", "1.2"): [record("PYSEC-2010-12", "django", "1.2.2", "CVE-2010-3082")]}
PLANTED = DJANGO | {("jinja2", "2.10"): [record("PYSEC-2019-217", "jinja2", "2.10.1", "CVE-2019-10906")]}
OSV = dict[tuple[str, str], list[Record]]


class Gate(NamedTuple):
    """The script with real pip-audit, against a server on loopback that answers like OSV's."""

    folder: Path
    url: str
    records: OSV

    def audit(self, *flags: str, version: str = "2.10", exceptions: str = "") -> subprocess.CompletedProcess[str]:
        bill, listed = self.folder / "bill.json", self.folder / "exceptions.toml"
        bill.write_text(json.dumps({"components": [{"purl": f"pkg:pypi/jinja2@{version}"}, {"name": "libc.so.6"}]}))
        listed.write_text(exceptions)
        command = [TOOLS, str(ROOT / "pins/audit.py"), str(bill), "--exceptions", str(listed), *flags]
        return subprocess.run(command, capture_output=True, text=True, timeout=120)

    def here(self, *flags: str, version: str = "2.10", exceptions: str = "") -> subprocess.CompletedProcess[str]:
        return self.audit("--advisories", self.url, *flags, version=version, exceptions=exceptions)


@pytest.fixture
def gate(tmp_path: Path) -> Iterator[Gate]:
    records: OSV = dict(PLANTED)

    class Answer(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            found = records.get((asked["package"]["name"], asked["version"]), [])
            body = json.dumps({"vulns": found} if found else {}).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Answer) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield Gate(tmp_path, f"http://127.0.0.1:{server.server_port}/", records)
        server.shutdown()
        thread.join()


def exception(
    until: date, id: str = "CVE-2019-10906", package: str = "jinja2", reason: str = "No template here."
) -> str:
    return f'[[exception]]\nid = "{id}"\npackage = "{package}"\nreason = "{reason}"\nuntil = {until}\n'


TODAY = date.today()
LATER = TODAY + timedelta(days=30)


@needs_tools
def test_a_vulnerable_pin_fails_and_names_its_remedy(gate: Gate) -> None:
    done = gate.here("--lenient")
    assert done.returncode == 1
    assert done.stderr == "jinja2 2.10 has PYSEC-2019-217 CVE-2019-10906: fixed in 2.10.1\n"
    done = gate.here(version="2.10.1")
    assert (done.returncode, done.stderr) == (0, ""), "what is fixed passes"
    assert re.match(r"(\d+) of \1 packages were judged", done.stdout) and "django" not in done.stdout


@needs_tools
def test_an_exception_counts_for_its_package_until_it_is_over(gate: Gate) -> None:
    assert gate.here(exceptions=exception(LATER)).returncode == 0
    assert gate.here(exceptions=exception(LATER, package="django")).returncode == 1
    done = gate.here(exceptions=exception(TODAY - timedelta(days=1)), version="2.10.1")
    assert done.returncode == 1 and "CVE-2019-10906 of jinja2 was over on" in done.stderr


@needs_tools
@pytest.mark.parametrize("wrong", [
    exception(LATER, reason=" "), exception(LATER).replace("until = ", "until = 2099-01-01T00:00:00 #"),
    exception(LATER) + "more = 1\n", "[[exception]]\nid = 'PYSEC-2019-217'\n",
])  # fmt: skip
def test_an_exception_without_reason_or_day_is_refused(gate: Gate, wrong: str) -> None:
    done = gate.here("--lenient", exceptions=wrong)
    assert done.returncode == 1 and "wanted id, package, reason (texts) and until (a date)" in done.stderr


@needs_tools
def test_without_advisories_no_package_passes_unnoticed(gate: Gate) -> None:
    nobody = ("--advisories", "http://127.0.0.1:9/")  # the port of `discard`, where nothing listens
    for flags, status in (((), 3), (("--lenient",), 0)):
        done = gate.audit(*nobody, *flags)
        assert done.returncode == status
        assert done.stdout.startswith("0 of ") and re.search(r"NOT judged \(.+\): .*\bjinja2\b", done.stderr)
    done = gate.audit(*nobody, "--lenient", exceptions=exception(TODAY - timedelta(days=1)))
    assert done.returncode == 1, "a day that is over needs no network"


@needs_tools
def test_an_index_that_knows_no_advisory_judges_nothing(gate: Gate) -> None:
    gate.records.clear()
    done = gate.here()
    assert done.returncode == 3 and "not even for django 1.2" in done.stderr


# --------------------------------------------------------------------------- releases


@pytest.fixture
def release(tmp_path: Path) -> Path:
    """A commit of a checkout, and a folder of it with a release's files."""
    checkout = tmp_path / "checkout"
    (checkout / "pins").mkdir(parents=True)
    for name in ("pins/provenance.py", "pins/server.txt", "pyproject.toml", "Dockerfile"):
        (checkout / name).write_text(sources()[PurePosixPath(name)])
    (checkout / ".gitignore").write_text("dist/\n")
    git = ["git", "-C", str(checkout), "-c", "user.name=nobody", "-c", "user.email=nobody@localhost"]
    for words in (["init", "-q"], ["add", "-A"], ["commit", "-qm", "Begin"]):
        subprocess.run([*git, *words], check=True)
    dist = checkout / "dist"
    dist.mkdir()
    (dist / "kvdock-0.1.0-cp311-cp311-linux_x86_64.whl").write_bytes(b"a wheel")
    (dist / "sbom.cdx.json").write_text("{}")
    assert provenance(dist, "write", "pip", "wheel", ".").returncode == 0
    return dist


def provenance(dist: Path, verb: str, *more: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-I", str(dist.parent / "pins/provenance.py"), verb, str(dist), *more]
    return subprocess.run(command, capture_output=True, text=True)


def statement(dist: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((dist / "provenance.json").read_text())
    return found


def test_a_release_states_its_files_commit_command_and_pins(release: Path) -> None:
    found, head = statement(release), subprocess.run(
        ["git", "-C", release, "rev-parse", "HEAD"], capture_output=True, text=True, check=True
    ).stdout.strip()
    assert (found["_type"], found["predicateType"]) == (
        "https://in-toto.io/Statement/v1", "https://slsa.dev/provenance/v1"
    )
    assert [one["name"] for one in found["subject"]] == ["kvdock-0.1.0-cp311-cp311-linux_x86_64.whl", "sbom.cdx.json"]
    built = found["predicate"]["buildDefinition"]
    assert built["externalParameters"] == {"commit": head, "command": ["pip", "wheel", "."]}
    named = {one["name"] for one in built["resolvedDependencies"]}
    assert named == {"source", "Dockerfile", "pins/provenance.py", "pins/server.txt", "pyproject.toml"}
    done = provenance(release, "verify")
    assert (done.returncode, done.stdout) == (0, f"{release}: 2 files are those of commit {head}\n")


def longer(dist: Path) -> None:
    with (dist / "sbom.cdx.json").open("a") as file:
        file.write(" ")


def gone(dist: Path) -> None:
    (dist / "sbom.cdx.json").unlink()


def more(dist: Path) -> None:
    (dist / "kvdock-0.1.0-cp312-cp312-linux_x86_64.whl").touch()


def another_pin(dist: Path) -> None:
    found = statement(dist)
    found["predicate"]["buildDefinition"]["resolvedDependencies"][-2]["digest"]["sha256"] = "0" * 64
    (dist / "provenance.json").write_text(json.dumps(found))


def another_commit(dist: Path) -> None:
    found = statement(dist)
    found["predicate"]["buildDefinition"]["externalParameters"]["commit"] = "0" * 40
    (dist / "provenance.json").write_text(json.dumps(found))


def another_builder(dist: Path) -> None:
    found = statement(dist)
    found["predicate"]["runDetails"]["builder"]["id"] = "urn:somebody"
    (dist / "provenance.json").write_text(json.dumps(found))


def no_statement(dist: Path) -> None:
    (dist / "provenance.json").write_text("[]")


@pytest.mark.parametrize(("tamper", "named"), [
    (longer, "file sbom.cdx.json: said"), (gone, "file sbom.cdx.json: said"), (more, "cp312-linux_x86_64.whl: said"),
    (another_pin, "input pins/server.txt: said"), (another_commit, "git ls-tree"), (another_builder, "the rest of the"),
    (no_statement, "is no statement of a release"),
])  # fmt: skip
def test_what_was_changed_after_the_release_is_named(release: Path, tamper: Callable[[Path], None], named: str) -> None:
    tamper(release)
    done = provenance(release, "verify")
    assert done.returncode == 1 and named in done.stderr and "Traceback" not in done.stderr, done.stderr


def test_no_release_is_made_of_a_checkout_with_changes(release: Path) -> None:
    (release.parent / "pins/server.txt").write_text("fastapi==0.1\n")
    done = provenance(release, "write", "pip", "wheel", ".")
    assert done.returncode == 1 and done.stderr == "the checkout differs from its commit: pins/server.txt\n"
