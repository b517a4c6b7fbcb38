from __future__ import annotations

from shmstage.trainer.timing import KEPT_STEPS, StepTiming

SECOND = 10**9


def test_stamps_are_told_as_seconds_before_the_reply() -> None:
    timing = StepTiming()
    timing.dispatched(3, "3.0@0:2", 0, 10 * SECOND, 11 * SECOND)
    timing.dispatched(3, "update.3", -1, 12 * SECOND, 13 * SECOND)
    timing.ready(3, "3.0@0:2", 14 * SECOND)
    report = timing.report(3, 20 * SECOND)
    assert report == {
        "step": 3,
        "microbatches": [
            {
                "request_id": "3.0@0:2",
                "index": 0,
                "dispatch_begin_ago_s": 10.0,
                "dispatch_end_ago_s": 9.0,
                "ready_ago_s": 6.0,
                "replay": None,
            }
        ],
        "update": {
            "request_id": "update.3",
            "index": -1,
            "dispatch_begin_ago_s": 8.0,
            "dispatch_end_ago_s": 7.0,
            "ready_ago_s": None,
            "replay": None,
        },
    }


def test_a_replayed_microbatch_is_ready_when_its_replay_is() -> None:
    timing = StepTiming()
    timing.dispatched(3, "3.0@0:2", 0, 10 * SECOND, 11 * SECOND)
    timing.ready(3, "3.0@0:2", 12 * SECOND)
    timing.replayed(3, "3.0@0:2", 13 * SECOND, 14 * SECOND)
    (microbatch,) = timing.report(3, 20 * SECOND)["microbatches"]
    assert microbatch["ready_ago_s"] is None
    timing.ready(3, "3.0@0:2", 15 * SECOND, replay=True)
    (microbatch,) = timing.report(3, 20 * SECOND)["microbatches"]
    assert microbatch["replay"] == {"dispatch_begin_ago_s": 7.0, "dispatch_end_ago_s": 6.0, "ready_ago_s": 5.0}
    assert (microbatch["dispatch_begin_ago_s"], microbatch["ready_ago_s"]) == (10.0, 5.0)


def test_an_unknown_step_has_no_times() -> None:
    assert StepTiming().report(1, 0) == {"step": 1, "microbatches": [], "update": None}


def test_only_the_last_steps_are_kept() -> None:
    timing = StepTiming()
    for step in range(1, KEPT_STEPS + 2):
        timing.dispatched(step, f"{step}.0@0:2", 0, 0, 0)
    assert timing.report(1, 0)["microbatches"] == []
    assert timing.report(2, 0)["microbatches"] != []
