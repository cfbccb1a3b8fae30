"""The shape of classes: how many arguments a constructor takes, and how many attributes an object has.

A class has state if its objects change. What is only data is a value, and is not counted: a dataclass, NamedTuple,
TypedDict, Protocol, Enum or msgspec Struct (settings and everything on the wire) none of whose methods assigns to self.
In C++ attributes are the members whose names end in `_`: a struct of plain fields has none.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import PurePosixPath
from typing import NamedTuple

from sources import nodes
from tidy_rules import NATIVE, NATIVE_NOISE

Files = Mapping[PurePosixPath, str]
VALUES = frozenset({"Struct", "NamedTuple", "TypedDict", "Protocol", "Enum", "IntEnum", "StrEnum", "Flag", "IntFlag"})


class Shape(NamedTuple):
    path: PurePosixPath
    line: int
    name: str
    arguments: int
    attributes: int

    @property
    def key(self) -> str:
        return f"{self.path} {self.name}"


def shapes(files: Files) -> list[Shape]:
    """The classes with state of all Python and native files, by path."""
    classes = {
        path: [node for node in nodes(text) if isinstance(node, ast.ClassDef)]
        for path, text in files.items() if path.suffix == ".py"
    }
    values = _values(node for found in classes.values() for node in found)
    shaped = []
    for path, text in files.items():
        if path in classes:
            shaped += [
                shape for node in classes[path] if (shape := _python_shape(path, node, values)) is not None
            ]
        elif path.suffix in NATIVE:
            shaped += _native_shapes(path, text)
    return shaped


# --------------------------------------------------------------------------- Python


def _values(classes: Iterable[ast.ClassDef]) -> frozenset[str]:
    """The names of VALUES and of all classes that inherit from one of them, through others too."""
    bases: dict[str, set[str]] = {}
    for node in classes:
        bases.setdefault(node.name, set()).update(map(_last_name, node.bases))
    found, before = VALUES, frozenset[str]()
    while found != before:
        before = found
        found |= {name for name, inherited in bases.items() if inherited & found}
    return found


def _last_name(node: ast.expr) -> str:
    """`Struct` of `msgspec.Struct`, of `Struct[T]` and of `Struct(frozen=True)`."""
    match node:
        case ast.Attribute():
            return node.attr
        case ast.Subscript():
            return _last_name(node.value)
        case ast.Call():
            return _last_name(node.func)
    return node.id if isinstance(node, ast.Name) else ""


def _python_shape(path: PurePosixPath, node: ast.ClassDef, values: frozenset[str]) -> Shape | None:
    """None for a value."""
    assigned = {name for method in _methods(node) for name in _assigned_on_self(method)}
    is_dataclass = "dataclass" in map(_last_name, node.decorator_list)
    is_value = is_dataclass or bool(values.intersection(map(_last_name, node.bases)))
    if is_value and not assigned:
        return None
    fields = {
        one.target.id for one in node.body
        if isinstance(one, ast.AnnAssign) and isinstance(one.target, ast.Name)
        and not ast.unparse(one.annotation).startswith(("ClassVar", "typing.ClassVar"))
    }
    constructor = next((method for method in _methods(node) if method.name == "__init__"), None)
    arguments = _arguments(constructor.args) if constructor is not None else len(fields) if is_value else 0
    return Shape(path, node.lineno, node.name, arguments, len(assigned | fields))


def _methods(node: ast.ClassDef) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    yield from (one for one in node.body if isinstance(one, ast.FunctionDef | ast.AsyncFunctionDef))


def _arguments(arguments: ast.arguments) -> int:
    """Without self; `*args` and `**kwargs` are one each."""
    named = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]
    return len(named) - 1 + (arguments.vararg is not None) + (arguments.kwarg is not None)


def _assigned_on_self(method: ast.FunctionDef | ast.AsyncFunctionDef) -> Iterator[str]:
    positional = [*method.args.posonlyargs, *method.args.args]
    if not positional or {"staticmethod", "classmethod"}.intersection(map(_last_name, method.decorator_list)):
        return
    this, waiting = positional[0].arg, list[ast.AST](method.body)
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.ClassDef):
            continue
        waiting += ast.iter_child_nodes(node)
        if (
            isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store)
            and isinstance(node.value, ast.Name) and node.value.id == this
        ):
            yield node.attr


# --------------------------------------------------------------------------- C++

_CLASS = re.compile(r"(?<!enum )\b(?:class|struct)\s+(?:[\w:]+::)?(\w+)(?:\s+final)?\s*(?::[^;{()]*)?\{")
_MEMBER = re.compile(r"\b([A-Za-z]\w*_)(?=\s*(?:\{|\[|,|$))")
_INITIALISER = re.compile(r"=[^,]*")


def _native_shapes(path: PurePosixPath, text: str) -> Iterator[Shape]:
    code = NATIVE_NOISE.sub(lambda match: "\n" * match[0].count("\n"), text)
    for match in _CLASS.finditer(code):
        statements = list(_statements(code, match.end()))
        members = {name for statement in statements for name in _members(statement)}
        constructors = [count for one in statements if (count := _parameters(match[1], one)) is not None]
        line = code.count("\n", 0, match.start()) + 1
        yield Shape(path, line, match[1], max(constructors, default=0), len(members))


def _statements(code: str, start: int) -> Iterator[str]:
    """What the class whose body begins at `start` declares, with `{}` for whatever is in braces."""
    statement, depth = "", 1
    for sign in code[start:]:
        if sign == "{":
            statement += "{" if depth == 1 else ""
            depth += 1
        elif sign == "}":
            depth -= 1
            if depth == 0:
                break
            if depth == 1:
                statement += "}"
                if "(" in _without_template_arguments(statement):  # a function's body, behind which no `;` comes
                    yield statement
                    statement = ""
        elif depth == 1 and sign == ";":
            yield statement
            statement = ""
        elif depth == 1:
            statement += sign
    yield statement


def _without_template_arguments(text: str) -> str:
    before = ""
    while before != text:
        before, text = text, re.sub(r"<[^<>;]*>", "", text)
    return text


def _members(statement: str) -> Iterator[str]:
    plain = _without_template_arguments(re.sub(r"\b(?:public|protected|private)\s*:", "", statement))
    if "(" not in re.split(r"[={]", plain)[0]:
        yield from _MEMBER.findall(_INITIALISER.sub("", plain).strip())


def _parameters(name: str, statement: str) -> int | None:
    """The parameters of the constructor that the statement declares; None if it declares something else."""
    found = re.match(
        rf"\s*(?:(?:public|protected|private)\s*:\s*)?(?:(?:explicit|constexpr|inline)\s+)*{name}\s*\(", statement
    )
    if found is None:
        return None
    rest, parameters, depth = _without_template_arguments(statement[found.end() :]), "", 1
    for sign in rest:
        depth += (sign in "([") - (sign in ")]")
        if depth == 0:
            break
        parameters += sign if depth == 1 else ""
    return parameters.count(",") + 1 if parameters.strip() else 0
