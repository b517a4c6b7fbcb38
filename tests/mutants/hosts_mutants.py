"""Faults in what runs on each of several hosts: stores, agents, the gang, a trainer's part, and who may talk."""

from __future__ import annotations

from mutant import Mutant

LAUNCH, TRAINER, TRANSPORT = "shmstage/launch", "shmstage/trainer", "shmstage/transport"
CALLS = "tests/fleet/test_fleet_calls.py"
STORES = "tests/multihost/test_agent_and_store.py"
AHEAD = "tests/multihost/test_fetch_ahead.py"
CHUNKS = "tests/multihost/test_ray_stores.py"
RAY = "tests/multihost/test_ray_hosts.py"
GANG = "tests/launch/test_gang.py"
HANDS = "tests/launch/test_fleet_hands.py"
RANGES = "tests/trainer/test_ranges.py"
PREPARATION = "tests/trainer/test_preparation.py"
DISTRIBUTED = "tests/trainer/test_distributed.py"
CURVE = "tests/transport/test_curve.py"
PEERS = "tests/transport/test_peers_file.py"

MUTANTS = (
    # --- stores and agents
    Mutant(
        "the place of what was packed is not given up",
        f"{LAUNCH}/fetch_ahead.py",
        "                self._drop(key)\n                self._begin_what_fits()\n",
        "                self._begin_what_fits()\n",
        (f"{STORES}::test_a_plan_that_was_prefetched_is_named_instead_of_sent_and_a_forgotten_one_is_asked_for",),
    ),
    Mutant(
        "what is fetched ahead has no limit of bytes",
        f"{LAUNCH}/fetch_ahead.py",
        "count >= AHEAD or (count and nbytes + wish.estimate_nbytes > self._limit_nbytes)",
        "count >= AHEAD",
        (f"{AHEAD}::test_bytes_fetched_ahead_stay_below_the_limit_but_for_what_is_packed_next",),
    ),
    Mutant(
        "what somebody waits for is forgotten for newer wishes",
        f"{LAUNCH}/fetch_ahead.py",
        "[known for known, wish in self._wishes.items() if not wish.taken]",
        "[known for known, wish in self._wishes.items()]",
        (f"{AHEAD}::test_what_somebody_waits_for_is_not_forgotten_however_much_is_wanted_after_it",),
    ),
    Mutant(
        "a wait for pieces outlives who waited",
        f"{LAUNCH}/fetch_ahead.py",
        "            if given_up():\n",
        "            if given_up() and left_s <= 0:\n",
        (f"{AHEAD}::test_a_wait_for_pieces_ends_when_nobody_wants_them_any_more",),
    ),
    Mutant(
        "verify = full verifies nothing",
        f"{LAUNCH}/fetch_ahead.py",
        "        if self._verify_full:\n",
        "        if self._verify_full and not pieces:\n",
        (f"{AHEAD}::test_full_verification_finds_values_that_are_not_those_of_their_digest",),
    ),
    Mutant(
        "a wait for pieces names nobody",
        f"{LAUNCH}/fetch_ahead.py",
        "for answers in asked for name in answers.unanswered())",
        "for answers in asked[:0] for name in answers.unanswered())",
        (f"{STORES}::test_a_wait_for_pieces_and_one_for_a_slot_end_at_the_deadline_and_say_who_is_waited_for",),
    ),
    Mutant(
        "a part of whole chunks has no end",
        f"{LAUNCH}/ray_stores.py",
        "for at in range(0, len(part) + 1, CHUNK_NBYTES)",
        "for at in range(0, max(1, len(part)), CHUNK_NBYTES)",
        (f"{CHUNKS}::test_parts_come_as_they_were_wherever_their_chunks_lie",),
    ),
    Mutant(
        "chunks that lie apart are taken for one span",
        f"{LAUNCH}/ray_stores.py",
        "if all(after - before == CHUNK_NBYTES for before, after in pairwise(addresses)):",
        "if all(after > before for before, after in pairwise(addresses)):",
        (f"{CHUNKS}::test_parts_come_as_they_were_wherever_their_chunks_lie",),
    ),
    Mutant(
        "chunks that lie in a row are copied",
        f"{LAUNCH}/ray_stores.py",
        "if all(after - before == CHUNK_NBYTES for before, after in pairwise(addresses)):",
        "if len(addresses) < 2:",
        (f"{CHUNKS}::test_chunks_that_lie_in_a_row_are_joined_without_a_copy_and_held",),
    ),
    Mutant(
        "a span does not hold its chunks",
        f"{LAUNCH}/ray_stores.py",
        "        self._chunks = chunks\n",
        "        self._chunks = len(chunks)\n",
        (f"{CHUNKS}::test_chunks_that_lie_in_a_row_are_joined_without_a_copy_and_held",),
    ),
    Mutant(
        "who has not answered yet is named for another's refusal",
        f"{LAUNCH}/ray_stores.py",
        "        found = {asked: _gotten(asked, names[asked]) for asked in came}\n        if late:\n",
        "        found = {}\n        if late:\n",
        (f"{RAY}::test_pieces_come_without_a_copy_and_who_gives_none_is_named",),
    ),
    Mutant(
        "groups passed over are held for ever",
        f"{LAUNCH}/trajectory_store.py",
        "                held = self._held.pop(number, None)\n",
        "                held = self._held.get(number)\n",
        (f"{STORES}::test_groups_that_are_passed_over_are_let_go",),
    ),
    Mutant(
        "the end is told while groups wait to be asked for",
        f"{LAUNCH}/trajectory_store.py",
        '"end": run.ended and not run.ready and run.error is None}',
        '"end": run.ended and run.error is None}',
        (f"{STORES}::test_the_end_is_told_when_everything_was_given_and_not_before",),
    ),
    Mutant(
        "a new orchestrator reads on where the dead one was",
        f"{LAUNCH}/trajectory_store.py",
        "                self._epoch = epoch\n                self._end_run()\n",
        "                self._epoch = epoch\n",
        (f"{STORES}::test_a_new_orchestrator_is_given_nothing_that_was_read_for_the_one_before",),
    ),
    Mutant(
        "evaluated trajectories have the numbers of trained ones",
        f"{LAUNCH}/trajectory_store.py",
        "            self._next_number = evaluation.read(self._next_number)\n",
        "            evaluation.read(self._next_number)\n",
        (f"{STORES}::test_what_is_evaluated_has_numbers_of_its_own_and_is_kept_for_every_orchestrator",),
    ),
    Mutant(
        "a store reads ahead as much as there is",
        f"{LAUNCH}/trajectory_store.py",
        "return len(run.ready) < AHEAD_GROUPS and run.ready_nbytes + nbytes <= self._ahead_nbytes",
        "return len(run.ready) < AHEAD_GROUPS",
        (f"{STORES}::test_reading_goes_ahead_only_as_far_as_there_is_room_and_release_makes_none",),
    ),
    Mutant(
        "a store lets go of one trajectory too many",
        f"{LAUNCH}/trajectory_store.py",
        "                if number >= below:\n",
        "                if number > below:\n",
        (f"{STORES}::test_what_is_let_go_of_memory_is_still_in_the_journal_until_it_is_covered",),
    ),
    Mutant(
        "a shard's journal counts in the fleet's numbers",
        f"{LAUNCH}/source_share.py",
        "journal.release(max(0, -(-(number - self._index) // self.stores)))",
        "journal.release(number)",
        (f"{STORES}::test_a_shards_journal_lets_go_of_its_own_groups_before_the_covered_one",),
    ),
    Mutant(
        "what is covered is let go of memory instead of the journal",
        f"{LAUNCH}/store_commands.py",
        '        store.covered(arguments.take("cursor", int))\n',
        '        store.release(arguments.take("cursor", int))\n',
        (f"{STORES}::test_a_stores_door_asks_the_store_for_what_it_was_asked",),
    ),
    Mutant(
        "a store's door is shut for as long as one asks it to wait",
        f"{LAUNCH}/store_commands.py",
        'return store.read(pass_number, cursor, count, min(take("wait_s", float), MAX_WAIT_S))',
        'return store.read(pass_number, cursor, count, take("wait_s", float))',
        (f"{STORES}::test_a_stores_door_asks_the_store_for_what_it_was_asked",),
    ),
    Mutant(
        "a pool is left behind when another one is opened",
        f"{LAUNCH}/host_agent.py",
        "        self.close_pool()\n        pool = Pool.create(",
        "        pool = Pool.create(",
        (f"{STORES}::test_a_second_pool_takes_the_place_of_the_first_and_without_one_nothing_is_packed",),
    ),
    Mutant(
        "an agent waits for a slot that a dead trainer holds",
        f"{LAUNCH}/host_agent.py",
        "        if lost is not None:\n            raise PeerLostError(",
        "        if lost is not None and given_up():\n            raise PeerLostError(",
        (f"{STORES}::test_a_wait_ends_when_the_trainer_is_dead_and_names_it",),
    ),
    # --- the gang
    Mutant(
        "bad input is tried again and again",
        f"{LAUNCH}/gang.py",
        "            if isinstance(each.told, InputError):\n",
        "            if isinstance(each.told, InputError) and len(self._ended) == 1:\n",
        (f"{GANG}::test_bad_input_ends_the_run_at_once_even_beside_a_death",),
    ),
    Mutant(
        "a death of the attempt before ends the new one",
        f"{LAUNCH}/gang.py",
        "    def begin(self) -> None:\n        self._ended = []\n",
        "    def begin(self) -> None:\n        self._ended = self._ended or []\n",
        (f"{GANG}::test_a_new_attempt_does_not_remember_who_ended_in_the_one_before",),
    ),
    Mutant(
        "a host that is cut off is waited for, for ever",
        f"{LAUNCH}/fleet.py",
        "if not host.is_lost and self._clock() > host.answered_at + HOST_TIMEOUT_S + WAIT_S:",
        "if host.is_lost and self._clock() > host.answered_at + HOST_TIMEOUT_S + WAIT_S:",
        (f"{HANDS}::test_a_host_that_answers_nothing_is_lost_after_a_while_and_told_once",),
    ),
    Mutant(
        "nobody ends what a dead agent left",
        f"{LAUNCH}/fleet.py",
        "            if not ended:  # an agent",
        "            if ended:  # an agent",
        (f"{HANDS}::test_what_a_dead_agent_left_is_ended_on_its_own_host",),
    ),
    Mutant(
        "a dead agent's trainer lives on",
        f"{LAUNCH}/fleet.py",
        'for told in (host.facts, host.trainer) if "start_ticks" in told]',
        'for told in (host.facts,) if "start_ticks" in told]',
        (f"{HANDS}::test_what_a_dead_agent_left_is_ended_on_its_own_host",),
    ),
    Mutant(
        "a dead store is trained from in the next attempt",
        f"{LAUNCH}/fleet.py",
        ' or not self._lives(host.store):\n                self._drop_store',
        ":\n                self._drop_store",
        (f"{HANDS}::test_stores_outlive_an_attempt_but_a_dead_one_is_replaced",),
    ),
    Mutant(
        "what is left over is the last host's alone",
        f"{LAUNCH}/fleet.py",
        "            found |= set() if isinstance(names, Died) else set(names)\n",
        "            found = set() if isinstance(names, Died) else set(names)\n",
        (f"{HANDS}::test_what_is_left_over_on_any_host_is_told",),
    ),
    # --- a trainer's part
    Mutant(
        "a part is cut without its origin",
        f"{TRAINER}/ranges.py",
        "slice(begin - first, end - first) for",
        "slice(begin, end) for",
        (f"{RANGES}::test_every_device_is_given_its_own_part_of_what_its_host_holds[rows]",
         f"{RANGES}::test_every_device_is_given_its_own_part_of_what_its_host_holds[tokens]"),
    ),
    Mutant(
        "devices that hold no rectangle are taken for one",
        f"{TRAINER}/ranges.py",
        "    if sum(map(volume, cells)) != volume(box):\n",
        "    if sum(map(volume, cells)) > volume(box):\n",
        (f"{RANGES}::test_what_cannot_be_cut_is_refused_with_values_and_remedy[diagonal-words2]",),
    ),
    Mutant(
        "devices take their part of the whole from a slot that holds a part",
        f"{TRAINER}/placement.py",
        "slices(rectangle_of(index, f.shape), box))",
        "slices(rectangle_of(index, f.shape), tuple((0, size) for size in f.shape)))",
        (f"{RANGES}::test_every_device_is_given_its_own_part_of_what_its_host_holds[rows]",
         f"{RANGES}::test_every_device_is_given_its_own_part_of_what_its_host_holds[tokens]"),
    ),
    Mutant(
        "only the host with the first replica can copy an array",
        f"{TRAINER}/host_copy.py",
        "for shard in reversed(array.addressable_shards)}",
        "for shard in reversed(array.addressable_shards) if shard.replica_id == 0}",
        (f"{RANGES}::test_a_host_copies_what_it_holds_whichever_replica_that_is",),
    ),
    Mutant(
        "what no device of this host holds is copied from nowhere",
        f"{TRAINER}/host_copy.py",
        "    if found != volume(wanted):\n",
        "    if not found:\n",
        (f"{RANGES}::test_a_host_copies_what_it_holds_whichever_replica_that_is",),
    ),
    Mutant(
        "parameters on several hosts lie in the caller's memory",
        f"{TRAINER}/distributed.py",
        "    values = np.array(leaf)  # a copy",
        "    values = np.asarray(leaf)  # a copy",
        (f"{DISTRIBUTED}::test_state_that_is_copied_over_hosts_is_the_callers_no_more",),
    ),
    Mutant(
        "what was prepared once runs twice",
        f"{TRAINER}/preparation.py",
        "prepared, self._prepared = self._prepared, None",
        "prepared = self._prepared",
        (f"{PREPARATION}::test_what_was_prepared_runs_once",),
    ),
    Mutant(
        "hosts are not asked which micro-batch they were told",
        f"{TRAINER}/preparation.py",
        '"microbatch": None if handle is None else _facts_of(handle),',
        '"microbatch": None,',
        (f"{CALLS}::test_micro_batches_of_different_content_are_not_trained_together",),
    ),
    Mutant(
        "any stage is dropped, whichever was named",
        f"{TRAINER}/preparation.py",
        "        if stage is None or stage.handle.request_id != request_id:\n            return {\"dropped\": False}\n",
        "        if stage is None:\n            return {\"dropped\": False}\n",
        (f"{PREPARATION}::test_a_stage_is_dropped_by_its_own_name_and_the_next_one_fits",),
    ),
    Mutant(
        "every host restores its own newest checkpoint",
        f"{TRAINER}/distributed.py",
        "    return None if said is None else int(said)\n",
        "    return mine\n",
        (f"{DISTRIBUTED}::test_what_the_first_host_says_counts_for_all_each_time",),
    ),
    Mutant(
        "a part of the parameters is saved as all of them",
        f"{TRAINER}/distributed.py",
        "        if not is_whole_here(leaf):\n",
        "        if not leaf.size:\n",
        (f"{DISTRIBUTED}::test_state_of_which_no_host_has_all_is_refused_by_name",),
    ),
    Mutant(
        "every host writes the checkpoint",
        f"{TRAINER}/optax_engine.py",
        "        if self._spans_hosts and jax.process_index():\n            return _WrittenElsewhere(step)\n",
        "",
        (f"{DISTRIBUTED}::test_of_several_hosts_the_first_alone_writes_and_discards_checkpoints[1]",),
    ),
    Mutant(
        "every host discards checkpoints",
        f"{TRAINER}/optax_engine.py",
        "        if not (self._spans_hosts and jax.process_index()):\n",
        "        if self._spans_hosts or not jax.process_index():\n",
        (f"{DISTRIBUTED}::test_of_several_hosts_the_first_alone_writes_and_discards_checkpoints[1]",),
    ),
    Mutant(
        "a mesh that is partly of this host is taken for this host's",
        f"{TRAINER}/distributed.py",
        "    return any(device.process_index != here",
        "    return all(device.process_index != here",
        (f"{DISTRIBUTED}::test_a_mesh_spans_hosts_if_one_of_its_devices_is_anothers",),
    ),
    # --- who may talk
    Mutant(
        "anybody with a key is let in",
        f"{TRANSPORT}/curve.py",
        'is_known = (version, domain, mechanism) == (b"1.0", _DOMAIN, b"CURVE") and key in self._allowed',
        'is_known = (version, domain, mechanism) == (b"1.0", _DOMAIN, b"CURVE") and bool(key)',
        (f"{CURVE}::test_client_off_the_list_gets_an_auth_error",),
    ),
    Mutant(
        "a group may read the run's keys",
        f"{TRANSPORT}/peers_file.py",
        "stat.S_IMODE(found.st_mode) & 0o077:",
        "stat.S_IMODE(found.st_mode) & 0o007:",
        (f"{PEERS}::test_only_the_owner_may_read_it",),
    ),
)  # fmt: skip
