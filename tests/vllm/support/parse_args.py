"""What vLLM's own parser of `vllm serve` makes of the arguments, as JSON."""

from __future__ import annotations

import json
import sys

import vllm.platforms
from vllm.platforms.cpu import CpuPlatform

vllm.platforms._current_platform = CpuPlatform()  # builds for GPUs see none here

from vllm.engine.arg_utils import AsyncEngineArgs  # noqa: E402
from vllm.utils.argparse_utils import FlexibleArgumentParser  # noqa: E402

try:
    from vllm.entrypoints.common.cli_args import make_arg_parser
except ImportError:
    try:
        from vllm.entrypoints.launchers.cli_args import make_arg_parser  # vLLM 0.32
    except ImportError:
        from vllm.entrypoints.openai.cli_args import make_arg_parser

args = make_arg_parser(FlexibleArgumentParser()).parse_args(sys.argv[1:])
transfer = AsyncEngineArgs.from_cli_args(args).kv_transfer_config
assert transfer is not None
print(json.dumps({
    "connector": transfer.kv_connector, "role": transfer.kv_role, "extra": transfer.kv_connector_extra_config,
    "shutdown_timeout": args.shutdown_timeout,
}))
