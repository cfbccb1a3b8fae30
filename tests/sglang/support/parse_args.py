"""What SGLang's own parser of `sglang serve` makes of the arguments, as JSON."""

from __future__ import annotations

import argparse
import json
import sys

from sglang.srt.server_args import ServerArgs

parser = argparse.ArgumentParser()
ServerArgs.add_cli_args(parser)
args = parser.parse_args(sys.argv[1:])
print(json.dumps({
    "page_size": args.page_size, "linker": args.enable_unified_cache_external_linker,
    "backend": args.unified_cache_external_linker_backend, "config": args.unified_cache_external_linker_config,
}))
