"""Writes kernel_image.cpp: the compiled kernels as bytes, or none.

    python embed.py "sm_80,sm_90" kernel_image.cpp [kernels.fatbin]
"""

from __future__ import annotations

import sys
from pathlib import Path


def main(targets: str, output: str, image: str | None = None) -> None:
    data = Path(image).read_bytes() if image else b""
    rows = [", ".join(str(byte) for byte in data[at : at + 32]) for at in range(0, len(data), 32)]
    body = ",\n".join(rows) or "0"
    names = ", ".join(f'"{name}"' for name in targets.split(",") if name)
    Path(output).write_text(
        '#include "cuda/kernel_image.h"\n\n'
        "namespace kvdock::cuda {\n\n"
        f"const std::vector<std::string> kKernelTargets{{{names}}};\n"
        f"const size_t kKernelImageBytes = {len(data)};\n"
        f"alignas(16) const unsigned char kKernelImage[] = {{\n{body}}};\n\n"
        "}  // namespace kvdock::cuda\n"
    )


if __name__ == "__main__":
    main(*sys.argv[1:])
