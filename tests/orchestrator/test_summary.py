"""The summary counts from step lines alone."""

from __future__ import annotations

from typing import Any

from shmstage.orchestrator.summary import summarise


def line(step: int, **more: Any) -> dict[str, Any]:
    base = {
        "step": step, "mode": "serial", "boundary_idle_s": None if step == 1 else 0.25 * step, "staged": False,
        "step_s": float(step), "denominator": 10.0, "loss": 0.5, "digests": ["d"], "payload_digests": [""],
        "trajectory_passes": [1, 1], "trajectory_ids": [f"a{step}", f"b{step}"],
    }  # fmt: skip
    return {**base, **more}


def test_figures_come_from_the_lines() -> None:
    got = summarise([line(1), line(2, staged=True), line(3, staged=True)])
    assert (got["steps"], got["staged_boundaries"], got["step_s"]["median"]) == (3, 2, 2.0)
    assert got["boundary_idle_s"] == {"median": 0.625, "max": 0.75}
    assert got["trajectories"] == {"distinct": 6, "trained": 6, "min_times": 1, "max_times": 1}


def test_a_trajectory_trained_twice_in_one_pass_shows() -> None:
    got = summarise([line(1), line(1)])
    assert got["trajectories"] == {"distinct": 2, "trained": 4, "min_times": 2, "max_times": 2}
    assert summarise([line(1), line(1, trajectory_passes=[2, 2])])["trajectories"]["max_times"] == 1


def test_no_lines_is_no_crash() -> None:
    assert summarise([])["boundary_idle_s"] == {"median": None, "max": None}


def test_what_a_person_should_look_at_is_a_warning() -> None:
    got = summarise([line(1), line(2, loss=float("nan")), line(3, denominator=0.0)])
    assert got["warnings"] == [
        "the loss of 1 steps is not finite, the first is step 2",
        "the denominator of 1 steps is 0, nothing trains in them; the first is step 3",
    ]
    assert summarise([line(1)])["warnings"] == []


def test_payload_digests_that_nobody_took_are_none() -> None:
    assert summarise([line(1)])["payload_digests"] is None
    assert summarise([line(1, payload_digests=["a"])])["payload_digests"] == [["a"]]
