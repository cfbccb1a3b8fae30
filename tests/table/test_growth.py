"""What one call costs while the table fills: no call pays for the growth of a whole array, and nobody can choose keys
that make the table slow.

Growth is counted in pages of memory that a call touches for the first time: time says little on a busy machine. An
array that doubled within a call would touch all of its new memory. Huge pages are off: each page is 4 KiB.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Final

import pytest
from paths import SUPPORT
from table_helpers import PAGE, Client, key, new_region, new_table

pytestmark = [pytest.mark.table_model, pytest.mark.security]

OF_CALL: Final = 1024
CHUNKS: Final = 120 * OF_CALL
"""The index of keys has grown last at 91,750."""
MOST_FAULTS: Final = 600
"""An index that doubles within a call touches 1,590 pages at 45,900 chunks, and 3,100 at 91,750."""
PROGRAM: Final = """
import ctypes, json, resource, sys
PR_SET_THP_DISABLE = 41
assert ctypes.CDLL(None).prctl(PR_SET_THP_DISABLE, 1, 0, 0, 0) == 0
import test_growth
faults = []
def counting(store):
    before = resource.getrusage(resource.RUSAGE_THREAD).ru_minflt
    store()
    faults.append(resource.getrusage(resource.RUSAGE_THREAD).ru_minflt - before)
test_growth.fill(test_growth.CHUNKS, test_growth.key, counting)
print(json.dumps(faults))
"""


def fill(chunks: int, named: Callable[[int], bytes], calling: Callable[[Callable[[], None]], None]) -> None:
    """Stores so many chunks in calls of OF_CALL, each through `calling`."""
    client = Client(new_table(chunks * PAGE, records=2 * chunks, region=new_region(2 * chunks)), PAGE)
    for first in range(0, chunks, OF_CALL):
        names = [named(number) for number in range(first, first + OF_CALL)]

        def store(names: list[bytes] = names) -> None:
            assert client.store(names) == OF_CALL

        calling(store)
    client.table.check_integrity()


def test_no_store_pays_for_the_growth_of_the_table() -> None:
    environment = {"PYTHONPATH": f"{SUPPORT}:{SUPPORT.parent}/table"}
    done = subprocess.run([sys.executable, "-c", PROGRAM], env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    faults: list[int] = json.loads(done.stdout)
    assert len(faults) == CHUNKS // OF_CALL
    assert max(faults) < MOST_FAULTS, [(at, count) for at, count in enumerate(faults) if count >= MOST_FAULTS]


@pytest.mark.parametrize("varies", [0, 8, 16, 24])
def test_keys_that_are_alike_cost_no_more_than_others(varies: int) -> None:
    """Engines choose keys: here all differ in eight of their bytes alone."""
    took_s: dict[bool, list[float]] = {True: [], False: []}
    for is_alike in (False, True):

        def timed(store: Callable[[], None], took_s: list[float] = took_s[is_alike]) -> None:
            began_s = time.thread_time()
            store()
            took_s.append(time.thread_time() - began_s)

        def alike(number: int) -> bytes:
            return bytes(varies) + (number + 1).to_bytes(8, "big") + bytes(24 - varies)

        fill(12 * OF_CALL, alike if is_alike else key, timed)
    assert min(took_s[True][-4:]) < 8 * max(took_s[False][-4:]), took_s
