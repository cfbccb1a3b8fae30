"""`sglang serve`, where there is no GPU: prepared for the CPU, with processes forked."""

from __future__ import annotations

import os
import sys

os.environ.update(SGLANG_USE_CPU_ENGINE="1", CUDA_VISIBLE_DEVICES="")

from engine_process import import_sglang

if __name__ == "__main__":
    import_sglang()
    from sglang.launch_server import run_server
    from sglang.srt.plugins import load_plugins
    from sglang.srt.server_args import prepare_server_args

    load_plugins()
    run_server(prepare_server_args(sys.argv[1:]))
