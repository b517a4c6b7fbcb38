"""Faults in when memory may be written again: device buffers, the double buffer, the weights pool and its readers."""

from __future__ import annotations

from mutant import Mutant

BUFFERS = "shmstage/trainer/device_buffers.py"
DOUBLE = "shmstage/trainer/double_buffer.py"
HOST = "shmstage/trainer/host_buffers.py"
ARRANGEMENT = "shmstage/trainer/arrangement.py"
WEIGHTS = "shmstage/trainer/weights.py"
CELLS = "shmstage/memory/cells.py"
TESTS = "tests/trainer/test_device_buffers.py"
CONVENTIONS = "tests/ecosystem/test_double_buffer_conventions.py"
IN_DOUBLE = "tests/trainer/test_double_buffer.py"
READERS = "tests/trainer/test_weights_readers.py"

RETIRED = "        return self.settled and self.dropped and not self.computing\n"

MUTANTS = (
    Mutant(
        "a buffer is reused while it is computed on",
        BUFFERS,
        RETIRED,
        "        return self.settled and self.dropped\n",
        (f"{TESTS}::test_a_place_is_free_when_settled_resolved_and_dropped_in_any_order",),
    ),
    Mutant(
        "a buffer is reused while its micro-batch may be replayed",
        BUFFERS,
        RETIRED,
        "        return self.dropped and not self.computing\n",
        (f"{TESTS}::test_a_place_is_free_when_settled_resolved_and_dropped_in_any_order",),
    ),
    Mutant(
        "a buffer is reused while JAX still holds its arrays",
        BUFFERS,
        RETIRED,
        "        return self.settled and not self.computing\n",
        (f"{TESTS}::test_a_place_is_free_when_settled_resolved_and_dropped_in_any_order",),
    ),
    Mutant(
        "news of an earlier use frees a buffer",
        BUFFERS,
        "        if buffer.use != use:\n            return\n",
        "",
        (f"{TESTS}::test_late_news_of_an_earlier_use_retires_nothing",),
    ),
    Mutant(
        "one token that is told twice frees a buffer of its replay",
        BUFFERS,
        "            buffer.computing.discard(token)\n",
        "            buffer.computing.clear()\n",
        (f"{TESTS}::test_a_replayed_places_first_token_does_not_free_it",),
    ),
    Mutant(
        "nobody looks whether the slot moved on while it was copied",
        BUFFERS,
        "        lease.check()  # the slot held this generation from the first byte to the last\n",
        "",
        (f"{TESTS}::test_a_slot_that_moves_on_while_it_is_copied_stages_nothing[2]",),
    ),
    Mutant(
        "the lease ends before the copy",
        BUFFERS,
        "        use = buffer.use\n        buffer.dropped = False\n",
        "        use = buffer.use\n        buffer.dropped = False\n        lease.end()\n",
        (f"{TESTS}::test_the_generation_is_checked_before_and_after_the_copy_and_then_the_lease_ends",),
    ),
    Mutant(
        "a lease that is kept ends all the same",
        BUFFERS,
        "        if not keep_lease:\n            lease.end()\n",
        "        lease.end()\n",
        (f"{TESTS}::test_a_kept_lease_is_the_callers_to_end",),
    ),
    Mutant(
        "the lease ends when an upload is issued, not when it is over",
        BUFFERS,
        "        arrays = put(views)\n\n        def report",
        "        arrays = put(views)\n        lease.end()\n\n        def report",
        (f"{TESTS}::test_where_uploads_read_the_slot_the_lease_ends_on_readiness",),
    ),
    Mutant(
        "an upload of a slot that moved on is told as good",
        BUFFERS,
        "                    error = error or describe(raised)\n",
        "                    error = error and describe(raised)\n",
        (f"{TESTS}::test_where_uploads_read_the_slot_a_stale_one_is_reported",),
    ),
    Mutant(
        "arrays on the CPU are the slot itself",
        "shmstage/trainer/aliasing.py",
        "    return any(is_cpu(sharding) for sharding in shardings.values())\n",
        "    return not shardings\n",
        (f"{IN_DOUBLE}::test_arrays_are_the_private_buffers_themselves_not_copies_of_them",
         "tests/trainer/test_poison.py::test_losses_survive_poisoned_slots_and_buffers[aligned]"),
    ),
    Mutant(
        "a stage that was given up keeps its buffer",
        BUFFERS,
        "        self._buffers[batch.buffer].computing.clear()\n",
        "",
        (f"{TESTS}::test_a_discarded_batch_frees_its_place",),
    ),
    Mutant(
        "who waits for a buffer cannot be told to stop",
        BUFFERS,
        "        if self._cancelled():\n",
        "        if self._cancelled is None:\n",
        (f"{TESTS}::test_a_wait_ends_when_it_is_cancelled",),
    ),
    # --- the double buffer
    Mutant(
        "the next micro-batch is uploaded only when it is asked for",
        DOUBLE,
        "        self._upload_ahead()\n",
        "",
        (f"{IN_DOUBLE}::test_the_next_microbatch_is_uploaded_while_this_one_is_used",),
    ),
    Mutant(
        "an error of the batch ahead takes this one with it",
        DOUBLE,
        "                self._ahead.append(error)  # what is on the device already must not go with it\n",
        "                raise\n",
        (f"{IN_DOUBLE}::test_every_batch_uploaded_before_the_producer_died_is_given_out_first[1]",),
    ),
    Mutant(
        "an error of the batch ahead is not told",
        DOUBLE,
        "                self._ahead.append(error)  # what is on the device already must not go with it\n",
        "                pass\n",
        (f"{IN_DOUBLE}::test_an_error_of_the_batch_ahead_is_told_once_and_forgotten_when_closed",),
    ),
    Mutant(
        "a micro-batch that finds no place is lost",
        DOUBLE,
        "            self._waiting.appendleft(lease)  # no place for it; the next call tries again\n",
        "",
        (f"{IN_DOUBLE}::test_holding_on_to_every_batch_ends_at_a_deadline_with_the_remedy",),
    ),
    Mutant(
        "what waits on the host keeps its slot",
        HOST,
        "        finally:\n            lease.end()\n",
        "        finally:\n            pass\n",
        (f"{CONVENTIONS}::test_what_waits_on_the_host_has_given_its_slot_back",),
    ),
    Mutant(
        "one place on the host is given to two micro-batches",
        HOST,
        "        memory = self._free.popleft()\n",
        "        memory = self._free[0]\n",
        (f"{CONVENTIONS}::test_what_waits_on_the_host_has_given_its_slot_back",),
    ),
    Mutant(
        "a place on the host is never free again",
        HOST,
        "            self.free.append(self.memory)\n",
        "            pass\n",
        (f"{CONVENTIONS}::test_a_place_on_the_host_is_free_again_once_its_upload_is_over",),
    ),
    Mutant(
        "a micro-batch overtakes one that waits on the host",
        DOUBLE,
        "self._waiting.popleft() if self._waiting else self._receive(timeout_s)",
        "self._waiting.pop() if self._waiting else self._receive(timeout_s)",
        (f"{CONVENTIONS}::test_every_size_gives_the_same_losses_in_the_same_order[3-2]",),
    ),
    Mutant(
        "only one micro-batch is uploaded ahead, whatever is asked for",
        DOUBLE,
        "        self._most_ahead = device_buffer_size - 1\n",
        "        self._most_ahead = 1\n",
        (f"{CONVENTIONS}::test_device_buffer_size_counts_the_one_in_use_and_those_ahead[3]",),
    ),
    Mutant(
        "fields that into leaves out are uploaded",
        ARRANGEMENT,
        "        return _Chosen(lease, tuple(self.shardings))\n",
        "        return lease\n",
        (f"{CONVENTIONS}::test_a_field_that_into_leaves_out_is_not_uploaded",),
    ),
    Mutant(
        "a slot whose fields make no tree is never given back",
        DOUBLE,
        "            lease.end()  # as below\n",
        "            pass\n",
        (f"{CONVENTIONS}::test_an_into_that_makes_no_tree_of_the_fields_is_refused_and_the_slot_given_back[computed]",),
    ),
    Mutant(
        "a field at two leaves lies where the first says, without a word",
        ARRANGEMENT,
        "        if found.setdefault(name, placed) != placed:\n",
        "        if found.setdefault(name, placed) is None:\n",
        (f"{CONVENTIONS}::test_one_field_at_two_leaves_lies_in_one_place",),
    ),
    Mutant(
        "a batch is given out, and may be donated, while its slot is still read",
        DOUBLE,
        "            self._ahead[0].wait_over(self._timeout_s)\n",
        "            pass\n",
        (f"{IN_DOUBLE}::test_a_batch_is_given_out_only_when_its_slot_has_been_read",),
    ),
    Mutant(
        "a loop that is left early leaves its thread",
        DOUBLE,
        "        weakref.finalize(self, self._watcher.close, 0.0).atexit = False\n",
        "",
        (f"{IN_DOUBLE}::test_a_loop_that_is_left_early_leaves_no_thread",),
    ),
    Mutant(
        "nobody looks whether the slot moved on while it was copied to the host",
        HOST,
        "            lease.check()  # the slot held this generation from the first byte to the last\n",
        "",
        (f"{CONVENTIONS}::test_a_slot_that_moves_on_while_it_is_copied_to_the_host_is_no_batch_and_its_place_is_free",),
    ),
    Mutant(
        "a copy to the host that fails keeps its place",
        HOST,
        "            self._free.append(memory)\n            raise\n",
        "            raise\n",
        (f"{CONVENTIONS}::test_a_slot_that_moves_on_while_it_is_copied_to_the_host_is_no_batch_and_its_place_is_free",),
    ),
    Mutant(
        "closing keeps the lease that found no place",
        DOUBLE,
        "                lease.end()\n        self._ahead.clear()\n",
        "                pass\n        self._ahead.clear()\n",
        (f"{CONVENTIONS}::test_closing_ends_a_lease_that_found_no_place_on_the_device",),
    ),
    # --- the weights pool
    Mutant(
        "weights are written where somebody reads",
        WEIGHTS,
        "                if place != newest and place not in read:\n",
        "                if place != newest:\n",
        (f"{READERS}::test_what_is_read_is_not_written_while_versions_go_on",),
    ),
    Mutant(
        "weights are written over the newest version",
        WEIGHTS,
        "                if place != newest and place not in read:\n",
        "                if place not in read:\n",
        (f"{READERS}::test_the_newest_version_is_not_written_over_although_nobody_reads_it",),
    ),
    Mutant(
        "a new version is never announced",
        WEIGHTS,
        "            pool.cells.announce(place)\n",
        "            pool.cells.announce(0)\n",
        (f"{READERS}::test_a_reader_takes_the_newest_version_each_time",),
    ),
    Mutant(
        "a released version is still taken",
        WEIGHTS,
        "            if self._pool.cells.newest_slot() in places:\n"
        "                self._pool.cells.announce_nothing()\n",
        "",
        (f"{READERS}::test_a_released_version_is_not_taken_any_more_but_may_be_read_to_the_end",),
    ),
    Mutant(
        "a synchronous round is skipped",
        WEIGHTS,
        "self._free_place(pool, version, deadline) if sync else self._try_free_place(pool)[0]",
        "self._try_free_place(pool)[0]",
        (f"{READERS}::test_with_no_free_place_a_sync_round_fails_at_its_deadline_naming_the_reader",),
    ),
    Mutant(
        "the cells of living readers are cleared",
        CELLS,
        "            if watch.dead():\n",
        "            if not watch.dead():\n",
        (f"{READERS}::test_what_is_read_is_not_written_while_versions_go_on",),
    ),
)
