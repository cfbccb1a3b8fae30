"""`kvdock size`: how much memory the pool should have, from a server's lookups or, before there is traffic, by a
formula."""

from __future__ import annotations

from dataclasses import dataclass

import msgspec
from rich.console import Console

from kvdock.cli.client import print_json, reached
from kvdock.cli.errors import FAILED, WRONG, CommandError
from kvdock.cli.render import duration, percent, say_table, size
from kvdock.protocol.reports import Curve, CurvePoint

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "fp8": 1}
NEAR = 0.02
"""A pool whose hit share is this much below that of an unlimited pool is large enough: the error of the estimate is
about as large."""
MUCH = 0.1
"""A larger pool is worth a command if it finds this much more."""
ERROR_CELLS = 160
"""A narrower window has no room for the errors of each model's shares."""
MIB = 1 << 20
SHARES = (0.25, 0.5, 1.0)


@dataclass(frozen=True)
class Model:
    """The bytes of a token's KV, or the shape of the model from which they follow."""

    bytes_per_token: int | None
    layers: int | None
    kv_heads: int | None
    head_size: int | None
    dtype: str

    @property
    def is_named(self) -> bool:
        return any(one is not None for one in (self.bytes_per_token, self.layers, self.kv_heads, self.head_size))

    def token_bytes(self) -> int:
        """Bytes of the keys and values of all layers. Raises CommandError if an option is missing or superfluous."""
        shape = (self.layers, self.kv_heads, self.head_size)
        if self.bytes_per_token is not None:
            if any(one is not None for one in shape):
                raise CommandError("give --bytes-per-token or the model's shape, not both", WRONG)
            return self.bytes_per_token
        if self.dtype not in DTYPE_BYTES:
            raise CommandError(f"--dtype: found {self.dtype!r}, wanted {', '.join(DTYPE_BYTES)}", WRONG)
        layers, kv_heads, head_size = shape
        if layers is None or kv_heads is None or head_size is None:
            raise CommandError("give --bytes-per-token, or all of --layers, --kv-heads and --head-size", WRONG)
        return 2 * layers * kv_heads * head_size * DTYPE_BYTES[self.dtype]


@dataclass(frozen=True)
class Users:
    count: int
    tokens_each: int
    """Tokens of each user's longest prompt, without the shared ones."""
    shared_tokens: int
    new_tokens: int
    """Tokens at the end of each prompt that no earlier prompt had."""


class SizedPoint(msgspec.Struct, kw_only=True):
    pool_bytes: int
    users: int
    """How many users' prompts fit, beside the shared tokens."""


class Sized(msgspec.Struct, kw_only=True):
    """The result of the formula; `--json` prints it."""

    bytes_per_token: int
    pool_bytes: int
    """Memory for the prompts of all users."""
    most_hit_share: float
    """The hit share if all tokens of a prompt except its new ones are found."""
    points: list[SizedPoint]


def show_size(server: str, *, model: Model, users: Users | None, as_json: bool, console: Console) -> None:
    """Raises CommandError for wrong options, when no server answers, and when it has had too few lookups, and
    ApiError."""
    if users is None:
        if model.is_named:
            raise CommandError("the formula needs --users and --tokens-each as well", WRONG)
        _show_curve(server, as_json, console)
        return
    token_bytes = model.token_bytes() if model.is_named else _bytes_per_token(server)
    sized = by_formula(token_bytes, users)
    if as_json:
        print_json(console, sized)
        return
    shared = f" + {users.shared_tokens:,} shared" if users.shared_tokens else ""
    each = f"{users.count:,} users × {users.tokens_each:,} tokens{shared}"
    console.print(f"{each}, {size(token_bytes)} a token: {size(sized.pool_bytes)}", highlight=False)
    say_table(console, ("pool", "users whose prompts fit"), [
        (size(point.pool_bytes), f"{point.users:,}") for point in sized.points
    ], texts=("pool",))
    found = f"At most {percent(sized.most_hit_share, 0)} of a prompt's tokens can be found" if users.new_tokens else (
        "The share of tokens that is found depends on how much of each prompt is new"
    )
    console.print(f"{found}. This is a formula: ask again when the server has had traffic.", highlight=False)


def by_formula(bytes_per_token: int, users: Users) -> Sized:
    """A prompt is found again if its chunks stay until the user's next prompt. If the prompts of all users fit, they
    stay, in whatever order the prompts arrive; otherwise they stay for as many users as fit."""
    shared, each = users.shared_tokens * bytes_per_token, users.tokens_each * bytes_per_token
    whole = shared + users.count * each
    prompt = users.shared_tokens + users.tokens_each
    return Sized(
        bytes_per_token=bytes_per_token, pool_bytes=whole,
        most_hit_share=max(0, prompt - users.new_tokens) / prompt,
        points=[
            SizedPoint(pool_bytes=int(share * whole), users=max(0, int(share * whole) - shared) // each)
            for share in SHARES
        ],
    )


def _bytes_per_token(server: str) -> int:
    """The bytes that the server's engines store for each token, if all store the same."""
    with reached(server) as client:
        spaces = client.namespaces().namespaces
    found = {space.chunk_bytes // space.manifest.chunk_tokens for space in spaces}
    if len(found) != 1:
        what = "no engine has attached" if not found else "its engines store different numbers of bytes"
        raise CommandError(f"{what}: name the model, with --bytes-per-token for example", FAILED)
    return found.pop()


def _show_curve(server: str, as_json: bool, console: Console) -> None:
    with reached(server) as client:
        curve = client.curve()
    if as_json:
        print_json(console, curve)
        return
    total = curve.total
    if not total.points:
        raise CommandError(
            f"{total.lookups:,} lookups are too few for an answer; for an estimate give --users and --tokens-each",
            FAILED,
        )
    console.print(
        f"{total.tokens:,} tokens in {total.lookups:,} lookups over {duration(curve.covers_s)}; the pool itself found "
        f"{percent(total.hit_share or 0, 0)} of them", highlight=False,
    )
    per_token = {one.chunk_bytes / one.chunk_tokens for one in curve.namespaces}
    holds = per_token.pop() if len(per_token) == 1 else None  # of models of several sizes, no number of tokens is true
    say_table(console, ("pool", *(("tokens it holds",) if holds else ()), "share of tokens it would find"), [
        (_pool(point, curve), *((_tokens(point, holds),) if holds else ()), share_in_words(point))
        for point in total.points
    ], texts=("pool",))
    if enough := _enough(total.points):
        console.print(f"A pool of {size(enough)} would find nearly as much as an unlimited one.", highlight=False)
    if better := _better(total.points):
        wanted = better if better % MIB else f"{better // MIB}MiB"
        console.print(f"→ kvdock config set pool_bytes={wanted}", style="italic", highlight=False)
    apart = [one for one in curve.namespaces if one.points]
    if len(apart) > 1:
        points = tuple(map(_column, apart[0].points))
        in_words = share_in_words if console.width >= ERROR_CELLS else _share
        say_table(console, ("model", "namespace", "tenant", "found", *points), [
            (one.model, one.namespace[:8], one.tenant, percent(one.hit_share or 0, 0), *map(in_words, one.points))
            for one in apart
        ], texts=("model", "namespace", "tenant"), yields=("tenant", "found", points[0], points[-2]))


def _better(points: list[CurvePoint]) -> int | None:
    """The size of the smallest larger pool that finds much more than this one, and nearly as much as the others."""
    known = {point.factor: point for point in points if point.factor is not None and point.hit_share is not None}
    larger = [point for factor, point in sorted(known.items()) if factor > 1]
    if 1.0 not in known or not larger:
        return None
    most = max(point.hit_share or 0 for point in larger)
    best = next(point for point in larger if most - (point.hit_share or 0) < NEAR)
    return best.pool_bytes if (best.hit_share or 0) - (known[1.0].hit_share or 0) >= MUCH else None


def _enough(points: list[CurvePoint]) -> int | None:
    """The size of the smallest pool that finds nearly as much as an unlimited one."""
    most = points[-1].hit_share or 0
    sizes = [one.pool_bytes for one in points[:-1] if one.hit_share is not None and one.hit_share >= most - NEAR]
    return next((one for one in sizes if one is not None), None)


def _pool(point: CurvePoint, curve: Curve) -> str:
    if point.pool_bytes is None:
        return "unlimited"
    return f"{size(point.pool_bytes)}{' (now)' if point.pool_bytes == curve.pool_bytes else ''}"


def _tokens(point: CurvePoint, bytes_per_token: float) -> str:
    return "" if point.pool_bytes is None else f"{point.pool_bytes / bytes_per_token:,.0f}"


def _column(point: CurvePoint) -> str:
    return "∞" if point.factor is None else f"{point.factor:g}×"


def share_in_words(point: CurvePoint) -> str:
    return f"{_share(point)} ± {percent(point.error, 1)}" if point.error else _share(point)


def _share(point: CurvePoint) -> str:
    return "?" if point.hit_share is None else percent(point.hit_share, 1)
