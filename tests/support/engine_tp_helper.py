"""A real engine of four processes, the first of which is to be killed: engine_tp_helper.py ADDRESS

It prints the process ids of the other ranks once it computes and stores, and never ends.
"""

from __future__ import annotations

import sys

from engine_helpers import prompt, sampling
from tp_helpers import engine_of_ranks, shared

from kvdock.engine.process_group import ProcessGroup


def main(address: str) -> None:
    process_group = ProcessGroup(4)
    engine = engine_of_ranks(process_group, shared("tiny-mla", 4), address)
    said = False
    number = 0
    while True:
        engine.add_request(prompt(number, 200), sampling(8))
        number += 1
        while engine.has_unfinished:
            engine.step()
            if not said and engine.scheduler.storing:
                said = True
                print(*(process.pid for process in process_group.processes.values()), flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
