"""Builds, audits and tries out what is published: `make wheels`, or `packages/wheels.py [--quick] [--untried]`.

A wheel of kvdock-engine for each processor and Python, tagged manylinux_2_28; the wheel of kvdock, for all; the source
archives. Device code is compiled once. zig's C++ compiler (of PyPI) has the headers and stubs of glibc 2.28 and links
its own C++ library statically, so the machine that builds may be newer and of the other processor. What the source
archives hold is built again in another folder, for one Python: all files must have the same bytes.

Headers and interpreters of a Python come from the first of these that has them:
1. KVDOCK_PYTHONS, folders separated by colons, each of which has `ARCH/3.X/`, a tree with `usr/` as
   packages/pythons.py makes it from packages of the distribution, or `bin/python3.X` (native);
2. `python3.X` on the path, for the processor of this machine;
3. for headers alone: those of the same Python for another processor. Its headers are the same, but for macros of
   their configuration that no public header reads.
A wheel without any headers is not built, and one without an interpreter not tried out; then the last lines say which
and why, and the exit status is 3 (1: something failed). With --untried, what is built and not tried out is no failure.
"""

from __future__ import annotations

import argparse
import gzip
import io
import os
import platform
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).parent.parent
WORK: Final = ROOT / "build" / "wheels"
TOOLS: Final = ROOT / ".venv-tools" / "bin"
NVCC: Final = ".venv-nvcc/lib/python3*/site-packages/nvidia/cu*"
GLIBC: Final = "2.28"
ARCHES: Final = ("x86_64", "aarch64")
VERSIONS: Final = ("3.11", "3.12", "3.13", "3.14")
SEVERAL_MISSING: Final = 3
LOADERS: Final = {"x86_64": "ld-linux-x86-64.so.2", "aarch64": "ld-linux-aarch64.so.1"}


class NotTried(Exception):
    """A wheel was built, and could not be tried out here."""


class Failed(Exception):
    """A sentence for whoever called."""


@dataclass(frozen=True)
class Target:
    arch: str
    version: str
    headers: tuple[Path, ...]
    """Folders to include; none: there are no headers of this Python."""
    program: tuple[str, ...]
    """What runs this Python here; empty: nothing does."""
    environ: tuple[tuple[str, str], ...] = ()

    @property
    def tag(self) -> str:
        return f"cp{self.version.replace('.', '')}"

    @property
    def platform(self) -> str:
        return f"manylinux_{GLIBC.replace('.', '_')}_{self.arch}"

    def __str__(self) -> str:
        return f"CPython {self.version} on {self.arch}"


def run(*command: object, say: bool = False, **environ: str) -> str:
    """Its output. Raises Failed."""
    done = subprocess.run(
        [str(word) for word in command], cwd=ROOT, env={**os.environ, **environ}, text=True, stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )
    if say or done.returncode:
        print(done.stdout[-6000:].rstrip(), flush=True)
    if done.returncode:
        raise Failed(f"{' '.join(map(str, command))[:400]} ended with {done.returncode}")
    return done.stdout


# --------------------------------------------------------------------------- Pythons


def targets(*, quick: bool) -> list[Target]:
    versions = (f"{sys.version_info.major}.{sys.version_info.minor}",) if quick else VERSIONS
    return [target(arch, version) for arch in ARCHES for version in versions]


def target(arch: str, version: str) -> Target:

    for folder in given_folders():
        tree = folder / arch / version
        if (include := tree / "usr/include" / f"python{version}" / "Python.h").is_file():
            return Target(arch, version, (include.parent, include.parent.parent), *in_tree(tree, arch, version))
    if arch == platform.machine() and (found := native(version)):
        # -S: what is installed beside this interpreter is out of reach.
        return Target(arch, version, (found[1],), (found[0], "-S"))
    for other in ARCHES:
        if other != arch and (headers := target_headers(other, version)):
            return Target(arch, version, headers, ())
    return Target(arch, version, (), ())


def given_folders() -> list[Path]:
    return [Path(name) for name in os.environ.get("KVDOCK_PYTHONS", "").split(":") if name]


def target_headers(arch: str, version: str) -> tuple[Path, ...]:
    return (found[1],) if arch == platform.machine() and (found := native(version)) else ()


def native(version: str) -> tuple[str, Path] | None:
    """An interpreter of this machine, and its headers."""
    own = sys.executable if version == f"{sys.version_info.major}.{sys.version_info.minor}" else None
    path = os.pathsep.join([*(f"{folder}/bin" for folder in given_folders()), os.environ.get("PATH", os.defpath)])
    for program in filter(None, (own, shutil.which(f"python{version}", path=path))):
        asked = "import sysconfig; print(sysconfig.get_path('include')); print(sysconfig.get_python_version())"
        done = subprocess.run([program, "-c", asked], capture_output=True, text=True)
        include, _, said = done.stdout.strip().partition("\n")
        if done.returncode == 0 and said == version and (Path(include) / "Python.h").is_file():
            return program, Path(include)
    return None


def in_tree(tree: Path, arch: str, version: str) -> tuple[tuple[str, ...], tuple[tuple[str, str], ...]]:
    """What runs the Python of a tree: by the tree's own loader, under an emulator where this is another processor."""
    python, libraries = tree / "usr/bin" / f"python{version}", tree / "usr/lib" / f"{arch}-linux-gnu"
    loader = next((path for path in (tree / "usr/lib64", libraries, tree / "lib64", tree / "lib")
                   if (path / LOADERS[arch]).is_file()), None)
    emulator = () if arch == platform.machine() else (shutil.which(f"qemu-{arch}-static") or "",)
    if not python.is_file() or loader is None or "" in emulator:
        return (), ()
    loading = (str(loader / LOADERS[arch]), "--library-path", str(libraries))
    return (*emulator, *loading, str(python)), (("PYTHONHOME", str(tree / "usr")),)


# --------------------------------------------------------------------------- what is built


def epoch() -> str:
    """The time that all files carry: that of the commit."""
    if given := os.environ.get("SOURCE_DATE_EPOCH"):
        return given
    done = subprocess.run(["git", "-C", ROOT, "log", "-1", "--format=%ct"], capture_output=True, text=True)
    return done.stdout.strip() or "315532800"


def kernels(source: Path, work: Path) -> Path:
    """The device code, compiled once for all wheels, by one nvcc on all machines (pins/nvcc.txt)."""
    folder, toolkit = work / "kernels", next(ROOT.glob(NVCC))
    run(sys.executable, "-m", "cmake", "-G", "Ninja", "-S", source, "-B", folder, "-DKVDOCK_CUDA=require",
        f"-DPython_EXECUTABLE={sys.executable}", f"-Dpybind11_DIR={pybind11()}", CUDA_HOME=str(toolkit))
    run(sys.executable, "-m", "cmake", "--build", folder, "--target", "kernels")
    return folder / "kernels.fatbin"


def pybind11() -> str:
    return run(sys.executable, "-m", "pybind11", "--cmakedir").strip()


def compiler(arch: str) -> Path:
    """A program that compiles C++ for that processor and glibc 2.28."""
    path = WORK / f"c++-{arch}"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f'#!/bin/sh\nexec {TOOLS / "python"} -m ziglang c++ -target {arch}-linux-gnu.{GLIBC} "$@"\n')
    path.chmod(0o755)
    return path


def engine_wheel(wanted: Target, image: Path, out: Path, source: Path = ROOT, work: Path = WORK) -> Path:
    """Builds it with the Python that runs here, in a build folder for each processor, then renames its tags."""
    suffix = f".cpython-{wanted.tag[2:]}-{wanted.arch}-linux-gnu.so"
    # One level of optimisation in every step: zig builds its C++ library once for each. No path of this machine is in
    # the file, of the sources or of zig's headers. The machine's strip knows its own processor alone.
    foreign = {} if wanted.arch == platform.machine() else {"CMAKE_STRIP": ""}
    flags = f"-O2 -ffile-prefix-map={ROOT}=. -ffile-prefix-map={source}=." + (" -g0" if foreign else "")
    defines = {
        "KVDOCK_FATBIN": image, "KVDOCK_PYTHON_HEADERS": ";".join(map(str, wanted.headers)),
        "PYTHON_MODULE_EXTENSION": suffix, "PYTHON_MODULE_DEBUG_POSTFIX": "",
        # What CMake tries is compiled and not linked, else zig would build its library for programs, too.
        "CMAKE_TRY_COMPILE_CONFIGURATION": "Release", "CMAKE_TRY_COMPILE_TARGET_TYPE": "STATIC_LIBRARY",
        "CMAKE_SYSTEM_PROCESSOR": wanted.arch,
        "CMAKE_INTERPROCEDURAL_OPTIMIZATION": "OFF", "CMAKE_CXX_COMPILER": compiler(wanted.arch),
        "CMAKE_CXX_FLAGS": flags, **foreign,
    }
    with tempfile.TemporaryDirectory() as folder:
        run(sys.executable, "-m", "pip", "wheel", "--quiet", "--no-build-isolation", "--no-deps", "--wheel-dir", folder,
            f"--config-settings=build-dir={work / wanted.arch}",
            *(f"--config-settings=cmake.define.{name}={value}" for name, value in defines.items()), source)
        made, = Path(folder).glob("*.whl")
        run(TOOLS / "python", "-m", "wheel", "tags", "--remove", "--python-tag", wanted.tag, "--abi-tag", wanted.tag,
            "--platform-tag", wanted.platform, made)  # audit() judges whether that is true
        made, = Path(folder).glob("*.whl")
        return Path(shutil.move(made, out / made.name))


def others(out: Path, engine: Path, server: Path) -> list[Path]:
    """The wheel of kvdock, which any Python takes, and the source archives of both folders."""
    run(sys.executable, "-m", "pip", "wheel", "--quiet", "--no-build-isolation", "--no-deps", "--wheel-dir", out,
        server)
    made = []
    for folder in (engine, server):
        program = "import os, sys; from scikit_build_core.build import build_sdist as b; os.chdir(sys.argv[1]); " \
            "print(b(sys.argv[2]))"
        made.append(out / run(sys.executable, "-c", program, folder, out).splitlines()[-1])
        put_in_order(made[-1])
    return [*out.glob("kvdock-*-py3-none-any.whl"), *made]


def put_in_order(archive: Path) -> None:
    """Its files by name: else they are in the order that the file system gives."""
    with tarfile.open(archive) as old:
        new = io.BytesIO()
        with tarfile.open(fileobj=new, mode="w", format=tarfile.PAX_FORMAT) as in_order:
            for member in sorted(old, key=lambda member: member.name):
                in_order.addfile(member, old.extractfile(member) if member.isfile() else None)
    archive.write_bytes(gzip.compress(new.getvalue(), mtime=int(os.environ["SOURCE_DATE_EPOCH"])))


# --------------------------------------------------------------------------- what must hold


def audit(wheel: Path, wanted: Target) -> str:
    """What auditwheel says of a wheel. Raises Failed unless its tag holds and it has the kernels' code."""
    said = re.sub(r"\s+", " ", run(TOOLS / "auditwheel", "show", wheel))
    found = re.search(r'consistent with the following platform tag: "manylinux_2_(\d+)_(\w+)"', said)
    if found is None or int(found[1]) > int(GLIBC[2:]) or found[2] != wanted.arch:
        raise Failed(f"{wheel.name}: wanted {wanted.platform}, auditwheel says {said}")
    needed = sorted(set(re.findall(r"(lib[\w+-]+\.so\.\d+)", said)))
    return f"{wheel.name}: {wheel.stat().st_size / 1e6:.1f} MB, symbols of glibc <= 2.{found[1]}, {', '.join(needed)}"


def check_reproduced(wanted: Target, out: Path) -> str:
    """Builds what the source archives hold, archives included, in another folder. Raises Failed if a file of `out` has
    other bytes."""
    with tempfile.TemporaryDirectory(prefix="kvdock-again-") as name:
        folder, again = Path(name), Path(name, "dist")
        again.mkdir()
        for archive in out.glob("*.tar.gz"):
            shutil.unpack_archive(archive, folder, filter="data")
        engine, server = (next(folder.glob(f"{name}-[0-9]*")) for name in ("kvdock_engine", "kvdock"))
        for source in (engine, server):
            (source / "PKG-INFO").unlink()  # an archive of an archive would have it twice
        shutil.copy(ROOT / "kvdock/_core.pyi", engine / "kvdock")  # made by the checkout's own installation
        made = [engine_wheel(wanted, kernels(engine, folder), again, engine, folder), *others(again, engine, server)]
        differing = [path.name for path in made if path.read_bytes() != (out / path.name).read_bytes()]
        if differing:
            kept = Path(shutil.move(again, tempfile.mkdtemp(prefix="kvdock-differing-")))
            raise Failed(f"not reproducible: {', '.join(differing)}; what was built again is in {kept}")
        return f"built again in another folder, with the same bytes: {', '.join(path.name for path in made)}"


def check_metadata(out: Path) -> None:
    files = sorted(out.glob("kvdock*"))
    run(TOOLS / "twine", "check", "--strict", *files)
    run(TOOLS / "check-wheel-contents", *out.glob("*.whl"))
    for archive in out.glob("*.tar.gz"):
        said = run(TOOLS / "pyroma", "--min", "10", archive)
        print(f"{archive.name}: pyroma {(re.findall(r'Final rating: *([0-9/]+)', said) or ['?'])[0]}", flush=True)


def without_wheels(pins: list[str], *asked: object) -> list[str]:
    """Those of the packages for which the index has no wheel of the kind that pip is asked for."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", folder, *map(str, asked)]
        return [pin for pin in pins if subprocess.run([*command, pin], capture_output=True).returncode]


def smoke(wanted: Target, out: Path) -> str:
    """Installs both wheels and what they depend on into a folder, and tries them out there, with no other program than
    that Python in reach. Raises NotTried if there is no such Python here, or no wheel of what they depend on."""
    if not wanted.program:
        raise NotTried(f"{wanted}: built, but not tried out: no interpreter runs here")
    version = version_of_both()
    pins = re.findall(r"^([a-z0-9.-]+==\S+)", (ROOT / "pins/server.txt").read_text(), re.MULTILINE)
    asked = [
        *(f"--platform=manylinux_2_{minor}_{wanted.arch}" for minor in range(28, 16, -1)),
        f"--platform=manylinux2014_{wanted.arch}", f"--python-version={wanted.version}", "--implementation=cp",
        f"--abi={wanted.tag}", "--abi=abi3", "--abi=none", "--only-binary=:all:",
    ]
    with tempfile.TemporaryDirectory(prefix="kvdock-wheel-") as folder:
        constraints = Path(folder, "pins.txt")
        constraints.write_text("\n".join(pins))
        try:
            run(sys.executable, "-m", "pip", "install", "--quiet", "--no-compile", "--target", f"{folder}/site", *asked,
                "--find-links", out, "--constraint", constraints, f"kvdock=={version}")
        except Failed:
            if lacking := without_wheels(pins, *asked):
                raise NotTried(f"{wanted}: built, but not tried out: no wheel of {', '.join(lacking)}") from None
            raise
        clean = {"PATH": "/nonexistent", "PYTHONPATH": f"{folder}/site", "HOME": folder, **dict(wanted.environ)}
        done = subprocess.run(
            [*wanted.program, str(ROOT / "packages/smoke.py"), *wanted.program], cwd=folder, env=clean, text=True,
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=600,
        )
    if done.returncode:
        raise Failed(f"{wanted}: {done.stdout[-3000:]}")
    return done.stdout.splitlines()[-1] if done.stdout else ""


def version_of_both() -> str:
    found = re.search(r'__version__ = "(.+)"', (ROOT / "kvdock/__init__.py").read_text())
    dependencies = tomllib.loads((ROOT / "packages/server/pyproject.toml").read_text())["project"]["dependencies"]
    if found is None or f"kvdock-engine=={found[1]}" not in dependencies:
        raise Failed(f"kvdock: wanted kvdock-engine of its own version, found {dependencies[0]}")
    return found[1]


# --------------------------------------------------------------------------- all of it


def made(wanted: list[Target], out: Path) -> Iterator[Exception]:
    """Does everything, and says what could not be done: Failed or NotTried."""
    image = kernels(ROOT, WORK)
    built = [each for each in wanted if each.headers]
    for each in wanted:
        if each not in built:
            yield Failed(f"{each}: not built: no headers of this Python")
            continue
        wheel = engine_wheel(each, image, out)
        print(audit(wheel, each), flush=True)
    for path in others(out, ROOT, ROOT / "packages/server"):
        print(path.name, flush=True)
    check_metadata(out)
    for each in built:
        try:
            print(f"{each}: {smoke(each, out)}", flush=True)
        except NotTried as why:
            yield why
    if built:
        print(check_reproduced(built[0], out), flush=True)


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--quick", action="store_true", help="for the Python that runs this alone")
    parser.add_argument("--untried", action="store_true", help="what cannot be tried out here is no failure")
    parser.add_argument("--out", type=Path, default=ROOT / "dist")
    given = parser.parse_args()
    os.environ.setdefault("SOURCE_DATE_EPOCH", epoch())
    shutil.rmtree(given.out, ignore_errors=True)
    given.out.mkdir(parents=True)
    try:
        missing = list(made(targets(quick=given.quick), given.out.absolute()))
    except Failed as error:
        print(error, file=sys.stderr)
        return 1
    for why in missing:
        print(f"MISSING {why}")
    untried = all(isinstance(why, NotTried) for why in missing)
    return 0 if not missing or given.quick or (given.untried and untried) else SEVERAL_MISSING


if __name__ == "__main__":
    sys.exit(main())
