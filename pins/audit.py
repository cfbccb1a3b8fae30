"""The gate for known vulnerabilities: of what the server ships and what builds it, no package may have an advisory that
is not in pins/exceptions.toml, and no exception there may be over.

    python pins/audit.py BILL [--lenient] [--advisories URL] [--exceptions FILE]

BILL is what pins/bill.py writes. pip-audit asks PyPI's JSON API about each package, or a server that answers like OSV's
at URL. Exit status: 0 all is well, 1 something is to be done, 3 not all packages could be judged; with --lenient, which
is for machines without network, 0 in place of 3. Every package that was not judged is named.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterable
from datetime import date
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import unquote

HERE = Path(__file__).parent
ANSWER_S = 25
UNJUDGED = 3
KNOWN_BAD = ("django", "1.2")
"""Asked about, too: a source that has nothing against this one has no advisories at all."""


class Advisory(NamedTuple):
    package: str
    version: str
    ids: tuple[str, ...]
    """Its own and its aliases: one fault has a number in each database."""
    fixed_in: tuple[str, ...]


class Accepted(NamedTuple):
    """One entry of the exceptions."""

    id: str
    package: str
    reason: str
    until: date

    def covers(self, advisory: Advisory) -> bool:
        return self.package == advisory.package and self.id in advisory.ids


class CannotAsk(Exception):
    """Nothing is known about any package."""


def packages(bill: Path) -> dict[str, str]:
    """Versions by name: those of the bill, and what builds the extension."""
    found = {}
    for component in json.loads(bill.read_text())["components"]:
        if match := re.match(r"pkg:pypi/([^@?]+)@([^?]+)", component.get("purl", "")):
            found[match[1]] = unquote(match[2])
    if not found:
        raise SystemExit(f"{bill} lists no Python package: it is not the server's bill of materials")
    built_with = re.findall(r"^([a-z0-9.-]+)==(\S+)", (HERE / "build.txt").read_text(), re.MULTILINE)
    return found | dict(built_with)


def exceptions(path: Path) -> list[Accepted]:
    found = []
    for entry in tomllib.loads(path.read_text()).get("exception", []):
        kinds = {name: type(value) for name, value in entry.items()}
        wanted = {"id": str, "package": str, "reason": str, "until": date}
        if kinds != wanted or not entry["reason"].strip():
            raise SystemExit(f"{path}: wanted id, package, reason (texts) and until (a date), found {entry}")
        found.append(Accepted(**entry))
    return found


def asked(wanted: dict[str, str], advisories: str | None) -> list[dict[str, Any]]:
    """What pip-audit says of each package. Raises CannotAsk."""
    with tempfile.TemporaryDirectory(prefix="kvdock-audit-") as folder:
        pins, answer = Path(folder, "pins.txt"), Path(folder, "answer.json")
        pins.write_text("".join(f"{name}=={version}\n" for name, version in sorted({*wanted.items(), KNOWN_BAD})))
        source = ["--vulnerability-service", "osv", "--osv-url", advisories] if advisories else []
        command = [
            sys.executable, "-m", "pip_audit", "--requirement", pins, "--no-deps", "--disable-pip", *source,
            "--timeout", "10", "--cache-dir", folder, "--progress-spinner", "off", "--format", "json", "--output",
            answer,
        ]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=ANSWER_S)
        except subprocess.TimeoutExpired:
            raise CannotAsk(f"no answer within {ANSWER_S} s") from None
        if not answer.is_file():
            raise CannotAsk((done.stderr.strip().splitlines() or ["pip-audit said nothing"])[-1])
        dependencies = {one["name"]: one for one in json.loads(answer.read_text())["dependencies"]}
        if not dependencies.pop(KNOWN_BAD[0]).get("vulns"):
            raise CannotAsk(f"the index has no advisories: not even for {' '.join(KNOWN_BAD)}")
        return list(dependencies.values())


def known(dependencies: Iterable[dict[str, Any]]) -> list[Advisory]:
    return [
        Advisory(one["name"], one["version"], (fault["id"], *fault["aliases"]), tuple(fault["fix_versions"]))
        for one in dependencies for fault in one.get("vulns", [])
    ]


def fix(advisory: Advisory) -> str:
    return f"fixed in {', '.join(advisory.fixed_in)}" if advisory.fixed_in else "not fixed yet"


def faults(advisories: list[Advisory], accepted: list[Accepted], today: date) -> list[str]:
    """What somebody has to do, a sentence each."""
    found = [
        f"{one.package} {one.version} has {' '.join(one.ids)}: {fix(one)}"
        for one in advisories if not any(each.covers(one) for each in accepted)
    ]
    over = [
        f"the exception for {each.id} of {each.package} was over on {each.until}: renew the package, or judge it again"
        for each in accepted if each.until < today
    ]
    return found + over


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("bill", type=Path)
    parser.add_argument("--lenient", action="store_true")
    parser.add_argument("--advisories")
    parser.add_argument("--exceptions", type=Path, default=HERE / "exceptions.toml")
    given = parser.parse_args()
    wanted, accepted = packages(given.bill), exceptions(given.exceptions)
    why = "the index does not know them"
    try:
        dependencies = asked(wanted, given.advisories)
    except CannotAsk as error:
        dependencies, why = [], str(error)
    wrong = faults(known(dependencies), accepted, date.today())
    unjudged = sorted(wanted.keys() - {one["name"] for one in dependencies if "skip_reason" not in one})
    for line in wrong:
        print(line, file=sys.stderr)
    print(f"{len(wanted) - len(unjudged)} of {len(wanted)} packages were judged, {len(accepted)} exceptions")
    if unjudged:
        print(f"NOT judged ({why}): {', '.join(unjudged)}", file=sys.stderr)
    if wrong:
        return 1
    return UNJUDGED if unjudged and not given.lenient else 0


if __name__ == "__main__":
    sys.exit(main())
