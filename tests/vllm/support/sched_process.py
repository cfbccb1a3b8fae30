"""Runs scenarios around a real Scheduler: reads jobs as JSON lines, writes their figures. Importing vLLM takes longer
than most scenarios, so one process runs many.

A job is {"module": "sched_scenarios", "scenario": "warm", "arguments": [ADDRESS, …], "named": {…}}; the answer is
{"figures": …} or {"raised": "traceback"}.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import traceback
from typing import Any


def main() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print is no answer
    import sched_engine  # noqa: F401  # with the environment that vLLM reads when it is imported
    from vllm.model_executor.models import registry

    # vLLM asks another process what a class of model can do, and that process imports vllm again.
    registry._run_in_subprocess = lambda ask: ask()
    for line in sys.stdin:
        job = json.loads(line)
        answer: dict[str, Any]
        try:
            scenario = getattr(importlib.import_module(job["module"]), job["scenario"])
            answer = {"figures": scenario(*job["arguments"], **job["named"])}
        except Exception:  # the test that asked for it fails, others go on
            answer = {"raised": traceback.format_exc()}
        print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    main()
