"""Writes a bill of materials of the server as CycloneDX JSON: its packages, and the libraries that the extension links.

    python pins/bill.py ENVIRONMENT EXTENSION FILE

As `excluded`, which says that they are not shipped, it lists the Debian packages of compiler and linker, and those
whose code these put into the extension. ENVIRONMENT is the Python of an environment that holds what pins/server.txt
lists; EXTENSION the built `_core`, or a wheel of `make wheels` that has one: its compiler and C++ library are zig's. It
needs the packages of pins/tools.txt and binutils, but no network. The same input makes the same file.
"""

from __future__ import annotations

import importlib.metadata
import json
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import Any
from urllib.parse import quote

from cyclonedx.schema import SchemaVersion
from cyclonedx.validation.json import JsonStrictValidator

ROOT = Path(__file__).parent.parent
PROJECT = ROOT / "packages/server/pyproject.toml"
ENGINE = "kvdock-engine"
VERSION = re.findall(r'__version__ = "(.+)"', (ROOT / "kvdock/__init__.py").read_text())[0]


def output(*command: str) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def needed(extension: Path) -> list[str]:
    """The shared libraries that it links."""
    wanted = re.findall(r"\(NEEDED\).*\[(.+)\]", output("readelf", "--wide", "--dynamic", str(extension)))
    if not wanted:
        raise SystemExit(f"{extension} links no library: it is not the extension")
    return sorted(wanted)


def linked(extension: Path) -> list[dict[str, Any]]:
    """A component for each of them; its version is the Debian package's, where there is one."""
    paths = dict(re.findall(r"^\s*(\S+) .*=> (\S+)$", output("ldconfig", "--print-cache"), re.MULTILINE))
    return [component(name, paths.get(name)) for name in needed(extension)]


def of_extension(file: Path) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """What the extension links, and what builds it."""
    if file.suffix != ".whl":
        return linked(file), built_with()
    with tempfile.TemporaryDirectory() as folder:
        return [of_any_machine(name) for name in needed(extension_of(file, folder))], zig()


def extension_of(wheel: Path, folder: str) -> Path:
    with zipfile.ZipFile(wheel) as archive:
        name, = (name for name in archive.namelist() if re.fullmatch(r"kvdock/_core\..*\.so", name))
        return Path(archive.extract(name, folder))


def of_any_machine(soname: str) -> dict[str, Any]:
    """A library whose version is that of the machine where it runs."""
    return {"type": "library", "name": soname, "bom-ref": f"linked:{soname}"}


def zig() -> list[dict[str, Any]]:
    version = importlib.metadata.version("ziglang")
    return [{
        "type": "application", "name": "ziglang", "bom-ref": "built-with:ziglang", "scope": "excluded",
        "version": version, "purl": f"pkg:pypi/ziglang@{version}",
    }]


def built_with() -> list[dict[str, Any]]:
    """A component for each Debian package that has a tool which builds the extension, or code that is linked in."""
    tools = [shutil.which(name) for name in ("c++", "ld")]
    parts = [output("c++", f"-print-file-name={name}").strip() for name in ("libstdc++.a", "libgcc.a", "crti.o")]
    packages = {found for path in [*tools, *parts] if path and (found := debian_package(str(Path(path).resolve())))}
    return [
        {"type": "application", "name": name, "bom-ref": f"built-with:{name}", "scope": "excluded"}
        | versioned(name, version) for name, version in sorted(packages)
    ]


def versioned(name: str, version: str) -> dict[str, str]:
    return {"version": version, "purl": f"pkg:deb/debian/{quote(name)}@{quote(version)}"}


def component(soname: str, path: str | None) -> dict[str, Any]:
    found = of_any_machine(soname)
    package = debian_package(path) if path else None
    if package:
        found |= versioned(*package)
    return found


def debian_package(path: str) -> tuple[str, str] | None:
    """Name and version. /lib may be a link to /usr/lib, of which dpkg knows one."""
    for known in (path, str(Path(path).resolve()), path.removeprefix("/usr"), f"/usr{path}"):
        try:
            owner = output("dpkg-query", "--search", known).partition(":")[0]
            return owner, output("dpkg-query", "--show", "--showformat", "${Version}\n", owner).splitlines()[0]
        except (OSError, subprocess.CalledProcessError):
            continue
    return None


def main(environment: str, extension: str, written: str) -> None:
    tool = str(Path(sys.executable).with_name("cyclonedx-py"))
    bill = json.loads(output(
        tool, "environment", environment, "--pyproject", str(PROJECT), "--output-reproducible", "--of", "JSON"
    ))
    libraries, tools = of_extension(Path(extension))
    references = [library["bom-ref"] for library in libraries]
    bill["components"] += libraries + tools
    root = next(entry for entry in bill["dependencies"] if entry["ref"] == bill["metadata"]["component"]["bom-ref"])
    if not any(one["name"] == ENGINE for one in bill["components"]):  # where it is not installed: a checkout's lists
        bill["components"].append({
            "type": "library", "name": ENGINE, "bom-ref": ENGINE, "version": VERSION,
            "purl": f"pkg:pypi/{ENGINE}@{VERSION}",
        })
        references.append(ENGINE)
    root["dependsOn"] = sorted([*root.get("dependsOn", []), *references])
    known = {one["ref"] for one in bill["dependencies"]}
    added = [*references, *(tool["bom-ref"] for tool in tools)]
    bill["dependencies"] += [{"ref": reference} for reference in added if reference not in known]
    text = json.dumps(bill, indent=1, sort_keys=True) + "\n"
    if wrong := JsonStrictValidator(SchemaVersion.from_version(bill["specVersion"])).validate_str(text):
        raise SystemExit(f"the bill is no valid CycloneDX {bill['specVersion']}: {wrong}")
    Path(written).write_text(text)
    print(f"{written}: {len(bill['components'])} components")


if __name__ == "__main__":
    main(*sys.argv[1:])
