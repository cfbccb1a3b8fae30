"""A copy of the checkout under build/mutants, where mutants are applied and tested.

The copy has an import path of its own: links to its rooms and to its extension, and a sitecustomize.py that takes
the editable installation out of every Python process that inherits PYTHONPATH. So tests in the copy, and the
processes that they start, run the copy's code, and neither the checkout nor .venv is touched. What was compiled for
one run stays for the next; `make clean` removes all of it.
"""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
import sysconfig
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from shutil import rmtree

from .mutant import DoesNotApply, Mutant, Outcome, Verdict, outcome_of

ROOT = Path(__file__).parent.parent.parent
FOLDER = ROOT / "build" / "mutants"
EXTENSION = f"_core{sysconfig.get_config_var('EXT_SUFFIX')}"
PYTEST = (sys.executable, "-m", "pytest", "-x", "-q", "-rfE", "-p", "no:cacheprovider", "-n", "0")
VLLM_PATH = ("-o", "pythonpath=tests/support tests/vllm/support .")
WITHOUT_EDITABLE = '''"""kvdock is the package of the copy, not the editable installation."""
import sys

sys.meta_path[:] = [finder for finder in sys.meta_path if "_editable_skbc_kvdock" not in type(finder).__module__]
'''


class BuildFailed(Exception):
    """The extension of the copy could not be compiled; the message is the compiler's."""


class Scratch:
    def __init__(self, folder: Path = FOLDER) -> None:
        self.checkout, self._path = folder / "checkout", folder / "path"

    @contextmanager
    def mine(self) -> Iterator[None]:
        """One run at a time: a second waits."""
        self.checkout.mkdir(parents=True, exist_ok=True)
        with (self.checkout.parent / ".lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield

    def refresh(self) -> None:
        """Makes the copy what the checkout is now; an unchanged file keeps its time, so it is not compiled again."""
        git = ["git", "-c", "safe.directory=*", "ls-files", "-z", "-co", "--exclude-standard"]
        listed = subprocess.run(git, cwd=ROOT, capture_output=True, text=True, check=True).stdout.split("\0")
        wanted = {name for name in listed if name and (ROOT / name).is_file()}
        for name in self._copied() - wanted:
            (self.checkout / name).unlink()
        for name in wanted:
            there, content = self.checkout / name, (ROOT / name).read_bytes()
            if not there.is_file() or there.read_bytes() != content:
                there.parent.mkdir(parents=True, exist_ok=True)
                there.write_bytes(content)
        for environment in ROOT.glob(".venv*"):
            _link(self.checkout / environment.name, environment)
        self._make_import_path()

    def _copied(self) -> set[str]:
        """Files in the copy that nothing made there."""
        made = {"build", "__pycache__", ".hypothesis", ".pytest_cache"}
        found = set()
        for folder, folders, files in os.walk(self.checkout):
            folders[:] = [name for name in folders if name not in made and not name.startswith(".venv")]
            found |= {str((Path(folder) / name).relative_to(self.checkout)) for name in files if name != EXTENSION}
        return found

    def _make_import_path(self) -> None:
        rmtree(self._path, ignore_errors=True)
        self._path.mkdir(parents=True)
        (self._path / "sitecustomize.py").write_text(WITHOUT_EDITABLE)

    def build(self) -> None:
        """Compiles what has changed of the copy's extension: minutes the first time, then as long as a file takes."""
        build = "import kill_build; print(kill_build.build('core'))"
        environ = {**os.environ, "PYTHONPATH": str(self.checkout / "tests" / "support")}
        done = subprocess.run([sys.executable, "-c", build], env=environ, capture_output=True, text=True)
        if done.returncode:
            raise BuildFailed(done.stderr)
        _link(self.checkout / "kvdock" / EXTENSION, Path(done.stdout.strip().splitlines()[-1]))

    def pytest(self, mutant: Mutant) -> str:
        """What the guard printed, the copy being as it is."""
        # A failing example kept from an earlier break would kill this one by luck.
        rmtree(self.checkout / ".hypothesis", ignore_errors=True)
        environ = {**os.environ, "PYTHONPATH": f"{self._path}{os.pathsep}{self.checkout}", "VLLM_SEEDS": "40"}
        environ.pop("KVDOCK_NO_SKIPS", None)  # a test that is skipped does not kill
        command = [*PYTEST, *(VLLM_PATH if mutant.in_vllm else ()), *mutant.guard]
        return subprocess.run(command, cwd=self.checkout, env=environ, stdin=subprocess.DEVNULL, text=True,
                              stdout=subprocess.PIPE, stderr=subprocess.STDOUT).stdout

    def test(self, mutant: Mutant) -> Verdict:
        """Applies the break, runs the guard, and takes the break away."""
        began = time.monotonic()
        file = self.checkout / mutant.file
        try:
            broken = mutant.broken(self.checkout)
        except DoesNotApply as error:
            return Verdict(mutant, Outcome.DOES_NOT_APPLY, str(error))
        whole = file.read_text()
        try:
            file.write_text(broken)
            self.build()
            outcome, detail = outcome_of(mutant, self.pytest(mutant))
        except BuildFailed as error:
            outcome, detail = Outcome.DOES_NOT_BUILD, str(error)
        finally:
            file.write_text(whole)
        return Verdict(mutant, outcome, detail, time.monotonic() - began)


def _link(link: Path, target: Path) -> None:
    link.unlink(missing_ok=True)
    link.symlink_to(target)
