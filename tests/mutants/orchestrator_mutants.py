"""Faults in what the orchestrator does besides the order of commands: input, books, checkpoints, hooks, figures."""

from __future__ import annotations

from mutant import Mutant

ORCHESTRATOR = "shmstage/orchestrator"
TESTS = "tests/orchestrator"
PROGRAM = f"{TESTS}/test_program.py"
FEEDER = f"{TESTS}/test_feeder.py"
QUEUE = f"{TESTS}/test_queue.py"
RESUME = f"{TESTS}/test_resume.py"
JOURNAL = "tests/packing/test_journal.py"

MUTANTS = (
    # --- the program
    Mutant(
        "a failed token is passed over",
        f"{ORCHESTRATOR}/listener.py",
        "                return\n            raise error\n        self._ledger.token",
        "                return\n            return\n        self._ledger.token",
        (f"{PROGRAM}::test_a_failed_token_ends_the_run_and_names_step_and_microbatch[fwd_bwd]",),
    ),
    Mutant(
        "a failed ticket is passed over",
        f"{ORCHESTRATOR}/listener.py",
        "        if not event.ok:\n            self._ticket_failed(",
        "        if event.number < 0:\n            self._ticket_failed(",
        (f"{PROGRAM}::test_a_failed_ticket_ends_the_run[save_checkpoint]",),
    ),
    Mutant(
        "nobody notices an update that the trainer ran against the plan",
        f"{ORCHESTRATOR}/program.py",
        "        if result.updated != (command.is_final and not command.defer_update):\n",
        "        if command.step < 0:\n",
        (f"{PROGRAM}::test_an_update_the_trainer_ran_against_the_plan_is_noticed",),
    ),
    Mutant(
        "the loss tokens of before the patch are trained with",
        f"{ORCHESTRATOR}/program.py",
        "handle = replace(packed.handle, loss_tokens=patch.loss_tokens) if patch else packed.handle",
        "handle = packed.handle",
        (f"{PROGRAM}::test_loss_tokens_of_the_patch_replace_the_handles_and_late_digests_stand_in_the_line[serial]",),
    ),
    Mutant(
        "training begins before checkpoint 0 is asked for",
        f"{ORCHESTRATOR}/program.py",
        "        if restored is None:\n            self._save(0)\n",
        "",
        (f"{PROGRAM}::test_a_hook_is_asked_of_every_checkpoint_and_told_of_every_step[staged_before_update]",),
    ),
    Mutant(
        "a restart publishes the weights of an old version again",
        f"{ORCHESTRATOR}/program.py",
        'if self._schedule.config.weight_sync != "off" and version >= self._saving.published:',
        'if self._schedule.config.weight_sync != "off":',
        (f"{PROGRAM}::test_weights_older_than_those_published_before_a_restart_are_not_published_again",),
    ),
    Mutant(
        "what the hook said does not count",
        f"{ORCHESTRATOR}/listener.py",
        "self._schedule.hook_returned(verdict.step, go_on=verdict.go_on)",
        "self._schedule.hook_returned(verdict.step, go_on=True)",
        (f"{PROGRAM}::test_a_hook_that_ends_the_run_leaves_no_update_behind_it[staged_before_update]",),
    ),
    Mutant(
        "a stop inside a step loses the step before it",
        f"{ORCHESTRATOR}/program.py",
        "        if last <= self._saving.saved:\n",
        "        if last <= self._saving.saved or self._schedule.state.sent > 0:\n",
        (f"{PROGRAM}::test_a_stop_inside_a_step_saves_the_step_before_it_unless_the_trainer_refuses[False-serial]",),
    ),
    Mutant(
        "the line's denominator counts what was packed, not what was trained",
        f"{ORCHESTRATOR}/ledger.py",
        '"denominator": metrics.get("denominator"),',
        '"denominator": float(sum(p.handle.loss_tokens for p in packed)),',
        (f"{TESTS}/test_ledger.py::test_the_denominator_of_a_line_is_the_trainers_and_not_what_was_packed",),
    ),
    Mutant(
        "a step is complete before its update has landed",
        f"{ORCHESTRATOR}/ledger.py",
        "or step.metrics is None or not step.landed_ns or step.evals_open:",
        "or step.metrics is None or step.evals_open:",
        (f"{TESTS}/test_ledger.py::test_a_step_of_which_one_thing_is_unknown_is_not_complete[update]",),
    ),
    Mutant(
        "a checkpoint says where the input stood at the step's beginning",
        f"{ORCHESTRATOR}/saving.py",
        "        self._input[packed.handle.step] = packed.state_after\n",
        "        self._input.setdefault(packed.handle.step, packed.state_after)\n",
        (f"{TESTS}/test_saving.py::test_save_checkpoint_k_carries_the_last_microbatchs_stamp",),
    ),
    Mutant(
        "a step is safe although its line is not written",
        f"{ORCHESTRATOR}/saving.py",
        "        safe = self._durable if self._written >= self._durable else self._told\n",
        "        safe = self._durable\n",
        (f"{TESTS}/test_saving.py::test_a_step_is_safe_only_when_its_checkpoint_is_durable_and_its_line_is_written",),
    ),
    Mutant(
        "the published version goes back",
        f"{ORCHESTRATOR}/saving.py",
        "            return\n        self.published = max(self.published, version)\n",
        "            pass\n        self.published = version\n",
        (f"{TESTS}/test_saving.py::test_the_published_version_is_found_again_in_out_and_never_goes_back",),
    ),
    Mutant(
        "lines of steps that are trained again stay",
        f"{ORCHESTRATOR}/step_lines.py",
        'if line["step"] <= to_step]',
        'if line["step"] <= to_step + 1]',
        (f"{TESTS}/test_step_lines.py::test_rolling_back_keeps_what_is_covered_and_knows_the_highest_attempt",),
    ),
    # --- hooks and late fields
    Mutant(
        "a hook that says nothing ends the run",
        f"{ORCHESTRATOR}/hooks.py",
        "self._on_checkpoint(step, facts) is not False",
        "bool(self._on_checkpoint(step, facts))",
        (f"{TESTS}/test_hooks.py::test_only_false_ends_the_run[None-True]",),
    ),
    Mutant(
        "a verdict is forgotten with its process",
        f"{ORCHESTRATOR}/hooks.py",
        '        self._record.write({"step": step, "go_on": go_on})\n',
        "",
        (f"{TESTS}/test_hooks.py::test_verdicts_are_found_again_in_out",),
    ),
    Mutant(
        "a hook judges a checkpoint whose metrics are missing",
        f"{ORCHESTRATOR}/hooks.py",
        "            facts = self._facts_of(step)\n",
        "            facts = self._facts_of(step) or {}\n",
        (f"{TESTS}/test_hooks.py::test_a_checkpoint_is_judged_when_its_metrics_and_evaluation_are_there",),
    ),
    Mutant(
        "a late field is written and not committed",
        f"{ORCHESTRATOR}/late_fields.py",
        "        self._pool.commit_late(handle, SAMPLER_IS_WEIGHTS)\n",
        "",
        (f"{TESTS}/test_late_fields.py::"
         "test_the_producer_writes_the_samplers_weights_from_its_own_and_the_trainers_log_probs",),
    ),
    Mutant(
        "the sampler's log-probs are looked at after the trainer wrote over them",
        f"{ORCHESTRATOR}/late_fields.py",
        "np.array(self._pool.late_views(handle)[OLD_LOGPS])",
        "self._pool.late_views(handle)[OLD_LOGPS]",
        (f"{TESTS}/test_late_fields.py::"
         "test_the_producer_writes_the_samplers_weights_from_its_own_and_the_trainers_log_probs",),
    ),
    Mutant(
        "importance weights are not capped",
        f"{ORCHESTRATOR}/importance.py",
        "np.minimum(ratio, cap)",
        "ratio",
        (f"{TESTS}/test_late_fields.py::test_importance_weights_are_capped_masked_and_finite",),
    ),
    # --- the input
    Mutant(
        "a resumed feeder numbers its steps from the first one",
        f"{ORCHESTRATOR}/feeder.py",
        "            step += self._first_step\n",
        "            step += 1\n",
        (f"{FEEDER}::test_a_resumed_feeder_begins_with_the_first_microbatch_of_its_first_step",),
    ),
    Mutant(
        "no micro-batch is final",
        f"{ORCHESTRATOR}/feeder.py",
        "        is_final = index == self._per_step - 1\n",
        "        is_final = index == self._per_step\n",
        (f"{FEEDER}::test_the_last_microbatch_of_each_step_alone_is_final",),
    ),
    Mutant(
        "more is let go than a durable checkpoint covers",
        f"{ORCHESTRATOR}/feeder.py",
        " if number <= step}",
        " if number <= step + 1}",
        (f"{FEEDER}::test_only_what_a_durable_checkpoint_covers_is_let_go",),
    ),
    Mutant(
        "what is left over at the end of the input is not trained",
        f"{ORCHESTRATOR}/intake.py",
        "        yield from self._taken(self.planner.flush())\n",
        "",
        (f"{TESTS}/test_intake.py::test_every_trajectory_comes_exactly_once_per_pass[1]",),
    ),
    Mutant(
        "what is left over is lost at a resume",
        f"{ORCHESTRATOR}/intake.py",
        "ranges_between(oldest.first_arrival, self._arrival, self._held)",
        "ranges_between(oldest.first_arrival, self._arrival, ())",
        (f"{RESUME}::test_the_multiset_of_trained_trajectories_is_whole_over_a_resume_in_the_middle",),
    ),
    Mutant(
        "what is done is trained again after a resume",
        f"{ORCHESTRATOR}/intake.py",
        "        return place >= 0 and number < self._begun_at.done[place][1]\n",
        "        return False\n",
        (f"{RESUME}::test_the_multiset_of_trained_trajectories_is_whole_over_a_resume_in_the_middle",),
    ),
    Mutant(
        "a state file that was altered is believed",
        f"{ORCHESTRATOR}/resume.py",
        "    if got != sha256:\n",
        "    if not got:\n",
        (f"{RESUME}::test_a_state_file_that_is_altered_or_gone_is_refused",),
    ),
    Mutant(
        "a latecomer is dropped",
        f"{ORCHESTRATOR}/batch_order.py",
        "            self.late += batch < self.serving\n            out += self._admitted(held, self._ahead)\n",
        "            self.late += batch < self.serving\n"
        "            out += self._admitted(held, self._ahead) if batch == self.serving else []\n",
        (f"{QUEUE}::test_prompt_batch_order",),
    ),
    Mutant(
        "holes are not counted",
        f"{ORCHESTRATOR}/batch_order.py",
        "        self._count(batch, groups)\n",
        "",
        (f"{QUEUE}::test_a_late_expectation_and_holes_pass_a_batch",),
    ),
    Mutant(
        "the error of a source overtakes what it gave before",
        f"{ORCHESTRATOR}/queue.py",
        "            self._ended, self._end_error = True, error\n",
        "            self._ended, self._end_error, self._error = True, error, error\n",
        (f"{TESTS}/test_reader.py::test_the_error_of_a_source_comes_after_all_it_gave",),
    ),
    Mutant(
        "what a live source gave is let go when it has landed",
        f"{ORCHESTRATOR}/held.py",
        "            if self._until_durable:\n",
        "            if not self._until_durable:\n",
        (f"{TESTS}/test_held.py::test_what_a_source_cannot_give_again_is_held_until_it_is_durable",),
    ),
    # --- the journal
    Mutant(
        "a group counts before it is durable",
        "shmstage/packing/journal.py",
        "            os.fdatasync(self._descriptor)\n",
        "            pass\n",
        (f"{JOURNAL}::test_a_group_is_synced_before_it_is_counted",),
    ),
    Mutant(
        "one group too many is released",
        "shmstage/packing/journal.py",
        "self._segments[1] <= cursor:",
        "self._segments[1] <= cursor + 1:",
        (f"{JOURNAL}::test_release_removes_whole_segments_and_the_count_survives",),
    ),
    Mutant(
        "a torn tail stays in the journal",
        "shmstage/packing/journal.py",
        "            if os.fstat(descriptor).st_size > self._end:\n",
        "            if os.fstat(descriptor).st_size < self._end:\n",
        (f"{JOURNAL}::test_a_tail_of_anything_but_whole_records_is_dropped",),
    ),
    Mutant(
        "a damaged group is believed",
        "shmstage/packing/journal_segment.py",
        "    if xxhash.xxh3_128_digest(body) != record.digest:\n",
        "    if not body:\n",
        (f"{JOURNAL}::test_damage_before_the_last_record_is_an_error_and_nothing_is_dropped[0-body]",),
    ),
    Mutant(
        "a live group is trained without being journaled",
        "shmstage/packing/journal_source.py",
        "            self.journal.append(group)\n",
        "            self.journal.count += 1\n",
        (f"{JOURNAL}::test_a_live_source_is_journaled_before_it_is_seen_and_replayed_from_any_cursor",),
    ),
    # --- figures and what they decide
    Mutant(
        "the wait before a late update is no idle time",
        "shmstage/timeline/idle.py",
        "return length_ns(self.before_update) + length_ns(self.after_update)\n",
        "return length_ns(self.after_update)\n",
        ("tests/timeline/test_idle.py::test_a_wait_before_a_late_update_is_not_a_win",),
    ),
    Mutant(
        "time in which the devices scored is idle time",
        "shmstage/timeline/idle.py",
        "difference(union([(landed, started)]), windows)",
        "union([(landed, started)])",
        ("tests/timeline/test_idle.py::test_time_in_which_the_devices_scored_or_evaluated_is_not_idle",),
    ),
    Mutant(
        "the smaller of the idle estimators is reported",
        "shmstage/timeline/idle.py",
        "started = max(stamped, calibrated)",
        "started = min(stamped, calibrated)",
        ("tests/timeline/test_idle.py::test_the_larger_estimator_is_reported",),
    ),
    Mutant(
        "late fields that come late are no idle time",
        "shmstage/timeline/idle.py",
        "at.first_staged_ready, at.first_patch_ready)",
        "at.first_staged_ready)",
        ("tests/timeline/test_idle.py::test_a_first_microbatch_that_waits_for_its_late_fields_is_idle",),
    ),
    Mutant(
        "an update that was held back costs nothing",
        "shmstage/timeline/staging.py",
        "overhead_s=max(0.0, held_back_s - waited_elsewhere_s) + slowed_s,",
        "overhead_s=slowed_s,",
        (f"{TESTS}/test_latch.py::test_overhead_is_an_update_held_back_by_control_alone",),
    ),
    Mutant(
        "staging is blamed for a wait that a snapshot caused",
        "shmstage/timeline/staging.py",
        "max(0.0, held_back_s - waited_elsewhere_s)",
        "held_back_s",
        (f"{TESTS}/test_latch.py::test_a_wait_for_a_snapshot_or_a_hook_is_not_stagings_overhead",),
    ),
    Mutant(
        "the latch counts bad boundaries that are not running",
        f"{ORCHESTRATOR}/latch.py",
        "        if cost.pays:\n            self._bad = 0\n            return\n",
        "        if cost.pays:\n            return\n",
        (f"{TESTS}/test_latch.py::test_one_boundary_that_pays_starts_the_count_anew",),
    ),
    Mutant(
        "the latch never probes again",
        f"{ORCHESTRATOR}/latch.py",
        'if self.level != "on" and self._boundaries >= PROBE_AFTER:',
        'if self.level == "on" and self._boundaries >= PROBE_AFTER:',
        (f"{TESTS}/test_latch.py::test_after_twenty_boundaries_it_probes_again[off]",),
    ),
    Mutant(
        "an evaluation is a mean of means",
        f"{ORCHESTRATOR}/evaluation.py",
        "value / denominator for name",
        "value / len(parts) for name",
        (f"{PROGRAM}::test_the_figures_of_an_evaluation_stand_in_the_line_of_its_step",),
    ),
)
