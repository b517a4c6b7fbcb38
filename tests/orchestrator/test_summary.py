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
