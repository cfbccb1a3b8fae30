"""The examples that `--help` shows: for each command, lines to type and what they do."""

from __future__ import annotations

EXAMPLES: dict[str, tuple[tuple[str, str], ...]] = {
    "": (
        ("kvdock serve --pool-bytes 8GiB", "start a server"),
        ("kvdock status", "is it up, is it helping"),
        ("kvdock top", "the same, live"),
        ("kvdock COMMAND --help", "what a command does"),
    ),
    "serve": (
        ("kvdock serve --pool-bytes 64GiB --growth ahead", "beside engines with GPUs"),
        ("kvdock serve --config /etc/kvdock.toml", "settings from a file"),
        ("kvdock serve --takeover --on-exit keep", "replace a running server"),
    ),
    "status": (
        ("kvdock status", "this user's server"),
        ("kvdock status --server localhost:7410", "another one"),
        ("kvdock status --json | jq .hit_rate", "for scripts"),
    ),
    "top": (
        ("kvdock top", "live; q ends it"),
        ("kvdock top --once", "one picture"),
        ("kvdock top --json --interval 10 >> kvdock.log", "an object every 10 s"),
    ),
    "explain": (
        ("kvdock explain cmpl-7f3a", "why it missed"),
        ("kvdock explain cmpl-7f3a --json", "all figures"),
    ),
    "events": (
        ("kvdock events", "what has happened lately"),
        ("kvdock events --follow --kinds attached,left,dead", "engines that come and go"),
    ),
    "cached": (
        ("kvdock cached", "what fills the pool"),
        ("kvdock cached --json --limit 256", "all figures"),
    ),
    "history": (
        ("kvdock history", "the last half day"),
        ("kvdock history --over days", "the last two weeks"),
    ),
    "size": (
        ("kvdock size", "what other sizes would find"),
        ("kvdock size --users 50 --tokens-each 8000", "without any traffic yet"),
    ),
    "doctor": (
        ("kvdock doctor", "what helps or hinders here"),
        ("kvdock doctor --config /etc/kvdock.toml", "before a server starts with it"),
    ),
    "lookup": (
        ("kvdock lookup --tokens-file tokens.json", "a prompt's token ids"),
        ("echo 1 2 3 | kvdock lookup --tokens-file -", "from standard input"),
    ),
    "keep": (
        ("kvdock keep --tokens-file system.json --for 12h", "for half a day"),
        ("kvdock keep --tokens-file system.json --end", "no longer"),
    ),
    "evict": (
        ("kvdock evict --bytes 2GiB", "what is worth least"),
        ("kvdock evict --free 8GiB", "until so much is free"),
        ("kvdock evict --tokens-file old.json --yes", "a prompt, without asking"),
    ),
    "clear": (
        ("kvdock clear --namespace 5e1c", "what one model's engines stored"),
        ("kvdock clear --all", "everything"),
    ),
    "sessions": (("kvdock sessions", "engines, their processes, what they hold"),),
    "leases": (("kvdock leases --limit 20", "the oldest first"),),
    "requests": (
        ("kvdock requests", "the last lookups and stores"),
        ("kvdock requests cmpl-7f3a", "what became of one request"),
    ),
    "access-token": (
        ("kvdock access-token me --scope admin --access-file FILE", ""),
        ("kvdock access-token team-a --scope engine --tenant a > token", ""),
    ),
    "bench": (("kvdock bench --mib 256 --threads 4", "some seconds"),),
    "demo": (("kvdock demo --port 0", "any free port"),),
    "config": (
        ("kvdock config --config /etc/kvdock.toml", "of a server started with it"),
        ("kvdock config get", "of the running server"),
        ("kvdock config set pool_bytes=16GiB", "change the running server"),
    ),
    "config get": (
        ("kvdock config get", "this user's server"),
        ("kvdock config get --json | jq .limits", "what can be changed live"),
    ),
    "config set": (
        ("kvdock config set pool_bytes=16GiB", "a larger pool"),
        ("kvdock config set session_cap=0.25 total_cap=0.9", "both, or neither"),
        ("kvdock config set 'tenants={\"a\": {\"sessions\": 4}}'", "a quota"),
    ),
}
