"""Digests of tensors that an engine passes to its model: of images, sound, embeddings."""

from __future__ import annotations

from typing import Any

import torch


class Unhashable(ValueError):
    """An input to be hashed is not in this process, or has no bytes of its own."""


def add_tensor(digest: Any, found: Any) -> None:
    """Adds a tensor's type, shape and elements to `digest`, one of hashlib's. Unhashable unless it is in host
    memory."""
    if not isinstance(found, torch.Tensor) or found.device.type != "cpu":
        raise Unhashable(f"found {type(found).__name__}, wanted a tensor in memory")
    digest.update(f"{found.dtype} {tuple(found.shape)}:".encode())
    digest.update(found.detach().contiguous().reshape(-1).view(torch.uint8).numpy())
