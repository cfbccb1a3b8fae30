"""Breaks of clears and deletions below the pool: what was cleared comes back from no tier, even if it was under way."""

from __future__ import annotations

from .mutant import Mutant

CLEARS, WRITES = "kvdock/api/tiers/clears.py", "kvdock/tiers/mover/write_behind.py"


def on_disk(test: str) -> tuple[str, ...]:
    return "tests/tiers/test_clears.py", "--sweeps", "-k", f"disk and {test}"


MUTANTS = (
    Mutant(
        "T9a", "the mover gets no order to clear", CLEARS,
        "        for order in pending:\n            if order is not None:\n                self._send(order)\n"
        "        cleared = InPool(await self._remove_cleared(), ",
        "        cleared = InPool(await self._remove_cleared(), ",
        on_disk("no_tier and clear"), "",
        equivalent="tiers follow the pool's generations, too",
    ),
    Mutant(
        "T9z", "what was cleared is reported as stored", CLEARS,
        "        if not self._pending:\n            return known\n", "        return known\n",
        ("tests/tiers/test_kv_media.py", "-k", "is_not_believed"),
        "test_what_is_cleared_before_its_storing_is_told_is_not_believed",
    ),
    Mutant(
        "T9b", "a deletion reaches the pool alone", CLEARS,
        "pending = None if space.tenant else self._order(space.digest, 0, keys, space)", "pending = None",
        on_disk("no_tier and delete"), "test_what_was_cleared_comes_back_from_no_tier",
    ),
    Mutant(
        "T9c", "what was found to be damaged in the pool stays below", CLEARS,
        'self._background.once("deleting in tiers", '
        "self._delete_in_tiers(space, keys, self.contents.tiers))", "pass",
        on_disk("no_tier and quarantine"), "test_what_was_cleared_comes_back_from_no_tier",
    ),
    Mutant(
        "T9d", "names of parts do not hold the generation", "kvdock/tiers/notes.py",
        "return PartName(namespace, key, group, writer, self.birth, self.generation, self.deleted.get(key, 0))",
        "return PartName(namespace, key, group, writer, self.birth, 0, self.deleted.get(key, 0))",
        ("tests/tiers/test_notes.py",), "test_a_clear_gives_all_parts_new_names",
    ),
    Mutant(
        "T9e", "names of parts do not hold the deletion", "kvdock/tiers/notes.py",
        "return PartName(namespace, key, group, writer, self.birth, self.generation, self.deleted.get(key, 0))",
        "return PartName(namespace, key, group, writer, self.birth, self.generation, 0)",
        ("tests/tiers/test_notes.py",), "test_a_deletion_gives_the_parts_of_its_key_new_names",
    ),
    Mutant(
        "T9f", "what was leased before a clear is stored under the names of after", WRITES,
        "        stores: list[ToStore] = []\n",
        "        agreed = self._agreement.of(self._handle, space.digest) or agreed\n"
        "        stores: list[ToStore] = []\n",
        on_disk("was_leased_before"),
        "test_what_was_leased_before_a_clear_is_neither_found_after_it_nor_known_to_be_stored",
    ),
    Mutant(
        "T9g", "what was cleared while it was written counts as stored", WRITES,
        "            if self._agreement.of(self._handle, space.digest) != agreed:\n                return False\n", "",
        on_disk("was_leased_before"),
        "test_what_was_leased_before_a_clear_is_neither_found_after_it_nor_known_to_be_stored",
    ),
    Mutant(
        "T9h", "pending orders to tiers are lost with the server", CLEARS,
        "                await asyncio.to_thread(self._file.write, orders)\n", "                pass\n",
        on_disk("pending_order"),
        "test_a_tier_with_a_pending_order_is_not_used_until_it_has_carried_it_out",
    ),
    Mutant(
        "T9i", "a server does not follow what others clear", CLEARS,
        "        if generation > self._table.generation(space.table_id):\n            log.info(",
        "        if False:\n            log.info(",
        ("tests/tiers/test_clears.py", "--sweeps", "-k", "redis and at_no_other"),
        "test_what_one_server_clears_is_found_at_no_other_that_shares_the_store",
    ),
    Mutant(
        "T9j", "a note of an object store is never written again", "kvdock/tiers/stores/objects.py",
        "self._clock() - cached.written_s > NOTE_FRESH_S", "False",
        ("tests/tiers/test_objects.py", "-k", "written_again"),
        "test_a_note_is_written_again_before_a_rule_of_the_bucket_deletes_it",
    ),
    Mutant(
        "T9k", "damage is deleted below in the namespace that the session uses now", "kvdock/api/pool/damage.py",
        "found.space, found.keys = space,", "found.space, found.keys = session.namespace.table_id,",
        ("tests/tiers/test_weights.py", "-k", "damage"),
        "test_damage_that_is_found_after_the_weights_have_changed_goes_from_the_tier_of_before",
    ),
)
