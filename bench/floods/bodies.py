"""Every call of the OpenAPI document with the largest body that the server decodes, and with those that it refuses
because to decode them would take too long."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import msgspec

from kvdock.protocol.forms import JSON, PACKED
from kvdock.protocol.wire_types import Scope

SHARES = (1 / 64, 1 / 16, 1 / 8, 1 / 4, 1 / 2, 1.0)
"""Parts of the greatest length that the document gives to each list."""
UNBOUNDED = 1000
LONGEST_BYTES = 16 << 20
"""The longest body that is made: twice what a server takes."""
_HOLLOW = b"\x81\xa1x\xdd" + (7_000_000).to_bytes(4, "big")


class Body(NamedTuple):
    content: bytes
    media_type: str = JSON.media_type


BOMBS = {
    "JSON of hollow lists": Body(b'{"x":[' + b"[]," * 330_000 + b"[]]}"),
    "JSON of many megabytes": Body(b'{"x":[' + b"0," * 3_500_000 + b"0]}"),
    "JSON of names of tokens": Body(b'{"tokens" :' * 600_000),
    "packed nils": Body(_HOLLOW + b"\xc0" * 7_000_000, PACKED.media_type),
    "packed tokens": Body(msgspec.msgpack.encode({"tokens": [150_000] * (1 << 20)}), PACKED.media_type),
    "packed blocks": Body(
        msgspec.msgpack.encode({"blocks": [[None, [1 << 63] * 768, b""]] * 1024}), PACKED.media_type
    ),
    "packed hollow lists": Body(_HOLLOW + b"\x90" * 7_000_000, PACKED.media_type),
}
"""Bodies that are nothing but values."""


class Described(NamedTuple):
    """A call of the document. `query`: the names of its query's parameters, and whether the call needs them.
    `forms`: the media types of its body, each with the schema; none: it has no body."""

    method: str
    path: str
    scope: Scope
    query: dict[str, bool]
    forms: dict[str, Any]
    is_stream: bool

    @property
    def name(self) -> str:
        return f"{self.method} {self.path}"

    def target(self, ids: Mapping[str, str]) -> str:
        """The path with these ids, the longest page, and something for each parameter that the call needs."""
        path = self.path
        for name, value in ids.items():
            path = path.replace(f"{{{name}}}", value)
        query = [f"{name}={ids.get(name, '0')}" for name, is_required in self.query.items() if is_required]
        query += ["limit=1000"] if "limit" in self.query else []
        return f"{path}?{'&'.join(query)}" if query else path


def calls_of(document: dict[str, Any]) -> Iterator[Described]:
    for path, methods in document["paths"].items():
        for method, call in methods.items():
            answers = call["responses"].get("200", {}).get("content", {})
            yield Described(
                method.upper(), path, call["x-scope"],
                {one["name"]: one["required"] for one in call["parameters"] if one["in"] == "query"},
                {kind: one["schema"] for kind, one in call.get("requestBody", {}).get("content", {}).items()},
                "text/event-stream" in answers,
            )


class Largest:
    """Makes values that a schema of the document allows, with `share` of the longest lists."""

    def __init__(self, document: dict[str, Any], share: float, known: Mapping[str, str]) -> None:
        """`known`: values of fields that name what is there."""
        self._schemas, self._share, self._known = document["components"]["schemas"], share, known

    def of(self, schema: dict[str, Any]) -> Any:
        if "$ref" in schema:
            return self.of(self._schemas[schema["$ref"].rpartition("/")[2]])
        if choices := schema.get("anyOf") or schema.get("oneOf"):
            return max(map(self.of, choices), key=lambda value: len(msgspec.json.encode(value)))
        if "enum" in schema or "const" in schema:
            return schema.get("const", schema.get("enum", [None])[0])
        make: Callable[[dict[str, Any]], Any] = getattr(self, f"_{schema.get('type', 'null')}")
        return make(schema)

    def _object(self, schema: dict[str, Any]) -> Any:
        made = {
            name: self._known[name] if name in self._known else self.of(one)
            for name, one in schema.get("properties", {}).items()
        }
        more = schema.get("additionalProperties")
        if isinstance(more, dict):
            made |= {f"name-{number}": self.of(more) for number in range(max(1, int(UNBOUNDED * self._share)))}
        return made

    def _array(self, schema: dict[str, Any]) -> Any:
        if "prefixItems" in schema:
            return [self.of(one) for one in schema["prefixItems"]]
        count = max(1, schema.get("minItems", 0), int(schema.get("maxItems", UNBOUNDED) * self._share))
        item = self.of(schema["items"]) if isinstance(schema.get("items"), dict) else None
        return [item] * count

    def _string(self, schema: dict[str, Any]) -> str:
        length: int = schema.get("maxLength", 64)
        return "A" * (length // 4 * 4) if "contentEncoding" in schema else "0" * length

    def _integer(self, schema: dict[str, Any]) -> int:
        return int(schema.get("maximum", schema.get("exclusiveMaximum", 1 << 31) - 1))

    def _number(self, schema: dict[str, Any]) -> float:
        return float(schema.get("maximum", 1.0))

    def _boolean(self, _: dict[str, Any]) -> bool:
        return False

    def _null(self, _: dict[str, Any]) -> None:
        return None


def is_refused_undecoded(status: int, content: bytes) -> bool:
    """Whether that answer refuses a body for its length or for what decoding it would cost."""
    return status == 413 or (status == 422 and b'"too many values' in content)


def bodies_of(
    document: dict[str, Any], call: Described, known: Mapping[str, str], is_decoded: Callable[[bytes], bool]
) -> tuple[Body, list[Body]]:
    """The largest body that is decoded; and those that are refused before: the next larger one, if there is one, and
    the bombs. `is_decoded`: sends a body of JSON and says whether the server decoded it."""
    legal, refused = Body(b"{}"), list[Body]()
    for share in SHARES:
        body = Body(msgspec.json.encode(Largest(document, share, known).of(call.forms[JSON.media_type])))
        if len(body.content) > LONGEST_BYTES:
            break
        if not is_decoded(body.content):
            refused.append(body)
            break
        legal = body
    return legal, refused + [bomb for bomb in BOMBS.values() if bomb.media_type in call.forms]
