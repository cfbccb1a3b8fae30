"""A mutant: one deliberate break of the product, and the test that must notice it."""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

VLLM_TESTS = "tests/vllm/"
_FAILED = re.compile(r"^(?:FAILED|ERROR) (\S+?(?:\[.*\])?)(?: - .*)?$", re.MULTILINE)
_PASSED = re.compile(r"\b\d+ passed\b")


class DoesNotApply(Exception):
    """The code that a mutant replaces is not there any more, or is there more than once."""


@dataclass(frozen=True)
class Mutant:
    name: str
    breaks: str
    """What goes wrong, in a few words."""
    file: str
    """From the root of the checkout, with `/`."""
    find: str
    """Occurs exactly once in the file."""
    put: str
    """Stands in the place of `find`."""
    guard: tuple[str, ...]
    """Arguments of pytest: the tests that ought to notice."""
    killer: str
    """The name of the test, or of its class, that fails, without parameters."""
    equivalent: str = ""
    """Why no test can notice; empty where one can."""

    @property
    def in_vllm(self) -> bool:
        """Whether the guard needs the environments of `make test-vllm`."""
        return any(argument.startswith(VLLM_TESTS) for argument in self.guard)

    def broken(self, checkout: Path) -> str:
        """The file's text with the break in it."""
        path = checkout / self.file
        text = path.read_text() if path.is_file() else ""
        if (found := text.count(self.find)) != 1:
            raise DoesNotApply(f"{self.name}: {self.file} holds the code to replace {found} times, wanted once")
        return text.replace(self.find, self.put)


class Outcome(Enum):
    """How the guard ended."""

    KILLED = "killed"
    KILLED_BY_ANOTHER = "killed by another test"
    SURVIVED = "survived"
    DOES_NOT_APPLY = "does not apply any more"
    DOES_NOT_BUILD = "does not build"
    NOT_TESTED = "not tested"


@dataclass(frozen=True)
class Verdict:
    mutant: Mutant
    outcome: Outcome
    detail: str = ""
    seconds: float = 0.0

    @property
    def is_wanted(self) -> bool:
        if self.mutant.equivalent:
            return self.outcome is Outcome.SURVIVED
        return self.outcome in (Outcome.KILLED, Outcome.KILLED_BY_ANOTHER)

    def __str__(self) -> str:
        note = f"; changes nothing: {self.mutant.equivalent}" if self.mutant.equivalent else ""
        detail = f": {self.detail}" if self.detail else ""
        return f"{self.mutant.name:5} {self.outcome.value}{detail} ({self.seconds:.0f} s){note}"


def outcome_of(mutant: Mutant, output: str) -> tuple[Outcome, str]:
    """(outcome, which test or why) from what pytest printed with `-x -rfE`."""
    failed = _FAILED.search(output)
    if failed is None:
        if _PASSED.search(output):
            return Outcome.SURVIVED, ""
        last = output.strip().splitlines()[-1:]
        return Outcome.NOT_TESTED, f"the guard ran no test: {''.join(last)}"
    test = failed[1]
    names = [name.partition("[")[0] for name in test.split("::")[1:]]
    return (Outcome.KILLED if mutant.killer in names else Outcome.KILLED_BY_ANOTHER), test
