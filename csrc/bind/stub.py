"""Writes the types of the built extension for type checkers and editors: `stub.py MODULE FILE`.

pybind11 puts a signature before the docstring of each function that it binds, in the syntax of Python's types. What it
accepts as an int, more than checks of types should, is an int here.
"""

import importlib.util
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

HEAD = '''"""{}

csrc/bind/stub.py made this file from the extension."""

import builtins
import collections.abc
import typing
import typing_extensions
'''
PLAIN = [
    (r"typing\.SupportsInt \| typing\.SupportsIndex", "int"),
    (r"typing\.SupportsFloat \| typing\.SupportsIndex", "float"),
    (r"\bself: [\w.]+", "self"), (r"\barg0: [\w.]+", "self"), (r"kvdock\._core\.", ""),
    (r"(?<![\w.'])bytes\b(?![:(])", "builtins.bytes"),  # the type, in classes that have a property of this name
]


def main(built: str, stub: str) -> None:
    spec = importlib.util.spec_from_file_location("kvdock._core", built)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    Path(stub).write_text("\n".join([HEAD.format(module.__doc__), *lines_of(module, ""), ""]))


def lines_of(owner: ModuleType | type, indent: str) -> Iterator[str]:
    """The declarations of all that the module or class has of its own."""
    for name, value in vars(owner).items():
        if isinstance(value, type):
            bases = ", ".join(base.__name__ for base in value.__bases__ if base.__module__ == "builtins")
            bases = "" if bases in ("object", "pybind11_object") else f"({bases})"
            yield f"\nclass {name}{bases}:"
            yield f'    """{value.__doc__ or name}"""'
            yield from lines_of(value, "    ")
        elif isinstance(value, property):
            yield f"{indent}@property"
            yield from function(f"def {name}{value.fget.__doc__.strip()}", indent)
        elif isinstance(value, staticmethod):
            yield f"{indent}@staticmethod"
            yield from function(f"def {value.__func__.__doc__}", indent)
        elif callable(value) and f"{name}(" in (value.__doc__ or ""):
            yield from function(f"def {value.__doc__}", indent)
        elif isinstance(value, int | list) and not name.startswith("_"):
            kind = f"list[{type(value[0]).__name__}]" if isinstance(value, list) else "int"
            yield f"{name}: typing.Final[{kind}]"
    for name, hint in vars(owner).get("__annotations__", {}).items():
        yield f"{indent}{name}: {hint}"
    if owner.__name__ == "Mapping":  # only Python 3.12 has a method for the buffer protocol
        yield f"{indent}def __buffer__(self, flags: int, /) -> memoryview: ..."


def function(text: str, indent: str) -> Iterator[str]:
    signature, _, doc = text.strip().partition("\n")
    for found, plain in PLAIN:
        signature = re.sub(found, plain, signature)
    yield f"{indent}{signature}:" + ("" if doc.strip() else " ...")
    if doc.strip():
        yield f'{indent}    """{doc.strip()}"""'


if __name__ == "__main__":
    main(*sys.argv[1:])
