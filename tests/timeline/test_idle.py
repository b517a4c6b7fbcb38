"""The idle estimators give what a device with exact stamps would say."""

from __future__ import annotations

from dataclasses import replace

from shmstage.timeline.idle import BoundaryInstants, boundary_idle_s, calibrated_microbatch_s

MS = 1_000_000
#: L done at 100, update runs 100..115, F was dispatched at 90 and runs 115..215: the device never waits
SEAMLESS = BoundaryInstants(
    last_finished=100 * MS, update_dispatched=95 * MS, update_landed=115 * MS, first_dispatched=96 * MS,
    first_staged_ready=60 * MS, first_ready=215 * MS,
)  # fmt: skip


def test_a_seamless_boundary_has_no_idle() -> None:
    assert boundary_idle_s(SEAMLESS, 0.1) == 0.0


def test_late_dispatch_of_the_first_microbatch_is_idle() -> None:
    late = replace(SEAMLESS, first_dispatched=120 * MS, first_ready=220 * MS)
    assert boundary_idle_s(late, 0.1) == 0.005


def test_a_late_upload_is_idle() -> None:
    late = replace(SEAMLESS, first_staged_ready=135 * MS, first_ready=235 * MS)
    assert boundary_idle_s(late, None) == 0.02


def test_a_wait_before_a_late_update_is_not_a_win() -> None:
    late = replace(
        SEAMLESS, update_dispatched=140 * MS, update_landed=155 * MS, first_dispatched=141 * MS, first_ready=255 * MS
    )
    assert boundary_idle_s(late, 0.1) == 0.04


def test_the_larger_estimator_is_reported() -> None:
    stalled = replace(SEAMLESS, first_ready=245 * MS)
    assert boundary_idle_s(stalled, None) == 0.0
    assert boundary_idle_s(stalled, 0.1) == 0.03


def test_calibration_is_the_median_of_device_times() -> None:
    assert calibrated_microbatch_s([]) is None
    intervals = [(0, 10 * MS, 20 * MS), (30 * MS, 20 * MS, 50 * MS), (40 * MS, 50 * MS, 65 * MS)]
    assert calibrated_microbatch_s(intervals) == 0.015


def test_a_first_microbatch_that_waits_for_its_late_fields_is_idle() -> None:
    patched = replace(SEAMLESS, first_patch_ready=125 * MS, first_ready=225 * MS)
    assert boundary_idle_s(patched, None) == 0.01


def test_time_in_which_the_devices_scored_or_evaluated_is_not_idle() -> None:
    late = replace(SEAMLESS, first_dispatched=155 * MS, first_ready=255 * MS)
    assert boundary_idle_s(late, 0.1) == 0.04
    windows = [(110 * MS, 125 * MS), (120 * MS, 135 * MS), (150 * MS, 200 * MS)]  # they overlap, and reach beyond
    assert boundary_idle_s(late, 0.1, windows) == 0.015


def test_late_fields_that_arrive_late_are_idle() -> None:
    assert boundary_idle_s(replace(SEAMLESS, first_patch_ready=125 * MS, first_ready=225 * MS), 0.1) == 0.01
