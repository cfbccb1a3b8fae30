"""Breaks of what is counted of the pool: csrc/table/census.cpp, who asks for it, and what the page does with it."""

from __future__ import annotations

from .mutant import Mutant

CENSUS_FILE = "csrc/table/census.cpp"
CENSUS = ("tests/table/test_census.py",)
FOREST_TEST = "test_a_count_in_slices_finds_every_prefix_with_its_chunks_and_uses"
BUDGET_TEST = "test_no_call_does_more_than_its_budget_however_many_prefixes_there_are_or_deep"
LAST_TEST = "test_the_last_key_is_the_deepest_that_half_of_the_lookups_found_and_a_pin_of_it_keeps_it_all"
LAST = (*CENSUS, "-k", "last_key_is_the_deepest")
RANKED_TEST = "test_the_most_used_of_many_prefixes_of_several_namespaces_are_ranked_together"
GONE_TEST = "test_a_prefix_that_goes_after_the_count_is_left_out_and_what_takes_its_record_is_not_it"
MEANWHILE_TEST = "test_the_last_key_is_one_of_its_prefix_although_chunks_go_meanwhile"
CONTENTS_FILE = "kvdock/api/reports/contents.py"
USAGE = ("tests/api/test_usage.py", "-k", "prefixes or operator")
LOOP = ("tests/api/test_loop.py", "-k", "counted_in_short")
LOOP_TEST = "test_all_that_is_cached_is_counted_in_short_turns_and_once_for_all_who_ask"
OPERATOR_TEST = "test_what_an_operator_takes_out_of_use_is_not_counted_any_more"
PAGE = ("tests/page/test_views.py", "-k", "prefix")

MUTANTS = (
    Mutant(
        "C43", "one call ranks all prefixes", CENSUS_FILE,
        "if (at_ < prefix_count_) return rank(", "while (at_ < prefix_count_) rank(",
        CENSUS, BUDGET_TEST,
    ),
    Mutant(
        "C44", "one call goes all the way from a chunk to its first one", CENSUS_FILE,
        "if (climb()) ++at_, walk_ = kNone;", "while (!climb()) {\n    }\n    ++at_, walk_ = kNone;",
        CENSUS, BUDGET_TEST,
    ),
    Mutant(
        "C45", "the least used of many prefixes are ranked", CENSUS_FILE,
        "if (!comes_first(one, in.top.front())) return 1;", "if (comes_first(one, in.top.front())) return 1;",
        CENSUS, RANKED_TEST,
    ),
    Mutant(
        "C46", "one namespace's prefixes come after the other's", CENSUS_FILE,
        "return comes_first(*b.first, *a.first);", "return a.first->space < b.first->space;",
        CENSUS, RANKED_TEST,
    ),
    Mutant(
        "C47", "a prefix that has gone since the count is listed", CENSUS_FILE,
        "if (is_there(at->record, at->stamp)) out", "if (true) out",
        CENSUS, GONE_TEST,
    ),
    Mutant(
        "C48", "a chunk that took another's record counts as that one", CENSUS_FILE,
        "return is_ready(id) && this->stamp(id) == stamp;", "return is_ready(id) && stamp > 0;",
        CENSUS, GONE_TEST,
    ),
    Mutant(
        "C49", "what is to be kept is the deepest, whoever uses it", CENSUS_FILE,
        "depth > to.last_chunks && ", "depth > to.last_chunks || ",
        LAST, LAST_TEST,
    ),
    Mutant(
        "C50", "what is to be kept must be found by more than half of the lookups", CENSUS_FILE,
        "* 2 >= records_.info", "* 2 > records_.info",
        LAST, LAST_TEST,
    ),
    Mutant(
        "C51", "the depth of a chunk is lost as the way to it becomes shorter", CENSUS_FILE,
        "{over.above, node.up + over.up, ", "{over.above, node.up, ",
        CENSUS, FOREST_TEST,
    ),
    Mutant(
        "C52", "chunks that name each other in a circle are of no prefix", CENSUS_FILE,
        "node = is_there(walk_, node.stamp) ? Node", "node = false ? Node",
        CENSUS, "test_chunks_that_name_each_other_in_a_circle_are_one_prefix",
    ),
    Mutant(
        "C53", "what lost its beginning counts as a prefix", CENSUS_FILE,
        "if (!r.parent.names_chunk() || (before && before->ready == id))",
        "if (!before || before->ready >= end_ || before->ready == id)",
        (*CENSUS, "-k", "lost"), "test_what_lost_its_beginning_is_of_no_prefix_until_that_is_stored_again",
    ),
    Mutant(
        "C54", "a chunk counts for the prefix that took its parent's record", CENSUS_FILE,
        "if (over.stamp != node.above_stamp) {", "if (false) {",
        CENSUS, "test_a_chunk_is_not_counted_for_what_took_its_parents_record",
    ),
    Mutant(
        "C55", "what is to be kept is what took that chunk's record", CENSUS_FILE,
        "if (is_there(prefix.last, prefix.last_stamp))", "if (prefix.last_stamp)",
        CENSUS, MEANWHILE_TEST,
    ),
    Mutant(
        "C57", "a chunk counts for the prefix of that which had its record before", CENSUS_FILE,
        "if (!is_there(id, nodes_.at(id).stamp) ||", "if (!is_ready(id) ||",
        CENSUS, MEANWHILE_TEST,
    ),
    Mutant(
        "C58", "a record is looked for where its page holds larger ones", CENSUS_FILE,
        "return records_.next(id) == id && records_", "return records_",
        CENSUS, "test_ids_of_records_that_their_page_has_no_more_room_for_are_not_followed",
    ),
    Mutant(
        "P81", "the pool is counted again for each who asks", CONTENTS_FILE,
        "if not self._is_stale and self._now_s()", "if self._is_stale and self._now_s()",
        USAGE, OPERATOR_TEST,
    ),
    Mutant(
        "P82", "what an operator took out of use stays counted", CONTENTS_FILE,
        'gets a new count."""\n        self._is_stale = True', 'gets a new count."""\n        self._is_stale = False',
        USAGE, OPERATOR_TEST,
    ),
    Mutant(
        "P83", "those who ask while it is counted have it counted again", CONTENTS_FILE,
        "if self._making is None or self._making.done():", "if True:",
        LOOP, LOOP_TEST,
    ),
    Mutant(
        "P84", "nobody has a turn while the pool is counted", CONTENTS_FILE,
        "            await asyncio.sleep(0)\n", "",
        LOOP, LOOP_TEST,
    ),
    Mutant(
        "P85", "a tenant sees the prefixes of others", CONTENTS_FILE,
        "for one in self._registry.namespaces() if peer.sees(one.tenant)}", "for one in self._registry.namespaces()}",
        USAGE, "test_a_tenant_sees_its_own_prefixes_alone",
    ),
    Mutant(
        "P86", "a prefix is removed whatever a person answers", "kvdock/web/views/cached.js",
        'verb: "Remove" }))) return "";', 'verb: "Remove" }))) void 0;',
        PAGE, "test_prefixes_show_age_and_use_and_can_be_removed",
    ),
    Mutant(
        "P87", "of a prefix its first chunk alone is kept", "kvdock/web/views/cached.js",
        "return pin(prefix.namespace, prefix.last_key,", "return pin(prefix.namespace, prefix.key,",
        PAGE, "test_what_most_uses_of_a_prefix_find_can_be_kept_after_a_question",
    ),
)
