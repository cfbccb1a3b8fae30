"""What vLLM's own parser of `vllm serve` makes of the arguments, as JSON."""

from __future__ import annotations

import json
import sys
from importlib import import_module
from typing import Any

import vllm.platforms
from vllm.platforms.cpu import CpuPlatform

PARSERS = {
    "vllm.entrypoints.common.cli_args": "0.33", "vllm.entrypoints.launchers.cli_args": "0.32",
    "vllm.entrypoints.openai.cli_args": "0.24",
}
"""Where versions of vLLM have it."""


def main() -> None:
    vllm.platforms._current_platform = CpuPlatform()  # builds for GPUs see none here
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    args = _parsers().make_arg_parser(FlexibleArgumentParser()).parse_args(sys.argv[1:])
    transfer = AsyncEngineArgs.from_cli_args(args).kv_transfer_config
    assert transfer is not None
    print(json.dumps({
        "connector": transfer.kv_connector, "role": transfer.kv_role, "extra": transfer.kv_connector_extra_config,
        "shutdown_timeout": args.shutdown_timeout,
    }))


def _parsers() -> Any:
    for name in PARSERS:
        try:
            return import_module(name)
        except ModuleNotFoundError:
            continue
    raise AssertionError("no version of vLLM that is known")


main()
