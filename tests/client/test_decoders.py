"""Decoders of messages that many threads want at once."""

from __future__ import annotations

import subprocess
import sys

_THREADS_WANT_NEW_TYPES = """
import sys, threading, types
from kvdock.protocol.forms import decoder_of

sys.setswitchinterval(1e-6)
FIELDS = "".join(f"    f{n}: int = 0\\n" for n in range(20))
for turn in range(40):
    module = sys.modules[f"m{turn}"] = types.ModuleType(f"m{turn}")
    code = "from __future__ import annotations\\nimport msgspec\\n"
    for n in range(12):
        code += f"class T{n}(msgspec.Struct):\\n{FIELDS}" + (f"    inner: list[T{n - 1}] = []\\n" if n else "")
    exec(code, module.__dict__)
    start, found = threading.Barrier(8), []

    def decode():
        start.wait()
        found.append(decoder_of(module.T11, packed=False).decode(b'{"inner": [{"inner": [{"f3": 3}]}]}'))

    threads = [threading.Thread(target=decode) for _ in range(8)]
    for one in threads: one.start()
    for one in threads: one.join()
    assert [one.inner[0].inner[0].f3 for one in found] == [3] * 8
print("done")
"""


def test_threads_that_want_decoders_of_the_same_new_types_do_no_harm() -> None:
    """Without the lock the process ends with SIGSEGV."""
    ran = subprocess.run(
        [sys.executable, "-c", _THREADS_WANT_NEW_TYPES], capture_output=True, text=True, timeout=120, check=False
    )
    assert (ran.returncode, ran.stdout.strip()) == (0, "done"), ran.stderr
