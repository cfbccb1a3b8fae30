"""A server whose /dev/shm fills up: run as root in a mount namespace of its own, whose /dev/shm is 40 MiB.

    unshare --mount python tests/support/full_shm.py

Prints one JSON object of what was seen.
"""

from __future__ import annotations

import json
import subprocess
from contextlib import suppress
from pathlib import Path

from api_helpers import MIB, ServerProcess, attach, eventually, keys, unique

from kvdock.client.client import Client
from kvdock.protocol.admin_schemas import AskedQuota, PatchConfig

SHM = Path("/dev/shm")


def main() -> dict[str, object]:
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=40m", "tmpfs", str(SHM)], check=True)
    seen: dict[str, object] = {}
    too_large = ServerProcess(pool_bytes=64 * MIB, segment_bytes=2 * MIB, table_records=1024, table_grants=64)
    seen["too_large_status"] = too_large.process.wait(30)
    seen["too_large_says"] = too_large.log_text()
    too_large.close()
    settings = {"pool_bytes": 8 * MIB, "segment_bytes": 2 * MIB, "table_records": 1024, "table_grants": 64}
    with ServerProcess(**settings) as server, Client(server.unix) as client:
        engine = attach(client)
        filler = SHM / "somebody-elses"
        with filler.open("wb", buffering=0) as file, suppress(OSError):  # the server may write meanwhile
            while True:
                file.write(bytes(64 << 10))
        first = engine.reserve(keys(400, unique("full")))
        seen["chunks_when_full"] = len(first.chunks)
        seen["limited_by"] = first.limited_by
        seen["ready_when_full"] = engine.commit(first).ready
        status = client.status()
        seen["growth_reason"] = status.reasons
        quotas = client.configure(PatchConfig(tenants={"team": AskedQuota(bytes="5MiB")})).tenants
        seen["quota_when_full"] = quotas["team"].quota.bytes
        seen["quota_reasons"] = client.status().reasons
        seen["beside_when_full"] = [path.name for path in SHM.iterdir() if path.name.endswith(".new")]
        filler.unlink()
        client.configure(PatchConfig(tenants={"team": AskedQuota(bytes="6MiB")}))
        seen["quota_reasons_after"] = [one for one in client.status().reasons if "quota" in one]
        second = unique("after")
        eventually(lambda: len(engine.reserve(keys(400, second), store=unique("s")).chunks) > len(first.chunks), 30.0)
        seen["segments_after"] = client.status().pool.segments
        engine.close()
    seen["left"] = sorted(path.name for path in SHM.iterdir())
    return seen


if __name__ == "__main__":
    print(json.dumps(main()))
