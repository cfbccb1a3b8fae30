"""Breaks of kvdock/connectors/, the part that knows no engine."""

from __future__ import annotations

from .mutant import Mutant

MUTANTS = (
    Mutant(
        "P6b", "a load counts as far as the rank that got most", "kvdock/connectors/plans.py",
        "return min(ranks", "return max(ranks",
        ("tests/connectors/test_worker.py",),
        "test_a_load_is_valid_as_far_as_on_the_rank_that_got_least_and_nowhere_if_a_rank_is_lost",
    ),
    Mutant(
        "P6d", "loads of one copy have each other's damaged chunks", "kvdock/datapath/joint.py",
        "[at - first for at in self._joint.wrong if first <= at < end]", "self._joint.wrong",
        ("tests/connectors/test_worker.py", "-k", "one_forward_pass"),
        "test_loads_of_one_forward_pass_are_one_copy_and_each_has_a_verdict_of_its_own",
    ),
    Mutant(
        "P6e", "loads of one copy are loaded into the shared blocks of running requests", "kvdock/datapath/copy.py",
        "one.block_ids, one.skips,", "one.block_ids, bytes(len(one.skips) * 8),",
        ("tests/connectors/test_worker.py", "-k", "one_forward_pass"),
        "test_loads_of_one_forward_pass_are_one_copy_and_each_has_a_verdict_of_its_own",
    ),
    Mutant(
        "P6c", "what the other ranks got is not looked at", "kvdock/connectors/engine_connector.py",
        "valid = max(plan.local_tokens, min(valid, elsewhere))", "valid = max(plan.local_tokens, valid)",
        ("tests/engine/test_tp.py", "-k", "not_attached"),
        "test_a_rank_that_is_not_attached_makes_a_miss_and_strands_nothing",
    ),
    Mutant(
        "P7a", "an engine whose member is dead goes on under the same id", "kvdock/connectors/session.py",
        '"unknown_member", "member_dead"}', '"unknown_member"}',
        ("tests/connectors/test_session.py", "-k", "taken_for_dead or takes_for_dead"),
        "test_a_member_that_the_server_takes_for_dead_attaches_again_under_a_new_id",
    ),
    Mutant(
        "P7b", "an engine whose session is unknown goes on with heartbeats", "kvdock/connectors/session.py",
        'frozenset({"unknown_session", "unknown', 'frozenset({"unknown',
        ("tests/connectors/test_session.py",),
        "test_an_answer_of_a_dead_server_is_still_loaded_and_never_hurts_its_successor",
    ),
    Mutant(
        "P7c", "a member is presented to another pool than its own", "kvdock/connectors/session.py",
        "        if last is not None and last.pool_id == pool_id:\n", "        if last is not None and pool_id:\n",
        ("tests/connectors/test_session.py",), "",
        equivalent="the other pool refuses the member's lock",
    ),
    Mutant(
        "P8a", "a declined request stays declined after `finished`", "kvdock/connectors/cost.py",
        "        self._declined.discard(request_id)\n", "",
        ("tests/connectors/test_limits.py",), "test_a_load_below_the_minimum_is_declined_and_its_lease_given_up",
    ),
    Mutant(
        "P8b", "a load that is declined keeps its lease", "kvdock/connectors/lookups.py",
        "min_load_tokens=least", "min_load_tokens=1",
        ("tests/connectors/test_limits.py",), "test_a_load_below_the_minimum_is_declined_and_its_lease_given_up",
    ),
    Mutant(
        "P8c", "the share that a load may have is not limited", "kvdock/connectors/cost.py",
        "min(int(len(tokens) * self.max_load_share), self.max_load_tokens)", "self.max_load_tokens",
        ("tests/connectors/test_limits.py",), "test_a_limit_caps_what_is_loaded",
    ),
    Mutant(
        "P19", "what failed to load is asked for again", "kvdock/connectors/lookups.py",
        "request.limit(valid_tokens // self._chunk_tokens)",
        "request.store.offered = min(request.store.offered, valid_tokens // self._chunk_tokens)",
        ("tests/vllm/test_parallel.py", "-k", "offered_again"),
        "test_what_one_worker_had_is_not_offered_again_when_another_had_less",
    ),
    Mutant(
        "P20", "a load of another length than was answered begins", "kvdock/connectors/lookups.py",
        "            if not pieces.arrays.complete():\n                return None",
        "            if not pieces:\n                return None",
        ("tests/connectors/test_groups.py", "-k", "another_length"),
        "test_a_load_of_another_length_than_answered_is_refused_and_its_lease_ends",
    ),
    Mutant(
        "P26", "the end of one copy of a grant counts as the end of all", "kvdock/connectors/session.py",
        "            self._active[grant] -= 1\n", "            self._active[grant] = 0\n",
        ("tests/connectors/test_grants.py",), "test_a_grant_at_work_is_not_answered_for_until_all_its_copies_ended",
    ),
    Mutant(
        "P27", "a store behind a gap is made", "kvdock/connectors/stores.py",
        "if not is_there or batch.first > progress.reserved:", "if not is_there:",
        ("tests/connectors/test_offers.py",),
        "test_what_lies_between_two_offers_that_found_no_room_is_offered_again",
    ),
    Mutant(
        "P28", "more is stored when a request ends than was computed", "kvdock/connectors/stores.py",
        "min(progress.fell_short_at, computed_tokens // self._chunk_tokens)", "progress.fell_short_at",
        ("tests/connectors/test_offers.py",), "test_no_more_is_stored_when_a_request_ends_than_was_computed",
    ),
    Mutant(
        "P29", "a dear hit is loaded", "kvdock/connectors/cost.py",
        "load_s * self._speed.tokens_per_s <= tokens:", "True:",
        ("tests/connectors/test_load_cost.py",),
        "test_a_short_hit_is_slower_to_load_than_to_compute_and_a_long_one_is_not",
    ),
    Mutant(
        "P75b", "a preempted request is divided by its last admission", "kvdock/connectors/outcomes.py",
        "        story.is_first = not story.is_admitted\n", "        story.is_first = True\n",
        ("tests/connectors/test_engine_outcomes.py", "-k", "first_admitted"),
        "test_the_prompt_of_a_preempted_request_is_divided_as_it_was_first_admitted",
    ),
    Mutant(
        "P75c", "short rests behind a hit make the engine look slow", "kvdock/connectors/outcomes.py",
        "tokens >= LONG_TOKENS or not has_hit", "True",
        ("tests/connectors/test_engine_outcomes.py", "-k", "shows_the_speed"),
        "test_the_rest_of_a_prompt_behind_a_hit_shows_the_speed_only_if_it_is_long",
    ),
    Mutant(
        "P75", "heartbeats go on telling what the server does not take", "kvdock/connectors/outcomes.py",
        "                self._refuse()\n", "                self._put_back(beat)\n",
        ("tests/connectors/test_outcomes.py", "-k", "without_this_field"),
        "test_a_server_without_this_field_loses_no_engine",
    ),
    Mutant(
        "A2", "sizes that leave no whole head are shared", "kvdock/connectors/heads.py",
        "if parts % workers and (workers % heads or parts != heads):",
        "if parts % workers and workers % heads:",
        ("tests/connectors/test_any_tensor_parallel.py",), "test_an_engine_that_cannot_share_sizes_says_why",
    ),
    Mutant(
        "A4", "heads of odd sizes are divided", "kvdock/connectors/vllm/heads.py",
        "    if _head_bytes(tensor) % RUN_BYTES:\n",
        "    if False:\n",
        ("tests/connectors/test_any_tensor_parallel.py",), "test_an_engine_that_cannot_share_sizes_says_why",
    ),
    Mutant(
        "A5", "stages take each other's parts", "kvdock/connectors/vllm/heads.py",
        "    ranks = tuple(rank * stages + stage for rank in",
        "    ranks = tuple(rank * stages for rank in",
        ("tests/connectors/test_any_tensor_parallel.py",), "test_each_pipeline_stage_has_parts_of_its_own_layers",
    ),
)
