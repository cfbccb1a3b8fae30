"""Settings of the connector from the environment: KVDOCK_VLLM_CHUNK_TOKENS is chunk_tokens.

vLLM's processes have one environment, but for workers that Ray starts elsewhere.
"""

from __future__ import annotations

from collections.abc import Mapping

from kvdock.connectors.errors import NotSupportedError
from kvdock.protocol.address import CONNECTOR_PREFIX

TRUTHS = {"true": True, "1": True, "false": False, "0": False}


def from_environment(environ: Mapping[str, str], known: Mapping[str, type]) -> dict[str, object]:
    """`known`: the type of each setting. NotSupportedError for a variable that names none, or whose text is not of its
    setting's type."""
    found: dict[str, object] = {}
    for variable, text in environ.items():
        if not variable.startswith(CONNECTOR_PREFIX):
            continue
        name = variable.removeprefix(CONNECTOR_PREFIX).lower()
        if name not in known:
            raise NotSupportedError(f"{variable}: {name!r} is no setting of kvdock, which has {', '.join(known)}.")
        try:
            found[name] = TRUTHS[text.lower()] if known[name] is bool else known[name](text)
        except (KeyError, ValueError) as error:
            wanted = "true or false" if known[name] is bool else known[name].__name__
            raise NotSupportedError(f"{variable} is {text!r}, and {wanted} is wanted.") from error
    return found
