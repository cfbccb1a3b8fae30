"""Breaks of csrc/table/: each is compiled, so these take longest."""

from __future__ import annotations

from .mutant import Mutant

MODEL = ("tests/table/test_model.py",)
MODEL_TEST = "TestTableAgainstModel"

MUTANTS = (
    Mutant(
        "C1", "a skipped prefix is rounded up to a chunk", "csrc/table/lookup.cpp",
        "call.skip_tokens / ns.chunk_tokens)", "(call.skip_tokens + ns.chunk_tokens - 1) / ns.chunk_tokens)",
        ("tests/api/test_reading.py", "-k", "skip"), "test_a_skip_leaves_out_the_chunks_wholly_before_it",
    ),
    Mutant(
        "C3a", "the first rank that does not exist is accepted", "csrc/table/grants.cpp",
        "if (r >= g.readers) throw", "if (r > g.readers) throw",
        ("tests/api/test_error_codes.py", "tests/api/test_errors.py"), "",
    ),
    Mutant(
        "C3b", "a lease is cancelled after a rank has answered", "csrc/table/grants.cpp",
        "if (left.size() != g.readers)", "if (left.size() > g.readers)",
        ("tests/api/test_error_codes.py",), "test_a_plan_that_a_rank_has_seen_cannot_be_cancelled",
    ),
    Mutant(
        "C4", "a grant ends while one reader is left", "csrc/table/grants.cpp",
        "if (g.live_holders() ||", "if (std::popcount(g.holders[0]) + std::popcount(g.holders[1]) > 1 ||",
        MODEL, MODEL_TEST,
    ),
    Mutant(
        "C5", "a parent is evicted before its child", "csrc/table/table.cpp",
        "in.pins == 0 && in.children == 0 && !in.kept", "in.pins == 0 && !in.kept",
        MODEL, MODEL_TEST,
    ),
    Mutant(
        "C6", "a deadline discharges the holders", "csrc/table/life.cpp",
        "  for (uint32_t at : late) close_reservation(at);\n",
        "  for (uint32_t at : late) {\n    close_reservation(at);\n"
        "    for (uint32_t r : remaining(grants_[at])) discharge(at, r);\n    finish_if_done(at);\n  }\n",
        MODEL, MODEL_TEST,
    ),
    Mutant(
        "C7", "the generation stays when a record is reused", "csrc/table/store.cpp",
        "uint64_t generation = ++header_->last_generation;", "uint64_t generation = header_->last_generation |= 1;",
        MODEL, MODEL_TEST,
    ),
    Mutant(
        "C8", "adoption publishes a reserved chunk whose first part is committed", "csrc/table/adopt_build.cpp",
        "    if (t.record(id).state() != RecordState::kReserved) continue;\n",
        "    if (t.record(id).state() != RecordState::kReserved) continue;\n"
        "    if (t.record(id).parts[0].committed & kCommitted) {\n"
        "      t.publish_record(id);\n      continue;\n    }\n",
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
        "C11", "a chunk that other sessions share counts as this session's", "csrc/table/lookup.cpp",
        "(in.sole == kMany && shared_pins_.count(uint64_t{session} << 32 | id))", "in.sole == kMany",
        MODEL, "",
    ),
    Mutant(
        "C13", "one segment too many counts as pinned", "csrc/table/lookup.cpp",
        "if (r.parts[p].segment >= below) return i;", "if (r.parts[p].segment > below) return i;",
        ("tests/segments/test_registration.py", "-k", "hit_ends"), "test_a_hit_ends_where_a_rank_has_not_registered",
    ),
    Mutant(
        "C15", "settling counts from the last heartbeat", "csrc/table/life.cpp",
        "now >= m.dead_ms + options_.settle_ms", "now >= m.heartbeat_ms + options_.settle_ms",
        MODEL, MODEL_TEST,
    ),
    Mutant(
        "C16", "adoption takes a rank for done when its last part is committed", "csrc/table/adopt_build.cpp",
        "      if (!committed) busy[r.parts[p].writer / 64] |= 1ull << (r.parts[p].writer % 64);\n",
        "      uint64_t bit = 1ull << (r.parts[p].writer % 64), &word = busy[r.parts[p].writer / 64];\n"
        "      word = committed ? word & ~bit : word | bit;\n",
        MODEL, MODEL_TEST,
    ),
    Mutant(
        "C17", "a mismatch does not compare generations", "csrc/table/grants.cpp",
        "if (r.generation() == line.generation && r.state() == RecordState::kReady)",
        "if (r.state() == RecordState::kReady)",
        MODEL, "", equivalent="a line pins its record, so the generation cannot change (I2)",
    ),
    Mutant(
        "C18", "a late repeat of a commit does not compare generations", "csrc/table/store.cpp",
        "    if (r.generation() != it->generation) continue;", "    if (it->generation == 0) continue;",
        ("tests/api/test_retry.py",), "",
    ),
)
