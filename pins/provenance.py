"""States where the files of a release come from, as an in-toto statement with SLSA's provenance: their digests, the
commit, the command, and the digests of the lists that pin what the build installs. It needs git and Python alone.

    python pins/provenance.py write FOLDER COMMAND…
    python pins/provenance.py verify FOLDER

`write` makes FOLDER/provenance.json for all other files there, from a checkout without changes. `verify` makes the
statement anew, from the files and from the commit that it names, and compares the two. The statement is not signed: who
publishes the files signs them.
"""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
NAME = "provenance.json"
INPUTS = ("pins", "packages", "pyproject.toml", "CMakeLists.txt", "Makefile", "Dockerfile")


class Wrong(Exception):
    """A sentence for whoever called."""


def git(*words: str) -> bytes:
    done = subprocess.run(["git", "-c", "safe.directory=*", "-C", str(ROOT), *words], capture_output=True)
    if done.returncode:
        raise Wrong(f"git {' '.join(words)}: {done.stderr.decode().strip()}")
    return done.stdout


def statement(folder: Path, commit: str, command: list[str]) -> dict[str, Any]:
    """The same for the same files, commit and command. Raises Wrong."""
    files = sorted(path for path in folder.iterdir() if path.name != NAME)
    if not files:
        raise Wrong(f"{folder} has no file of a release")
    names = git("ls-tree", "-r", "--name-only", commit, "--", *INPUTS).decode().splitlines()
    return {
        "_type": "https://in-toto.io/Statement/v1",
        "subject": [{"name": path.name, "digest": digest(path.read_bytes())} for path in files],
        "predicateType": "https://slsa.dev/provenance/v1",
        "predicate": {
            "buildDefinition": {
                "buildType": "urn:kvdock:release:1",
                "externalParameters": {"commit": commit, "command": command},
                "resolvedDependencies": [
                    {"name": "source", "digest": {"gitCommit": commit}},
                    *({"name": name, "digest": digest(git("show", f"{commit}:{name}"))} for name in names),
                ],
            },
            "runDetails": {"builder": {"id": "urn:kvdock:make"}},
        },
    }


def digest(data: bytes) -> dict[str, str]:
    return {"sha256": hashlib.sha256(data).hexdigest()}


def write(folder: Path, command: list[str]) -> str:
    if changed := git("status", "--porcelain").decode().splitlines():
        raise Wrong(f"the checkout differs from its commit: {', '.join(line[3:] for line in changed)}")
    commit = git("rev-parse", "HEAD").decode().strip()
    made = statement(folder, commit, command)
    (folder / NAME).write_text(json.dumps(made, indent=1) + "\n")
    return f"{folder / NAME}: {len(made['subject'])} files of commit {commit}"


def verify(folder: Path) -> str:
    try:
        said = json.loads((folder / NAME).read_text())
        parameters = said["predicate"]["buildDefinition"]["externalParameters"]
        commit, command = parameters["commit"], parameters["command"]
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise Wrong(f"{folder / NAME} is no statement of a release: {error!r}") from error
    if wrong := differences(said, statement(folder, commit, command)):
        raise Wrong("\n".join([f"{folder} is not what {NAME} says:", *wrong]))
    return f"{folder}: {len(said['subject'])} files are those of commit {commit}"


def differences(said: Any, found: Any) -> list[str]:
    """What differs, a line each; for files and inputs by name."""
    lines = []
    for kind, of in (("file", subjects), ("input", inputs)):
        try:
            before, after = ({each["name"]: each["digest"] for each in of(one)} for one in (said, found))
        except (LookupError, TypeError) as error:
            return [f"the list of {kind}s cannot be read: {error!r}"]
        lines += [
            f"{kind} {name}: said {before.get(name, 'nothing')}, found {after.get(name, 'nothing')}"
            for name in sorted(before.keys() | after.keys()) if before.get(name) != after.get(name)
        ]
    return lines or ([] if said == found else ["the rest of the statement is not what this commit makes"])


def subjects(made: Any) -> Any:
    return made["subject"]


def inputs(made: Any) -> Any:
    return made["predicate"]["buildDefinition"]["resolvedDependencies"]


def main() -> int:
    try:
        match sys.argv[1:]:
            case ["write", folder, *command] if command:
                print(write(Path(folder), command))
            case ["verify", folder]:
                print(verify(Path(folder)))
            case _:
                print(__doc__, file=sys.stderr)
                return 2
    except Wrong as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
