"""What is settled once, when the linker is made: settings, and what is refused.

Invariant: what is not known to work is refused with one sentence that names what was found and what is wanted.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, fields
from typing import Any

from kvdock.connectors.errors import NotSupportedError, SettingError
from kvdock.connectors.limits import LoadLimits
from kvdock.connectors.settings import checked
from kvdock.protocol.address import default_address

log = logging.getLogger("kvdock.sglang")

EXTRA = "linker_extra_config"
PAGES = (64, 128)
"""Sizes of a page, in tokens, that are worth a chunk each: smaller ones cost more to find than they hold."""
MOST_WAIT_S = 1.0
"""Longer waits in the scheduling loop cost more than what they wait for."""
MOST_RANKS = 128
DRAFTS_WITHOUT_KV = (None, "NGRAM")


@dataclass(frozen=True)
class Settings(LoadLimits):
    """The limits count tokens that the engine's own cache lacks: SGLang asks for no others."""

    address: str = ""
    """The server's: unix:/path or http://host:port. As a rule this user's own (protocol/address.py)."""
    access_token_file: str = ""
    """Holds this engine's access token; the server's own user needs none over the Unix socket."""
    timeout_s: float = 2.0
    """Bounds every call to the server."""
    lookup_wait_s: float = 0.005
    """How late the server's answer to a lookup may be before nobody waits for it (connectors/patience.py)."""
    verify_wait_s: float = 0.5
    """How long a lookup may wait until what was found is hashed; SGLang computes what was not verified by then."""
    trust_s: float = 600.0
    """What was hashed and right so lately is promised without being hashed again; 0: all of it is hashed each time."""
    copy_threads: int = 2
    """Threads that copy when KV is on the CPU."""
    weights_digest: str = ""
    """Names the weights; empty: a digest of the model's files does (connectors/weights.py)."""
    chunk_statistics: bool = False
    """Counts which chunks are used again, and logs a summary at the end."""

    @classmethod
    def load(cls, extra: Mapping[str, object], environ: Mapping[str, str]) -> Settings:
        """`extra`: SGLang's linker_extra_config. NotSupportedError for a name that is no setting, a value of another
        type, a value out of range."""
        known = {field.name: type(field.default) for field in fields(cls)}
        values = {"address": default_address(environ), **checked(extra, known, EXTRA)}
        try:
            made = cls(**values)  # type: ignore[arg-type]  # checked against the fields above
        except SettingError as error:
            raise NotSupportedError(f"{EXTRA}: {error}.") from error
        if not made.address.startswith(("unix:", "http://")):
            raise NotSupportedError(
                f"{EXTRA}: address is {made.address!r}, and unix:/path or http://host:port is wanted."
            )
        for name in ("lookup_wait_s", "verify_wait_s"):
            if not 0.0 <= getattr(made, name) <= MOST_WAIT_S:
                raise NotSupportedError(
                    f"{EXTRA}: {name} is {getattr(made, name)}, and 0.0 to {MOST_WAIT_S} is wanted."
                )
        if not made.trust_s >= 0.0:
            raise NotSupportedError(f"{EXTRA}: trust_s is {made.trust_s}, and 0.0 or more is wanted.")
        if made.copy_threads < 1 or made.timeout_s <= 0:
            raise NotSupportedError(
                f"{EXTRA}: copy_threads and timeout_s are wanted above zero, found {made.copy_threads} and "
                f"{made.timeout_s}."
            )
        return made


def refuse_what_is_not_supported(args: Any, params: Any, model: Any, components: Collection[str]) -> None:
    """NotSupportedError, one sentence each. `args`, `params`, `model`: SGLang's ServerArgs, CacheInitParams and
    ModelConfig; `components`: the names of its tree's components."""
    if params.page_size not in PAGES:
        raise NotSupportedError(
            f"kvdock stores whole pages: --page-size is {params.page_size}, and {' or '.join(map(str, PAGES))} is "
            "wanted."
        )
    for what, found in (
        ("pipeline parallelism", params.pp_size), ("context parallelism of attention", params.attn_cp_size),
        ("context parallelism of decoding", getattr(args, "dcp_size", 1) or 1),
        ("several nodes", getattr(args, "nnodes", 1)),
    ):
        if found > 1:
            raise NotSupportedError(f"kvdock does not serve {what} under SGLang: found {found}, and 1 is wanted.")
    if "MAMBA" in components and (args.speculative_algorithm is not None or "SWA" in components):
        found = "sliding windows" if "SWA" in components else f"--speculative-algorithm {args.speculative_algorithm}"
        raise NotSupportedError(
            f"kvdock does not serve recurrent states (Mamba, linear attention) beside {found} under SGLang: one of the "
            "two is wanted."
        )
    if args.speculative_algorithm not in DRAFTS_WITHOUT_KV and not drafts_of(params):
        raise NotSupportedError(
            f"kvdock does not know where the drafts of --speculative-algorithm {args.speculative_algorithm} have their "
            "KV under SGLang: an algorithm whose draft model has a pool (EAGLE, STANDALONE), NGRAM or none is wanted."
        )
    if getattr(model, "is_multimodal", False):
        raise NotSupportedError(
            "kvdock does not serve images under SGLang, whose page hashes may name them as a client says: "
            "--enable-multimodal false is wanted, or a model without them."
        )
    for name, why in UNSERVED.items():
        if getattr(args, name, None) not in (None, False, "", "null"):
            raise NotSupportedError(f"kvdock does not serve --{name.replace('_', '-')} under SGLang: {why}.")


def drafts_of(params: Any) -> tuple[Any, ...]:
    """The pools of KV of draft models, which have the target's pages."""
    return (*params.mtp_draft_device_pools, *params.sidecar_draft_device_pools)


UNSERVED = {
    "enable_memory_saver": "it takes KV memory away while copies may be in flight",
    "enable_unified_memory": "its pools move while they are in use",
    "enable_hisparse": "part of its KV is elsewhere",
    "dllm_algorithm": "a diffusion model's KV depends on later tokens",
    "disaggregation_mode": "the transfer between the two engines is not tried beside it",
}
"""Settings that are on, with the reason for which they are refused."""

VERSIONS = (0, 5, 23), (0, 5, 23)
"""The first and the last version of SGLang that were tried."""


def warn_of_version(version: str) -> None:
    """`version`: SGLang's own."""
    first, last = VERSIONS
    found = re.match(r"(\d+)\.(\d+)\.(\d+)", version)
    if found is None or not first <= tuple(map(int, found.groups())) <= last:
        tried = ".".join(map(str, first))
        log.warning("found SGLang %s, and kvdock was tried with %s: watch for errors", version, tried)
