"""Faults in what spans hosts: commands for all of them, parts of a micro-batch, stores, the gang, ranges and keys."""

from __future__ import annotations

from mutant import Mutant

ORCHESTRATOR, PACKING, LAUNCH = "shmstage/orchestrator", "shmstage/packing", "shmstage/launch"
TRAINER, TRANSPORT = "shmstage/trainer", "shmstage/transport"
CALLS = "tests/fleet/test_fleet_calls.py"
EVENTS = "tests/fleet/test_fleet_events.py"
BOOK = "tests/fleet/test_handle_book.py"
PHASES = "tests/fleet/test_two_phases.py"
FLEET = "tests/orchestrator/test_fleet_packing.py"
LAYOUTS = "tests/orchestrator/test_fleet_layouts.py"
PARTS = "tests/packing/test_parts.py"
PIECES = "tests/packing/test_pieces.py"
WINDOWS = "tests/packing/test_windows.py"
STORES = "tests/multihost/test_agent_and_store.py"
AHEAD = "tests/multihost/test_fetch_ahead.py"
GANG = "tests/launch/test_gang.py"
HANDS = "tests/launch/test_fleet_hands.py"
RANGES = "tests/trainer/test_ranges.py"
PREPARATION = "tests/trainer/test_preparation.py"
DISTRIBUTED = "tests/trainer/test_distributed.py"
CURVE = "tests/transport/test_curve.py"
PEERS = "tests/transport/test_peers_file.py"

MUTANTS = (
    # --- one command on all hosts
    Mutant(
        "a command is dispatched although one host refused it",
        f"{ORCHESTRATOR}/two_phases.py",
        "self._enter(Phase.OVER if self.error is not None else Phase.COMMIT)",
        "self._enter(Phase.COMMIT)",
        (f"{PHASES}::test_nothing_runs_anywhere_unless_all_accept_in_the_same_state[False-2]",),
    ),
    Mutant(
        "hosts in different states go on together",
        f"{ORCHESTRATOR}/two_phases.py",
        "if error is not None or not self._compares:",
        "if error is not None or self._compares:",
        (f"{CALLS}::test_a_host_in_another_state_is_named_with_the_difference",),
    ),
    Mutant(
        "any stage that only one host has is overlooked",
        f"{ORCHESTRATOR}/two_phases.py",
        "if self._overlooks and staged == self._overlooks else state",
        "if self._overlooks else state",
        (f"{PHASES}::test_a_stage_that_only_some_have_is_overlooked_and_no_other",),
    ),
    Mutant(
        "every host is told of host 0's slot",
        f"{ORCHESTRATOR}/trainer_fleet.py",
        "            part = self._book.parts(whole.request_id)[host]\n",
        "            part = self._book.parts(whole.request_id)[0]\n",
        (f"{CALLS}::test_every_host_is_told_of_its_own_slot_and_of_the_loss_tokens_of_the_whole",),
    ),
    Mutant(
        "hosts divide by the loss tokens of before the patch",
        f"{ORCHESTRATOR}/trainer_fleet.py",
        "handle_to_wire(replace(part, loss_tokens=whole.loss_tokens))",
        "handle_to_wire(part)",
        (f"{CALLS}::test_every_host_is_told_of_its_own_slot_and_of_the_loss_tokens_of_the_whole",),
    ),
    Mutant(
        "a stage that could not be dropped on one host stays there",
        f"{ORCHESTRATOR}/trainer_fleet.py",
        'self._left_behind = request_id if phases.left_behind else ""',
        'self._left_behind = ""',
        (f"{CALLS}::test_a_drop_that_was_not_heard_is_told_again_before_the_next_command",),
    ),
    Mutant(
        "a stage whose upload failed on one host stays on the others",
        f"{ORCHESTRATOR}/trainer_fleet.py",
        '            if isinstance(event, TokenEvent) and event.kind == "staged" and not event.ok:\n',
        '            if isinstance(event, TokenEvent) and event.kind == "staged" and event.step < 0:\n',
        (f"{CALLS}::test_an_upload_that_fails_later_on_one_host_is_told_and_dropped_on_all",),
    ),
    Mutant(
        "hosts with different parameters go on together",
        f"{ORCHESTRATOR}/fleet_answers.py",
        "            if other is not None:\n",
        '            if other is not None and key != "param_digest":\n',
        (f"{PHASES}::test_what_must_be_equal_and_is_not_names_both_hosts[param_digest]",),
    ),
    # --- events of all hosts
    Mutant(
        "what failed on another host than the first is passed over",
        f"{ORCHESTRATOR}/fleet_events.py",
        "ok=not errors, error=",
        "ok=events[0].ok, error=",
        (f"{EVENTS}::test_one_failure_makes_the_whole_fail_and_names_its_host",),
    ),
    Mutant(
        "hosts that summed different micro-batches go on",
        f"{ORCHESTRATOR}/fleet_events.py",
        "            if mine != theirs:\n",
        "            if mine is None and theirs is not None:\n",
        (f"{EVENTS}::test_denominators_that_differ_name_both_hosts_after_what_came_before",),
    ),
    Mutant(
        "an event of before a restore counts for the micro-batch after it",
        f"{ORCHESTRATOR}/fleet_events.py",
        "        self._tokens.clear()\n",
        "",
        (f"{EVENTS}::test_a_restore_forgets_what_was_under_way",),
    ),
    Mutant(
        "a ticket told early of before a restore answers one after it",
        f"{ORCHESTRATOR}/fleet_events.py",
        "        self._early.clear()\n",
        "",
        (f"{EVENTS}::test_a_restore_forgets_what_was_under_way",),
    ),
    Mutant(
        "evaluated micro-batches are never forgotten",
        f"{ORCHESTRATOR}/fleet_events.py",
        "            if ticket.of:\n                self._book.over(ticket.of)\n",
        "",
        (f"{EVENTS}::test_an_evaluation_is_forgotten_when_all_hosts_have_evaluated",),
    ),
    Mutant(
        "a trained micro-batch's names on the hosts are never forgotten",
        f"{ORCHESTRATOR}/handle_book.py",
        "            wholes.pop(part.request_id, None)\n",
        "            wholes.get(part.request_id, None)\n",
        (f"{BOOK}::test_it_is_forgotten_when_its_step_landed_and_its_events_are_told_in_any_order",),
    ),
    # --- what comes in
    Mutant(
        "a second reading begins where the first one ended",
        f"{ORCHESTRATOR}/fleet_source.py",
        "            share.reached, share.ended = cursor, False\n",
        "            share.ended = False\n",
        (f"{FLEET}::test_reading_begins_anew_wherever_it_is_told_and_whatever_was_read_before",),
    ),
    Mutant(
        "what an earlier reading left over is given once more",
        f"{ORCHESTRATOR}/fleet_source.py",
        "            share.ready.clear()\n",
        "",
        (f"{FLEET}::test_reading_begins_anew_wherever_it_is_told_and_whatever_was_read_before",),
    ),
    Mutant(
        "another store is asked for a group than the one that has it",
        f"{ORCHESTRATOR}/fleet_source.py",
        'self._read(share.store, "train", pass_number, share.reached)',
        'self._read(len(self._shares) - 1 - share.store, "train", pass_number, share.reached)',
        (f"{FLEET}::test_reading_begins_anew_wherever_it_is_told_and_whatever_was_read_before",),
    ),
    Mutant(
        "the first trajectory is the first store's",
        f"{ORCHESTRATOR}/fleet_source.py",
        "groups = sorted((group for group in found if group.trajectories), key=lambda group: group.number)",
        "groups = [group for group in found if group.trajectories]",
        (f"{FLEET}::test_the_first_trajectory_is_that_of_the_first_group_that_has_one",),
    ),
    Mutant(
        "evaluations go store by store",
        f"{ORCHESTRATOR}/fleet_source.py",
        "EvaluationReferences(sorted(found, key=lambda group: group.number), ",
        "EvaluationReferences(found, ",
        (f"{FLEET}::test_an_evaluation_has_every_group_once_in_order_however_many_answers_it_takes",),
    ),
    Mutant(
        "the last group of an answer is evaluated twice",
        f"{ORCHESTRATOR}/fleet_source.py",
        "cursor = groups[-1].number + 1 if groups else cursor",
        "cursor = groups[-1].number if groups else cursor",
        (f"{FLEET}::test_an_evaluation_has_every_group_once_in_order_however_many_answers_it_takes",),
    ),
    Mutant(
        "a store lets go of the group that is trained next",
        f"{ORCHESTRATOR}/fleet_source.py",
        "share.kept[0][:2] < landed:",
        "share.kept[0][:2] <= landed:",
        (f"{FLEET}::test_memory_of_a_live_source_goes_when_its_step_landed_and_its_journal_when_that_is_durable",),
    ),
    Mutant(
        "a journal lets go of what has landed and is not durable",
        f"{ORCHESTRATOR}/fleet_source.py",
        '{"cursor": covered[1]}',
        '{"cursor": landed[1]}',
        (f"{FLEET}::test_memory_of_a_live_source_goes_when_its_step_landed_and_its_journal_when_that_is_durable",),
    ),
    Mutant(
        "a batch of a sharded source is as large as the first store's part",
        f"{ORCHESTRATOR}/fleet_source.py",
        "stores = range(self._giving) if self._sums_batches else range(1)",
        "stores = range(1)",
        (f"{FLEET}::test_a_batch_of_a_sharded_source_is_as_large_as_its_parts_together",),
    ),
    Mutant(
        "a batch is complete although one store does not know its size",
        f"{ORCHESTRATOR}/fleet_source.py",
        "sum(known) if len(known) == len(counts) else None",
        "sum(known) if known else None",
        (f"{FLEET}::test_a_batch_of_a_sharded_source_is_as_large_as_its_parts_together",),
    ),
    # --- what goes out
    Mutant(
        "every host packs host 0's rows",
        f"{ORCHESTRATOR}/fleet_packer.py",
        "return [part_of(plan, references, window) for window in self._windows]",
        "return [part_of(plan, references, self._windows[0]) for window in self._windows]",
        (f"{FLEET}::test_slots_hold_what_one_host_would_have_in_its_own[rows]",),
    ),
    Mutant(
        "what a host packed is not compared with the plan",
        f"{ORCHESTRATOR}/fleet_packer.py",
        "        if digests != want:\n",
        "        if len(digests) != len(want):\n",
        (f"{FLEET}::test_a_host_that_packed_something_else_is_named_with_the_row",),
    ),
    Mutant(
        "a plan that one host forgot is told to the first",
        f"{ORCHESTRATOR}/fleet_packer.py",
        'self._doors.call(host, "pack", again,',
        'self._doors.call(0, "pack", again,',
        (f"{FLEET}::test_a_plan_that_one_host_forgot_is_told_to_it_once_more",),
    ),
    Mutant(
        "every host writes the late fields of host 0's slot",
        f"{ORCHESTRATOR}/fleet_late.py",
        '{"handle": handle_to_wire(part), **more} for part in self._book.parts(handle.request_id)]',
        '{"handle": handle_to_wire(self._book.parts(handle.request_id)[0]), **more} for _ in range(len(self._doors))]',
        (f"{FLEET}::test_each_host_writes_the_late_fields_of_its_own_slot",),
    ),
    Mutant(
        "a place that no host holds is trained by nobody",
        f"{ORCHESTRATOR}/fleet_layouts.py",
        "w.row_begin <= row < w.row_end and w.token_begin <= token < w.token_end for w in windows",
        "w.row_begin <= row < w.row_end for w in windows",
        (f"{LAYOUTS}::test_every_place_of_a_microbatch_lies_on_a_host",),
    ),
    # --- parts and pieces
    Mutant(
        "tokens of a segment are counted from the row's begin",
        f"{PACKING}/parts.py",
        "begins = np.clip(self.window.token_begin - starts, 0, lengths)",
        "begins = np.clip(self.window.token_begin, 0, lengths)",
        (f"{PARTS}::test_a_part_has_every_segment_of_its_rows_and_what_it_wants_only_those_with_a_token_in_it",),
    ),
    Mutant(
        "a store may answer with other tokens than it was asked for",
        f"{PACKING}/parts.py",
        "            if got != want:\n",
        "            if got[:2] != want[:2]:\n",
        (f"{PARTS}::test_what_is_not_the_answer_is_refused_by_store_and_number",),
    ),
    Mutant(
        "validity of a cut begins with the trajectory's",
        f"{PACKING}/pieces.py",
        "validity[first * entry.layers : last * entry.layers]",
        "validity[: (last - first) * entry.layers]",
        (f"{PIECES}::test_what_comes_out_is_the_span_that_went_in",),
    ),
    Mutant(
        "bytes that changed on their way are trained",
        f"{PACKING}/pieces.py",
        '        if _hash(packed, name + b"\\0", own) != told:\n',
        "        if len(told) != _HASH_NBYTES:\n",
        (f"{PIECES}::test_any_byte_that_changed_is_noticed_and_names_its_trajectory[False]",),
    ),
    Mutant(
        "a host's tokens are those of the row's begin",
        f"{PACKING}/window_fill.py",
        "(window.row_begin, window.row_end, window.token_begin, window.token_end),",
        "(window.row_begin, window.row_end, 0, window.tokens),",
        (f"{WINDOWS}::test_four_hosts_fill_what_one_would[dense]",
         f"{FLEET}::test_slots_hold_what_one_host_would_have_in_its_own[tokens]"),
    ),
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
