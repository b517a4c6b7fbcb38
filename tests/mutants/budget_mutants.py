"""Faults in the forecast: what is not counted, what is counted against the wrong limit, what is said of it."""

from __future__ import annotations

from mutant import Mutant

FORMULA = "shmstage/budget/formula.py"
TESTS = "tests/budget"
FORMULAS = f"{TESTS}/test_formula.py"

MUTANTS = (
    Mutant(
        "what is scored lies in a buffer that is trained with",
        FORMULA,
        "scored = [layout] if inputs.scores else []",
        "scored = []",
        (f"{FORMULAS}::test_what_is_scored_or_evaluated_has_a_buffer_of_its_own",),
    ),
    Mutant(
        "only reference log-probs keep the parameters that training began with",
        FORMULA,
        "    if inputs.scores:\n        text =",
        "    if inputs.reference:\n        text =",
        (f"{FORMULAS}::test_an_engine_that_scores_keeps_the_parameters_it_began_with",),
    ),
    Mutant(
        "the limit with the fewest bytes left is named, whichever the verdict is of",
        "shmstage/budget/verdict.py",
        "(_WORST_FIRST.index(fit.verdict), fit.headroom_nbytes)",
        "fit.headroom_nbytes",
        (f"{TESTS}/test_verdict.py::test_one_limit_with_low_headroom_is_enough_although_another_binds_in_bytes",),
    ),
    Mutant(
        "brackets in a formula are markup",
        "shmstage/budget/report.py",
        "table.add_row(*map(Text, cells))",
        "table.add_row(*cells)",
        (f"{TESTS}/test_budget_command.py::test_people_get_tables_and_a_verdict_line",),
    ),
    Mutant(
        "held bytes force no checkpoint",
        FORMULA,
        "return 1 if self.journaled and self.max_held_nbytes else self.checkpoint_every",
        "return self.checkpoint_every",
        (f"{FORMULAS}::test_held_bytes_of_a_journaled_source_may_force_a_checkpoint_at_any_step",),
    ),
    Mutant(
        "a journal forgets the checkpoint that waits to be copied",
        FORMULA,
        "unsaved = (SNAPSHOT_COPIES + 1) * inputs.saves_every",
        "unsaved = SNAPSHOT_COPIES * inputs.saves_every",
        (f"{FORMULAS}::test_a_journal_holds_what_no_durable_checkpoint_covers",),
    ),
    Mutant(
        "arrays of the weights pool lie side by side",
        FORMULA,
        "inputs.param_nbytes + inputs.param_leaves * (ALIGNMENT - 1)",
        "inputs.param_nbytes",
        (f"{FORMULAS}::test_the_weights_pool_of_many_small_arrays_takes_no_more_than_is_forecast",),
    ),
    Mutant(
        "a restarted orchestrator asks for the trainer's buffers again",
        "shmstage/budget/check.py",
        "lower_bound(inputs, has_buffers=restarted)",
        "lower_bound(inputs)",
        (f"{TESTS}/test_check.py::test_both_gates_ask_with_the_same_figures",),
    ),
    Mutant(
        "a refusal keeps to itself what gc would free",
        "shmstage/budget/check.py",
        "if 'shm' in binding.bound.scopes else",
        "if 'shm' not in binding.bound.scopes else",
        (f"{TESTS}/test_check.py::test_a_refusal_says_what_gc_would_free",),
    ),
    Mutant(
        "less than a step is suggested to be held",
        "shmstage/budget/search.py",
        "max(inputs.waiting_nbytes(inputs.step_nbytes), 1)",
        "1",
        (f"{TESTS}/test_search.py::test_a_limit_on_what_is_held_is_suggested_down_to_one_step",),
    ),
    Mutant(
        "the file's table beats a flag",
        "shmstage/operate/budget_settings.py",
        "        if key not in args.spelled:\n",
        "        if True:\n",
        (f"{TESTS}/test_budget_command.py::test_what_only_the_budget_is_told_comes_from_a_table_of_the_file",),
    ),
)
