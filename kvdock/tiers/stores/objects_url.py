"""Reads the URL of an object store, and opens the store with obstore."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, Final
from urllib.parse import unquote

from kvdock.tiers.stores.urls import TierUrl, existing_file, read_url, some_bytes, some_text, whole, yes_or_no
from kvdock.tiers.tier import NO_LIMITS, Limits, TierUrlError

MIB: Final = 1 << 20
DAY_S: Final = 86400.0
UNUSED_DAYS: Final = 30
"""A namespace that no server has served for so long is removed, unless the URL says otherwise: an upgrade or other
weights have left it."""
CONNECT_S: Final = 5
SILENCE_S: Final = 30
"""A request that has moved no byte for this long has failed, whatever its deadline is."""
REQUEST_S: Final = 3600
"""Longer than any deadline, so that the deadline ends a request."""

_ANY: Final = {"connections": whole(1, 256)}
_LIMITS: Final = {"bytes": some_bytes, "tenant_bytes": some_bytes, "unused_days": whole(0, 36500)}
_REMOTE: Final = {**_ANY, "ca_file": existing_file, "retries": whole(0, 10)}
_CLOUD: Final = {
    **_REMOTE, **_LIMITS, "endpoint": some_text, "machine_role": yes_or_no, "multipart_mib": whole(5, 5120),
    "skip_signature": yes_or_no,
}  # fmt: skip
_S3: Final = {
    **_CLOUD, "region": some_text, "unsigned_payload": yes_or_no, "virtual_hosted": yes_or_no, "create": yes_or_no,
}  # fmt: skip
_AZURE: Final = {**_CLOUD, "account": some_text}
_OPTIONS: Final[Mapping[str, Mapping[str, Callable[[str], Any]]]] = {
    "az": _AZURE, "file": {**_ANY, **_LIMITS}, "gs": _CLOUD, "http": _REMOTE, "https": _REMOTE, "s3": _S3,
}  # fmt: skip
_NAMES: Final = {  # obstore's names of the parameters
    "account": "account_name", "endpoint": "endpoint", "region": "region", "skip_signature": "skip_signature",
    "unsigned_payload": "unsigned_payload", "virtual_hosted": "virtual_hosted_style_request",
}  # fmt: skip

_KEYS: Final[Mapping[str, tuple[str, ...]]] = {
    "s3": (
        "AWS_ACCESS_KEY_ID", "AWS_WEB_IDENTITY_TOKEN_FILE", "AWS_CONTAINER_CREDENTIALS_RELATIVE_URI",
        "AWS_CONTAINER_CREDENTIALS_FULL_URI", "AWS_SKIP_SIGNATURE",
    ),
    "gs": (
        "GOOGLE_APPLICATION_CREDENTIALS", "GOOGLE_SERVICE_ACCOUNT", "GOOGLE_SERVICE_ACCOUNT_PATH",
        "GOOGLE_SERVICE_ACCOUNT_KEY", "GOOGLE_SKIP_SIGNATURE",
    ),
    "az": (
        "AZURE_STORAGE_ACCOUNT_KEY", "AZURE_STORAGE_ACCESS_KEY", "AZURE_STORAGE_MASTER_KEY", "AZURE_STORAGE_SAS_TOKEN",
        "AZURE_STORAGE_SAS_KEY", "AZURE_STORAGE_TOKEN", "AZURE_STORAGE_CLIENT_SECRET", "AZURE_CLIENT_SECRET",
        "AZURE_FEDERATED_TOKEN_FILE", "AZURE_USE_AZURE_CLI", "AZURE_SKIP_SIGNATURE",
    ),
}  # fmt: skip
"""The environment variables, by scheme, with one of which obstore asks no metadata service of a cloud."""
_GOOGLE_FILE: Final = Path(".config/gcloud/application_default_credentials.json")
"""Where obstore finds Google's credentials too, in the user's home."""


@dataclass(frozen=True)
class StoreLocation:
    """`store`: obstore's object. `connections`: how many loads, how many stores, and how many other requests may be in
    progress at once. `can_create`: whether the store can refuse to overwrite an object. `ranges`: whether ranges of an
    object can be requested. `multipart_bytes`: larger objects are uploaded in several requests at once. `folder`: set
    if the store is a folder of this machine. `limits`: what it may have."""

    store: Any
    read_only: bool
    can_create: bool
    ranges: bool
    connections: int
    multipart_bytes: int
    folder: Path | None = None
    limits: Limits = NO_LIMITS


def open_location(url: str, stores: Any) -> StoreLocation:
    """`stores`: the module obstore.store. Raises TierUrlError."""
    found = read_url(url, tuple(_OPTIONS), _OPTIONS.get(url.partition(":")[0], {}))
    scheme, options = found.parts.scheme, found.options
    if found.user is not None:
        raise TierUrlError(f"{scheme}: found a user in the URL, wanted credentials in the environment")
    folder = Path(unquote(found.parts.path)) if scheme == "file" else None
    connections, create = options.pop("connections", 64), options.pop("create", True)
    multipart_bytes = options.pop("multipart_mib", 64) * MIB
    is_http = scheme in ("http", "https")
    limits = NO_LIMITS if is_http else Limits(
        options.pop("bytes", 0), options.pop("tenant_bytes", 0), options.pop("unused_days", UNUSED_DAYS) * DAY_S
    )
    try:
        store = _local(found, stores) if scheme == "file" else _remote(found, stores)
    except TierUrlError:
        raise
    except Exception as error:  # obstore raises errors of its own and of Python
        raise TierUrlError(f"{scheme}: wanted a URL that obstore can use: {error}") from error
    return StoreLocation(store, is_http, create, not is_http, connections, multipart_bytes, folder, limits)


def _local(found: TierUrl, stores: Any) -> Any:
    path = Path(unquote(found.parts.path))
    if found.parts.netloc or not path.is_dir():
        raise TierUrlError(f"file: found {found.parts.netloc}{path}, wanted file:///PATH of a folder that exists")
    return stores.LocalStore(prefix=path)


def _remote(found: TierUrl, stores: Any) -> Any:
    parts, options = found
    if not parts.hostname:
        raise TierUrlError(f"{parts.scheme}: found no name of a bucket, container or host, wanted one")
    client: dict[str, Any] = {
        "connect_timeout": timedelta(seconds=CONNECT_S), "read_timeout": timedelta(seconds=SILENCE_S),
        "timeout": timedelta(seconds=REQUEST_S),
    }  # fmt: skip
    if (authority := options.pop("ca_file", None)) is not None:
        client["root_certificate"] = authority.read_bytes()
    if parts.scheme == "http" or str(options.get("endpoint", "")).startswith("http://"):
        client["allow_http"] = True
    retry = {
        "max_retries": options.pop("retries", 2), "retry_timeout": timedelta(seconds=SILENCE_S),
        "backoff": {"init_backoff": timedelta(milliseconds=50), "max_backoff": timedelta(seconds=1), "base": 2},
    }  # fmt: skip
    arguments: dict[str, Any] = {"client_options": client, "retry_config": retry}
    if parts.scheme in ("http", "https"):
        return stores.HTTPStore(f"{parts.scheme}://{parts.netloc}{parts.path}", **arguments)
    may_lack_keys = options.pop("machine_role", False) or options.get("skip_signature", False)
    arguments |= {_NAMES[name]: value for name, value in options.items()}
    if parts.scheme == "gs" and "endpoint" in arguments:
        arguments["base_url"] = arguments.pop("endpoint")
    kind = {"s3": stores.S3Store, "gs": stores.GCSStore, "az": stores.AzureStore}[parts.scheme]
    store = kind(parts.netloc, prefix=unquote(parts.path).strip("/") or None, **arguments)
    if not may_lack_keys:
        _require_keys(parts.scheme)
    return store


def _require_keys(scheme: str) -> None:
    """Without credentials obstore would ask the cloud's metadata service for them, at an address that may be anybody's
    on another network, and again with each request. Raises TierUrlError."""
    if any(os.environ.get(name) for name in _KEYS[scheme]):
        return
    if scheme == "gs" and (Path.home() / _GOOGLE_FILE).is_file():
        return
    raise TierUrlError(
        f"{scheme}: found no credentials in the environment, wanted {_KEYS[scheme][0]} or another variable of "
        "docs/operate/tiers_objects.md, machine_role=yes in the URL to ask the cloud's metadata service for the "
        "machine's role, or skip_signature=yes to use none"
    )
