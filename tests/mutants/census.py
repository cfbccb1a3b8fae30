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
FORKS = (*CENSUS, "-k", "fork or goes_on or kept_chunk or pages_and or named")
FORK_TEST = "test_a_prefix_ends_where_its_tree_forks_and_its_branches_are_counted_from_there"
PREFIXES = ("tests/api/test_prefixes.py",)

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
        "if (!is_there(at->record, at->stamp)) --out.all;", "if (false) --out.all;",
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
        "(over.above, node.up + over.up, ", "(over.above, node.up, ",
        CENSUS, FOREST_TEST,
    ),
    Mutant(
        "C52", "chunks that name each other in a circle are of no prefix", CENSUS_FILE,
        "if (of_.space == kNone && is_there(walk_, node.stamp)) node", "if (false) node",
        CENSUS, "test_chunks_that_name_each_other_in_a_circle_are_one_prefix",
    ),
    Mutant(
        "C53", "what lost its beginning counts as a prefix", CENSUS_FILE,
        "return !r.parent.names_chunk() || (before && before->ready == id);",
        "return !before || before->ready >= end_ || before->ready == id;",
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
        "if (!is_there(at_, nodes_.at(at_).stamp) ||", "if (!is_ready(at_) ||",
        CENSUS, MEANWHILE_TEST,
    ),
    Mutant(
        "C58", "a record is looked for where its page holds larger ones", CENSUS_FILE,
        "return records_.next(id) == id && records_", "return records_",
        CENSUS, "test_ids_of_records_that_their_page_has_no_more_room_for_are_not_followed",
    ),
    Mutant(
        "P81", "the pool is counted again for each who asks", CONTENTS_FILE,
        "return not self.is_stale and self._now_s()", "return self.is_stale and self._now_s()",
        USAGE, OPERATOR_TEST,
    ),
    Mutant(
        "P82", "what an operator took out of use stays counted", CONTENTS_FILE,
        "            answer.is_stale = True", "            answer.is_stale = False",
        USAGE, OPERATOR_TEST,
    ),
    Mutant(
        "P83", "those who ask while it is counted have it counted again", CONTENTS_FILE,
        "if self._all.making is None or self._all.making.done():", "if True:",
        LOOP, LOOP_TEST,
    ),
    Mutant(
        "P84", "a search takes all of the time of the event loop", CONTENTS_FILE,
        "            await asyncio.sleep(pause * slice_s)\n", "",
        ("tests/api/test_loop.py", "-k", "search_of_what"),
        "test_a_search_of_what_is_cached_leaves_most_of_the_time_to_others",
    ),
    Mutant(
        "P85", "a tenant sees the prefixes of others", CONTENTS_FILE,
        "for one in self._registry.namespaces() if peer.sees(one.tenant)}", "for one in self._registry.namespaces()}",
        USAGE, "test_a_tenant_sees_its_own_prefixes_alone",
    ),
    Mutant(
        "P86", "a prefix is removed whatever a person answers", "kvdock/web/views/prefixes.js",
        'verb: "Remove" }))) return "";', 'verb: "Remove" }))) void 0;',
        PAGE, "test_prefixes_show_age_and_use_and_can_be_removed",
    ),
    Mutant(
        "P87", "of a prefix its first chunk alone is kept", "kvdock/web/views/prefixes.js",
        "return pin(prefix.namespace, prefix.last_key,", "return pin(prefix.namespace, prefix.key,",
        PAGE, "test_what_most_uses_of_a_prefix_find_can_be_kept_after_a_question",
    ),
    Mutant(
        "C59", "the common part ends at the deepest fork", CENSUS_FILE,
        "children != 1 && depth < to.fork_chunks", "children != 1",
        FORKS, FORK_TEST,
    ),
    Mutant(
        "C60", "what the common part holds has one chunk more", CENSUS_FILE,
        "else if (walked_ < to.shared_chunks())", "else if (walked_ <= to.shared_chunks())",
        FORKS, FORK_TEST,
    ),
    Mutant(
        "C61", "what goes on from a chunk is looked for in all namespaces", CENSUS_FILE,
        "if (of_.space != kNone && r.space != of_.space) return;", "",
        FORKS, "test_what_goes_on_from_a_chunk_is_of_its_namespace_alone",
    ),
    Mutant(
        "C62", "no prefix is kept", CENSUS_FILE,
        "to.kept |= records_.info(id).kept;", "to.kept |= false;",
        FORKS, "test_a_kept_chunk_keeps_the_prefixes_before_it_and_no_others",
    ),
    Mutant(
        "C63", "each page begins with the first prefix", CENSUS_FILE,
        "else if (place >= start) out", "else out",
        FORKS, "test_branches_come_in_pages_and_each_comes_once",
    ),
    Mutant(
        "C64", "a search lists all prefixes", CENSUS_FILE,
        "if (!is_sought_[r.space] && !prefix.is_sought) return 1;", "",
        FORKS, "test_named_chunks_are_found_in_their_prefixes_and_searched_for",
    ),
    Mutant(
        "P88", "a tenant sees what goes on from a chunk of others", CONTENTS_FILE,
        "self._registry.namespace(key_bytes([namespace]), sees=peer.sees)",
        "self._registry.namespace(key_bytes([namespace]), sees=lambda tenant: True)",
        PREFIXES, "test_prefixes_are_found_by_label_model_tenant_and_key",
    ),
    Mutant(
        "P89", "labels are not kept for the next server", "kvdock/api/build.py",
        ', "labels": labels,', ",",
        PREFIXES, "test_labels_are_kept_for_the_next_server_of_the_pool",
    ),
    Mutant(
        "P90", "a label stays where its first request ended", "kvdock/api/record/labels.py",
        "shared = asked if known is None else", "shared = asked if True else",
        PREFIXES, "test_a_clients_label_names_what_its_requests_share",
    ),
    Mutant(
        "P91", "a name may hold characters that turn text around", "kvdock/protocol/wire_types.py",
        " and text.isprintable()", "",
        PREFIXES, "test_a_name_that_cannot_be_read_is_refused",
    ),
    Mutant(
        "P92", "a name stays when its prefix is kept no longer", "kvdock/api/record/labels.py",
        "if label.namespace == digest and label.key in ended", "if label.key in digest",
        PREFIXES, "test_a_kept_prefix_has_its_name_until_it_is_kept_no_longer",
    ),
    Mutant(
        "P93", "a label of many is never forgotten", "kvdock/api/record/labels.py",
        "if len(labels := self._of_clients(tenant)) > most:", "if False:",
        PREFIXES, "test_the_labels_of_a_tenant_are_bounded_and_the_oldest_goes",
    ),
    Mutant(
        "P94", "the page's arrow keys do not unfold", "kvdock/web/views/prefixes.js",
        'key === "ArrowRight" && !isOpen', "false",
        ("tests/page/test_live.py", "-k", "unfolds"),
        "test_a_prefix_unfolds_by_key_and_by_mouse_page_by_page_and_is_searched_for",
    ),
    Mutant(
        "P95", "kvdock cached unfolds nothing", "kvdock/cli/lists.py",
        "for _ in range(levels):", "for _ in range(0):",
        ("tests/cli/test_cached.py", "-k", "unfold"),
        "test_prefixes_unfold_at_their_forks_and_are_searched_for",
    ),
)
