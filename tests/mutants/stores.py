"""Breaks of the tiers over Redis and over object stores."""

from __future__ import annotations

from .mutant import Mutant

_ALL = "tests/tiers/test_conformance.py"
_REDIS, _CLUSTER = "tests/tiers/test_redis.py", "tests/tiers/test_redis_cluster.py"
_OBJECTS = "tests/tiers/test_objects.py"
_RECEIVED, _RECEIVE = "tests/tiers/test_objects_receive.py", "kvdock/tiers/stores/objects_receive.py"
_BUNDLES = "tests/tiers/test_bundles.py"

MUTANTS = (
    Mutant(
        "ST1", "a value of another length is left on the connection", "kvdock/tiers/stores/resp.py",
        "            self._drop(length, deadline)\n", "            pass\n",
        (_REDIS, "-k", "another_length"), "test_another_length_than_wanted_spoils_nothing_behind_it",
    ),
    Mutant(
        "ST2", "a connection that was left in mid-reply is used again", "kvdock/tiers/stores/redis.py",
        "        except OutOfTime:\n            wire.close()\n",
        "        except OutOfTime:\n            self._nodes.give_back(address, wire)\n",
        (_REDIS, "-k", "mid_reply"), "test_a_connection_that_was_left_in_mid_reply_is_not_used_again",
    ),
    Mutant(
        "ST3", "a value's header may be of another part", "kvdock/tiers/stores/redis.py",
        "Record.read_of(bytes(header), part.name, part.length).checksum", "Record.read(bytes(header)).checksum",
        (_ALL, "-k", "another_part and redis"), "test_a_record_of_another_part_is_not_taken_for_the_right_one",
    ),
    Mutant(
        "ST4", "the second writer replaces what the first has stored", "kvdock/tiers/stores/redis.py", '(b"NX",)', "()",
        (_REDIS, "-k", "two_writers"), "test_the_first_of_two_writers_stays_and_a_damaged_one_is_replaced",
    ),
    Mutant(
        "ST5", "what is damaged stays", "kvdock/tiers/stores/redis.py",
        "[at for at in there if fits[at] is False]", "[]",
        (_REDIS, "-k", "two_writers"), "test_the_first_of_two_writers_stays_and_a_damaged_one_is_replaced",
    ),
    Mutant(
        "ST6", "any certificate will do", "kvdock/tiers/stores/redis_nodes.py", "**files, **arguments)",
        '**files, **given, ssl_cert_reqs="none")',
        (_REDIS, "-k", "tls"), "test_tls_carries_values_and_trusts_only_its_own_certificate",
    ),
    Mutant(
        "ST7", "a receiving thread looks at no deadline", "kvdock/tiers/stores/resp.py",
        "            _require_time(deadline)\n            try:\n                received =",
        "            try:\n                got =",
        (_REDIS, "-k", "mid_reply", "--timeout", "20"),
        "test_a_connection_that_was_left_in_mid_reply_is_not_used_again",
    ),
    Mutant(
        "ST8", "a moved slot is looked for where it was", "kvdock/tiers/stores/redis_nodes.py",
        "        \"\"\"A server does not have a slot that it had: the cluster is asked again soon.\"\"\"\n"
        "        self._is_stale = True\n",
        "        \"\"\"A server does not have a slot that it had: the cluster is asked again soon.\"\"\"\n",
        (_CLUSTER, "-k", "moved"), "test_a_slot_that_has_moved_is_found_again",
    ),
    Mutant(
        "ST9", "connections that lie idle are used without a look", "kvdock/tiers/stores/redis_nodes.py",
        "            if wire.is_quiet():\n", "            if wire:\n",
        (_REDIS, "-k", "between_two_verbs"), "test_a_server_that_was_restarted_between_two_verbs_costs_nothing",
    ),
    Mutant(
        "ST10", "a verb returns while threads of its own still receive", "kvdock/tiers/stores/redis.py",
        "            wait([other for other in others if not other.cancel()])\n"
        "        for other in others:\n            if not other.cancelled():\n                other.result()\n",
        "            pass\n",
        (_REDIS, "-k", "threads_receive"), "test_no_verb_returns_while_its_threads_receive",
    ),
    Mutant(
        "ST11", "a URL's unknown parameter is ignored", "kvdock/tiers/stores/urls.py",
        "        if name not in options:\n", "        if False:\n",
        (_REDIS, _OBJECTS, "-k", "not_understood"), "test_a_url_that_is_not_understood_is_refused",
    ),
    Mutant(
        "ST12", "pages are given back while they are being sent", "kvdock/tiers/stores/objects.py",
        "            _release(list(itertools.chain.from_iterable(views)))\n", "            pass\n",
        (_OBJECTS, "-k", "held_by_nobody"), "test_pages_of_a_store_that_was_given_up_are_held_by_nobody",
    ),
    Mutant(
        "ST13", "a deadline that is over before a request has a task is not seen", "kvdock/tiers/stores/objects.py",
        "            if is_cancelled:", "            if False:",
        (_OBJECTS, "-k", "hardly_begun"), "test_a_deadline_that_is_over_at_once_ends_what_has_hardly_begun",
    ),
    Mutant(
        "ST14", "two ranges may be of two objects", "kvdock/tiers/stores/objects.py",
        'if len(set(await asyncio.gather(*ranges))) > 1:', 'if not await asyncio.gather(*ranges):',
        (_OBJECTS, "-k", "between_two_ranges"), "test_an_object_that_is_replaced_between_two_ranges_is_not_loaded",
    ),
    Mutant(
        "ST15", "an object store's second writer replaces the first's", "kvdock/tiers/stores/objects.py",
        ', use_multipart=False, mode="create")', ", use_multipart=False)",
        (_OBJECTS, "-k", "two_writers"), "test_of_two_writers_the_first_stays_where_the_store_can",
    ),
    Mutant(
        "ST16", "fewer bytes than wanted are a whole range", "kvdock/tiers/stores/objects_loads.py",
        "        if len(data) != end - begin:\n", "        if len(data) > end - begin:\n",
        (_OBJECTS, "-k", "lies"), "test_a_store_that_lies_about_a_range_is_not_believed",
    ),
    Mutant(
        "ST17", "a store that cannot refuse to overwrite is not written", "kvdock/tiers/stores/objects.py",
        "        except (errors.NotSupportedError, NotImplementedError):\n            self._can_create = False\n",
        "        except ZeroDivisionError:\n            self._can_create = False\n",
        (_OBJECTS, "-k", "cannot_refuse"), "test_a_store_that_cannot_refuse_to_overwrite_is_written_all_the_same",
    ),
    Mutant(
        "ST18", "a full object store is one that fails", "kvdock/tiers/stores/objects.py", '"507 ", ', "",
        (_OBJECTS, "-k", "full_store"), "test_a_full_store_is_full",
    ),
    Mutant(
        "ST19", "full memory is a failure", "kvdock/tiers/stores/redis.py",
        '        elif reply.code == "OOM":\n            judged = Outcome.FULL\n', "",
        (_REDIS, "-k", "full_memory"), "test_full_memory_is_full",
    ),
    Mutant(
        "ST20", "values live for ever", "kvdock/tiers/stores/redis.py", "*condition, *lifetime)", "*condition)",
        (_REDIS, "-k", "live_as_long"), "test_values_live_as_long_as_the_url_says",
    ),
    Mutant(
        "ST21", "a bundle's table is not compared with its checksum", "kvdock/tiers/mover/bundles.py",
        "    if checksum(bundle.table) != answer.checksum:", "    if False:",
        (_BUNDLES, "-k", "damage and redis"), "test_damage_to_one_part_or_to_the_table_is_seen",
    ),
    Mutant(
        "ST22", "parts of a deleted bundle that are records of their own stay", "kvdock/tiers/mover/bundles.py",
        "dict.fromkeys((*itertools.chain.from_iterable(records), *names))",
        "dict.fromkeys(itertools.chain.from_iterable(records))",
        (_BUNDLES, "-k", "different_lengths and redis"),
        "test_parts_of_different_lengths_are_records_of_their_own_behind_a_table",
    ),
    Mutant(
        "ST23", "a load that has ended may go on writing to pages", _RECEIVE,
        "return self._state.wait_for(lambda: not self._is_writing, wait_s)", "return True",
        (_RECEIVED, "-k", "still_written"), "test_a_page_that_is_still_written_to_ends_the_process",
    ),
    Mutant(
        "ST24", "a request that was stopped is waited for until the store goes on", _RECEIVE,
        "socket.socket.shutdown(self._socket, socket.SHUT_RDWR)", "pass",
        (_RECEIVED, "-k", "has_ended"), "test_a_load_that_has_ended_writes_to_no_page",
    ),
    Mutant(
        "ST25", "an answer with any status is taken", _RECEIVE,
        "found = (answer.status,", "found = (200 if wanted.is_all else 206,",
        (_RECEIVED, "-k", "any_other"), "test_any_other_answer_is_left_to_obstore",
    ),
    Mutant(
        "ST26", "what never works is tried with each load", _RECEIVE, "if self._failures >= FAILURES:", "if False:",
        (_RECEIVED, "-k", "alone_for_a_while"), "test_after_some_failures_obstore_is_asked_alone_for_a_while",
    ),
    Mutant(
        "ST27", "the end of an answer is not seen", _RECEIVE, "!= len(some):", "< 0:",
        (_RECEIVED, "-k", "any_other"), "test_any_other_answer_is_left_to_obstore",
    ),
)
