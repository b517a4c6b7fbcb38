"""Faults in shared memory: slots, leases, handles, who is alive, and the headers' own code."""

from __future__ import annotations

from mutant import Mutant

POOL = "shmstage/memory/pool.py"
SLOTS = "shmstage/memory/slots.py"
READER = "shmstage/memory/reader.py"
IDENTITY = "shmstage/memory/identity.py"
SWEEP = "shmstage/memory/sweep.py"
FACTS = "shmstage/memory/facts.py"
NATIVE = "native/slots.cpp"
LIFE = "tests/memory/test_slot_life.py"
LYING = "tests/memory/test_lying_handles.py"

MUTANTS = (
    # --- the writer's side
    Mutant(
        "a published slot can still be written",
        SLOTS,
        "        for view in views.values():\n            view.setflags(write=False)\n        layout_id",
        "        layout_id",
        (f"{LIFE}::test_nothing_can_be_written_after_publication",),
    ),
    Mutant(
        "a slot is published for the first consumer alone",
        SLOTS,
        "mask = self._all_consumers if consumers is None else consumers",
        "mask = 1 if consumers is None else consumers",
        (f"{LIFE}::test_a_slot_is_free_only_when_every_targeted_consumer_has_ended",),
    ),
    Mutant(
        "a writer that raises keeps its slot",
        SLOTS,
        "        self.abandon()\n",
        "        return\n",
        (f"{LIFE}::test_an_abandoned_writer_moves_on_to_the_next_even_generation",),
    ),
    Mutant(
        "a forked child publishes its parent's slot",
        SLOTS,
        "        if os.getpid() != self._pid:\n            raise ForkedError",
        "        if self._pid == 0:\n            raise ForkedError",
        (f"{LIFE}::test_a_forked_child_neither_publishes_nor_abandons_its_parents_slot",),
    ),
    Mutant(
        "micro-batches to be trained take the slots of evaluations",
        POOL,
        "if aux else (0, self.slots)",
        "if aux else (0, self.slots + self.aux_slots)",
        (f"{LIFE}::test_aux_slots_are_never_taken_by_an_ordinary_acquire",),
    ),
    Mutant(
        "a stale handle takes back what was published after it",
        POOL,
        "self._headers.discard(handle.slot, handle.generation)",
        "self._headers.discard(handle.slot, self._headers.generation(handle.slot))",
        (f"{LIFE}::test_a_withdrawn_slot_is_free_and_its_handle_stale",),
    ),
    Mutant(
        "late fields are written into a slot that has moved on",
        POOL,
        "        if generation != handle.generation:\n",
        "        if generation < handle.generation:\n",
        ("tests/orchestrator/test_late_fields.py::test_late_fields_of_a_slot_that_has_moved_on_are_refused",),
    ),
    Mutant(
        "with a dead consumer's leases those of the living are ended",
        POOL,
        "                self._headers.end_lease(slot, generation, consumer)\n",
        "                for each in range(self._all_consumers.bit_length()):\n"
        "                    self._headers.end_lease(slot, generation, each)\n",
        (f"{LIFE}::test_ending_the_leases_of_a_dead_consumer_leaves_those_of_the_others",),
    ),
    Mutant(
        "a pool is made beyond its budget",
        "shmstage/memory/reservation.py",
        "    check_fits(geometry.pool_nbytes, what, remedy, limits)\n",
        "",
        ("tests/memory/test_reservation.py::test_a_pool_beyond_the_limit_is_refused_before_anything_is_allocated",),
    ),
    # --- the reader's side
    Mutant(
        "a handle is believed",
        READER,
        "        self._check_handle(handle)\n        return Lease(",
        "        return Lease(",
        (f"{LIFE}::test_stale_generation_is_refused",
         f"{LIFE}::test_an_ended_lease_can_neither_be_read_nor_taken_again"),
    ),
    Mutant(
        "nobody looks whether the slot moved on while it was read",
        READER,
        "        self._reader._check_usable()\n        self._reader._check_handle(self.handle)\n",
        "        self._reader._check_usable()\n",
        (f"{LIFE}::test_stale_generation_is_refused",),
    ),
    Mutant(
        "a lease is over as soon as it is taken",
        READER,
        "        self._check_handle(handle)\n        return Lease(",
        "        self._check_handle(handle)\n        self.end_lease(handle.slot, handle.generation)\n"
        "        return Lease(",
        (f"{LIFE}::test_a_published_slot_is_read_back_read_only",
         f"{LIFE}::test_any_sequence_of_acts_keeps_generations_going_forward"),
    ),
    Mutant(
        "an ended lease does not free its slot",
        READER,
        "                self._reader.end_lease(self.handle.slot, self.handle.generation)\n",
        "                pass\n",
        (f"{LIFE}::test_a_leased_slot_is_not_handed_out_and_a_freed_one_is",),
    ),
    Mutant(
        "what was leased can be read on after its end",
        READER,
        "            self._views = self._late = None\n",
        "            pass\n",
        (f"{LIFE}::test_an_ended_lease_can_neither_be_read_nor_taken_again",),
    ),
    Mutant(
        "the reader may write the payload",
        READER,
        'Mapping(descriptor, facts["nbytes"], writable=False)',
        'Mapping(descriptor, facts["nbytes"], writable=True)',
        (f"{LIFE}::test_a_published_slot_is_read_back_read_only",),
    ),
    Mutant(
        "a late field is committed although the slot was taken away",
        READER,
        "        self.check()\n        self._reader._headers.bump_late_version",
        "        self._reader._headers.bump_late_version",
        (f"{LIFE}::test_a_late_field_of_a_slot_that_was_taken_away_is_not_committed",),
    ),
    Mutant(
        "a pool of another epoch is attached",
        FACTS,
        '    if facts["epoch"] != epoch:\n',
        '    if facts["epoch"] < 0:\n',
        (f"{LYING}::test_an_unknown_consumer_another_run_and_another_epoch_are_refused",),
    ),
    # --- who is alive
    Mutant(
        "two that watch a process take each other for it",
        IDENTITY,
        "fcntl.LOCK_SH | fcntl.LOCK_NB",
        "fcntl.LOCK_EX | fcntl.LOCK_NB",
        ("tests/memory/test_identity.py::test_two_watches_do_not_take_each_other_for_the_owner",),
    ),
    Mutant(
        "a pid that was given out again passes for the process before",
        IDENTITY,
        "        if self.start_ticks and read_start_ticks(self.pid) == self.start_ticks:\n",
        "        if self.start_ticks:\n",
        ("tests/memory/test_identity.py::test_a_recycled_pid_does_not_keep_a_dead_owner_alive",),
    ),
    Mutant(
        "the pool of a living owner is swept",
        SWEEP,
        "    if owner.alive:\n        return False,",
        "    if False:\n        return False,",
        ("tests/memory/test_sweep.py::test_a_pool_that_outlived_its_identity_in_another_life_is_swept",),
    ),
    Mutant(
        "a pool is swept because somebody tidied its lock away",
        "shmstage/memory/inspect.py",
        "            alive = same if comparable else None\n",
        "            alive = False\n",
        ("tests/memory/test_sweep.py::test_the_pool_of_a_living_process_survives_the_loss_of_its_lock_file",),
    ),
    # --- the headers' own code
    Mutant(
        "a slot is reused before its lease has ended",
        NATIVE,
        "load_acquire(header.ended[consumer]) < generation) return false;",
        "load_acquire(header.ended[consumer]) + 2 < generation) return false;",
        (f"{LIFE}::test_a_leased_slot_is_not_handed_out_and_a_freed_one_is",),
    ),
    Mutant(
        "the end of a lease that never was frees slots to come",
        NATIVE,
        "    if ((generation & 1) != 0 || generation > load_acquire(header.generation)) return false;\n",
        "    if ((generation & 1) != 0) return false;\n",
        (f"{LYING}::test_ending_a_lease_that_never_was_frees_nothing[4]",),
    ),
    Mutant(
        "the end of an old lease takes the end of a newer one back",
        NATIVE,
        "    while (ended < generation) {",
        "    while (ended != generation) {",
        (f"{LIFE}::test_ending_a_lease_twice_is_harmless",),
    ),
    Mutant(
        "a handle is valid at whatever generation the slot is",
        NATIVE,
        "    if (load_acquire(header.generation) != generation) return LeaseState::kMovedOn;\n",
        "",
        (f"{LIFE}::test_stale_generation_is_refused",),
    ),
    Mutant(
        "a generation that nobody published can be leased",
        NATIVE,
        "    } else {\n        store_release(header.target_mask, std::uint64_t{0});\n",
        "    } else {\n",
        (f"{LIFE}::test_a_generation_nobody_published_cannot_be_leased",),
    ),
    Mutant(
        "a slot is published twice by one writer",
        NATIVE,
        "    if ((generation & 1) == 0 || load_acquire(header.generation) != generation) return 0;\n",
        "",
        ("tests/native/test_headers.py::test_a_mask_is_seen_with_its_generation",),
    ),
    Mutant(
        "a new generation keeps the late versions of the one before",
        NATIVE,
        "        for (std::uint32_t& version : header.late_versions) store_relaxed(version, std::uint32_t{0});\n",
        "",
        (f"{LIFE}::test_late_fields_are_written_by_the_reader_that_may_and_carry_a_version",),
    ),
)
