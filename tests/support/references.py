"""What comments, docstrings and documents refer to, and whether it is there: labels, headings, files, names, commands.

Each rule takes one line of prose and a Tree, and yields what it cannot resolve. A reference that cannot be resolved
sends a reader to something that is gone. tests/house/test_references.py shows each rule a text that breaks it.
"""

from __future__ import annotations

import ast
import builtins
import posixpath
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from fnmatch import fnmatch
from functools import cached_property
from pathlib import PurePosixPath

from graphs import EXTENSION, bound
from sources import nodes
from tidy_rules import CODE, NATIVE, PYTHON

Line = tuple[int, str]

PROTOCOL = "docs/understand/lifetime_protocol.md"
HASH_COMMENTS = frozenset({".sh", ".toml", ".yml", ".yaml", ""})
FENCE = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)
_NATIVE_TOKEN = re.compile(
    r'"(?:\\.|[^"\\\n])*"|\'(?:\\.|[^\'\\\n])*\'|`(?:\\.|[^`\\])*`|(//[^\n]*|/\*.*?\*/)', re.DOTALL
)
_PYTHON_COMMENT = re.compile(r"""(?:[^"'#]|"(?:\\.|[^"\\])*"|'(?:\\.|[^'\\])*')*(#.*)""")


def anchors(page: str) -> frozenset[str]:
    """The headings of a Markdown page as links name them: lower case, spaces to hyphens, punctuation gone."""
    headings = re.findall(r"^#+ +(.+)$", FENCE.sub("", page), re.MULTILINE)
    return frozenset(re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings)


def prose(path: PurePosixPath, text: str) -> Iterator[Line]:
    """(line, text) of a file's comments and docstrings; of a document, all of it."""
    if path.suffix == ".md":
        yield from enumerate(text.splitlines(), 1)
    elif path.suffix in PYTHON:
        yield from _python_prose(text)
    elif path.suffix in NATIVE | {".js", ".css"}:
        for token in _NATIVE_TOKEN.finditer(text):
            if token[1]:
                yield from enumerate(token[1].splitlines(), text.count("\n", 0, token.start()) + 1)
    elif path.suffix in HASH_COMMENTS and path.name != "LICENSE":
        for number, line in enumerate(text.splitlines(), 1):
            if match := re.search(r"(?:^|\s)#.*", line):
                yield number, match[0]


def _python_prose(text: str) -> Iterator[Line]:
    for number, line in enumerate(text.splitlines(), 1):
        if "#" in line and (match := _PYTHON_COMMENT.match(line)):
            yield number, match[1]
    for node in nodes(text):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            yield from enumerate(node.value.value.splitlines(), node.lineno)


ELSEWHERE = {
    "kvdock/_core.pyi": "the build writes it, with csrc/bind/stub.py",
    "kernel_image.cpp": "the build writes it, with csrc/cuda/embed.py",
    "__init__.py": "stands for that file of any package",
    "sitecustomize.py": "Python looks for it; tests/mutants/scratch.py writes one",
    "kvdock.service": "a systemd unit, not a module",
    "kvdock/2": "names of parts in stores begin so",
}
"""What prose may name although the repository does not hold it, and why."""
# Functions of these modules are not ours to check.
FOREIGN_ROOTS = frozenset(sys.stdlib_module_names) | {"torch", "vllm"}
_FILE = r"(?:[\w.-]+/)*[\w-][\w.-]*\.(?:pyi?|cpp|cuh?|h|md|js|css|html|sh)"
_PATH = re.compile(rf"(?<![\w/.*<-])({_FILE})(?:#([\w-]+))?(?![\w(-])")
_DEFINED_JS = re.compile(
    r"(?:function\*?|class|const|let|var) (\w+)|^ *(?:async |static |get )*(\w+)\([^)]*\) \{", re.MULTILINE
)
_DEFINED_NATIVE = re.compile(
    r"(?:class|struct|using|enum|#define|namespace) (\w+)|[\w>&*\]] +[*&]*(?:\w+::)*(~?\w+)\(|(\w+)\s*[;=,{}[]"
)


class Tree:
    """What can be referred to. `verbs`: the options of each subcommand of `kvdock`, such as `status` and `token add`,
    and of `kvdock` itself as ""."""

    def __init__(self, files: Mapping[PurePosixPath, str], verbs: Mapping[str, frozenset[str]]) -> None:
        self.files, self.verbs = files, verbs
        self.folders = frozenset(folder for path in files for folder in path.parents)
        tops = "|".join(sorted(path.parts[0] for path in self.folders if len(path.parts) == 1))
        self.under_top = re.compile(rf"(?<![\w/.*<@-])((?:{tops or '$.'})/[\w./*-]*)")

    @cached_property
    def _read(self) -> Mapping[PurePosixPath, tuple[tuple[Line, ...], frozenset[str]]]:
        """Both at once, so that each file is parsed once."""
        return {
            path: (tuple(prose(path, text)), frozenset(definitions(path, text) if path.suffix in CODE else ()))
            for path, text in self.files.items()
        }

    @cached_property
    def prose(self) -> Mapping[PurePosixPath, tuple[Line, ...]]:
        return {path: lines for path, (lines, _) in self._read.items()}

    @cached_property
    def labels(self) -> frozenset[str]:
        return frozenset(re.findall(r"^- \*\*([IWDL]\d+)\*\*", self.files[PurePosixPath(PROTOCOL)], re.MULTILINE))

    @cached_property
    def targets(self) -> frozenset[str]:
        return frozenset(re.findall(r"^([a-z][\w-]*):(?!=)", self.files[PurePosixPath("Makefile")], re.MULTILINE))

    @cached_property
    def defined(self) -> Mapping[PurePosixPath, frozenset[str]]:
        """The names that each source file defines."""
        return {path: names for path, (_, names) in self._read.items() if path.suffix in CODE}

    @cached_property
    def in_extension(self) -> frozenset[str]:
        return frozenset(bound(self.files))

    @cached_property
    def all_defined(self) -> frozenset[str]:
        return frozenset().union(*self.defined.values())

    def resolve(self, path: PurePosixPath, name: str) -> PurePosixPath | None:
        """The file or folder that `path` means by `name`: from the root, its own folder, or the folders that its
        includes and imports are looked up in."""
        around = [PurePosixPath(), path.parent]
        around += [PurePosixPath("csrc")] if path.suffix in NATIVE else []
        around += [PurePosixPath("tests/support"), path.parent / "support"] if path.parts[0] == "tests" else []
        for folder in around:
            found = PurePosixPath(posixpath.normpath(folder / name))
            if found in self.files or found in self.folders:
                return found
        return None

    def runs(self, dotted: str) -> bool:
        """Whether `python -m` finds a program there."""
        base = PurePosixPath(*dotted.split("."))
        return base.with_suffix(".py") in self.files or base / "__main__.py" in self.files

    def holds(self, dotted: str) -> bool:
        """A module or folder by its dotted name from the root, or what such a module defines."""
        parts = dotted.split(".")
        if dotted.startswith(EXTENSION):
            return self.in_extension.issuperset(parts[2:])
        for used in range(len(parts), 0, -1):
            base = PurePosixPath(*parts[:used])
            if (module := base.with_suffix(".py")) in self.defined:
                return all(part in self.defined[module] for part in parts[used:])
            if base in self.folders:  # a package, and a class that it exports
                exported = parts[used] if used < len(parts) and parts[used][0].isupper() else None
                inside = (names for path, names in self.defined.items() if path.parent == base)
                return used == len(parts) or any(exported in names for names in inside)
        return False


def definitions(path: PurePosixPath, text: str) -> Iterator[str]:
    yield from bound({path: text})
    if path.suffix not in PYTHON:
        for names in (_DEFINED_NATIVE if path.suffix in NATIVE else _DEFINED_JS).findall(text):
            yield from filter(None, names)
        return
    for node in nodes(text):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.attr
        elif isinstance(node, ast.arg):
            yield node.arg


# --------------------------------------------------------------------------- the rules, a line at a time


def labels(tree: Tree, path: PurePosixPath, line: str) -> Iterator[str]:
    """I1, L2, W3, D1: an invariant or rule of the protocol page."""
    for label in re.findall(r"(?<![\w.])[IWDL]\d+(?!\w)", line):
        if label not in tree.labels:
            yield f"{label} is no label of {PROTOCOL}"


def sections(tree: Tree, path: PurePosixPath, line: str) -> Iterator[str]:
    """No page has numbered sections: a heading is named as docs/<page>.md#<heading>."""
    for match in re.finditer(r"\bsections? \d+", line):
        yield f"{match[0]}: name the heading, as docs/<page>.md#<heading>"


def paths(tree: Tree, path: PurePosixPath, line: str) -> Iterator[str]:
    """A file or folder as a path from the root or from this file's folder, and a heading of a page."""
    for name, heading in _PATH.findall(line):
        if name in ELSEWHERE:
            continue
        found = tree.resolve(path, name)
        if found is None:
            yield f"{name} is not there"
        elif heading and heading not in anchors(tree.files[found]):
            yield f"{name}#{heading}: no such heading"
    for name in tree.under_top.findall(line):
        name = name.rstrip("./")
        if any(name.startswith(f"{other}/") for other in ELSEWHERE):
            continue
        if "*" in name and any(fnmatch(str(other), name) for other in tree.files):
            continue
        if tree.resolve(path, name) is None and not re.fullmatch(_FILE, name):
            yield f"{name} is not there"


def names(tree: Tree, path: PurePosixPath, line: str) -> Iterator[str]:
    """`call()`, `Class.method`, a dotted name from kvdock or bench, and a name beside the path that is to hold it."""
    for dotted in re.findall(r"(?<![\w.])([A-Za-z_][\w.]*)\(\)", line):
        first, last = dotted.split(".")[0], dotted.split(".")[-1]
        if first not in FOREIGN_ROOTS and last not in tree.all_defined and last not in dir(builtins):
            yield f"{dotted}() is defined nowhere"
    for owner, name in re.findall(r"(?<![\w./-])([A-Z]\w+)(?:\.|::)([a-z_]\w*)\b(?!\.)", line):
        holders = [defined for defined in tree.defined.values() if owner in defined]
        if holders and not any(name in defined for defined in holders):
            yield f"{owner}.{name}: no {name} where {owner} is defined"
    for dotted in re.findall(r"(?<![\w./])((?:kvdock|bench)(?:\.\w+)+)", line):
        if dotted not in ELSEWHERE and not tree.holds(dotted):
            yield f"{dotted} is not there"
    for name, file in re.findall(rf"`([\w.]+)(?:\(\))?` \(`?({_FILE})`?\)", line):
        found = tree.resolve(path, file)
        held = tree.defined.get(found) if found is not None else None
        if held is not None and any(part not in held for part in name.split(".")):
            yield f"{name} is not in {file}"


def commands(tree: Tree, path: PurePosixPath, line: str) -> Iterator[str]:
    """Commands in backticks, and in the indented or fenced lines of a document."""
    quoted = re.findall(r"`([^`]+)`", line)
    if path.suffix == ".md" and not quoted:
        quoted = [re.sub(r"^\s*(?:[\w-]+: )?(?:\$ |exec |sudo )?", "", line)]
    for command in quoted:
        for module in re.findall(r"python3? -m ((?:bench|tests|kvdock)[.\w]*)", command):
            if not tree.runs(module):
                yield f"python -m {module}: no such program"
        for target in re.findall(r"^(?:\w+=\S+ )*make (?:-\w+ )?([a-z][\w-]*)(?=\s|$|\.)", command):
            if target not in tree.targets and " " not in command.split(target, 1)[1].strip():
                yield f"make {target}: no such target"
        if match := re.match(r"(?:\.venv/bin/)?kvdock(?: ([a-z][a-z-]*))?((?: .*)?)$", command):
            yield from _wrong_use(tree, match[1] or "", match[2])


def _wrong_use(tree: Tree, verb: str, rest: str) -> Iterator[str]:
    if verb not in tree.verbs:
        yield f"kvdock {verb}: no such command"
        return
    inner = f"{verb} {next(iter(rest.split()), '')}"
    verb = inner if inner in tree.verbs else verb
    for option in re.findall(r"(?<=\s)--[a-z][\w-]*", rest):
        if option not in tree.verbs[verb]:
            yield f"kvdock {verb} {option}: no such option"


Rule = Callable[[Tree, PurePosixPath, str], Iterator[str]]
RULES: tuple[Rule, ...] = (labels, sections, paths, names, commands)


def breaches(rule: Rule, tree: Tree) -> list[str]:
    return [
        f"{path}:{number}: {what}" for path, lines in tree.prose.items() for number, line in lines
        for what in rule(tree, path, line)
    ]
