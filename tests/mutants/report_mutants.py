"""Faults in what a report says of a boundary: instants, legs, the page's text, what it overwrites."""

from __future__ import annotations

from mutant import Mutant

BOUNDARIES = "shmstage/timeline/boundaries.py"
LEGS = "shmstage/timeline/legs.py"
MICROBATCHES = "shmstage/timeline/microbatches.py"
RUN_REPORT = "shmstage/timeline/run_report.py"
TEST_IDLE = "tests/timeline/test_idle.py"
TEST_LEGS = "tests/timeline/test_legs.py"
TEST_MICROBATCHES = "tests/timeline/test_microbatches.py"
TEST_REPORT = "tests/timeline/test_run_report.py"

MUTANTS = (
    Mutant(
        "the last cause is blamed for an idle",
        LEGS,
        "    for leg, intervals in causes:\n",
        "    for leg, intervals in causes[::-1]:\n",
        (f"{TEST_LEGS}::test_a_partition_covers_the_idle_once_and_blames_the_first",),
    ),
    Mutant(
        "idle that has a cause is counted again as control",
        LEGS,
        "        left = difference(left, covering)\n",
        "",
        (f"{TEST_LEGS}::test_a_serial_boundary_goes_where_the_plan_says",),
    ),
    Mutant(
        "a copy that an update waits for is the update's",
        LEGS,
        '        ("snapshots", seen.copies_in_the_way),\n',
        "",
        (f"{TEST_LEGS}::test_a_copy_that_the_update_waits_for_is_of_the_snapshots",),
    ),
    Mutant(
        "what goes on beside a slow first micro-batch is blamed for it",
        LEGS,
        '        ("device", seen.slow_first),\n',
        "",
        (f"{TEST_LEGS}::test_a_first_microbatch_that_begins_late_without_a_reason_is_the_devices",),
    ),
    Mutant(
        "windows in which the devices scored are not looked for",
        BOUNDARIES,
        'return [(event.t, event.end) for event in attempt.spans["scored"].between(begin, end)]',
        "return []",
        (f"{TEST_IDLE}::test_the_estimate_is_what_the_device_waited",),
    ),
    Mutant(
        "the second run of a micro-batch is taken for a long first one",
        BOUNDARIES,
        "        first_ready=first.ready,\n",
        "        first_ready=first.finished,\n",
        (f"{TEST_IDLE}::test_a_first_microbatch_that_is_run_again_is_not_taken_for_a_late_one",),
    ),
    Mutant(
        "a restore does not begin another attempt",
        MICROBATCHES,
        'e.figures.get("command") == "restore_checkpoint"',
        'e.figures.get("command") == "restore"',
        (f"{TEST_MICROBATCHES}::test_every_restore_begins_an_attempt",),
    ),
    Mutant(
        "processes of two hosts are drawn on two clocks",
        MICROBATCHES,
        "event if not shift else _shifted(event, shift)",
        "event",
        (f"{TEST_MICROBATCHES}::test_an_orchestrator_on_another_host_is_put_on_the_trainers_clock",),
    ),
    Mutant(
        "a boundary that was rolled back is drawn for the one that counts",
        RUN_REPORT,
        "        if line.idle_s is None:\n",
        "        if line.step < 0:\n",
        (f"{TEST_REPORT}::test_an_attempt_that_was_rolled_back_is_not_drawn_for_the_one_that_counts",),
    ),
    Mutant(
        "a trajectory's name ends the page's script",
        "shmstage/timeline/page.py",
        '.replace("<", "\\\\u003c")',
        "",
        (f"{TEST_REPORT}::test_embedded_text_comes_back_as_it_was",),
    ),
    Mutant(
        "a warning becomes markup",
        "shmstage/timeline/page_text.py",
        'lines += [f"{name}{escape(text)}" for text in report.warnings]',
        'lines += [f"{name}{text}" for text in report.warnings]',
        (f"{TEST_REPORT}::test_text_from_files_never_becomes_markup",),
    ),
    Mutant(
        "figures that differ from the summary are not said",
        "shmstage/timeline/run_record.py",
        "        if getattr(told, name) != getattr(counted, name)\n",
        "        if getattr(told, name) is None\n",
        (f"{TEST_REPORT}::test_a_summary_that_says_something_else_is_said",),
    ),
    Mutant(
        "a report may overwrite any file",
        "shmstage/operate/report_command.py",
        "if args.out.exists() and not _may_be_replaced(args.out):",
        "if args.out.exists() and args.out.is_symlink():",
        ("tests/operate/test_report.py::test_bad_input_is_refused_before_anything_is_written",),
    ),
)
