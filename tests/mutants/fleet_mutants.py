"""Faults in what the orchestrator does for several hosts: commands, events, input, and parts of micro-batches."""

from __future__ import annotations

from mutant import Mutant

ORCHESTRATOR, PACKING = "shmstage/orchestrator", "shmstage/packing"
CALLS = "tests/fleet/test_fleet_calls.py"
EVENTS = "tests/fleet/test_fleet_events.py"
BOOK = "tests/fleet/test_handle_book.py"
PHASES = "tests/fleet/test_two_phases.py"
FLEET = "tests/orchestrator/test_fleet_packing.py"
LAYOUTS = "tests/orchestrator/test_fleet_layouts.py"
PARTS = "tests/packing/test_parts.py"
PIECES = "tests/packing/test_pieces.py"
WINDOWS = "tests/packing/test_windows.py"

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
)  # fmt: skip
