"""Every error of the control plane, its HTTP status, and the one shape in which it travels.

    KvdockError
    ├── SettingsError, StartupError, AdoptionError, AccessFileError    the server's own: kvdock/api/errors.py
    ├── ServerUnavailable        client: refused, lost, or silent for longer than the call's timeout
    ├── AnswerError              kvdock/client/transport.py: bytes that are no HTTP answer; callers see it as
    │                            ServerUnavailable
    ├── ManifestError            a manifest or token list without one canonical form
    └── ApiError                 the server's answer was a problem: `code`, `status`, `found`, `wanted`

ApiError is the same class in the server and the client: the server raises it, the client raises it again from the
RFC 9457 body. `CODES` is the only place that knows a code's status and title. This module stays light, because
engines import it.
"""

from __future__ import annotations

import re
from typing import Any, Final, NamedTuple

from kvdock.protocol.reports import Problem


class Code(NamedTuple):
    """What a code means: its HTTP status and its title."""

    status: int
    title: str


CODES: dict[str, Code] = {
    # sessions and members
    "unknown_session": Code(404, "This server has no such session"),
    "unknown_member": Code(404, "No such member in the session"),
    "unknown_namespace": Code(404, "No engine uses this namespace, and nothing is stored in it"),
    "member_suspect": Code(409, "The member missed its heartbeats"),
    "member_dead": Code(409, "The member's process is gone"),
    "rank_taken": Code(409, "Another member of the session has this rank"),
    "lock_not_visible": Code(409, "Nobody holds the member's byte of the lock file"),
    "layout_mismatch": Code(409, "The instance is attached with another manifest"),
    "foreign_session": Code(403, "The session belongs to another access token"),
    "ambiguous_member": Code(422, "The session has several members: name the one that leaves"),
    "pool_too_small": Code(422, "Not one chunk of this manifest fits in the pool"),
    # grants
    "unknown_grant": Code(404, "No such lease or reservation"),
    "unknown_request": Code(404, "No such request"),
    "grant_closed": Code(410, "The lease or reservation is closed"),
    "foreign_grant": Code(403, "The grant belongs to another session"),
    "not_the_scheduler": Code(403, "Only the scheduler's member may do this"),
    "not_the_asker": Code(403, "Only the member that asked for the grant may do this"),
    "handed_out": Code(409, "The plan was handed to a rank, so it cannot be cancelled"),
    "not_a_holder": Code(422, "The rank does not hold the grant"),
    "id_reused": Code(409, "The same id was used with another body"),
    "stale_epoch": Code(409, "A later epoch of this request exists"),
    "already_committed": Code(409, "The part was committed with another checksum"),
    "not_reserved": Code(422, "The part is not in the reservation"),
    "cleared_meanwhile": Code(409, "Chunks of the namespace were cleared or deleted meanwhile"),
    "chain_mismatch": Code(409, "The key is stored under another parent"),
    "skip_misaligned": Code(422, "The skip is not a whole number of blocks"),
    "skip_exceeds_hit": Code(409, "The skip is longer than the hit"),
    "table_full": Code(507, "The chunk table has no room"),
    "too_many_grants": Code(429, "The session has too many leases and reservations open"),
    "reports_refused": Code(429, "Too many chunks were reported as damaged that are not"),
    "quota_exceeded": Code(429, "The tenant has as much as its quota allows"),
    "corrupt": Code(500, "The chunk table failed its integrity check"),
    # who calls
    "unauthenticated": Code(401, "The call needs an access token"),
    "forbidden": Code(403, "The caller may not do this"),
    # requests
    "bad_argument": Code(422, "An argument is out of range"),
    "invalid_body": Code(422, "The body does not match the schema"),
    "malformed_json": Code(400, "The body is not JSON"),
    "malformed_msgpack": Code(400, "The body is not MessagePack"),
    "unsupported_media_type": Code(415, "Bodies are application/json or application/msgpack"),
    "too_large": Code(413, "The body is too large"),
    "malformed_request": Code(400, "The request is not HTTP/1.1"),
    "url_too_long": Code(414, "The URL is too long"),
    "header_too_large": Code(431, "The request's header is too large"),
    "too_slow": Code(408, "The request did not arrive in time"),
    "not_found": Code(404, "No such page"),
    "method_not_allowed": Code(405, "The page does not accept this method"),
    "wrong_host": Code(421, "This server does not serve that host name"),
    "cross_site": Code(403, "A web page of another site may not call this server"),
    "unknown_parameter": Code(422, "The call has no such query parameter"),
    "unsupported_version": Code(400, "The server does not speak that version of the API"),
    # the server
    "not_ready": Code(503, "The server is not ready"),
    "too_busy": Code(503, "The server has too much to do for other clients"),
    "no_memory": Code(422, "The machine has less memory than that"),
    "internal": Code(500, "The server failed; see its log"),
}


class KvdockError(Exception):
    """Root of the errors that kvdock raises on purpose."""


class ServerUnavailable(KvdockError):
    """There is no answer: the connection was refused or lost, or nothing came within the timeout. An engine treats it
    as a miss."""


class ManifestError(KvdockError, ValueError):
    """A manifest or token list without one canonical form; `found` and `wanted` are the values that the message
    names."""

    def __init__(self, message: str, *, found: object, wanted: object) -> None:
        super().__init__(f"{message}: found {found}, wanted {wanted}")
        self.found = found
        self.wanted = wanted


class ApiError(KvdockError):
    """A refusal with a stable `code`; `found` and `wanted` name the values where there are any."""

    def __init__(
        self, code: str, detail: str, *, found: Any = None, wanted: Any = None, status: int | None = None
    ) -> None:
        super().__init__(detail)
        self.code = code
        self.detail = detail
        self.found = found
        self.wanted = wanted
        self.status = CODES[code].status if status is None else status

    def __str__(self) -> str:
        values = "" if self.found is None and self.wanted is None else f" (found {self.found}, wanted {self.wanted})"
        return f"{self.code}: {self.detail}{values}"

    @classmethod
    def from_problem(cls, problem: Problem) -> ApiError:
        """For the client. A code that this version does not know keeps the status of the answer."""
        return cls(
            problem.code, problem.detail, found=problem.found, wanted=problem.wanted, status=problem.status
        )


_SECRET_PART: Final = re.compile(r"-[0-9a-f]{32,}(?=/|\Z)", re.IGNORECASE)
_SESSION: Final = re.compile(r"([-_][0-9]{1,20})[-_][0-9a-f]{16,}", re.IGNORECASE)
"""Whatever stands before and behind it, and also if some characters were lost."""


def without_secrets(text: str) -> str:
    """A path, or what a caller sent as a session's id, without the secret parts of ids: errors and logs show it."""
    return without_session_secrets(_SECRET_PART.sub("", text))


def without_session_secrets(text: str) -> str:
    """Any text in which a caller may have put a session's id, where something else belongs."""
    return _SESSION.sub(r"\1", text)


def without_password(address: str) -> str:
    """An address or a URL, even one that cannot be read, without all that stands before its last `@`."""
    before, at, rest = address.rpartition("@")
    return f"…@{rest}" if before or at else rest


def problem_of(code: str, detail: str, *, found: object = None, wanted: object = None, path: str = "") -> Problem:
    """For the server: problem details for one of CODES. `type` is the code's entry on the /docs page."""
    status, title = CODES[code]
    return Problem(
        type=f"/docs#{code}",
        title=title,
        status=status,
        detail=without_session_secrets(detail),
        code=code,
        instance=without_secrets(path),
        found=_plain(found),
        wanted=_plain(wanted),
    )


def _plain(value: object) -> Any:
    """The value in a form that JSON has; digests and keys as hex. Where a caller has sent a session's id in the place
    of something else, it is without its secret part."""
    if isinstance(value, str):
        return without_session_secrets(value)
    if value is None or isinstance(value, bool | int | float):
        return value
    if isinstance(value, bytes):
        return value.hex()
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, dict):
        return {without_session_secrets(str(name)): _plain(item) for name, item in value.items()}
    return without_session_secrets(str(value))
