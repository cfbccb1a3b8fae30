"""Lets SGLang's wheel, which is made for GPUs, be imported where there is none. Call prepare() before importing it.
fork_processes() is for programs that run it.

    python cpu_only.py PROGRAM ARGUMENTS…

runs a program that needs no more than what is installed beside SGLang, and would fail at torchvision, too.

Two things stand in its way on a CPU: its compiled kernels (sgl_kernel), of which a CPU calls none that these tests
reach, and torchvision, which describes operators that its own build for GPUs alone brings. What is put in the place of
a kernel fails when it is called, so no test passes by it.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import multiprocessing
import runpy
import sys
import types
from collections.abc import Callable, Sequence
from typing import Any

KERNELS = "sgl_kernel"
OPERATORS = (
    "fused_sigmoid_mul_cpu", "fused_qk_gemma_rmsnorm_cpu", "fused_qk_gemma_rmsnorm_with_gate_cpu",
    "fused_qkvzba_split_reshape_cat_contiguous_cpu",
)
"""Operators of other models, which are imported with Qwen-VL's processor of images."""


class Kernel:
    """In the place of any name of the kernels."""

    def __init__(self, name: str) -> None:
        self.__name__ = self.__qualname__ = name

    def __getattr__(self, name: str) -> Kernel:
        if name.startswith("__"):
            raise AttributeError(name)
        return Kernel(f"{self.__name__}.{name}")

    def __call__(self, *args: object, **kwargs: object) -> Any:
        raise RuntimeError(f"{self.__name__} needs a GPU")


class Kernels(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds modules of the kernels, all of whose names are there."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname.partition(".")[0] != KERNELS:
            return None
        return importlib.machinery.ModuleSpec(fullname, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        module = types.ModuleType(spec.name)

        def name_of(name: str) -> Kernel:
            if name.startswith("__"):
                raise AttributeError(name)
            return Kernel(f"{spec.name}.{name}")

        module.__getattr__ = name_of  # type: ignore[method-assign]  # a module may have it
        return module

    def exec_module(self, module: types.ModuleType) -> None:
        """There is nothing in it."""


def _unpinned(made: Callable[..., Any]) -> Callable[..., Any]:
    def make(*args: Any, pin_memory: bool = False, **kwargs: Any) -> Any:
        return made(*args, **kwargs)

    return make


def prepare() -> None:
    """Any number of times."""
    import torch

    if any(isinstance(finder, Kernels) for finder in sys.meta_path):
        return
    sys.meta_path.append(Kernels())
    described = torch.library.register_fake

    def register_fake(op: Any, *args: Any, **kwargs: Any) -> Callable[[Any], Any]:
        try:
            register = described(op, *args, **kwargs)
        except RuntimeError:  # there is no such operator
            return lambda function: function

        def registered(function: Any) -> Any:
            try:
                return register(function)
            except RuntimeError:
                return function

        return registered

    for name in ("tensor", "empty", "zeros"):  # adapters want page-locked memory, which a GPU's driver gives
        setattr(torch, name, _unpinned(getattr(torch, name)))
    torch.Tensor.pin_memory = lambda tensor: tensor  # type: ignore[method-assign]  # for this process alone
    torch.library.register_fake = register_fake  # type: ignore[assignment]  # for this process alone
    for name in OPERATORS:
        setattr(torch.ops.sgl_kernel, name, Kernel(name))


def fork_processes() -> None:
    """SGLang spawns its processes, and each of them would import all of SGLang again. They are forked here, and what
    SGLang itself chooses later has no effect."""
    multiprocessing.set_start_method("fork", force=True)
    multiprocessing.set_start_method = lambda *args, **kwargs: None  # type: ignore[method-assign]  # its choice


if __name__ == "__main__":
    prepare()
    del sys.argv[0]
    runpy.run_path(sys.argv[0], run_name="__main__")
