"""`kvdock config`: every setting that `kvdock serve` would use, and its source; and the settings of a running server,
some of which can be changed."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence
from typing import Any

import msgspec
from rich.console import Console
from rich.table import Column, Table
from rich.text import Text

from kvdock.api.errors import SettingsError
from kvdock.api.settings import ENV_PREFIX, Effective, Settings, parse_bytes
from kvdock.cli.errors import WRONG, CommandError
from kvdock.cli.meanings import choices_of, exact_bytes
from kvdock.cli.operator import LONG_TIMEOUT_S, print_json, reached
from kvdock.cli.render import counted, printable, say
from kvdock.protocol.admin_schemas import Amounts, Config, Limits, PatchConfig, TenantView


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
"""Settings that a running server changes."""
TENANTS = "tenants"


def show_live_config(server: str, *, as_json: bool, console: Console) -> None:
    """Raises CommandError when no server answers; ApiError."""
    with reached(server) as client:
        config = client.config()
        address = client.address
    if as_json:
        print_json(console, config)
        return
    say(console, f"settings of the server at {address}", "", _live_table(config))
    say(console, "", "Fixed until the server is started anew:", "", _fixed_table(config))
    if shown := {name: view for name, view in config.tenants.items() if _has_quota(view.quota)}:
        say(console, "", _tenants_table(shown))
    _say_retiring(console, config)


def change_live_config(server: str, changes: Sequence[str], *, as_json: bool, console: Console) -> None:
    """`changes`: NAME=VALUE each; all take effect, or none. Raises CommandError for what cannot be changed, and when no
    server answers; ApiError."""
    body = parse_changes(changes)
    with reached(server) as client:
        before = client.config().limits
        config = client.configure(body, timeout_s=LONG_TIMEOUT_S)
    if as_json:
        print_json(console, config)
        return
    for name in LIVE:
        if getattr(body, name) is not None:
            was, now = (in_words(name, getattr(limits, name)) for limits in (before, config.limits))
            say(console, f"{name}: {was} → {now}" if was != now else f"{name}: {now}, as before")
    for tenant in body.tenants or {}:
        view = config.tenants.get(tenant)
        named = printable(tenant) or "the server's own user"
        say(console, f"quota of {named}: {'none' if view is None else _amounts(view.quota)}")
    _say_retiring(console, config)
    kept = [name for name in LIVE if getattr(body, name) is not None]
    if kept:
        variable = f"{ENV_PREFIX}{kept[0].upper()}={in_words(kept[0], getattr(config.limits, kept[0]))}"
        say(console, f"This lasts until the server ends: start the next with {variable}, or the same in its file.")


def parse_changes(changes: Sequence[str]) -> PatchConfig:
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
        values[name] = _parsed(name, text.strip())
    try:
        return msgspec.convert(values, PatchConfig, strict=False)
    except msgspec.ValidationError as error:
        given = " ".join(changes)
        raise CommandError(f"{error}; found {given}", WRONG) from error


def _require_live(name: str) -> None:
    known = [*LIVE, TENANTS]
    if name in known:
        return
    wanted = f"wanted one of {', '.join(known)}"
    if name in Settings.__struct_fields__:
        raise CommandError(f"{name} is fixed until the server is started anew; {wanted}", WRONG)
    near = difflib.get_close_matches(name, known, 1)
    raise CommandError(f"unknown setting {name!r}{f' (meant {near[0]}?)' if near else ''}; {wanted}", WRONG)


def _parsed(name: str, text: str) -> Any:
    """As the body of PATCH has it; msgspec converts numbers."""
    if name == TENANTS:
        try:
            return msgspec.json.decode(text)
        except msgspec.DecodeError as error:
            wanted = 'JSON as in {"a": {"bytes": 8589934592}, "b": null}'
            raise CommandError(f"tenants: wanted {wanted}, found {text!r}: {error}", WRONG) from error
    if name.endswith("_bytes"):
        try:
            return parse_bytes(text)
        except SettingsError as error:
            raise CommandError(f"{name}: {error}", WRONG) from error
    if (choices := choices_of(name)) and text not in choices:
        raise CommandError(f"{name}: wanted {' or '.join(choices)}, found {text!r}", WRONG)
    if not text or text.lower() in ("null", "none"):
        raise CommandError(f"{name}: wanted a value, found {text!r}", WRONG)
    return text


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
        limited = [field for field in Amounts.__struct_fields__ if getattr(view.quota, field) is not None]
        named = Text(printable(name) or "(own user)")
        table.add_row(named, _amounts(view.quota, limited), _amounts(view.used, limited))
    return table


def _has_quota(quota: Amounts) -> bool:
    return any(getattr(quota, field) is not None for field in Amounts.__struct_fields__)


def _amounts(amounts: Amounts, fields: Iterable[str] = Amounts.__struct_fields__) -> str:
    said = [
        exact_bytes(value) if field == "bytes" else f"{value:,} {field}"
        for field in fields if (value := getattr(amounts, field)) is not None
    ]
    return ", ".join(said) or "no limit"


def _say_retiring(console: Console, config: Config) -> None:
    if config.retiring:
        say(console, f"being emptied, as the pool has become smaller: {counted(len(config.retiring), 'segment')}")
