"""The house rules over source text. Each rule takes a file's path and text and yields (line, what is wrong).

Rules read, they change nothing. `RULES` says which files each rule is for. A rule that cannot find
anything is no rule: tests/house/test_tidy.py shows every one of them a text that breaks it.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterator
from pathlib import PurePosixPath
from typing import NamedTuple

from sources import nodes

MAX_LINE = 120
MAX_FUNCTION_LINES = 60

Finding = tuple[int, str]

PYTHON = frozenset({".py", ".pyi"})
NATIVE = frozenset({".cpp", ".h", ".cu", ".cuh"})
CODE = PYTHON | NATIVE | {".js", ".css"}
TEXT = CODE | {".html", ".svg", ".toml", ".txt", ".md", ".yml", ".yaml", ".json", ".sh", ""}
PRODUCT = frozenset({"kvdock", "csrc"})
MAY_PRINT = frozenset({"cli", "bench", "tests"})


def long_lines(path: PurePosixPath, text: str) -> Iterator[Finding]:
    for number, line in enumerate(text.splitlines(), 1):
        if len(line) > MAX_LINE:
            yield number, f"{len(line)} characters, at most {MAX_LINE}"


def untidy_space(path: PurePosixPath, text: str) -> Iterator[Finding]:
    for number, line in enumerate(text.split("\n"), 1):
        if line != line.rstrip():
            yield number, "space at the end of the line"
        if "\t" in line and path.name != "Makefile":
            yield number, "tab"
    if text and not text.endswith("\n"):
        yield len(text.splitlines()), "no newline at the end of the file"


# Folders of one developer's machine; `/home/x` is nobody's.
_MACHINE_PATH = re.compile(r"(?<![\w.$}*-])/(?:work|root|home/\w{2,})(?=[/\s\"'`)\],:;]|$)")


def machine_paths(path: PurePosixPath, text: str) -> Iterator[Finding]:
    for number, line in enumerate(text.splitlines(), 1):
        if match := _MACHINE_PATH.search(line):
            yield number, f"path of a developer's machine: {match[0]}"


_LEFTOVER_WORD = re.compile(
    r"\b(?:TODO|FIXME|XXX|HACK)\b|\bconsole\.log\b|^\s*debugger;|\bstd::c(?:out|err)\b|\bprintf\("
)


def leftovers(path: PurePosixPath, text: str) -> Iterator[Finding]:
    for number, line in enumerate(text.splitlines(), 1):
        if match := _LEFTOVER_WORD.search(line):
            yield number, f"leftover {match[0].strip()}"
    if path.suffix != ".py":
        return
    banned = {"breakpoint"} if MAY_PRINT & set(path.parts[:2]) else {"breakpoint", "print"}
    for node in nodes(text):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in banned:
            yield node.lineno, f"leftover {node.func.id}()"


def headless(path: PurePosixPath, text: str) -> Iterator[Finding]:
    """A module opens with a docstring, a header with a comment. An empty __init__ has nothing to say."""
    if not text.strip():
        return
    if path.suffix in PYTHON:
        module = nodes(text)[0]
        if isinstance(module, ast.Module) and ast.get_docstring(module) is None:
            yield 1, "module without a docstring"
    elif not text.lstrip().startswith(("//", "/*")):
        yield 1, "header that does not open with a comment"


def of_docstrings(path: PurePosixPath, text: str) -> Iterator[Finding]:
    """A docstring says what a thing is or does; one that opens with "Of" needs the line above to be understood."""
    statements = (node for node in nodes(text) if isinstance(node, ast.Expr))
    for node in statements:
        if isinstance(node.value, ast.Constant) and str(node.value.value).startswith("Of "):
            yield node.lineno, 'docstring that begins with "Of"'


def long_functions(path: PurePosixPath, text: str) -> Iterator[Finding]:
    for node in nodes(text):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.end_lineno is not None:
            lines = node.end_lineno - node.lineno + 1
            if lines > MAX_FUNCTION_LINES:
                yield node.lineno, f"{node.name}: {lines} lines, at most {MAX_FUNCTION_LINES}"


NATIVE_NOISE = re.compile(
    r'//[^\n]*|/\*.*?\*/|"(?:\\.|[^"\\\n])*"|\'(?:\\.|[^\'\\\n])\'|^[ \t]*#(?:[^\n]*\\\n)*[^\n]*',
    re.DOTALL | re.MULTILINE,
)
_NATIVE_SCOPE = re.compile(r"(?:template\s*<.*>\s*)?(?:namespace|class|struct|union|enum|extern)\b", re.DOTALL)
_MEMBER_INITIALISER = re.compile(r"\)[^:]*(?<!:):(?!:).*[\w>]\s*$", re.DOTALL)


def long_native_functions(path: PurePosixPath, text: str) -> Iterator[Finding]:
    """Follows braces: one behind a parameter list opens a function, unless it initialises a member."""
    code = NATIVE_NOISE.sub(lambda match: "\n" * match[0].count("\n"), text)
    kinds: list[str] = []
    header = first = 0
    for at, sign in ((match.start(), match[0]) for match in re.finditer(r"[{};]", code)):
        if sign == "{":
            before = code[header:at].strip()
            if "function" in kinds:
                kinds.append("inner")
            elif _NATIVE_SCOPE.match(before) or ")" not in before:
                kinds.append("scope")
            elif _MEMBER_INITIALISER.search(before):
                kinds.append("initialiser")
            else:
                kinds.append("function")
                first = code.count("\n", 0, at - len(code[header:at].lstrip())) + 1
        elif sign == "}" and kinds:
            last = code.count("\n", 0, at) + 1
            kind = kinds.pop()
            if kind == "function" and last - first + 1 > MAX_FUNCTION_LINES:
                yield first, f"a function of {last - first + 1} lines, at most {MAX_FUNCTION_LINES}"
            if kind == "initialiser":
                continue
        if not {"function", "initialiser"} & set(kinds):
            header = at + 1


_SILENCED = re.compile(r"#\s*(type:\s*ignore(?:\[[^\]]*\])?|noqa(?::\s*[A-Z]+\d+(?:\s*,\s*[A-Z]+\d+)*)?)(?P<rest>.*)")


def silenced_without_reason(path: PurePosixPath, text: str) -> Iterator[Finding]:
    for number, line in enumerate(text.splitlines(), 1):
        match = _SILENCED.search(line)
        if match and len(re.findall(r"\w", match["rest"])) < 3:
            yield number, f"`{match[1]}` without a reason after it"


def broad_excepts(path: PurePosixPath, text: str) -> Iterator[Finding]:
    """Catching everything needs a comment on its line or the next, unless it cleans up and raises again."""
    lines = text.splitlines()
    for node in nodes(text):
        if not isinstance(node, ast.ExceptHandler) or not _is_broad(node.type):
            continue
        last = node.body[-1]
        raises_again = isinstance(last, ast.Raise) and last.exc is None
        if not raises_again and not any("#" in line for line in lines[node.lineno - 1 : node.lineno + 1]):
            yield node.lineno, "except that catches everything, without a reason"


def _is_broad(caught: ast.expr | None) -> bool:
    if isinstance(caught, ast.Tuple):
        return any(_is_broad(item) for item in caught.elts)
    return caught is None or (isinstance(caught, ast.Name) and caught.id in ("Exception", "BaseException"))


class Rule(NamedTuple):
    check: Callable[[PurePosixPath, str], Iterator[Finding]]
    suffixes: frozenset[str]
    rooms: frozenset[str] | None = None
    """Top folders it is for; None: everywhere."""

    def applies(self, path: PurePosixPath) -> bool:
        inside = self.rooms is None or path.parts[0] in self.rooms
        return inside and path.suffix in self.suffixes and path.name != "LICENSE"


RULES = (
    Rule(long_lines, CODE | {".html", ".toml", ".sh", ""}),
    Rule(untidy_space, frozenset(TEXT)),
    Rule(machine_paths, frozenset(TEXT)),
    Rule(leftovers, CODE, PRODUCT),
    Rule(headless, PYTHON | {".h", ".cuh"}),
    Rule(long_functions, PYTHON),
    Rule(long_native_functions, NATIVE),
    Rule(of_docstrings, PYTHON),
    Rule(silenced_without_reason, PYTHON),
    Rule(broad_excepts, frozenset({".py"})),
)
