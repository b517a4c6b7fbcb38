"""The latch, judged by hand-made boundaries in every direction."""

from __future__ import annotations

import math

import pytest

from shmstage.orchestrator.latch import BAD_BOUNDARIES, PROBE_AFTER, Latch
from shmstage.timeline.staging import StagingCost, staging_cost

GOOD = StagingCost(upload_s=1.0, exposed_s=0.2, overhead_s=0.3)
BAD = StagingCost(upload_s=1.0, exposed_s=0.8, overhead_s=0.2)
SMALL = StagingCost(upload_s=0.04, exposed_s=9.0, overhead_s=9.0)


def latch(**more: object) -> Latch:
    return Latch(**{"enabled": True, "min_upload_s": 0.05, **more})  # type: ignore[arg-type]


def feed(latch: Latch, *costs: StagingCost | None) -> str:
    for cost in costs:
        latch.boundary(cost)
    return latch.level


def test_staging_pays_while_exposed_and_overhead_are_less_than_the_upload() -> None:
    assert GOOD.pays
    assert not BAD.pays


def test_three_bad_boundaries_running_move_the_stage_behind_the_update_then_switch_it_off() -> None:
    it = latch()
    assert feed(it, *[BAD] * (BAD_BOUNDARIES - 1)) == "on"
    assert feed(it, BAD) == "after_update"
    assert "exposed 0.800 s + overhead 0.200 s >= upload 1.000 s" in it.reason
    assert feed(it, *[BAD] * (BAD_BOUNDARIES - 1)) == "after_update"
    assert feed(it, BAD) == "off"


def test_one_boundary_that_pays_starts_the_count_anew() -> None:
    assert feed(latch(), BAD, BAD, GOOD, BAD, BAD) == "on"


def test_a_mode_that_stages_after_the_update_goes_off_at_once() -> None:
    assert feed(latch(staged_after=True), BAD, BAD, BAD) == "off"


@pytest.mark.parametrize("level", ["after_update", "off"])
def test_after_twenty_boundaries_it_probes_again(level: str) -> None:
    it = latch(staged_after=level == "off")
    assert feed(it, BAD, BAD, BAD) == level
    quiet = None if level == "off" else GOOD
    assert feed(it, *[quiet] * (PROBE_AFTER - 1)) == level
    assert feed(it, quiet) == "on"
    assert "probing" in it.reason
    assert feed(it, BAD, BAD, BAD) == level, "a probe that fails goes down again"


def test_small_uploads_and_unstaged_boundaries_are_not_judged() -> None:
    assert feed(latch(), *[SMALL] * 30, *[None] * 30) == "on"
    assert feed(latch(), BAD, BAD, SMALL, None, BAD) == "after_update", "they do not interrupt a row of bad ones either"


def test_a_latch_that_is_switched_off_never_moves() -> None:
    it = latch(enabled=False)
    assert feed(it, *[BAD] * 30) == "on"
    assert it.reason == "latch = false"


# --- where its figures come from ------------------------------------------------------------------------

MS = 1_000_000


def cost(**more: object) -> StagingCost:
    instants = {
        "upload_begin": 10 * MS, "staged_ready": 60 * MS, "last_ready": 100 * MS, "update_dispatched": 90 * MS,
        "waited_elsewhere_s": 0.0, "microbatch_s": [0.08, 0.08, 0.08],
    }  # fmt: skip
    return staging_cost(**{**instants, **more})  # type: ignore[arg-type]


def test_an_upload_that_ends_before_the_last_microbatch_costs_nothing() -> None:
    assert cost() == StagingCost(upload_s=0.05, exposed_s=0.0, overhead_s=0.0)


def test_exposed_is_what_outlasts_the_last_microbatch_and_is_counted_once() -> None:
    late = cost(staged_ready=130 * MS, update_dispatched=130 * MS)
    assert late.exposed_s == pytest.approx(0.03)
    assert late.overhead_s == 0.0


def test_overhead_is_an_update_held_back_by_control_alone() -> None:
    assert cost(update_dispatched=107 * MS).overhead_s == pytest.approx(0.007)
    assert cost(update_dispatched=107 * MS, staged_ready=105 * MS).overhead_s == pytest.approx(0.002)


def test_a_wait_for_a_snapshot_or_a_hook_is_not_stagings_overhead() -> None:
    assert cost(update_dispatched=407 * MS, waited_elsewhere_s=0.3).overhead_s == pytest.approx(0.007)
    assert cost(update_dispatched=407 * MS, waited_elsewhere_s=math.inf).overhead_s == 0.0


def test_overhead_is_what_the_last_microbatch_took_longer_than_the_median_of_its_step() -> None:
    assert cost(microbatch_s=[0.08, 0.08, 0.1]).overhead_s == pytest.approx(0.02)
    assert cost(microbatch_s=[0.08, 0.08, 0.06]).overhead_s == 0.0
    assert cost(microbatch_s=[0.5]).overhead_s == 0.0
