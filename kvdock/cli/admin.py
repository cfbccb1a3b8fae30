"""What an operator changes: `kvdock clear`, `evict`, `keep` and `drain`, and the settings of `kvdock config`.

Engines that hold a chunk which is removed go on with it; its memory is freed when they have released it.
"""

from __future__ import annotations

import difflib
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any, Final, NamedTuple

import msgspec
import typer
from rich.console import Console
from rich.table import Column, Table
from rich.text import Text

from kvdock.api.errors import SettingsError
from kvdock.api.settings import ENV_PREFIX, Effective, Settings, choices_of
from kvdock.api.sizes import AUTO_POOL, Whole, parse_bytes, parse_size, shared_memory
from kvdock.cli.client import LONG_TIMEOUT_S, Prompt, delete, parts_of, print_json, reached, resolve
from kvdock.cli.errors import FAILED, WRONG, CommandError
from kvdock.cli.render import counted, duration, printable, say, size
from kvdock.protocol.admin_schemas import (
    MAX_PIN_S,
    Amounts,
    AskedQuota,
    ClearCache,
    Config,
    Drained,
    DrainServer,
    EvictChunks,
    Limits,
    NamespaceView,
    PatchConfig,
    PinChunks,
    TenantView,
)
from kvdock.protocol.readable import exact_bytes
from kvdock.protocol.refused import TENANT_WANTED, WHOLE_WANTED, not_whole, refused
from kvdock.protocol.schemas import Lookup
from kvdock.protocol.wire_types import MAX_KEYS, MAX_LABEL, OWN_TENANT, Tenant, is_label

DRAIN_LOOK_S = 0.5
"""How often `drain --wait` looks at what is open."""


class Kept(msgspec.Struct):
    """What `keep --json` prints."""

    namespace: str
    model: str
    asked_chunks: int
    chunks: int
    """How many of the prompt's chunks are stored, and so are kept from now on; with `--end`, no longer."""
    duration_s: float
    """How long from now; 0: no longer."""


def acknowledge_findings(server: str, *, as_json: bool, console: Console) -> None:
    """`--json` prints the server's answer. Raises CommandError, ApiError."""
    with reached(server) as client:
        seen = client.acknowledge()
    if as_json:
        print_json(console, seen)
    else:
        say(console, f"{counted(seen.troubles, 'event')} acknowledged: dead engines, damage, pools left out")


def drain_server(server: str, *, wait: bool, as_json: bool, console: Console) -> None:
    """`--json` prints the server's answer; with `wait`, how it is at the end. Raises CommandError if somebody ends the
    drain meanwhile, and when no server answers; ApiError."""
    with reached(server) as client:
        drained = client.drain(DrainServer(is_drained=True))
        while wait and drained.leases + drained.reservations:
            time.sleep(DRAIN_LOOK_S)
            status = client.status()
            if "draining" not in status.reasons:
                raise CommandError("somebody has ended the drain: the server gives out slots again", FAILED)
            drained = Drained(is_drained=True, leases=status.leases, reservations=status.reservations)
    if as_json:
        print_json(console, drained)
    elif drained.leases + drained.reservations:
        say(console, f"the server is drained; open are {counted(drained.leases, 'lease')} and "
                     f"{counted(drained.reservations, 'reservation')}")
    else:
        say(console, "the server is drained, and no lease or reservation is open")


def undrain_server(server: str, *, as_json: bool, console: Console) -> None:
    """Raises CommandError if the server is about to end, and when no server answers; ApiError."""
    with reached(server) as client:
        drained = client.drain(DrainServer(is_drained=False))
    if drained.is_drained:
        raise CommandError("the server is about to end: it gives out nothing new any more", FAILED)
    if as_json:
        print_json(console, drained)
    else:
        say(console, "the server gives out slots again")


class ToClear(NamedTuple):
    """The options that say what is cleared: one of them."""

    namespace: str
    tenant: str | None
    everything: bool


def clear_cache(server: str, wanted: ToClear, *, yes: bool, as_json: bool, console: Console) -> None:
    """Raises CommandError for wrong options, when the user declines, and when no server answers, and ApiError."""
    tenant = wanted.tenant
    if sum((bool(wanted.namespace), tenant is not None, wanted.everything)) != 1:
        raise CommandError("clear needs one of --namespace, --tenant and --all", WRONG)
    require_tenant("--tenant", tenant or OWN_TENANT)
    with reached(server) as client:
        space = resolve(client, wanted.namespace) if wanted.namespace else None
        if not yes:
            status = client.status()
            what = "all namespaces" if space is None else _named(space)
            if tenant is not None:
                what += f" of {_tenant(tenant)}"
            stored = f"{status.chunks.ready:,} chunks of {size(status.pool.ready_bytes)}"
            confirm("clear", f"Clear {what} at {client.address}? All namespaces together have {stored}.",
                     "nothing was cleared")
        body = ClearCache(namespace=None if space is None else space.namespace, tenant=tenant)
        cleared = client.clear(body, timeout_s=LONG_TIMEOUT_S)
    if tenant and not cleared.namespaces:
        raise CommandError(
            f"{_tenant(tenant)} has no namespace, so nothing was cleared; `kvdock quota` lists the tenants that store "
            "something", FAILED,
        )
    if as_json:
        print_json(console, cleared)
    else:
        say(console, f"{cleared.chunks:,} chunks were cleared")
        _say_pending(console, cleared.pending_tiers)


def evict(
    server: str, prompt: Prompt, *, bytes_text: str, free_text: str, yes: bool, as_json: bool, console: Console
) -> None:
    """Evicts a prompt's chunks, or the least valuable ones. Raises CommandError for wrong options, when the user
    declines, and when no server answers, and ApiError."""
    if sum((prompt.given, bool(bytes_text), bool(free_text))) != 1:
        raise CommandError("evict needs one of --tokens-file, --keys, --bytes and --free", WRONG)
    if prompt.given:
        _evict_prompt(server, prompt, yes=yes, as_json=as_json, console=console)
        return
    if prompt.namespace:
        raise CommandError("--namespace goes with --tokens-file or --keys; `kvdock clear` removes a namespace", WRONG)
    amount = parse_bytes(bytes_text or free_text)
    with reached(server) as client:
        status = client.status()
        pool, ready = status.pool, status.pool.ready_bytes
        free = pool.free_bytes + max(0, pool.limit_bytes - pool.allocated_bytes)  # as the server counts
        wanted = free + amount if bytes_text else amount
        if amount > pool.limit_bytes:
            found, limit = bytes_text or free_text, exact_bytes(pool.limit_bytes)
            raise CommandError(f"found {found}, wanted at most what the pool may have: {limit}", FAILED)
        wanted = min(wanted, pool.limit_bytes)
        missing = max(0, wanted - free)
        if not yes and missing:
            lost = f"{size(min(missing, ready))} of the {size(ready)} that are stored, the least valuable chunks first"
            confirm("evict", f"Evict {lost}, at {client.address}? Chunks that engines hold, and kept chunks, stay.",
                     "nothing was evicted")
        evicted = client.evict(EvictChunks(free_bytes=wanted), timeout_s=LONG_TIMEOUT_S)
        left = client.status().pool.ready_bytes
    if as_json:
        print_json(console, evicted)
        return
    if not missing and not evicted.chunks:
        say(console, f"nothing was evicted: {size(evicted.free_bytes)} are free already")
        return
    say(console, f"{counted(evicted.chunks, 'chunk')} of {size(evicted.bytes)} evicted; "
                 f"{size(evicted.free_bytes)} are free")
    if left and evicted.free_bytes < wanted:  # segments' headers are never free
        say(console, f"{size(wanted)} were to be free, and no more may be evicted now: what is left is held by "
                     "engines, kept, being written, or was stored meanwhile")


def _evict_prompt(server: str, prompt: Prompt, *, yes: bool, as_json: bool, console: Console) -> None:
    wanted = prompt.read("evict")
    with reached(server) as client:
        space = resolve(client, prompt.namespace)
        keys = wanted.keys_in(space)
        stored = client.lookup(Lookup(namespace=space.namespace, keys=keys[:MAX_KEYS])).hit_tokens
        if not yes:
            lost = f"a prompt of {counted(len(keys), 'chunk')}, of which {stored:,} tokens are stored"
            confirm("evict", f"Evict {lost}, from {_named(space)} at {client.address}? Longer prompts that begin "
                     "with it will not be found any more either, including kept ones.", "nothing was evicted")
        gone = delete(client, space.namespace, keys)
    if as_json:
        print_json(console, gone)
        return
    say(console, f"{counted(gone.chunks, 'chunk')} evicted, of {len(keys):,}")
    if gone.tier_chunks:
        say(console, f"{counted(gone.tier_chunks, 'chunk')} deleted from lower tiers")
    if gone.is_cleared:
        say(console, "more keys were deleted than tiers can name, so the whole namespace was cleared")
    _say_pending(console, gone.pending_tiers)


def keep(
    server: str, prompt: Prompt, *, duration_s: float, name: str, as_json: bool, console: Console
) -> None:
    """`duration_s` 0: stop keeping it. `name`: a label for its last stored chunk; "": none. Raises CommandError for
    wrong options, when no chunk of the prompt is stored, and when no server answers, and ApiError."""
    wanted = prompt.read("keep")
    if name and not is_label(name):
        raise CommandError(
            f"--name: wanted at most {MAX_LABEL} characters that can be seen, found {printable(name)!r}", WRONG
        )
    if name and not duration_s:
        raise CommandError("--name does not go with --end: a prompt that is kept no longer has no name", WRONG)
    if duration_s > MAX_PIN_S:
        raise CommandError(f"--for: wanted at most {duration(MAX_PIN_S)}, found {duration(duration_s)}", WRONG)
    with reached(server) as client:
        space = resolve(client, prompt.namespace)
        keys = wanted.keys_in(space)
        label = name or msgspec.UNSET
        chunks = sum(
            client.pin(PinChunks(namespace=space.namespace, keys=part, duration_s=duration_s, name=label)).chunks
            for part in parts_of(keys)
        )
    if not chunks and duration_s:
        raise CommandError(f"no chunk of this prompt is stored for {_named(space)}: nothing is kept", FAILED)
    if as_json:
        print_json(console, Kept(space.namespace, space.model, len(keys), chunks, duration_s))
        return
    what = f"{chunks:,} of {counted(len(keys), 'chunk')} for {_named(space)}"
    if not duration_s:
        say(console, f"{what} are not kept any more")
        return
    until = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(time.time() + duration_s))
    rest = "" if chunks == len(keys) else "; the others are not stored"
    say(console, f"{what} are kept from eviction until {until}{rest}")


def _say_pending(console: Console, tiers: Sequence[str]) -> None:
    if tiers:
        say(console, f"pending in the lower tiers {', '.join(tiers)}; they are not used for the namespace until then")


def require_tenant(option: str, name: str) -> None:
    """Raises CommandError for what can be no tenant's name."""
    try:
        msgspec.convert(name, Tenant)
    except msgspec.ValidationError:
        raise CommandError(f"{option}: wanted {TENANT_WANTED}, found {name!r}", WRONG) from None


def _tenant(name: str) -> str:
    return f"tenant {printable(name)}" if name else "the server's own user"


def _named(space: NamespaceView) -> str:
    return f"{printable(space.model)} ({space.namespace[:8]})"


def confirm(command: str, question: str, refusal: str) -> None:
    """Asks on standard error, so that standard output stays JSON with --json."""
    if not sys.stdin.isatty():
        raise CommandError(f"{command} asks for confirmation, and standard input is no terminal: add --yes", WRONG)
    if not typer.confirm(question, err=True):
        raise CommandError(refusal, FAILED)


# ------------------------------------------------------------------ settings


def show_config(effective: Effective, *, as_json: bool, console: Console) -> None:
    values = {name: getattr(effective.settings, name) for name in effective.origins}
    if as_json:
        print_json(console, {"settings": {
            name: {"value": values[name], "source": origin.source, "where": origin.where}
            for name, origin in effective.origins.items()
        }})
        return
    table = Table(Column("setting", no_wrap=True), "value", "from", box=None, pad_edge=False)
    for name, origin in effective.origins.items():
        value = exact_bytes(values[name]) if name.endswith("_bytes") else str(values[name])
        place = f"{origin.source}: {origin.where}" if origin.where else origin.source
        style = "" if origin.source == "default" else "bold"
        table.add_row(name, Text(printable(value) or "(empty)", style=style, overflow="fold"),
                      Text(printable(place), overflow="fold"))
    say(console, table)


LIVE = Limits.__struct_fields__
"""Settings that can be changed in a running server."""
TENANTS = "tenants"


def show_live_config(server: str, *, as_json: bool, console: Console) -> None:
    """Raises CommandError when no server answers, and ApiError."""
    with reached(server) as client:
        config = client.config()
        address = client.address
    if as_json:
        print_json(console, config)
        return
    say(console, f"settings of the server at {address}", "", _live_table(config))
    say(console, "", "Fixed until the server is restarted:", "", _fixed_table(config))
    if shown := {name: view for name, view in config.tenants.items() if _has_quota(view.quota)}:
        say(console, "", _tenants_table(shown))
    _say_retiring(console, config)


def change_live_config(server: str, changes: Sequence[str], *, as_json: bool, console: Console) -> None:
    """`changes`: NAME=VALUE each, or one name and its value; all take effect, or none.

    Raises CommandError for a setting that cannot be changed, and when no server answers, and ApiError.
    """
    if len(changes) == 2 and "=" not in "".join(changes):
        changes = ["=".join(changes)]
    parse_changes(changes, ANY)
    with reached(server) as client:
        before = client.config().limits
        body = parse_changes(changes, Wholes(before.pool_bytes, client.address.startswith("unix:")))
        config = client.configure(body, timeout_s=LONG_TIMEOUT_S)
    if as_json:
        print_json(console, config)
        return
    for name in LIVE:
        if getattr(body, name) is not None:
            was, now = (in_words(name, getattr(limits, name)) for limits in (before, config.limits))
            say(console, f"{name}: {was} → {now}" if was != now else f"{name}: {now}, as before")
    for tenant in body.tenants or {}:
        _say_quota(console, config, tenant)
    _say_retiring(console, config)
    kept = [name for name in LIVE if getattr(body, name) is not None]
    if kept:
        variable = f"{ENV_PREFIX}{kept[0].upper()}={in_words(kept[0], getattr(config.limits, kept[0]))}"
        say(console, f"This lasts until the server ends: start the next one with {variable}, or set it in its file.")


def show_quotas(server: str, tenant: str | None, *, as_json: bool, console: Console) -> None:
    """`tenant` None: all. Raises CommandError when the server does not know the tenant, and when no server answers;
    ApiError."""
    with reached(server) as client:
        tenants = client.config().tenants
    if tenant is not None:
        if tenant not in tenants:
            raise CommandError(f"{_tenant(tenant)} uses nothing, and has the default quota", FAILED)
        tenants = {tenant: tenants[tenant]}
    if as_json:
        print_json(console, {"tenants": tenants})
    elif tenants:
        say(console, _tenants_table(tenants))
    else:
        say(console, "no tenant uses anything, and none has a quota of its own")


def change_quota(
    server: str, tenant: str, quota: AskedQuota | None, *, as_json: bool, console: Console
) -> None:
    """`quota` None: the one of the access file, or else the default. Raises CommandError for what can be no tenant's
    name, and when no server answers; ApiError."""
    require_tenant("TENANT", tenant)
    if quota is not None and isinstance(quota.bytes, str):
        _sized("--bytes", quota.bytes, lambda: Whole("the pool's limit", ANY.pool_bytes), None)  # only checks it
    with reached(server) as client:
        config = client.configure(PatchConfig(tenants={tenant: quota}), timeout_s=LONG_TIMEOUT_S)
    if as_json:
        print_json(console, {"tenants": {tenant: config.tenants[tenant]} if tenant in config.tenants else {}})
        return
    _say_quota(console, config, tenant)


def _say_quota(console: Console, config: Config, tenant: str) -> None:
    view = config.tenants.get(tenant)
    say(console, f"quota of {_tenant(tenant)}: {'the default' if view is None else _amounts(view.quota)}")


class Wholes(NamedTuple):
    """What shares of a running server are shares of."""

    pool_bytes: int
    """The pool's limit: for quotas."""
    is_here: bool
    """The server runs on this machine, so that this machine's shared memory is the server's."""


ANY: Final = Wholes(pool_bytes=1 << 40, is_here=True)
"""To check shares before the server is asked."""


def parse_changes(changes: Sequence[str], wholes: Wholes) -> PatchConfig:
    """Raises CommandError naming the change, what was found and what was wanted."""
    values: dict[str, Any] = {}
    for change in changes:
        name, equals, text = change.partition("=")
        name = name.strip().replace("-", "_")
        if not equals:
            raise CommandError(f"wanted NAME=VALUE, such as pool_bytes=16GiB, found {change!r}", WRONG)
        _require_live(name)
        if name in values:
            raise CommandError(f"{name} is given twice", WRONG)
        values[name] = _parsed(name, text.strip(), wholes)
    if fault := not_whole(values, PatchConfig):
        raise CommandError(f"{fault}: wanted {WHOLE_WANTED}, found {' '.join(changes)}", WRONG)
    try:
        return msgspec.convert(values, PatchConfig, strict=False)
    except msgspec.ValidationError as error:
        where, wanted = refused(error, {})
        raise CommandError(f"{where}: wanted {wanted}, found {' '.join(changes)}", WRONG) from error


def _require_live(name: str) -> None:
    known = [*LIVE, TENANTS]
    if name in known:
        return
    wanted = f"wanted one of {', '.join(known)}"
    if name in Settings.__struct_fields__:
        raise CommandError(f"{name} is fixed until the server is restarted; {wanted}", WRONG)
    near = difflib.get_close_matches(name, known, 1)
    raise CommandError(f"unknown setting {name!r}{f' (meant {near[0]}?)' if near else ''}; {wanted}", WRONG)


def _parsed(name: str, text: str, wholes: Wholes) -> Any:
    """The value for the body of PATCH; msgspec converts numbers."""
    if name == TENANTS:
        try:
            return _with_sizes(msgspec.json.decode(text), wholes)
        except msgspec.DecodeError as error:
            wanted = 'JSON as in {"a": {"bytes": "8GiB"}, "b": null}'
            raise CommandError(f"tenants: wanted {wanted}, found {text!r}: {error}", WRONG) from error
    if name.endswith("_bytes"):
        return _sized(name, text, shared_memory if wholes.is_here else None, AUTO_POOL if wholes.is_here else None)
    if (choices := choices_of(name)) and text not in choices:
        raise CommandError(f"{name}: wanted {' or '.join(choices)}, found {text!r}", WRONG)
    if not text or text.lower() in ("null", "none"):
        raise CommandError(f"{name}: wanted a value, found {text!r}", WRONG)
    return text


def _with_sizes(tenants: Any, wholes: Wholes) -> Any:
    """The quotas, with bytes as numbers; what is no mapping of quotas is left for msgspec to refuse."""
    pool = Whole("the pool's limit", wholes.pool_bytes)
    if isinstance(tenants, dict):
        for tenant, quota in tenants.items():
            if isinstance(quota, dict) and isinstance(text := quota.get("bytes"), str):
                quota["bytes"] = _sized(f"tenants: bytes of {tenant!r}", text, lambda: pool, None)
    return tenants


def _sized(name: str, text: str, whole: Callable[[], Whole] | None, auto: float | None) -> int:
    try:
        return parse_size(text, whole, auto)
    except SettingsError as error:
        raise CommandError(f"{name}: {error}", WRONG) from error


def in_words(name: str, value: object) -> str:
    if name.endswith("_bytes") and isinstance(value, int):
        return exact_bytes(value)
    return printable(str(value)) or "(empty)"


def _live_table(config: Config) -> Table:
    table = Table(Column("can be changed live", no_wrap=True), "value now", "started with", box=None, pad_edge=False)
    for name in LIVE:
        now, first = (in_words(name, value) for value in (getattr(config.limits, name), config.settings.get(name)))
        table.add_row(name, Text(now, style="" if now == first else "bold"), "" if now == first else first)
    return table


def _fixed_table(config: Config) -> Table:
    table = Table(Column(no_wrap=True), Column(overflow="fold"), box=None, pad_edge=False, show_header=False)
    for name, value in config.settings.items():
        if name not in LIVE:
            table.add_row(printable(name), Text(in_words(name, value), overflow="fold"))
    return table


def _tenants_table(tenants: dict[str, TenantView]) -> Table:
    table = Table("tenant", "quota", "used", box=None, pad_edge=False)
    for name, view in tenants.items():
        named = Text(printable(name) or "(own user)")
        table.add_row(named, _amounts(view.quota), _amounts(view.used, size))
    return table


def _has_quota(quota: Amounts) -> bool:
    return any(getattr(quota, field) is not None for field in Amounts.__struct_fields__)


def _amounts(amounts: Amounts, of_bytes: Callable[[int], str] = exact_bytes) -> str:
    shown = [
        of_bytes(value) if field == "bytes" else f"{value:,} {field if value != 1 else field.removesuffix('s')}"
        for field in Amounts.__struct_fields__ if (value := getattr(amounts, field)) is not None
    ]
    return ", ".join(shown) or "no limit"


def _say_retiring(console: Console, config: Config) -> None:
    if config.retiring:
        say(console, f"segments being emptied, because the pool was made smaller: {len(config.retiring)}")
