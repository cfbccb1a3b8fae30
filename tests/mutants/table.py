"""Breaks of csrc/table/: each is compiled, so these take longest."""

from __future__ import annotations

from .mutant import Mutant

MODEL = ("tests/table/test_model.py",)
MODEL_TEST = "TestTableAgainstModel"
GRANTS = ("tests/table/test_grants.py",)
QUOTAS = ("tests/table/test_quotas.py",)
ORDER = ("tests/table/test_order_model.py",)
HINTS = ("tests/table/test_hints.py",)
PROMISES = ("tests/table/test_promises.py",)
REUSE = ("tests/table/test_reuse_policy.py",)

MUTANTS = (
    Mutant(
        "C1", "a skipped prefix is rounded up to a chunk", "csrc/table/lookup.cpp",
        "(skip_tokens / chunk_tokens)", "((skip_tokens + chunk_tokens - 1) / chunk_tokens)",
        GRANTS, "test_a_skip_that_ends_inside_a_chunk_leases_that_chunk",
    ),
    Mutant(
        "C3a", "the first rank that does not exist is accepted", "csrc/table/grants.cpp",
        "if (r >= g.readers) throw", "if (r > g.readers) throw",
        GRANTS, "test_a_rank_equal_to_the_number_of_readers_or_writers_is_no_holder",
    ),
    Mutant(
        "C3b", "a lease is cancelled after a rank has answered", "csrc/table/table.cpp",
        "if (left.size() != g->readers)", "if (left.size() > g->readers)",
        ("tests/api/test_error_codes.py",), "test_a_plan_that_a_rank_has_seen_cannot_be_cancelled",
    ),
    Mutant(
        "C4", "a grant ends while one reader is left", "csrc/table/grants.cpp",
        "if (!g.live_holders() &&", "if (std::popcount(g.holders[0]) + std::popcount(g.holders[1]) <= 1 &&",
        MODEL, MODEL_TEST,
    ),
    Mutant(
        "C5", "a parent is evicted before its child", "csrc/table/eviction.cpp",
        "in.pins == 0 && in.children == 0 &&", "in.pins == 0 &&",
        MODEL, MODEL_TEST,
    ),
    Mutant(
        "C6", "a deadline discharges the holders", "csrc/table/grants.cpp",
        "      work.spend(cost_of(g));\n      close_reservation(g);\n",
        "      g.holders[0] = g.holders[1] = 0, close_reservation(g);\n",
        MODEL, MODEL_TEST,
    ),
    Mutant(
        "C7", "the generation stays when a record is reused", "csrc/table/records.cpp",
        "uint64_t generation = ++header_.last_generation;", "uint64_t generation = header_.last_generation |= 1;",
        MODEL, MODEL_TEST,
    ),
    Mutant(
        "C8", "adoption publishes a reserved chunk whose first part is committed", "csrc/table/chunks_adopt.cpp",
        "    if (c.record(id).state() != RecordState::kReserved) continue;\n",
        "    if (c.record(id).state() != RecordState::kReserved) continue;\n"
        "    if (c.record(id).parts[0].committed & kCommitted) {\n"
        "      c.publish_chunk(id);\n      continue;\n    }\n",
        ("tests/kill/test_matrix.py", "-k", "publish and server"), "test_a_kill_leaves_nothing_wrong_behind",
    ),
    Mutant(
        "C9", "a chunk is published before its last part is committed", "csrc/table/store.cpp",
        "      whole = whole && set;\n", "      whole = whole && (set || p + 1 == r.part_count);\n",
        MODEL, MODEL_TEST,
    ),
    Mutant(
        "C10", "a window's need is rounded down, so the hit is too long", "csrc/table/lookup.cpp",
        "(group.window_tokens + ns.chunk_tokens - 1) / ns.chunk_tokens", "group.window_tokens / ns.chunk_tokens",
        MODEL, MODEL_TEST,
    ),
    Mutant(
        "C11", "a chunk that other sessions share counts as this session's", "csrc/table/pins.h",
        "(in.sole == kMany && shared_.count(pair_of(session, id)))", "in.sole == kMany",
        GRANTS, "test_a_chunk_that_others_hold_counts_against_a_cap_and_one_that_i_hold_does_not",
    ),
    Mutant(
        "C13", "one segment too many counts as pinned", "csrc/table/lookup.cpp",
        "if (r.parts[p].segment >= below) return i;", "if (r.parts[p].segment > below) return i;",
        ("tests/segments/test_registration.py", "-k", "hit_ends"), "test_a_hit_ends_where_a_rank_has_not_registered",
    ),
    Mutant(
        "C15", "settling counts from the last heartbeat", "csrc/table/members.cpp",
        "now >= m.dead_ms + options.settle_ms", "now >= m.heartbeat_ms + options.settle_ms",
        GRANTS, "test_what_a_dead_member_held_is_released_a_settling_time_after_its_death_was_seen",
    ),
    Mutant(
        "C16", "adoption takes a rank for done when its last part is committed", "csrc/table/grants_adopt.cpp",
        "      if (!committed) busy[r.parts[p].writer / 64] |= 1ull << (r.parts[p].writer % 64);\n",
        "      uint64_t bit = 1ull << (r.parts[p].writer % 64), &word = busy[r.parts[p].writer / 64];\n"
        "      word = committed ? word & ~bit : word | bit;\n",
        GRANTS, "test_adoption_keeps_a_rank_that_has_committed_the_later_of_two_chunks_only",
    ),
    Mutant(
        "C18", "a late repeat of a commit does not compare generations", "csrc/table/store.cpp",
        "    if (!chunks_.records().names_live(entry)) continue;", "    if (entry.generation == 0) continue;",
        GRANTS, "test_a_commit_repeated_after_its_record_was_used_again_looks_at_nothing_of_the_new_one",
    ),
    Mutant(
        "C19", "a quota evicts the coldest chunk of any tenant", "csrc/table/leaf_lists.h",
        "    auto at = by_tenant_.find(tenant);\n", "    auto at = by_tenant_.begin();\n",
        QUOTAS, "test_a_tenant_at_its_quota_evicts_its_own_coldest_chunks_and_nobody_elses",
    ),
    Mutant(
        "C20", "a tenant may have one chunk more than its quota", "csrc/table/tenants.cpp",
        "t.usage.chunks + chunks <= quota(t).chunks", "t.usage.chunks + chunks <= quota(t).chunks + 1",
        MODEL, MODEL_TEST,
    ),
    Mutant(
        "C21", "a quota spares what an administrator keeps", "csrc/table/eviction.cpp",
        "  if (!c) c = kept_.of_tenant(", "  if (false) c = kept_.of_tenant(",
        QUOTAS, "test_a_pin_never_beats_a_quota_and_goes_last",
    ),
    Mutant(
        "C22", "a reservation brings a tenant down to a lowered quota all at once", "csrc/table/eviction.cpp",
        "  if (tenants.is_over(tenant) || !tenants.could_fit", "  if (!tenants.could_fit",
        QUOTAS, "test_a_lowered_quota_is_reached_in_slices_and_leaves_what_is_leased",
    ),
    Mutant(
        "C23", "any share of the pool is retained", "csrc/table/preferences.cpp",
        "if (in.priority <= 0 && !may_retain(id)) return", "if (false) return",
        HINTS, "test_only_so_much_of_the_pool_is_retained_and_the_rest_is_counted",
    ),
    Mutant(
        "C24", "a chunk is retained longer than the one before it", "csrc/table/preferences.cpp",
        "    *until_ms = std::min(*until_ms, priority_until(parent->any()));\n", "",
        HINTS, "test_the_end_of_a_chain_is_not_retained_without_its_beginning",
    ),
    Mutant(
        "C25", "the end of a conversation takes what others share", "csrc/table/table.cpp",
        "if (e && e->children > own_children) {", "if (e && e->children > own_children + 1) {",
        HINTS, "test_the_end_of_a_conversation_lets_exactly_the_unshared_chunks_go_first",
    ),
    Mutant(
        "C26", "what was let go stays so when somebody names it", "csrc/table/eviction.cpp",
        "  if (in.priority < 0) preferences_.set_priority(id, 0, 0);  // an engine asks for it after all\n", "",
        HINTS, "test_a_chunk_that_somebody_names_after_all_is_as_any_other",
    ),
    Mutant(
        "C27", "a quota spares what is retained", "csrc/table/eviction.cpp",
        "it != lists_.end() && !c; ++it)", "it != lists_.end() && it->first <= 0 && !c; ++it)",
        HINTS, "test_a_quota_evicts_what_is_retained_after_the_tenants_other_chunks",
    ),
    Mutant(
        "C28", "a chunk that takes another's place is not retained", "csrc/table/preferences.cpp",
        "if (priority > 0 && records_.info(to).priority <= 0 &&", "if (old.kept &&",
        HINTS, "test_a_chunk_that_is_replaced_stays_retained",
    ),
    Mutant(
        "C29", "what is retained keeps its room although nothing else is left", "csrc/table/eviction.cpp",
        "it != lists_.end() && !best;", "it != lists_.end() && !best && it->first <= 0;",
        HINTS, "test_when_nothing_else_is_left_what_is_retained_goes",
    ),
    Mutant(
        "C30", "a window takes what is retained before other leaves go", "csrc/table/eviction.cpp",
        "!(own && own->priority < 0)", "true",
        HINTS, "test_what_makes_room_for_slots_of_another_size_takes_what_is_retained_last",
    ),
    Mutant(
        "C36", "a chunk of a higher priority goes right after what continues it", "csrc/table/eviction.cpp",
        "|| in.priority != least.priority) return;", ") return;",
        ORDER, "test_what_goes_is_what_the_model_says",
    ),
    Mutant(
        "C40", "one tick drops all promises that are over", "csrc/table/promises.h",
        "left -= forget(swept_to_, left);", "forget(swept_to_, left);",
        PROMISES, "test_promises_that_are_over_go_some_at_a_time",
    ),
    Mutant(
        "R1", "a gap is learnt from the first reuse on", "csrc/table/reuse_policy.cpp",
        "return more % kUses == 1 ? more : with_gap(more, age);",
        "return with_gap(more, age);",
        REUSE, "test_what_is_worth_least_goes_first",
    ),
    Mutant(
        "R2", "a gap moves the whole way", "csrc/table/reuse_policy.cpp",
        "int gap = was == 0 ? now : (was + now + (now > was)) / 2;",
        "int gap = now;",
        REUSE, "test_what_is_worth_least_goes_first",
    ),
    Mutant(
        "R5", "gaps of evicted chunks are not remembered", "csrc/table/reuse_policy.cpp",
        "  if (chunk.kind >= kUses) past_.put(",
        "  if (false) past_.put(",
        REUSE, "test_gaps_are_remembered_longer_than_the_pool_holds_chunks",
    ),
    Mutant(
        "R6", "two uses at once count as two", "csrc/table/reuse_policy.cpp",
        "return age >= std::max<uint64_t>(2, resident_ / kTouchShare);",
        "return age >= 1;",
        REUSE, "test_what_is_worth_least_goes_first",
    ),
    Mutant(
        "R7", "what comes back stays among the past", "csrc/table/reuse_policy.cpp",
        "  past_.drop(chunk.name);\n",
        "",
        REUSE, "test_what_was_deleted_after_it_came_back_is_new",
    ),
    Mutant(
        "R8", "only the oldest leaf of a stretch is looked at", "csrc/table/reuse_policy.cpp",
        "      see(*std::prev(end));\n",
        "",
        REUSE, "test_what_is_worth_least_goes_first",
    ),
    Mutant(
        "R9", "a child inherits all uses", "csrc/table/reuse_policy.cpp",
        "std::min<uint8_t>(*inherited % kUses, kInherited)",
        "static_cast<uint8_t>(*inherited % kUses)",
        REUSE, "test_what_is_worth_least_goes_first",
    ),
    Mutant(
        "N2", "of a gap the prior is its rate alone", "csrc/table/reuse_model.cpp",
        "std::sqrt(of_gap_[gap][k] * common[k])",
        "of_gap_[gap][k]",
        REUSE, "test_what_is_worth_least_goes_first",
    ),
    Mutant(
        "N3", "counts never fade", "csrc/table/reuse_model.cpp",
        "constexpr double kKept = 511.0 / 512;",
        "constexpr double kKept = 1;",
        REUSE, "test_what_is_worth_least_goes_first",
    ),
    Mutant(
        "N4", "a stretch is one bin too long", "csrc/table/reuse_model.cpp",
        "  if (static_cast<double>(age) < middle(bin)) --bin;\n",
        "  bin -= 1;\n",
        REUSE, "test_what_is_worth_least_goes_first",
    ),
    Mutant(
        "U2", "past uses are kept no longer than the pool's", "csrc/table/past_uses.h",
        "kTimes = 64",
        "kTimes = 1",
        REUSE, "test_gaps_are_remembered_longer_than_the_pool_holds_chunks",
    ),
)
