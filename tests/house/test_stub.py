"""kvdock/_core.pyi has exactly the names, parameters and defaults of the extension module that it describes."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from types import ModuleType

import pytest
from paths import ROOT

from kvdock import _core

STUB = (ROOT / "kvdock/_core.pyi").read_text()
NOT_BOUND = {"Mapping.__buffer__"}
"""The buffer protocol has no method in this version of Python."""
ERRORS = {name for name in vars(_core) if name.endswith("Error")}
"""Their attributes are set when they are raised."""


def stubbed(text: str) -> dict[str, str]:
    """By dotted name: the parameters of a function, "" for anything else."""
    return dict(_stubbed(ast.parse(text).body, ""))


def _stubbed(body: list[ast.stmt], prefix: str) -> Iterator[tuple[str, str]]:
    for node in body:
        if isinstance(node, ast.ClassDef):
            yield prefix + node.name, ""
            if node.name not in ERRORS:
                yield from _stubbed(node.body, f"{prefix}{node.name}.")
        elif isinstance(node, ast.FunctionDef):
            yield prefix + node.name, _parameters_of(node.args)
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            yield prefix + node.target.id, ""


def _parameters_of(args: ast.arguments) -> str:
    ordinary = [*args.posonlyargs, *args.args]
    required = len(ordinary) - len(args.defaults)
    found = [one.arg + "=" * (index >= required) for index, one in enumerate(ordinary)]
    if args.kwonlyargs:
        found.append("*")
    found += [
        one.arg + "=" * (default is not None) for one, default in zip(args.kwonlyargs, args.kw_defaults, strict=True)
    ]
    return ", ".join(one for one in found if one != "self")


def bound(module: ModuleType) -> dict[str, str]:
    """The same of the module, by the signatures in its docstrings."""
    return dict(_bound(module, ""))


def _bound(owner: object, prefix: str) -> Iterator[tuple[str, str]]:
    for name in vars(owner):
        value = getattr(owner, name)
        signature = re.match(r"\w+\((.*)\) -> ", value.__doc__ or "") if callable(value) else None
        if name.startswith("_") and (signature is None or not prefix):
            continue  # Python's own, or pybind11's
        yield prefix + name, _parameters_in(signature[1]) if signature is not None else ""
        if isinstance(value, type) and name not in ERRORS:
            yield from _bound(value, f"{prefix}{name}.")


def _parameters_in(signature: str) -> str:
    """`a: int, *, b: list[str] = ['x']` as `a, *, b=`."""
    shallow = signature
    while (flatter := re.sub(r"\[[^\[\]]*\]|\([^()]*\)|b?'[^']*'", "", shallow)) != shallow:
        shallow = flatter
    parameters = [one.strip() for one in shallow.split(",") if one.strip()]
    names = [re.split(r"[:=]", one)[0].strip() + "=" * ("=" in one) for one in parameters]
    return ", ".join(name for name in names if name != "self")


def differences(text: str) -> list[str]:
    ours, core = stubbed(text), bound(_core)
    names = sorted((ours.keys() | core.keys()) - NOT_BOUND)
    return [
        f"{name}: the stub has ({ours.get(name, 'nothing')}), the module ({core.get(name, 'nothing')})"
        for name in names if ours.get(name) != core.get(name)
    ]


def test_the_stub_is_that_of_the_module() -> None:
    found = differences(STUB)
    assert not found, "\n".join(["", *found])


@pytest.mark.parametrize(("right", "wrong", "found"), [
    ("def peek(self, namespace: int, keys: bytes)", "def peek(self, keys: bytes, namespace: int)",
     "Table.peek: the stub has (keys, namespace), the module (namespace, keys)"),
    ("now_ms: int, computes: bool = False", "now_ms: int, computes: bool",
     "Table.lookup: the stub has (session, member, request, epoch, keys, *, readers, skip_tokens, now_ms, computes, "
     "is_apart=), the module (session, member, request, epoch, keys, *, readers, skip_tokens, now_ms, computes=, "
     "is_apart=)"),
    ("    entries: int", "    entrys: int", "Curve.entries: the stub has (nothing), the module ()"),
    ("def cpu_paths() -> list[str]:", "def cpu_path() -> list[str]:",
     "cpu_paths: the stub has (nothing), the module ()"),
    ("data_offset: int, data_bytes: int) -> None: ...", "data_offset: int, *, data_bytes: int) -> None: ...",
     "Table.add_segment: the stub has (segment, data_offset, *, data_bytes), "
     "the module (segment, data_offset, data_bytes)"),
])
def test_a_stub_that_differs_is_noticed(right: str, wrong: str, found: str) -> None:
    assert right in STUB
    assert found in differences(STUB.replace(right, wrong))
