"""Lays out CPythons of both processors from Debian's packages: `python packages/pythons.py FOLDER [3.X …]`.

FOLDER/ARCH/3.X/ is then a tree with the interpreter, its libraries and its headers, as packages/wheels.py takes it in
KVDOCK_PYTHONS. Nothing is installed on this machine: apt works in a state of its own, with this machine's mirror. There
is no CPython 3.12 in any of Debian's suites. To run those of the other processor, qemu-user-static is needed.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Final

SUITES: Final = {"3.11": "bookworm", "3.13": "trixie", "3.14": "forky"}
ARCHES: Final = {"x86_64": "amd64", "aarch64": "arm64"}
KEYS: Final = "/usr/share/keyrings/debian-archive-keyring.gpg"


def mirror() -> str:
    for path in (Path("/etc/apt/sources.list.d/debian.sources"), Path("/etc/apt/sources.list")):
        text = path.read_text() if path.is_file() else ""
        if found := re.search(r"^(?:URIs:|deb(?: \[[^\]]*\])?) (\S+)", text, re.MULTILINE):
            return found[1]
    raise SystemExit("this machine's apt names no mirror of Debian")


def apt(state: Path, suite: str, arch: str, *words: str) -> None:
    """Runs apt-get as on an empty machine of that processor."""
    (state / "lists/partial").mkdir(parents=True, exist_ok=True)
    (state / "archives/partial").mkdir(parents=True, exist_ok=True)
    (state / "status").touch()
    (state / "sources.list").write_text(f"deb [arch={arch} signed-by={KEYS}] {mirror()} {suite} main\n")
    settings = {
        "Dir::State": state, "Dir::State::status": state / "status", "Dir::State::lists": state / "lists",
        "Dir::Cache": state, "Dir::Cache::archives": state / "archives", "Dir::Etc::sourcelist": state / "sources.list",
        "Dir::Etc::sourceparts": "/dev/null", "APT::Architecture": arch, "APT::Architectures": arch,
        "APT::Sandbox::User": "root", "Acquire::Languages": "none", "Debug::NoLocking": "1",
        "APT::Install-Recommends": "0",
    }
    options = [f"-o{name}={value}" for name, value in settings.items()]
    subprocess.run(["apt-get", "-qq", *options, *words], check=True, stdin=subprocess.DEVNULL,
                   env={**os.environ, "DEBIAN_FRONTEND": "noninteractive"})


def lay_out(folder: Path, version: str, arch: str) -> None:
    tree, state = folder / arch / version, folder / "apt" / arch / version
    names = (SUITES[version], ARCHES[arch])
    apt(state, *names, "update")
    apt(state, *names, "install", "--yes", "--download-only", f"python{version}", "libstdc++6")
    headers = state / "headers"
    headers.mkdir(exist_ok=True)
    # Its dependencies have the C library's headers, which the compiler has itself.
    apt(state, *names, "install", "--yes", "--download-only", f"-oDir::Cache::archives={headers}",
        f"libpython{version}-dev")
    found = [*(state / "archives").glob("*.deb"), *headers.glob(f"libpython{version}-dev_*.deb")]
    for name in found:
        (tree / "usr").mkdir(parents=True, exist_ok=True)
        for link in ("lib", "lib64", "bin", "sbin"):  # as on a machine whose / is merged with /usr
            if not (tree / link).exists():
                (tree / "usr" / link).mkdir(exist_ok=True)
                (tree / link).symlink_to(f"usr/{link}")
        packed = subprocess.run(["dpkg-deb", "--fsys-tarfile", name], check=True, stdout=subprocess.PIPE).stdout
        subprocess.run(["tar", "-x", "--keep-directory-symlink", "-C", tree], input=packed, check=True)
    print(f"{tree}: {len(found)} packages", flush=True)


if __name__ == "__main__":
    for version in sys.argv[2:] or SUITES:
        for arch in ARCHES:
            lay_out(Path(sys.argv[1]).absolute(), version, arch)
