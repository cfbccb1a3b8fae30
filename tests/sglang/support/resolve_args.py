"""What SGLang makes of settings, which are JSON, before it starts any process: {"linker": whether one is named,
"refused": why it does not start}."""

from __future__ import annotations

import json
import sys

from sglang.srt.arg_groups.overrides import resolved_view
from sglang.srt.plugins import load_plugins
from sglang.srt.server_args import ServerArgs

load_plugins()
args = ServerArgs(device="cpu", attention_backend="triton", skip_tokenizer_init=True, **json.loads(sys.argv[1]))
refused = ""
try:
    args.resolve_once()
except AssertionError as error:
    refused = str(error)
linker = not refused and bool(resolved_view(args).enable_unified_cache_external_linker)
print(json.dumps({"linker": linker, "refused": refused}))
