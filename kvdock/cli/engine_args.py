"""`kvdock vllm-args` and `kvdock sglang-args`: the arguments with which an engine uses the server.

    vllm serve MODEL $(kvdock vllm-args)

The shell splits what it is given at white space, and may take what remains for a pattern of file names; it takes no
quotes. So each argument is a line of its own, and JSON holds neither white space nor characters of patterns.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence

import typer

from kvdock.cli.client import default_address, open_client, remedy, then
from kvdock.cli.errors import WRONG, CommandError
from kvdock.cli.printable import printable
from kvdock.connectors.errors import NotSupportedError
from kvdock.connectors.settings import EngineSettings
from kvdock.protocol.access import default_address as own_address
from kvdock.protocol.errors import ApiError, ServerUnavailable

PATTERN = " \t\n*?[]~"
"""What must not stand in the shell's words, and in JSON stands within texts alone."""
TIMEOUT_S = 2.0
SHUTDOWN_S = 10
"""How long vLLM may take to end its processes in order."""


def vllm_args(server: str, given: Sequence[str]) -> list[str]:
    """Raises CommandError for what is no setting of the connector, or no value of it."""
    from kvdock.connectors.vllm.setup import Settings

    extra = _settings(Settings, server, given)
    wanted: dict[str, object] = {"kv_connector": "KvdockConnector", "kv_role": "kv_both"}
    if extra:
        wanted["kv_connector_extra_config"] = extra
    return ["--shutdown-timeout", str(SHUTDOWN_S), "--kv-transfer-config", one_word(wanted)]


def sglang_args(server: str, page_size: int, given: Sequence[str]) -> list[str]:
    """Raises CommandError as vllm_args does, and for another page size than those of kvdock."""
    from kvdock.connectors.sglang.plugin import LINKER
    from kvdock.connectors.sglang.setup import PAGES, WANTED_PAGES, Settings

    if page_size not in PAGES:
        raise CommandError(f"--page-size: found {page_size}, wanted {WANTED_PAGES}", WRONG)
    wanted = {**LINKER, "linker_extra_config": _settings(Settings, server, given)}
    return [
        "--page-size", str(page_size), "--enable-unified-cache-external-linker",
        "--unified-cache-external-linker-backend", "dynamic",
        "--unified-cache-external-linker-config", one_word(wanted),
    ]


def one_word(value: Mapping[str, object]) -> str:
    """JSON that the shell leaves as it is."""
    text = json.dumps(value, separators=(",", ":"))
    return "".join(f"\\u{ord(letter):04x}" if letter in PATTERN else letter for letter in text)


def show(words: Sequence[str], engine: str, server: str, *, as_json: bool) -> None:
    """Prints the arguments, and on standard error a sentence if no server answers yet."""
    typer.echo(json.dumps({"arguments": words}) if as_json else "\n".join(words))
    try:
        with open_client(server, TIMEOUT_S) as client:
            client.whoami()
    except ServerUnavailable as error:
        why = f"no server answers at {error}{then(remedy(error))}"
    except ApiError as error:
        why = f"the server refuses the call: {error}"
    else:
        return
    typer.echo(f"kvdock: until it reaches a server, {engine} computes all prompts itself: {printable(why)}", err=True)


def _settings(kind: type[EngineSettings], server: str, given: Sequence[str]) -> dict[str, object]:
    """The settings of `given`, each as NAME=VALUE, and the server's address unless it is the one of engines without
    settings."""
    known = kind.types()
    values: dict[str, object] = {}
    for setting in given:
        name, equals, text = setting.partition("=")
        if not equals:
            raise CommandError(f"found {setting!r}, wanted NAME=VALUE", WRONG)
        values[name] = text if known.get(name) is str else _value(text)
    address = server or default_address()
    if address != own_address({}):
        values.setdefault("address", address)
    try:
        kind.load(values, os.environ)  # type: ignore[attr-defined]  # each engine's settings have it
    except NotSupportedError as error:
        raise CommandError(str(error).rstrip("."), WRONG) from error
    return values


def _value(text: str) -> object:
    try:
        return json.loads(text)
    except ValueError:
        return text
