"""An S3 server (moto's) for tests: `python s3_process.py PORT FLAG`. While the file FLAG is there it takes no data."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from moto.moto_server.werkzeug_app import DomainDispatcherApplication, create_backend_app
from werkzeug.serving import make_server


def main(port: int, flag: Path) -> None:
    s3 = DomainDispatcherApplication(create_backend_app)

    def limited(environ: dict[str, Any], answer: Any) -> Iterable[bytes]:
        if environ["REQUEST_METHOD"] == "PUT" and flag.exists():
            environ["wsgi.input"].read(int(environ.get("CONTENT_LENGTH") or 0))
            answer("507 Insufficient Storage", [("Content-Type", "text/plain")])
            return [b"full"]
        served: Iterable[bytes] = s3(environ, answer)
        return served

    server = make_server("127.0.0.1", port, limited, threaded=True)
    print(server.server_port, flush=True)
    server.serve_forever()


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]))
