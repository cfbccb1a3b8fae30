"""Breaks of kvdock/api/ and kvdock/protocol/: what the server promises to engines, to people and to the next server."""

from __future__ import annotations

from .mutant import Mutant

MUTANTS = (
    Mutant(
        "P5c", "the namespace leaves out the type of the KV cache", "kvdock/protocol/keys.py",
        "canonical_manifest(manifest))",
        'canonical_manifest({name: value for name, value in manifest.items() if name != "kv_dtype"}))',
        ("tests/connectors/test_group_sizes.py", "-k", "namespace"),
        "test_a_manifest_of_one_block_size_is_the_namespace_it_was_before_groups_had_sizes",
    ),
    Mutant(
        "P10", "a repeated reservation is a second one", "kvdock/api/service.py",
        "        store = self._names.digest(body.store)\n",
        "        store = self._names.digest(body.store + str(self._tally.now_ns()))\n",
        ("tests/api/test_writing.py",), "test_a_repeated_reservation_is_the_same_one",
    ),
    Mutant(
        "P11", "answers over TCP lack the headers that browsers heed", "kvdock/api/http/dispatch.py",
        "(_UNIX_HEADERS if is_unix else _TCP_HEADERS)", "_UNIX_HEADERS",
        ("tests/api/test_people.py", "-k", "headers"), "test_every_answer_has_the_security_headers",
    ),
    Mutant(
        "P11b", "an eviction of some bytes evicts all that may go", "kvdock/api/admin.py",
        "table.evict(before + missing - freed, 1, ", "table.evict(self._pool.limit_bytes, 1 << 20, ",
        ("tests/api/test_evict.py",), "test_evict_frees_what_is_missing_and_takes_the_oldest_first",
    ),
    Mutant(
        "P12", "unknown fields of a body are accepted", "kvdock/protocol/wire_types.py",
        "class Body(msgspec.Struct, forbid_unknown_fields=True)", "class Body(msgspec.Struct)",
        ("tests/api/test_errors.py", "-k", "problem_with_its_code"), "test_a_refused_call_is_a_problem_with_its_code",
    ),
    Mutant(
        "P13a", "a server that drains grants leases", "kvdock/api/service.py",
        "        if not self._sessions.may_grant(session, request):\n            self._tally",
        "        if False:\n            self._tally",
        ("tests/cli/test_end.py", "-k", "drain"),
        "test_a_drain_gives_out_nothing_new_and_ends_when_the_last_grant_does",
    ),
    Mutant(
        "P13b", "a server that drains grants reservations", "kvdock/api/service.py",
        "            if not self._sessions.may_grant(session, store):\n",
        "            if False:\n",
        ("tests/cli/test_end.py", "-k", "drain"),
        "test_a_drain_gives_out_nothing_new_and_ends_when_the_last_grant_does",
    ),
    Mutant(
        "P13c", "a drain ends while reservations are open", "kvdock/api/pool/sessions.py",
        """stats["reservations"] or (stats["leases"] and""", """(stats["leases"] and""",
        ("tests/api/test_takeover.py",), "test_a_reservation_under_way_is_finished_before_the_pool_changes_hands",
    ),
    Mutant(
        "P14", "a lookup that is repeated within its epoch is counted again", "kvdock/api/record/tally.py",
        "            self._counters_of(session).lookup_renewals += 1\n",
        "            self._counters_of(session).lookup_renewals += 1\n"
        "            self._count_first(session, one.keys, tokens, found)\n",
        ("tests/api/test_reading.py", "-k", "counted"), "test_a_renewal_is_not_counted_as_a_lookup",
    ),
    Mutant(
        "P14b", "the metric of tokens asked for is twice the count", "kvdock/api/reports/metrics.py",
        "_HELP[name], value=total)", '_HELP[name], value=total * (1 + (name == "lookup_tokens")))',
        ("tests/api/test_people.py", "-k", "metrics"), "test_metrics_are_prometheus_text_with_base_units",
    ),
    Mutant(
        "P21", "only the first member of a session must hold its lock", "kvdock/api/pool/sessions.py",
        "        if not pool.lock_held(member.lock_offset):\n",
        "        if session is None and not pool.lock_held(member.lock_offset):\n",
        ("tests/api/test_errors.py", "-k", "problem_with_its_code"), "test_a_refused_call_is_a_problem_with_its_code",
    ),
    Mutant(
        "P25", "members of an adopted pool that never came back never die", "kvdock/api/keeper.py",
        "            if not self._pool.lock_held(lock_offset):\n",
        "            if not lock_offset and not self._pool.lock_held(lock_offset):\n",
        ("tests/api/test_adoption.py", "-k", "dead_held"),
        "test_what_the_dead_held_is_freed_and_what_the_living_hold_is_not",
    ),
    Mutant(
        "P70", "a session that comes back counts as a new one of its tenant", "kvdock/api/pool/quotas.py",
        "        if not self._table.session_of(nonce):\n", "        if nonce:\n",
        ("tests/api/test_quotas.py", "-k", "before_a_restart"),
        "test_a_session_of_before_a_restart_comes_back_also_when_its_tenant_may_have_no_more",
    ),
    Mutant(
        "P70m", "a member that comes back counts as a new one of its tenant", "kvdock/api/pool/quotas.py",
        " and not comes_back():\n", ":\n",
        ("tests/api/test_quotas.py", "-k", "member_of_before_a_restart"),
        "test_a_member_of_before_a_restart_comes_back_also_when_its_tenant_may_have_no_more",
    ),
    Mutant(
        "P71", "a grant that is held counts again when its call is repeated", "kvdock/api/pool/sessions.py",
        "        if known:\n            return True\n",
        "        if known and over_quota is None:\n            return True\n",
        ("tests/api/test_quotas.py", "-k", "grant_too_many"),
        "test_one_grant_too_many_is_refused_and_a_repeat_of_one_that_is_held_is_not",
    ),
    Mutant(
        "P72", "the keeper leaves tenants above a lowered quota", "kvdock/api/keeper.py",
        "self._keep_quotas, ", "",
        ("tests/api/test_quotas.py", "-k", "lowered"),
        "test_a_lowered_quota_evicts_while_the_server_runs_but_not_what_is_leased",
    ),
    Mutant(
        "P73", "what an engine tells of a request joins other sessions' lookups of that name",
        "kvdock/api/record/requests.py",
        '    return f"{request.session} {request.request}"\n', "    return request.request\n",
        ("tests/api/test_outcomes.py", "-k", "own_session"),
        "test_an_outcome_joins_the_lookups_of_its_own_session_alone",
    ),
    Mutant(
        "P74", "requests that are not listed any more are remembered", "kvdock/api/record/requests.py",
        "            self._forget(oldest[1])\n", "",
        ("tests/api/test_outcomes.py", "-k", "remembered"),
        "test_nothing_is_remembered_of_requests_that_are_not_listed_any_more",
    ),
    Mutant(
        "P80", "a store forgets its request's trace", "kvdock/connectors/stores.py",
        "traceparent=offer.traceparent or UNSET", "traceparent=UNSET",
        ("tests/engine/test_traces.py", "-k", "whole_tree"),
        "test_the_whole_tree_of_a_request_comes_to_the_collector",
    ),
    Mutant(
        "P76", "spans have no parent", "kvdock/api/feeds/traces.py",
        'name, _parent(getattr(event, "traceparent", "")),', "name, None,",
        ("tests/engine/test_traces.py", "-k", "whole_tree"),
        "test_the_whole_tree_of_a_request_comes_to_the_collector",
    ),
    Mutant(
        "P77", "a router's snapshot does not say that it is one", "kvdock/api/feeds/kv.py",
        "cleared: list[Item] = [AllBlocksCleared()]", "cleared: list[Item] = []",
        ("tests/api/test_kv_events.py", "-k", "sent_again"),
        "test_what_was_missed_is_sent_again_by_its_number_and_else_a_snapshot",
    ),
    Mutant(
        "P78", "routers do not hear of chunks that are gone", "kvdock/api/feeds/kv.py",
        "if is_there == (place in log.there):", "if not is_there or place in log.there:",
        ("tests/api/test_kv_events.py", "-k", "stored_and_cleared"),
        "test_what_is_stored_and_cleared_is_told_as_the_engine_knows_it",
    ),
    Mutant(
        "P79", "a tenant's routers see the KV events of the server's own user", "kvdock/api/http/routes_people.py",
        "        tenant, request.headers", '        "", request.headers',
        ("tests/api/test_kv_events.py", "-k", "tenant_s"),
        "test_a_tenant_s_routers_see_its_own_and_zeromq_has_the_server_s_own",
    ),
    Mutant(
        "Q2", "a turn stays owed to nobody", "kvdock/api/turns.py",
        "            self._turns.forgo(self)\n",
        "",
        ("tests/api/test_turn_queues.py",), "test_a_turn_that_is_owed_to_what_was_cancelled_holds_up_nobody",
    ),
    Mutant(
        "Q3", "a read overtakes those that wait", "kvdock/api/turns.py",
        "if self._left <= 0 or self._waiting or self._calls_wait():",
        "if self._left <= 0 or self._calls_wait():",
        ("tests/api/test_turn_queues.py",), "test_no_read_overtakes_another_that_waited_for_calls",
    ),
    Mutant(
        "Q5", "a slice is not begun anew", "kvdock/api/turns.py",
        "    await queues.slices.later()\n    queues.began_s = time.thread_time()\n",
        "    await queues.slices.later()\n",
        ("tests/api/test_turn_queues.py",), "test_work_gives_a_turn_after_a_slice_and_not_after_each_step",
    ),
)
