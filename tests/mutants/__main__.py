"""Breaks the product on purpose, one break at a time, and says which test notices it.

    python -m tests.mutants                 every mutant but those that change nothing
    python -m tests.mutants C1 engine       some, by name or by room
    python -m tests.mutants --list          what there is
    python -m tests.mutants --unbroken      the guards on code that is not broken: each must pass

Works in build/mutants, not in the checkout. Exit status 1 if a mutant survives or does not apply any more.
"""

from __future__ import annotations

import argparse
import sys
import time

from . import ROOMS
from .mutant import Mutant, Outcome, outcome_of
from .scratch import Scratch


def main() -> int:
    usage, _, text = (__doc__ or "").partition("\n\n")
    parser = argparse.ArgumentParser(
        "python -m tests.mutants", description=usage, epilog=text, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="*", metavar="NAME")
    parser.add_argument("--list", action="store_true")
    parser.add_argument("--unbroken", action="store_true")
    arguments = parser.parse_args()
    chosen = choose(arguments.names)
    if not chosen:
        parser.error(f"found no mutant or room {' '.join(arguments.names)}, wanted one of those that --list prints")
    if arguments.list:
        for mutant in chosen:
            print(f"{mutant.name:5} {mutant.breaks}\n      {mutant.file}; killer: {mutant.killer or 'none'}")
        return 0
    scratch = Scratch()
    with scratch.mine():
        scratch.refresh()
        return pass_unbroken(scratch, chosen) if arguments.unbroken else run(scratch, chosen)


def choose(names: list[str]) -> list[Mutant]:
    """In the order of the rooms. A mutant that changes nothing is chosen only by its name, or to be listed."""
    every = [(room, mutant) for room, mutants in ROOMS.items() for mutant in mutants]
    if not names:
        return [mutant for _, mutant in every if not mutant.equivalent or "--list" in sys.argv]
    unknown = set(names) - {*ROOMS, *(mutant.name for _, mutant in every)}
    return [] if unknown else [mutant for room, mutant in every if {room, mutant.name} & set(names)]


def run(scratch: Scratch, mutants: list[Mutant]) -> int:
    unwanted = 0
    began = time.monotonic()
    for mutant in mutants:
        verdict = scratch.test(mutant)
        unwanted += not verdict.is_wanted
        print(verdict, flush=True)
    took = time.monotonic() - began
    print(f"{len(mutants) - unwanted} of {len(mutants)} as wanted, {took / 60:.1f} min")
    return 1 if unwanted else 0


def pass_unbroken(scratch: Scratch, mutants: list[Mutant]) -> int:
    """Runs each guard once, however many mutants share it."""
    failed = 0
    scratch.build()
    for guard, mutant in {mutant.guard: mutant for mutant in mutants}.items():
        outcome, detail = outcome_of(mutant, scratch.pytest(mutant))
        failed += outcome is not Outcome.SURVIVED
        print("passes" if outcome is Outcome.SURVIVED else f"FAILS: {detail}:", " ".join(guard), flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
