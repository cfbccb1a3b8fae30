"""Breaks of what weights that change rest on in the server: where sessions are filed, and what goes first."""

from __future__ import annotations

from .mutant import Mutant

TABLE = ("tests/table/test_weights.py",)
API = ("tests/api/test_weights.py", "-k", "not thousands and not table_full")
SESSION = ("tests/connectors/test_session_weights.py",)
TIERS = ("tests/tiers/test_weights.py",)

MUTANTS = (
    Mutant(
        "G1", "what was left does not go first", "csrc/table/left_spaces.h",
        "    if (at == orders.end() || at->second.begin()->at_ms > until_ms) return std::nullopt;\n",
        "    if (at == orders.end() || until_ms != UINT64_MAX) return std::nullopt;\n",
        TABLE, "test_what_nobody_runs_goes_first_the_oldest_left_before_the_newer",
    ),
    Mutant(
        "G2", "what was left goes first at once", "csrc/table/namespaces.h",
        "return now_ms_ >= grace_ms_ ? now_ms_ - grace_ms_ : 0;", "return now_ms_;",
        TABLE, "test_it_goes_like_any_other_until_the_grace_is_over_and_once_somebody_runs_it_again",
    ),
    Mutant(
        "G3", "who comes back to a namespace does not end that it was left", "csrc/table/namespaces.cpp",
        "  entries_[space].left_ms = 0;\n  left_.come_back(space);\n", "",
        TABLE, "test_the_weights_that_engines_start_with_go_first_only_where_a_session_moved_out_of_them",
    ),
    Mutant(
        "G4", "a namespace was left once any session has moved out of it", "csrc/table/namespaces.h",
        "return has(space) && sessions_[space] == 0 && entries_[space].left_ms != 0;",
        "return has(space) && entries_[space].left_ms != 0;",
        TABLE, "test_an_older_namespace_is_left_when_its_last_session_goes",
    ),
    Mutant(
        "G5", "the next server does not know what was left", "csrc/table/adopt.cpp",
        "  chunks_.namespaces().restart(found->clock_ms);\n", "",
        TABLE, "test_the_next_server_finds_sessions_where_they_were_filed_and_knows_what_was_left",
    ),
    Mutant(
        "G6", "a promise of a session that has moved holds", "csrc/table/lookup.cpp",
        " || members_.session(*session).space() != promise.space", "",
        TABLE, "test_a_promise_made_under_other_weights_holds_nobody_up",
    ),
    Mutant(
        "G7", "a session moves to any namespace", "csrc/table/table.cpp",
        "  if (!chunks_.namespaces().differ_in_weights_alone(space, filed))\n"
        '    throw TableError("bad_argument", "a session moves',
        '  if (filed == kNone)\n    throw TableError("bad_argument", "a session moves',
        TABLE, "test_a_session_moves_within_its_own_manifest_and_tenant_only",
    ),
    Mutant(
        "G8", "an administrator's keep does not hold for what was left", "csrc/table/eviction.cpp",
        "  if (!in.kept) list_in_space(id);\n", "  list_in_space(id);\n",
        TABLE, "test_what_an_administrator_keeps_stays_and_what_engines_wished_to_retain_does_not",
    ),
    Mutant(
        "G9", "what was left is named as what goes next", "csrc/table/eviction.cpp",
        "      if (spaces_.left().has(records_.at(leaf.record).space)) return;  // no engine will look it up\n", "",
        TABLE, "test_what_is_left_is_never_named_as_what_goes_next",
    ),
    Mutant(
        "G20", "a worker's attach changes the weights", "kvdock/api/pool/sessions.py",
        "        if member.scheduler:\n            self.run_weights",
        "        if member.id:\n            self.run_weights",
        API, "test_workers_join_their_session_whatever_its_weights_are_and_cannot_change_them",
    ),
    Mutant(
        "G21", "the weights are not in the namespace", "kvdock/protocol/keys.py",
        'return _digest(b"kvdock weights", namespace + weights.encode()) if weights else namespace', "return namespace",
        API, "test_engines_share_what_they_store_under_weights_of_one_name_and_nothing_else",
    ),
    Mutant(
        "G22", "keys of tokens depend on the weights", "kvdock/api/tokens.py",
        "hash_tokens(namespace.base,", "hash_tokens(namespace.digest,",
        API, "test_keys_that_the_server_makes_of_tokens_do_not_depend_on_the_weights",
    ),
    Mutant(
        "G23", "who follows changes is not told that the session has moved", "kvdock/api/service.py",
        "        if member.follows is not session.namespace:\n", "        if member.follows is None:\n",
        API, "test_who_follows_changes_forgets_all_when_the_session_moves",
    ),
    Mutant(
        "G24", "a table full of left namespaces refuses", "kvdock/api/pool/sessions.py",
        "                if not self._table.empty_left(0, SLICE_EMPTIED_CHUNKS):\n                    raise\n",
        "                raise\n",
        ("tests/api/test_weights.py", "-k", "table_full"),
        "test_a_table_full_of_namespaces_that_were_left_takes_another_one",
    ),
    Mutant(
        "G25", "namespaces that were left count for a quota", "csrc/table/namespaces.cpp",
        "number == tenant_of_[i]) && !left_.has(i) && ", "number == tenant_of_[i]) && ",
        API, "test_one_engine_of_a_tenant_with_one_namespace_changes_weights_as_often_as_it_likes",
    ),
    Mutant(
        "G26", "a session comes back to the weights of before", "kvdock/connectors/session.py",
        'weights=self._weights.name if own.scheduler else "",', 'weights="",',
        SESSION, "test_a_session_that_attaches_later_or_again_says_what_its_engine_runs_by_then",
    ),
    Mutant(
        "G27", "a reset clears the weights that the server knows", "kvdock/connectors/vllm/resets.py",
        "            self._session.report_weights(attachment)", "            pass",
        SESSION, "test_a_reset_clears_what_the_weights_of_now_find",
    ),
    Mutant(
        "G28", "what waits to be written of dead weights is written", "kvdock/api/tiers/mover_client.py",
        "abandoned=[digest.hex() for digest in abandoned],", "abandoned=[],",
        TIERS, "test_what_waits_to_be_written_is_dropped_once_nobody_runs_its_weights",
    ),
    Mutant(
        "G29", "the mover attaches without the weights", "kvdock/tiers/mover/namespaces.py",
        "        session.runs(weights)\n", "",
        TIERS, "test_a_tier_has_the_chunks_of_each_weights_apart",
    ),
    Mutant(
        "G30", "old weights keep chunks whatever the setting", "kvdock/api/keeper.py",
        "kept = self._settings.weights_kept", "kept = 64",
        API, "test_with_none_kept_weights_that_nobody_runs_any_more_are_removed_and_their_memory_is_free",
    ),
)
