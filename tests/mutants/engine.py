"""Breaks of kvdock/engine/: the engine's own blocks, prefix cache and scheduler."""

from __future__ import annotations

from .mutant import Mutant

MUTANTS = (
    Mutant(
        "P9a", "groups allocate in turn, so one group's fresh block can be another's hit",
        "kvdock/engine/blocks.py",
        "return product((0, 1), range(len(self.kinds)))",
        "return [(phase, g) for g in range(len(self.kinds)) for phase in (0, 1)]",
        ("tests/engine/test_two_phase.py",), "test_two_phases_give_no_block_out_twice",
    ),
    Mutant(
        "P9b", "a block is free while a holder is left", "kvdock/engine/blocks.py",
        "            if self.references[block] == 0:\n                self.free[block] = None\n",
        "            if self.references[block] <= 1:\n                self.free[block] = None\n",
        ("tests/engine/test_blocks.py",), "test_random_use_matches_a_plain_model",
    ),
    Mutant(
        "P9c", "a preempted request keeps its table", "kvdock/engine/scheduler.py",
        "        self._give_up_blocks(request)\n        request.state = State.WAITING\n",
        "        request.state = State.WAITING\n",
        ("tests/engine/test_preemption.py",),
        "test_of_two_requests_that_saturate_seven_blocks_the_preempted_one_reloads",
    ),
    Mutant(
        "P30", "a window's hit is one block too long", "kvdock/engine/blocks.py",
        "run[length - 1] >= length - first for", "run[length - 1] >= length - first - 1 for",
        ("tests/engine/test_two_phase.py",), "test_two_phases_give_no_block_out_twice",
    ),
)
