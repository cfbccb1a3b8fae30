"""Breaks of who may do what: callers, tenants, and what one client may use of the server."""

from __future__ import annotations

from .mutant import Mutant

_ACCESS, _TENANTS = "tests/api/test_access.py", "tests/api/test_tenants.py"
_COMMANDS = "tests/cli/test_access_token.py"

MUTANTS = (
    Mutant(
        "S1", "a Unix caller of any user may do everything", "kvdock/api/access/peer.py",
        "    if uid in (os.geteuid(), 0):\n", "    if True:\n",
        (_ACCESS, "-k", "another_user"), "test_another_user_reaches_no_socket_and_through_an_open_one_only_health",
    ),
    Mutant(
        "S2", "a connection that the kernel does not name is nobody's, and served", "kvdock/api/access/peer.py",
        "    found = credentials_of(connected)\n",
        "    try:\n        found = credentials_of(connected)\n    except OSError:\n        return NOBODY\n",
        (_ACCESS, "-k", "kernel"), "test_a_connection_whose_peer_the_kernel_does_not_name_is_closed",
    ),
    Mutant(
        "S3", "a token may do what it is not for", "kvdock/api/http/guard.py",
        "        peer.require(wanted)\n", "",
        (_ACCESS, "-k", "scope_includes"), "test_a_token_may_do_what_its_scope_includes_and_is_forbidden_all_else",
    ),
    Mutant(
        "S4", "engine calls need no scope", "kvdock/api/http/dispatch.py",
        "admit(scope, headers, engine_call.call.scope)", 'admit(scope, headers, "health")',
        (_ACCESS, "-k", "scope_includes"), "test_a_token_may_do_what_its_scope_includes_and_is_forbidden_all_else",
    ),
    Mutant(
        "S5", "an unknown token is as good as none", "kvdock/api/access/access_file.py",
        '            raise ApiError("unauthenticated", "no such access token", found="another",'
        ' wanted="Bearer and its token")\n',
        "            return connection\n",
        (_ACCESS, "-k", "not_known"), "test_a_token_that_is_not_known_gets_nothing_not_even_what_is_open",
    ),
    Mutant(
        "S6", "a file that others may read counts as private", "kvdock/protocol/access.py",
        "FORBIDDEN_BITS: Final = 0o037\n", "FORBIDDEN_BITS: Final = 0o033\n",
        (_ACCESS, "-k", "others_may_open"), "test_an_access_file_that_others_may_open_is_refused",
    ),
    Mutant(
        "S7", "an access file is read while it is being written", "kvdock/api/access/access_file.py",
        "        if seen != self._changing:\n            self._changing = seen\n            return\n", "",
        (_ACCESS, "-k", "half_written"), "test_a_file_that_is_half_written_is_not_read",
    ),
    Mutant(
        "S8", "the id that lists show opens the session", "kvdock/api/pool/registry.py",
        "        found = self._by_capability.get(capability)\n",
        "        found = self._by_capability.get(capability) or self._by_id.get(capability)\n",
        (_ACCESS, "-k", "listed"), "test_a_listed_session_id_opens_nothing",
    ),
    Mutant(
        "S9", "the namespace leaves out the tenant", "kvdock/protocol/keys.py",
        " if tenant else digest\n", " if not digest else digest\n",
        (_TENANTS, "-k", "never_meet"), "test_equal_manifests_of_two_tenants_never_meet",
    ),
    Mutant(
        "S10", "another tenant's session may be used by whoever knows its id", "kvdock/api/pool/registry.py",
        "        if found is None or found.tenant != tenant or not found.is_open_to(identity):\n",
        "        if found is None:\n",
        (_TENANTS, "-k", "does_not_exist"), "test_a_session_of_another_tenant_does_not_exist",
    ),
    Mutant(
        "S11", "the answer about another tenant's grant differs from that about a grant that never was",
        "csrc/table/grants.cpp",
        "  if (!open || !members_.of_one_tenant(g.session, cell))\n", "  if (!open)\n",
        (_TENANTS, "-k", "grant_of_another"), "test_a_grant_of_another_tenant_does_not_exist",
    ),
    Mutant(
        "S12", "a tenant's list of requests shows those of all", "kvdock/api/reports/lists.py",
        "recent.view(limit, cursor, peer.sees, ", "recent.view(limit, cursor, lambda tenant: True, ",
        (_TENANTS, "-k", "lists_show"), "test_lists_show_a_tenant_its_own_only_and_an_operator_all",
    ),
    Mutant(
        "S13", "a manifest is shown with its salt", "kvdock/api/reports/lists.py",
        "manifest=shown_manifest(record.manifest)", "manifest=record.manifest",
        (_TENANTS, "-k", "salt"), "test_no_answer_shows_a_salt_or_a_seed",
    ),
    Mutant(
        "S14", "a URL may have any length", "kvdock/api/http/connection.py",
        "        if arriving.stage is Stage.HEAD and len(self.url) > limits.url_bytes:\n", "        if False:\n",
        ("tests/api/test_connections.py", "-k", "beyond_a_limit"),
        "test_a_request_beyond_a_limit_is_a_problem_and_ends_the_connection",
    ),
    Mutant(
        "S15", "a request that began may take for ever", "kvdock/api/http/connection.py",
        "            self._wait(self.limits.body_s if arriving.stage is Stage.BODY else self.limits.header_s)\n",
        "            pass\n",
        ("tests/api/test_connections.py", "-k", "too_slow"), "test_a_request_that_does_not_end_is_too_slow",
    ),
    Mutant(
        "S16", "long bodies together may fill the memory", "kvdock/api/http/limits.py",
        "        self.taken_bytes += more\n", "",
        ("tests/api/test_connections.py", "-k", "together"),
        "test_long_bodies_together_have_a_limit_and_short_ones_are_not_stopped",
    ),
    Mutant(
        "S17", "long bodies are not given back", "kvdock/api/http/limits.py",
        "        self.taken_bytes -= size_bytes\n", "",
        ("tests/api/test_connections.py", "-k", "together"),
        "test_long_bodies_together_have_a_limit_and_short_ones_are_not_stopped",
    ),
    Mutant(
        "S18", "a second token in a request is not noticed", "kvdock/api/http/connection.py",
        'count(b"authorization") > 1', 'count(b"authorization") > 2',
        ("tests/api/test_connections.py", "-k", "two_tokens"), "test_a_request_with_two_tokens_is_refused",
    ),
    Mutant(
        "S19", "one caller's refusals hide another's", "kvdock/api/log.py",
        '            template = f"{record.args[0]}: {template}"', '            template = f"{template}"',
        ("tests/api/test_log.py",), "test_one_callers_refusals_do_not_hide_anothers",
    ),
    Mutant(
        "S20", "a tenant at its quota evicts what others have", "csrc/table/eviction.cpp",
        "it->second.of_tenant(tenant,", "it->second.of_tenant(0,",
        ("tests/table/test_quotas.py",),
        "test_a_tenant_at_its_quota_evicts_its_own_coldest_chunks_and_nobody_elses",
    ),
    Mutant(
        "S21", "a token works after its end", "kvdock/api/access/access_file.py",
        "        if found.until_s <= self._wall_s():", "        if found.until_s < 0:",
        (_ACCESS, "-k", "wall_clock"), "test_a_token_ends_by_the_wall_clock_and_only_who_has_it_is_told",
    ),
    Mutant(
        "S22", "a replaced token has no end", "kvdock/api/access/access_file.py",
        "    ends = until if until", "    ends = None if until",
        (_COMMANDS, "-k", "prolongs"), "test_replacing_a_token_prolongs_none",
    ),
    Mutant(
        "S23", "two edits of the access file at once lose a token", "kvdock/api/access/access_file.py",
        "os.O_CREAT | os.O_EXCL | ", "os.O_CREAT | ",
        (_COMMANDS, "-k", "at_once"), "test_edits_at_once_lose_nothing",
    ),
    Mutant(
        "S24", "an operator of a tenant clears every tenant", "kvdock/api/admin.py",
        "        if tenant != peer.tenant:\n", "        if False:\n",
        (_TENANTS, "-k", "clears_its_own"), "test_an_operator_of_a_tenant_clears_its_own_alone",
    ),
    Mutant(
        "S25", "quotas by calls end with the server", "kvdock/api/build.py",
        '            "quotas": sessions.quotas,\n', "",
        ("tests/api/test_quotas.py", "-k", "after_a_restart"), "test_quotas_by_calls_are_there_after_a_restart",
    ),
    Mutant(
        "S26", "a drain of an operator gives out grants", "kvdock/api/pool/sessions.py",
        "        return self.begun or self.is_asked_for\n", "        return self.begun\n",
        ("tests/api/test_drain.py", "-k", "lets_what_is_open"),
        "test_a_drained_server_gives_out_nothing_and_lets_what_is_open_finish",
    ),
)
