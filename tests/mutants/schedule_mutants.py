"""Faults in the order of commands."""

from __future__ import annotations

from mutant import Mutant

STATE = "shmstage/orchestrator/schedule_state.py"
NEXT = "shmstage/orchestrator/schedule_next.py"
EVENTS = "shmstage/orchestrator/schedule_events.py"
SCHEDULE = "tests/orchestrator/test_schedule.py"
TABLE = tuple(
    f"{SCHEDULE}::test_commands_match_the_contracts_table[{case}]"
    for case in ("staged_before_update-2-4-2-True", "staged_after_update-3-2-1-True", "pipelined-1-4-1-False")
)
LATE = "tests/orchestrator/test_schedule_late.py"

MUTANTS = (
    Mutant(
        "the update is never deferred",
        STATE,
        'return config.mode == "staged_before_update" and state.latch == "on" and stage_is_planned(config, state)',
        "return False",
        TABLE,
    ),
    Mutant(
        "a stage is planned at the last step",
        STATE,
        "    if is_last(config, state, state.step):\n        return False\n    first",
        "    first",
        (f"{LATE}::test_no_stage_is_planned_at_the_last_step_of_an_endless_source",),
    ),
    Mutant(
        "a stage is planned although the input is over",
        STATE,
        "return not state.exhausted or packed_as(state, first) is not None",
        "return True",
        (f"{SCHEDULE}::test_input_that_ends_at_a_boundary_ends_the_run_there",
         f"{LATE}::test_no_stage_is_planned_when_the_source_is_known_to_be_exhausted"),
    ),
    Mutant(
        "a deferred update is applied twice",
        EVENTS,
        "    if kind is Kind.APPLY_DEFERRED:\n        state = replace(state, deferred=False)",
        "    if kind is Kind.APPLY_DEFERRED and state.deferred:\n"
        "        state = replace(state, deferred=False, duties=(Kind.APPLY_DEFERRED, *state.duties))",
        TABLE,
    ),
    Mutant(
        "metrics are asked for before the deferred update",
        EVENTS,
        "        duties = [Kind.STAGE, Kind.APPLY_DEFERRED]",
        "        duties = [Kind.STAGE, Kind.GET_METRICS, Kind.APPLY_DEFERRED]",
        TABLE,
    ),
    Mutant(
        "weights are published before the checkpoint",
        EVENTS,
        "    if config.weight_sync != \"off\" and state.step >= config.weights_floor:\n"
        "        duties.append(Kind.SYNC_WEIGHTS)",
        "    if config.weight_sync != \"off\" and state.step >= config.weights_floor:\n"
        "        duties.insert(0, Kind.SYNC_WEIGHTS)",
        TABLE,
    ),
    Mutant(
        "replayed steps publish old weights",
        EVENTS,
        "and state.step >= config.weights_floor:",
        "and state.step >= 0:",
        (f"{LATE}::test_replayed_steps_publish_no_weights_below_the_published_version",),
    ),
    Mutant(
        "books are kept before the update has landed",
        NEXT,
        "    if state.landed < step or state.metrics_of < step:\n        return False\n",
        "",
        (f"{LATE}::test_a_step_line_needs_landed_update_k_ok",),
    ),
    Mutant(
        "the update does not wait for the hook",
        NEXT,
        "    if duty is Kind.APPLY_DEFERRED and _verdict_is_missing(state):\n        return None\n",
        "",
        (f"{LATE}::test_the_call_that_includes_update_k_plus_1_waits_until_the_hook_has_returned",),
    ),
    Mutant(
        "a hook that ends the run lets the deferred update through",
        EVENTS,
        "return replace(state, discarding=True, duties=(), bookkeep=kept)",
        "return replace(state, stopping=True, bookkeep=kept)",
        (f"{LATE}::test_a_hook_that_ends_the_run_drops_what_is_deferred_or_staged_and_keeps_the_steps_before",),
    ),
    Mutant(
        "a micro-batch is trained before its late fields are patched",
        NEXT,
        "        if state.staged is not None and state.patched != micro.key:\n"
        "            return _of(Kind.PATCH, micro)\n",
        "",
        (f"{LATE}::test_recomputed_log_probs_are_scored_after_the_update_and_patched_before_the_forward_call",),
    ),
    Mutant(
        "a stage does not wait for reference log-probs",
        NEXT,
        "return not config.reference_logps or micro.key in state.reference_ready",
        "return True",
        (f"{LATE}::test_reference_log_probs_of_f_are_scored_before_step_ks_last_call_is_sent",),
    ),
    Mutant(
        "synchronous weights are not waited for",
        NEXT,
        'return config.weight_sync == "sync" and trained_here and state.published < version',
        "return False",
        (f"{LATE}::test_synchronous_weights_are_published_before_the_next_step_begins",),
    ),
    Mutant(
        "a lost stage is tried again in the next step",
        EVENTS,
        "return _next_step_if_done(replace(_without_stage(state), in_flight=None, staging_on=False))",
        "return _next_step_if_done(replace(_without_stage(state), in_flight=None))",
        ("tests/orchestrator/test_program.py::"
         "test_a_stage_lost_on_the_way_is_said_once_and_the_run_goes_on_unstaged",),
    ),
    Mutant(
        "a failed stage loses checkpoint k",
        EVENTS,
        "    if at_boundary and not saved:\n",
        "    if False:\n",
        (f"{LATE}::test_if_reference_log_probs_for_f_fail_step_k_is_kept_and_the_run_ends_after_it",),
    ),
    Mutant(
        "the feeder packs two steps ahead",
        EVENTS,
        "    return (state.closed + 2, 0)",
        "    return (state.closed + 3, 0)",
        (f"{SCHEDULE}::test_the_feeder_is_at_most_one_step_ahead",),
    ),
)
