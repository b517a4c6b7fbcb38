"""Faults in what is imported and recorded: padding that trains, groups that mix, bundles that only look whole."""

from __future__ import annotations

from mutant import Mutant

ROLLOUTS = "tests/packing/test_import_rollouts.py"
ADVANTAGES = "tests/packing/test_import_advantages.py"
INPUTS = "tests/ecosystem/test_bundle_inputs.py"
RECORDING = "tests/packing/test_recording.py"
RECORDER = "tests/orchestrator/test_recorder.py"

MUTANTS = (
    Mutant(
        "the deviation divides by n",
        "shmstage/packing/import_advantages.py",
        "(len(rewards) - 1)",
        "len(rewards)",
        (f"{ADVANTAGES}::test_normalised_is_the_difference_to_the_mean_over_the_sample_deviation",),
    ),
    Mutant(
        "what a tool said trains",
        "shmstage/packing/import_verl.py",
        "real_answer if trains is None else trains & real_answer",
        "real_answer",
        (f"{ROLLOUTS}::test_padding_of_a_verl_record_goes_and_what_a_tool_said_stays_untrained",),
    ),
    Mutant(
        "what verl's loss_mask takes out trains",
        "shmstage/packing/import_verl.py",
        '_MASKS = ("response_mask", "loss_mask")',
        '_MASKS = ("response_mask",)',
        (f"{ROLLOUTS}::test_a_loss_mask_takes_out_what_a_tool_said_whatever_the_response_mask_has",),
    ),
    Mutant(
        "a Parquet file takes what its encoding takes",
        "shmstage/packing/import_parquet.py",
        "8 * abs(column.num_values)",
        "0 * abs(column.num_values)",
        (f"{INPUTS}::test_equal_values_of_a_parquet_file_are_counted_as_they_are_unpacked",),
    ),
    Mutant(
        "a log that cannot be written ends the run",
        "shmstage/orchestrator/recorder.py",
        "with suppress(OSError, ValueError):",
        "with suppress(KeyError):",
        (f"{RECORDER}::test_a_full_disk_with_the_log_on_it_ends_the_recording_only",),
    ),
    Mutant(
        "a recording is kept in whatever a link points to",
        "shmstage/packing/recording.py",
        "if self._folder.is_symlink():",
        "if False:",
        (f"{RECORDING}::test_a_link_to_somebody_elses_directory_is_refused_and_nothing_in_it_is_removed",),
    ),
    Mutant(
        "log-probs computed again beat those of the sampler",
        "shmstage/packing/import_verl.py",
        '("rollout_log_probs", "old_log_probs")',
        '("old_log_probs", "rollout_log_probs")',
        (f"{ROLLOUTS}::test_log_probs_of_the_sampler_come_before_those_that_verl_computed_again",),
    ),
    Mutant(
        "answers to one prompt in two steps are one group",
        "shmstage/packing/import_trl.py",
        'return name if batch is None else f"step-{batch}-{name}"',
        "return name",
        (
            f"{ROLLOUTS}::test_without_a_group_id_the_answers_of_one_step_to_one_prompt_are_a_group",
            f"{ROLLOUTS}::test_a_prompt_that_comes_again_in_another_step_is_another_group",
        ),
    ),
    Mutant(
        "padded arrays are taken whole where a mask is missing",
        "shmstage/packing/import_trl.py",
        "if values.row.is_padded:",
        "if False:",
        (f"{INPUTS}::test_arrays_without_a_mask_are_refused_because_padding_cannot_be_told",),
    ),
    Mutant(
        "a header of a .npz file is believed",
        "shmstage/packing/import_npz.py",
        "if nbytes > file_nbytes:",
        "if False:",
        (f"{INPUTS}::test_a_header_that_claims_more_than_the_file_has_is_refused_before_memory_is_asked_for",),
    ),
    Mutant(
        "what is missing in a list of a Parquet file becomes a number",
        "shmstage/packing/import_parquet.py",
        "if not items.null_count and",
        "if",
        (f"{INPUTS}::test_a_value_missing_inside_a_list_of_a_parquet_file_is_named",),
    ),
    Mutant(
        "a recorded micro-batch with empty rows waits for the next one",
        "shmstage/orchestrator/intake.py",
        "self.planner.close_window() if self._keeps_leftovers else self.planner.flush()",
        "self.planner.close_window()",
        ("tests/ecosystem/test_recorded_runs.py::test_the_reference_loop_plans_what_was_recorded_as_the_job_did",),
    ),
    Mutant(
        "a step of which a kill lost a part is recorded as whole",
        "shmstage/orchestrator/recorder.py",
        "(step >= self._first_packed or self._recording.count(step) == self._per_step)",
        "True",
        (f"{RECORDER}::test_a_step_of_which_a_kill_lost_a_part_is_left_out",),
    ),
    Mutant(
        "a disk that does not keep up is given more and more to write",
        "shmstage/orchestrator/recorder.py",
        "if self._waiting and self._held_nbytes + planned.nbytes > max(self._waiting_nbytes, 2 * planned.nbytes):",
        "if False:",
        (f"{RECORDER}::test_a_disk_that_does_not_keep_up_ends_the_recording_and_what_came_before_is_kept",),
    ),
    Mutant(
        "what was packed before a restart is recorded again",
        "shmstage/orchestrator/recorder.py",
        "            if known is not None:\n",
        "            if known is not None and known != digest:\n",
        (f"{RECORDER}::test_what_an_attempt_before_recorded_is_not_recorded_again",),
    ),
    Mutant(
        "a run that is stopped makes a bundle of half its steps",
        "shmstage/orchestrator/recorder.py",
        "or (self._goes_on and not self._is_complete)",
        "or False",
        (f"{RECORDER}::test_a_run_that_is_stopped_leaves_no_bundle_but_its_parts",),
    ),
    Mutant(
        "what another run left is taken for one's own",
        "shmstage/packing/recording.py",
        'read_json(self._folder / WHOSE, "remove it") == whose',
        'bool(read_json(self._folder / WHOSE, "remove it"))',
        (f"{RECORDING}::test_what_another_run_left_is_removed",),
    ),
    Mutant(
        "two living runs record to one place",
        "shmstage/packing/recording.py",
        "if not lock_exclusively(self._lock):",
        "if lock_exclusively(self._lock) is None:",
        (f"{RECORDING}::test_two_living_runs_do_not_record_to_one_place",),
    ),
    Mutant(
        "groups of one name are joined though another came between",
        "shmstage/packing/recording.py",
        'group = f"{step}.{index}.{groups} {trajectory.group_id}"',
        'group = f"{step}.{index} {trajectory.group_id}"',
        (f"{RECORDING}::test_a_replay_gets_trajectories_in_the_order_of_their_arrival_whatever_their_groups_are_called",),
    ),
    Mutant(
        "a shard that was cut off counts as recorded",
        "shmstage/packing/recording.py",
        "return part if sizes and",
        "return part if",
        (f"{RECORDING}::test_a_part_that_is_not_whole_counts_for_nothing",),
    ),
)
