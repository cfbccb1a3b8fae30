"""Breaks of kvdock/tiers/stores/mooncake/: nothing of a verb goes on at the caller's pages, and no record is taken for
another."""

from __future__ import annotations

from .mutant import Mutant

TIER = "kvdock/tiers/stores/mooncake/tier.py"
OWN = ("tests/tiers/test_mooncake.py",)

MUTANTS = (
    Mutant(
        "T3a", "memory of the pool is registered over TCP too, where all can reach it", TIER,
        "        if not self._settings.registers_memory:\n            return\n        self._library.register(address",
        "        self._library.register(address",
        OWN, "test_nobody_reaches_the_pool_through_the_clients_port",
    ),
    Mutant(
        "T3b", "the header of another part is as good", TIER,
        "record = Record.read_of(buffer.view[:HEADER_BYTES], name, entry.length)",
        "record = Record.read(buffer.view[:HEADER_BYTES])",
        ("tests/tiers/test_conformance.py", "-k", "mooncake and record_of_another"),
        "test_a_record_of_another_part_is_not_taken_for_the_right_one",
    ),
    Mutant(
        "T3c", "what others have begun to write counts as stored", TIER,
        "if code == HEADER_BYTES:\n            with suppress(RecordError):",
        "if code == HEADER_BYTES:\n            return Outcome.DONE\n            with suppress(RecordError):",
        OWN, "test_a_write_that_never_ended_is_no_hit_and_can_be_stored",
    ),
    Mutant(
        "T3d", "a write that failed is ended like others", TIER,
        "            if code != length:\n                return False\n",
        "",
        (*OWN, "-k", "up_to_its_header"), "test_what_was_written_up_to_its_header_is_no_hit_and_can_be_stored",
    ),
    Mutant(
        "T3e", "a write that was given up stays begun", TIER,
        "self._library.revoke_writes(sorted(open_))",
        "self._library.revoke_writes([])",
        OWN, "test_a_peer_that_hangs_in_the_midst_of_a_copy_leaves_the_pages_alone",
    ),
    Mutant(
        "T3f", "the header goes after the bytes that it is written with", TIER,
        "        if self._library.write(entry.key, buffer.address, HEADER_BYTES, 0) != HEADER_BYTES:\n"
        "            return False\n",
        "        with call.touching():\n"
        "            if self._library.write(entry.key, buffer.address, HEADER_BYTES, 0) != HEADER_BYTES:\n"
        "                return False\n",
        OWN, "test_a_peer_that_hangs_before_a_copy_never_gets_at_the_pages",
    ),
    Mutant(
        "T3g", "a copy begins although its caller has given up", "kvdock/tiers/stores/mooncake/workers.py",
        "        with self.changed:\n            self.check()\n            self._touching += 1",
        "        with self.changed:\n            self._touching += 1",
        ("tests/tiers/test_workers.py",), "test_a_caller_who_gave_up_finds_its_pages_untouched_from_then_on",
    ),
    Mutant(
        "T3h", "a verb returns while a copy is in progress", "kvdock/tiers/stores/mooncake/workers.py",
        "if not call.give_up(patience_s):",
        "if not call.give_up(0) and patience_s < 0:",
        OWN, "test_a_peer_that_hangs_in_the_midst_of_a_copy_leaves_the_pages_alone",
    ),
    Mutant(
        "T3i", "two reads or writes of one name go on at once", "kvdock/tiers/stores/mooncake/workers.py",
        "while not self._used.isdisjoint(names):",
        "while False:",
        ("tests/tiers/test_workers.py",), "test_a_name_is_in_one_pair_of_hands",
    ),
)
