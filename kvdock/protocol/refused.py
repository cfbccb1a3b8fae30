"""What msgspec, or pydantic for typer and FastAPI, has refused in what people write: which value it is and what was
wanted, in their words."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any, Final, NamedTuple, get_args, get_type_hints

import msgspec

from kvdock.protocol.readable import exact_bytes

_PLACE: Final = re.compile(r" - at (?:`key` in )?`\$\.?(.*)`$", re.DOTALL)
_EXPECTED: Final = re.compile(
    r"Expected `(?P<kind>\w+)(?:[| \w]*)`(?: (?P<bound>>=|<=|<|>) (?P<limit>[-\d.e+]+)| of length (?P<length>.+)"
    r"| matching regex .*| with a timezone component)?(?:, got .*)?", re.DOTALL,
)
_KINDS: Final = {
    "int": "a whole number", "float": "a number", "str": "text", "array": "a list", "object": "names with values",
    "bool": "true or false", "datetime": "a date and time with a zone, as 2026-11-27T09:00:00Z",
}
TENANT_WANTED: Final = "a name of at most 64 characters: a-z, 0-9, dots, hyphens and underscores"
_PATTERNED: Final = {
    "name": "a name of 1 to 64 characters: letters, digits, dots, hyphens and underscores",
    "tenant": TENANT_WANTED, "tenants": TENANT_WANTED,
    "sha256": "the 64 hex digits of a token's SHA-256",
}
"""What is wanted of text with a pattern, by the name of its field."""
_FIELD: Final = re.compile(r"Object (?:contains unknown|missing required) field `(.*)`", re.DOTALL)


class Refused(NamedTuple):
    where: str
    """`port`, or `token[0].sha256`; empty: all of it."""
    wanted: str

    @property
    def name(self) -> str:
        """The last name of `where`: `sha256`."""
        return re.sub(r"\[.*?\]", "", self.where).rpartition(".")[2]


def refused(error: msgspec.ValidationError, choices: Mapping[str, Sequence[str]]) -> Refused:
    """`choices`: the values that a field may have, by its name."""
    message = str(error)
    place = _PLACE.search(message)
    where, said = (place[1], message[: place.start()]) if place else ("", message)
    at = Refused(where, "")
    if field := _FIELD.fullmatch(said):
        is_unknown = said.startswith("Object contains")
        return at._replace(wanted=f"no {field[1]!r}, which is unknown" if is_unknown else f"{field[1]!r} as well")
    if at.name in choices and said.startswith(("Invalid enum value", "Expected `str`")):
        return at._replace(wanted=" or ".join(choices[at.name]))
    if said.startswith("Invalid RFC3339"):
        return at._replace(wanted=_KINDS["datetime"])
    if (found := _EXPECTED.fullmatch(said)) is None:
        return at._replace(wanted="a finite number" if said.startswith("Number out of range") else said)
    if found["kind"] == "str" and at.name in _PATTERNED:
        return at._replace(wanted=_PATTERNED[at.name])
    is_size = at.name.endswith("bytes") and found["kind"] == "int"
    kind = "a size" if is_size else _KINDS.get(found["kind"], found["kind"])
    if found["length"]:
        return at._replace(wanted=f"{kind} of length {found['length']}")
    if found["bound"]:
        limit = exact_bytes(int(found["limit"])) if is_size else found["limit"]
        return at._replace(wanted=f"{kind} {found['bound']} {limit}")
    return at._replace(wanted=kind)


_WHOLE: Final = re.compile(r"-?[0-9]+")
WHOLE_WANTED: Final = "a whole number without fraction and exponent, as 1000"


def not_whole(values: Mapping[str, object], struct: type[msgspec.Struct]) -> str | None:
    """The first field of whole numbers whose value is none as people write them. msgspec would take 1e3 and 1000.0."""
    for name in values.keys() & _whole_fields(struct):
        value = values[name]
        if isinstance(value, float) or (isinstance(value, str) and not _WHOLE.fullmatch(value)):
            return name
    return None


@cache
def _whole_fields(struct: type[msgspec.Struct]) -> frozenset[str]:
    kinds = {name: {hint, *get_args(hint)} for name, hint in get_type_hints(struct).items()}
    return frozenset(name for name, its in kinds.items() if int in its and float not in its)


def found_at(where: str, content: object) -> object:
    """The value at the place that `refused` names. Raises LookupError or TypeError where it names none."""
    value: Any = content
    for name, index in re.findall(r"(\w+)|\[(\d+)\]", where):
        value = value[name or int(index)]
    return value


_SIGNS: Final = {"ge": ">=", "gt": ">", "le": "<=", "lt": "<"}
_PARSED: Final = {"int_parsing": "a whole number", "float_parsing": "a number", "finite_number": "a finite number"}
_CHOICE: Final = re.compile(r".* is not one of (.+?)\.?", re.DOTALL)


def wanted_of(refused: Mapping[str, Any]) -> str:
    """`refused`: an item of pydantic's ValidationError.errors(). Empty: only its own message can say."""
    about = refused.get("ctx", {})
    for name, sign in _SIGNS.items():
        if (limit := about.get(name)) is not None:
            return f"a number {sign} {limit:g}" if isinstance(limit, float) else f"a number {sign} {limit}"
    if refused["type"] in _PARSED:
        return _PARSED[refused["type"]]
    if "expected" in about:
        return str(about["expected"])
    choices = _CHOICE.fullmatch(str(about.get("error", "")))
    return f"one of {choices[1]}" if choices else ""
