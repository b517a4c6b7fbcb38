"""Faults in the trainer's commands: what is allowed, what a step does, what is told of it, what is saved."""

from __future__ import annotations

from mutant import Mutant

TRAINER = "shmstage/trainer"
TESTS = "tests/trainer"
GATE = f"{TRAINER}/gate.py"
WORKER = f"{TRAINER}/worker.py"
STEPPER = f"{TRAINER}/stepper.py"
IN_GATE = f"{TESTS}/test_gate.py"
IN_WORKER = f"{TESTS}/test_worker.py"
REFUSALS = f"{TESTS}/test_refusals_and_clean_up.py"
REPLAY = f"{TESTS}/test_replay.py"
SCORING = f"{TESTS}/test_scoring.py"
SNAPSHOTS = f"{TESTS}/test_snapshots.py"
OPTAX = f"{TESTS}/test_optax_engine.py"

MUTANTS = (
    # --- what is allowed
    Mutant(
        "the next micro-batch is trained while an update is deferred",
        GATE,
        '    "fwd_bwd", "fwd_bwd_staged", "update", "get_metrics", "save_checkpoint",',
        '    "update", "get_metrics", "save_checkpoint",',
        (f"{IN_GATE}::test_while_an_update_is_deferred_what_needs_the_step_closed_is_refused[fwd_bwd]",
         f"{REFUSALS}::test_while_an_update_is_deferred_it_raises_update_deferred_error_and_changes_nothing[fwd_bwd]"),
    ),
    Mutant(
        "a micro-batch is trained twice",
        GATE,
        "        elif handle.index <= state.last_index:\n",
        "        elif handle.index < 0:\n",
        (f"{IN_GATE}::test_a_microbatch_is_trained_once",),
    ),
    Mutant(
        "a step is left out",
        GATE,
        "            if handle.step != state.closed_step + 1:\n",
        "            if handle.step <= state.closed_step:\n",
        (f"{IN_GATE}::test_steps_are_trained_in_order",),
    ),
    Mutant(
        "what is staged is trained under another's id",
        GATE,
        "        if staged != request_id:\n",
        "        if not request_id:\n",
        (f"{IN_GATE}::test_another_staged_id_is_refused_and_the_stage_kept",),
    ),
    Mutant(
        "a stage that was not trained is written over",
        GATE,
        "        if staged is not None:\n            raise StageOccupiedError",
        "        if staged == \"\":\n            raise StageOccupiedError",
        (f"{IN_GATE}::test_staging_over_an_unused_stage_is_refused",),
    ),
    Mutant(
        "a deferred update can be applied twice",
        GATE,
        "        self._set(closed_step=step, open_step=None, last_index=-1, deferred_step=None)\n",
        "        self._set(closed_step=step, open_step=None, last_index=-1)\n",
        (f"{IN_GATE}::test_the_deferred_update_can_be_applied_once",),
    ),
    Mutant(
        "the first forward call does not wait for checkpoint 0",
        GATE,
        "awaits_first_checkpoint=step is None)",
        "awaits_first_checkpoint=False)",
        (f"{IN_GATE}::test_without_a_checkpoint_the_first_forward_waits_for_checkpoint_zero",),
    ),
    Mutant(
        "a new epoch finds the gate open",
        GATE,
        "        self.state = GateState()\n\n    def _set",
        "        self._set(staged=None, deferred_step=None)\n\n    def _set",
        (f"{IN_GATE}::test_a_new_epoch_closes_the_gate_and_forgets_stage_and_deferral",),
    ),
    Mutant(
        "a checkpoint is taken inside a step",
        GATE,
        "        if state.open_step is not None:\n            raise TrainerError(f\"{command}({step})",
        "        if state.open_step == 0:\n            raise TrainerError(f\"{command}({step})",
        (f"{IN_GATE}::test_snapshots_come_after_their_update_and_before_the_next_forward[save_checkpoint]",),
    ),
    Mutant(
        "an older epoch gets the trainer back",
        WORKER,
        "        if current is not None and hello.epoch < current.epoch:\n",
        "        if current is not None and hello.epoch < 0:\n",
        (f"{IN_WORKER}::test_an_older_epoch_is_refused",),
    ),
    # --- a step
    Mutant(
        "a deferral is not heeded",
        STEPPER,
        "        deferred = handle.is_final and defer_update\n",
        "        deferred = False\n",
        (f"{IN_WORKER}::test_shutdown_applies_a_deferred_update_unless_told_to_discard[True]",),
    ),
    Mutant(
        "a staged micro-batch is uploaded again",
        STEPPER,
        "        if stage is None or stage.handle.request_id != handle.request_id:\n            batch",
        "        if stage is None or stage.handle.request_id:\n            batch",
        (f"{REFUSALS}::test_fwd_bwd_of_a_staged_handle_consumes_the_existing_stage",),
    ),
    Mutant(
        "scores written after a stage was lost are not read",
        STEPPER,
        "        elif stage.lease is None:\n",
        "        elif stage.handle.request_id:\n",
        (f"{SCORING}::"
         "test_sent_whole_after_a_stage_whose_answer_was_lost_a_microbatch_is_trained_with_the_scores_of_its_slot",),
    ),
    Mutant(
        "a stage whose upload failed is trained",
        STEPPER,
        "        if stage.error:\n",
        "        if stage.error == stage:\n",
        (f"{IN_WORKER}::test_a_stage_whose_upload_failed_is_not_trained",),
    ),
    Mutant(
        "an update donates what a snapshot still copies",
        STEPPER,
        "        waited_s = self._snapshots.wait_copies(self._timeout_s)\n",
        "        waited_s = 0.0\n",
        (f"{IN_WORKER}::test_the_update_waits_for_a_checkpoint_copy_and_says_how_long",),
    ),
    Mutant(
        "a micro-batch is settled before the next one is dispatched",
        STEPPER,
        "            self._settle_all_but(1)\n",
        "            self._settle_all_but(0)\n",
        (f"{IN_WORKER}::test_replays_are_settled_for_the_one_before_and_for_all_before_the_update",),
    ),
    Mutant(
        "the last micro-batch is not settled before the update",
        STEPPER,
        "            self._settle_all_but(0)\n            begin_ns",
        "            begin_ns",
        (f"{IN_WORKER}::test_replays_are_settled_for_the_one_before_and_for_all_before_the_update",),
    ),
    Mutant(
        "nobody waits for a replay's token",
        STEPPER,
        "        for number, token in replays.items():\n",
        "        for number, token in ():\n",
        (f"{REPLAY}::test_a_replay_that_fails_fails_the_update_of_a_small_model_too",),
    ),
    Mutant(
        "an overflow is not replayed",
        f"{TRAINER}/replays.py",
        "            if bool(host_copy(attempt.overflow)):\n",
        "            if not attempt.number:\n",
        (f"{REPLAY}::test_what_dropped_tokens_made_infinite_does_not_reach_the_sums",),
    ),
    Mutant(
        "an overflow counts twice, as it came out first and replayed",
        f"{TRAINER}/optax_programs.py",
        "            new = jax.tree.map(lambda part: jnp.where(flag[0], jnp.zeros_like(part), part), new)\n",
        "            pass\n",
        (f"{REPLAY}::test_what_dropped_tokens_made_infinite_does_not_reach_the_sums",),
    ),
    Mutant(
        "the loss is not divided by the step's denominator",
        f"{TRAINER}/optax_programs.py",
        '"loss": sums["loss"] / divisor,',
        '"loss": sums["loss"],',
        (f"{OPTAX}::test_gradients_add_up_undivided_and_are_divided_once",),
    ),
    Mutant(
        "of the step's denominators only the last one counts",
        f"{TRAINER}/optax_programs.py",
        "        total = jax.tree.map(lambda total, part: total + part.astype(total.dtype), sums, new)\n",
        "        total = jax.tree.map(lambda total, part: total + part.astype(total.dtype), sums, new)\n"
        "        total[\"denominator\"] = denominator\n",
        (f"{OPTAX}::test_gradients_add_up_undivided_and_are_divided_once",),
    ),
    Mutant(
        "the next step begins with the sums of the last one",
        f"{TRAINER}/optax_programs.py",
        "jax.tree.map(jnp.zeros_like, sums), metrics, token",
        "jax.tree.map(lambda total: total + 0, sums), metrics, token",
        (f"{OPTAX}::test_sums_start_again_after_an_update",),
    ),
    # --- scores and late fields
    Mutant(
        "a patch does not reach the staged arrays",
        STEPPER,
        "        stage.batch.arrays.update(arrays)\n",
        "",
        (f"{SCORING}::test_a_staged_microbatch_is_trained_with_what_was_patched",),
    ),
    Mutant(
        "patched arrays are the slot itself",
        f"{TRAINER}/scoring.py",
        "np.array(stage.lease.late_views[name])",
        "stage.lease.late_views[name]",
        (f"{SCORING}::test_patched_arrays_do_not_change_when_the_slot_does",),
    ),
    Mutant(
        "the lease ends with the first patch",
        f"{TRAINER}/scoring.py",
        "            if stage.patched >= set(layout.late_names):\n",
        "            if stage.patched:\n",
        (f"{SCORING}::test_the_lease_is_kept_until_every_late_field_is_patched",),
    ),
    Mutant(
        "a micro-batch that was scored loses its lease before it is trained",
        f"{TRAINER}/scoring.py",
        "        keep = not attachment.is_aux(handle)\n",
        "        keep = False\n",
        (f"{SCORING}::test_a_training_slot_that_was_scored_keeps_its_lease[False]",),
    ),
    Mutant(
        "the reference moves with the policy",
        f"{TRAINER}/optax_engine.py",
        'self._params if role == "actor" else self._reference',
        "self._params",
        (f"{SCORING}::test_the_reference_stays_where_it_started",),
    ),
    # --- what is told
    Mutant(
        "a failed token does not close the gate",
        WORKER,
        'self._gate.failed(f"{failure.kind} of {failure.request_id} failed on the device: {failure.error}")',
        "pass",
        (f"{IN_WORKER}::test_a_failed_token_closes_the_gate_until_a_restore",),
    ),
    Mutant(
        "an update that summed up a failed micro-batch is told as good",
        f"{TRAINER}/completions.py",
        "                error = self.health.update_verdict(step, error)\n",
        "                pass\n",
        (f"{IN_WORKER}::test_a_failed_token_fails_the_update_metrics_and_snapshots_of_its_step",),
    ),
    Mutant(
        "a step that failed is forgotten and then taken for a good one",
        f"{TRAINER}/step_health.py",
        "return self.update_reported and self.uploads_open == 0 and not self.error",
        "return self.update_reported and self.uploads_open == 0",
        (f"{TESTS}/test_step_health.py::test_a_failed_step_is_not_forgotten_while_later_ones_finish",),
    ),
    Mutant(
        "failed device work is told as done",
        f"{TRAINER}/tokens.py",
        "    except Exception as error:  # XLA raises its own and plain RuntimeErrors\n        return f",
        "    except Exception as error:  # XLA raises its own and plain RuntimeErrors\n        return \"\" and f",
        (f"{TESTS}/test_device_buffers.py::test_watched_work_is_reported_in_order_with_its_failures",),
    ),
    # --- snapshots and checkpoints
    Mutant(
        "a checkpoint is stamped before its update has landed",
        WORKER,
        "copy(self.completions.health.require_landed(last_update) or self._clock_ns())",
        "copy(self._clock_ns())",
        (f"{REFUSALS}::test_a_checkpoint_is_not_stamped_before_its_update_landed",),
    ),
    Mutant(
        "the update does not wait for a checkpoint's copy",
        WORKER,
        'self._ticket("checkpoint", step, copy_with_stamps, snapshot.write, holds=True)',
        'self._ticket("checkpoint", step, copy_with_stamps, snapshot.write)',
        (f"{IN_WORKER}::test_the_update_waits_for_a_checkpoint_copy_and_says_how_long",),
    ),
    Mutant(
        "a checkpoint is told as durable before it is written",
        f"{TRAINER}/snapshots.py",
        "            self._to_write.put(ticket)\n",
        "            self._resolve(ticket, {} if value is None else value, None)\n"
        "            self._to_write.put(ticket)\n",
        (f"{SNAPSHOTS}::test_a_ticket_with_a_write_resolves_when_it_is_durable",),
    ),
    Mutant(
        "a snapshot that failed is told as done",
        f"{TRAINER}/snapshots.py",
        "ticket.kind, ticket.step, error is None, told, text, stamps",
        "ticket.kind, ticket.step, True, told, text, stamps",
        (f"{SNAPSHOTS}::test_what_goes_wrong_is_told_by_the_ticket[write]",),
    ),
    Mutant(
        "half a checkpoint is restored",
        f"{TRAINER}/checkpoints.py",
        "for entry in found if (entry / METADATA).is_file())",
        "for entry in found)",
        (f"{OPTAX}::test_the_highest_complete_checkpoint_is_restored",),
    ),
    Mutant(
        "a checkpoint is restored that is newer than what was asked for",
        f"{TRAINER}/optax_engine.py",
        "[step for step in steps if at_most is None or step <= at_most]",
        "[step for step in steps if step >= 0]",
        (f"{OPTAX}::test_a_restore_goes_no_further_than_it_is_told_to",),
    ),
    Mutant(
        "a restore keeps the gradients of the open step",
        f"{TRAINER}/optax_engine.py",
        "        self._sums, self._metrics = None, {}\n        if self._replays",
        "        self._metrics = {}\n        if self._replays",
        (f"{IN_WORKER}::test_a_restore_drops_stage_deferral_and_gradients",),
    ),
    Mutant(
        "an old save is committed after a restore has chosen",
        WORKER,
        "        self._quiesce()\n        if self._stepper.current is not None:\n"
        "            self._stepper.current.end_withdrawn",
        "        self._stepper.reset()\n"
        "        if self._stepper.current is not None:\n            self._stepper.current.end_withdrawn",
        (f"{IN_WORKER}::test_an_old_save_is_committed_before_a_restore_chooses",),
    ),
    Mutant(
        "training goes on after a restore that failed",
        WORKER,
        '            self._gate.failed("the last restore_checkpoint did not succeed")\n',
        "            pass\n",
        (f"{IN_WORKER}::test_after_a_restore_that_failed_nothing_is_trained_until_one_succeeds",),
    ),
    Mutant(
        "a trainer without checkpoints is taken for a new one",
        WORKER,
        "        if metadata is None and self._updates:\n",
        "        if metadata is None and not self._gate:\n",
        (f"{IN_WORKER}::test_without_a_checkpoint_a_trained_engine_cannot_go_back_to_the_start",),
    ),
    Mutant(
        "a shutdown forgets the deferred update",
        WORKER,
        '        if state.phase == "open" and state.deferred_step is not None:\n',
        '        if state.phase == "closed" and state.deferred_step is not None:\n',
        (f"{IN_WORKER}::test_shutdown_applies_a_deferred_update_unless_told_to_discard[False]",),
    ),
)
