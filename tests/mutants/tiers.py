"""Breaks of kvdock/tiers/: the limit, records taken for others, records that come back, and memory that others use."""

from __future__ import annotations

from .mutant import Mutant

DISK = "tests/tiers/test_disk.py"
LOG = "tests/tiers/test_disk_log.py"
PREFETCHES = "tests/tiers/test_prefetches.py"
HANDLES = "tests/tiers/test_tier_handle.py"
RANDOM = "tests/tiers/test_servers_at_random.py"
SHARED = "tests/tiers/test_shared_stores.py"

MUTANTS = (
    Mutant(
        "T9y", "the mover pauses after each few reports of what a tier has", "kvdock/tiers/mover/run.py",
        "            self._out.has_more = True  # else", "            pass  # else",
        ("tests/tiers/test_known_slices.py",), "test_no_slice_waits_once_the_ones_before_it_are_told",
    ),
    Mutant(
        "L1", "a disk's log grows beyond its limit", "kvdock/tiers/disk/log.py",
        "+ self.segment_bytes <= self._capacity_bytes", "+ self.segment_bytes <= 2 * self._capacity_bytes",
        (DISK, "-k", "limit"), "test_the_limit_is_never_exceeded_not_even_for_a_moment",
    ),
    Mutant(
        "L2", "a place is written to while a part is loaded from it", "kvdock/tiers/disk/space.py",
        "self.changed.wait_for(lambda: not any(_is_within(gaps, offset) for offset in segment.readers))", "pass",
        (DISK, "-k", "overwritten"), "test_a_record_that_is_being_loaded_is_not_overwritten",
    ),
    Mutant(
        "L3", "a part's bytes can pass for a record", "kvdock/tiers/disk/log.py",
        "if (found_mark, found_offset) != (mark, offset):", "if False:",
        (LOG, "-k", "look_like"), "test_bytes_of_a_part_that_look_like_a_record_are_none",
    ),
    Mutant(
        "L4", "a deleted part stays in the log", "kvdock/tiers/disk/tier.py",
        "                    self._log.mark_deleted(entry.segment, entry.offset, record)\n", "",
        (LOG, "-k", "anew"), "test_an_index_that_cannot_be_used_is_made_anew_from_the_log",
    ),
    Mutant(
        "L5", "what the index points to is taken for the part", "kvdock/tiers/disk/tier.py",
        "if is_whole and record == wanted and", "if is_whole and",
        (LOG, "-k", "points_to"), "test_an_index_that_points_to_another_part_is_damage_and_is_forgotten",
    ),
    Mutant(
        "L6", "two writers of one part leave two records", "kvdock/tiers/disk/space.py",
        "            others = absent & self.claimed\n", "            others = set[bytes]()\n",
        (LOG, "-k", "several_writers"), "test_of_several_writers_one_record_remains",
    ),
    Mutant(
        "L7", "a record that storage took a piece of counts as stored", "kvdock/tiers/disk/io.py",
        "            rest, done = _behind(rest, moved), done + moved\n        with",
        "            rest, done = [], done + moved\n        with",
        (DISK, "-k", "piece"), "test_a_record_that_storage_takes_only_a_piece_of_is_full",
    ),
    Mutant(
        "L8", "a part that another server has just replaced is deleted", "kvdock/tiers/mover/fetches.py",
        "        came = came.and_then(self._read(fetch, handle, came.bad), {load.name for load in came.bad})\n", "",
        (SHARED, "-k", "in_the_place"), "test_what_another_server_puts_in_the_place_of_a_damaged_part_is_not_deleted",
    ),
    Mutant(
        "L9", "what a store has lost is taken to be there for ever", "kvdock/tiers/mover/write_behind.py",
        "return [key for key in keys if self._known_stored.discard((digest, key))]", "return []",
        (SHARED, "-k", "has_lost"), "test_what_the_store_has_lost_is_a_miss_and_is_written_again",
    ),
    Mutant(
        "L10", "answers that come too late are no failure", "kvdock/tiers/mover/tier_handle.py",
        "why = judge(found)\n", "why = judge(found) and ''\n",
        (HANDLES,), "test_answers_that_come_too_late_or_fail_take_a_tier_off",
    ),
    Mutant(
        "L11", "calls that do not return are no failure", "kvdock/tiers/mover/tier_handle.py",
        "            if now_s - call.counted_s > LATE_S:\n", "            if False:\n",
        (HANDLES,), "test_calls_that_do_not_return_take_a_tier_off",
    ),
    Mutant(
        "L12", "a tier whose store hangs is used again at once", "kvdock/tiers/mover/tier_handle.py",
        'if any(call.kind == "store" for call in self._late()):', "if False:",
        (HANDLES,), "test_a_tier_whose_store_does_not_return_stays_off",
    ),
    Mutant(
        "L13", "every call that ends late keeps a tier off for longer", "kvdock/tiers/mover/tier_handle.py",
        "else kind != PROBE:", "else False:",
        (HANDLES,), "test_calls_that_end_late_do_not_keep_a_tier_off",
    ),
    Mutant(
        "L14", "a slot is given back while a load may write to it", "kvdock/tiers/mover/fetches.py",
        "found = handle.load(loads, fetch.deadline).result()\n        except TierError:",
        "found = handle.load(loads, fetch.deadline).result(fetch.deadline.left_s)\n"
        "        except (TierError, TimeoutError):",
        ("tests/tiers/test_frozen_midway.py", "-k", "disk"),
        "test_a_store_that_freezes_in_the_midst_of_a_part_harms_nobody",
    ),
    Mutant(
        "L15", "a server waits for a mover that hangs", "kvdock/api/tiers/process.py",
        "await asyncio.wait_for(process.wait(), STOP_S)", "await process.wait()",
        ("tests/tiers/test_hung_disk.py", "-k", "ends", "--timeout", "60"),
        "test_a_server_whose_disk_hangs_ends_and_the_next_one_finds_what_was_stored",
    ),
    Mutant(
        "L15b", "a server ends before what waits is written", "kvdock/api/pool/sessions.py",
        " or self.has_written()", " or True",
        ("tests/tiers/test_mover.py", "-k", "waits_is_written"),
        "test_what_waits_is_written_when_the_server_ends_and_found_by_the_next",
    ),
    Mutant(
        "L16", "bytes are not compared with their checksum", "kvdock/tiers/mover/fetches.py",
        "is_done and sum_of(load, loaded) == loaded.checksum",
        "loaded.outcome is Outcome.DONE",
        (RANDOM, "-k", "every_hit and redis"), "test_every_hit_is_what_was_stored_and_every_server_works_on",
    ),
    Mutant(
        "L17", "a damaged part stays for other servers to find", "kvdock/tiers/mover/fetches.py",
        "            handle.delete_damaged([load.name for load in bad])\n", "            pass\n",
        (RANDOM, "-k", "has_deleted and redis"), "test_a_server_whose_part_another_one_has_deleted_sees_a_miss",
    ),
    Mutant(
        "L18", "what has come is taken from a request as soon as its wait is over", "kvdock/api/tiers/tickets.py",
        "ticket.until_s + GRACE_S < now_s", "ticket.until_s < now_s",
        ("tests/tiers/test_mover.py", "-k", "soon_after"),
        "test_a_request_that_asks_soon_after_its_wait_has_what_has_come",
    ),
    Mutant(
        "L19", "a server waits for a mover that cannot be killed", "kvdock/api/tiers/process.py",
        "await asyncio.wait_for(process.wait(), KILL_S)", "await process.wait()",
        ("tests/tiers/test_hung_disk.py", "-k", "kernel", "--timeout", "50"),
        "test_a_server_ends_whose_mover_hangs_in_the_kernel_and_cannot_be_killed",
    ),
    Mutant(
        "L20", "chunks that came for a request that has ended stay", "kvdock/api/tiers/tickets.py",
        "self._table.drop_unread(space.table_id, keys[count * KEY_BYTES :])", "pass",
        (PREFETCHES, "-k", "gone_is_treated"), "test_what_comes_when_its_request_is_gone_is_treated_likewise",
    ),
    Mutant(
        "L21", "what a request waits for is dropped before the chunks in front of it came",
        "kvdock/api/tiers/tickets.py",
        "shared := _shared(ticket.call.keys, keys)) > count", "shared := _shared(ticket.call.keys, keys)) < count",
        (PREFETCHES, "-k", "in_front"), "test_what_comes_before_the_chunks_in_front_of_it_waits_for_its_request",
    ),
    Mutant(
        "L22", "prefetches push out as much as they like", "kvdock/api/tiers/mover_client.py",
        "int(SHARE * self._pool.limit_bytes) - evicted", "self._pool.limit_bytes",
        (PREFETCHES, "-k", "push_out"), "test_prefetches_push_out_no_more_than_a_share_of_the_pool",
    ),
    Mutant(
        "L23", "a prefetch goes on while a request waits", "kvdock/tiers/mover/fetches.py",
        "not all(one.is_ahead for one in self._running)", "False",
        ("tests/tiers/test_fetches.py",), "test_what_requests_wait_for_goes_before_what_comes_ahead_of_them",
    ),
    Mutant(
        "L24", "prefetches take the threads of requests", "kvdock/tiers/mover/fetches.py",
        "(self._threads.ahead if fetch.is_ahead else self._threads.fetches)", "self._threads.fetches",
        ("tests/tiers/test_fetches.py",), "test_what_requests_wait_for_goes_before_what_comes_ahead_of_them",
    ),
    Mutant(
        "L25", "what the pool is about to evict waits its turn", "kvdock/tiers/mover/run.py",
        "            self._prioritise(update.evicting_soon)\n", "            pass\n",
        ("tests/tiers/test_evicting_soon.py",), "test_chunks_that_a_tier_was_not_there_for_are_written_before_they_go",
    ),
    Mutant(
        "L26", "a request waits for tiers that are slower than computing", "kvdock/api/tiers/mover_client.py",
        "if not self._tiers.may_be_worth(", "if False and not self._tiers.may_be_worth(",
        ("tests/tiers/test_mover.py", "-k", "slower"), "test_nobody_waits_for_a_tier_that_is_slower_than_the_engine",
    ),
    Mutant(
        "L27", "chunks that never come back are written for ever", "kvdock/tiers/mover/write_behind.py",
        "self.pay = self._returned >= LEAST_SHARE * total", "pass",
        ("tests/tiers/test_admission.py",),
        "test_chunks_that_nobody_asks_for_again_are_not_written_and_those_asked_for_twice_are",
    ),
    Mutant(
        "L28", "a segment that was not read whole is read again", "kvdock/tiers/disk/reader.py",
        "            finally:  # what could not be read is missing\n                segment.is_read = True\n",
        "            finally:  # what could not be read is missing\n                pass\n            "
        "segment.is_read = True\n",
        ("tests/tiers/test_disk_reader.py",), "test_a_segment_that_could_not_be_read_is_emptied_like_any_other",
    ),
)
