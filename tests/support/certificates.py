"""Certificates for servers under test."""

from __future__ import annotations

import subprocess
from pathlib import Path


def self_signed(folder: Path) -> Path:
    """Makes key.pem and cert.pem of a server at localhost in the folder, and returns it. Clients of each TLS library
    take this certificate for the authority, too."""
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes",
         "-keyout", folder / "key.pem", "-out", folder / "cert.pem", "-days", "2", "-subj", "/CN=localhost",
         "-addext", "subjectAltName=DNS:localhost", "-addext", "basicConstraints=critical,CA:FALSE"],
        check=True, capture_output=True, timeout=60,
    )  # fmt: skip
    return folder
