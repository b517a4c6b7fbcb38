"""`record` on a real job, then the same steps on a desk: the digests and denominators of the job's own steps."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from command_line import finish, kill_role, run_json, start, wait_for_step

from shmstage.errors import RunFailedError
from shmstage.orchestrator.input import load_input
from shmstage.orchestrator.layouts import layout_of
from shmstage.packing.recording import Recording
from shmstage.packing.trajectory import Trajectory
from shmstage.settings import Settings
from shmstage.testing import compare
from shmstage.testing.reference_run import steps_of

LIVE = """
import numpy as np
from shmstage import Group, Trajectory

class Source:
    replayable = False                       # rollouts: they cannot be had again
    def groups(self, cursor):
        for number in range(cursor, 100):
            noise = np.random.default_rng(number)
            members = []
            for answer in range(4):
                n = int(noise.integers(20, 60))
                mask = np.r_[np.zeros(8), np.ones(n - 8)].astype(np.float32)
                members.append(Trajectory(
                    trajectory_id=f"t{number}.{answer}", group_id=f"g{number}", batch_index=number // 8,
                    tokens=noise.integers(1, 14, n).astype(np.int32), loss_mask=mask,
                    advantages=noise.standard_normal(n).astype(np.float32),
                    old_logprobs=-np.ones(n, np.float32)))
            yield Group(f"g{number}", number // 8, tuple(members))

def make(settings):
    return Source()
"""
#: a real-token limit lets micro-batches leave with rows that are empty
PLAN = 'rows = 4\ntokens = 128\nmicrobatches_per_step = 2\nmax_real_tokens = 300\nboundary = "staged_before_update"\n'


@pytest.fixture
def job(tmp_path: Path) -> Path:
    (tmp_path / "live.py").write_text(LIVE)
    (tmp_path / "job.toml").write_text(PLAN + '[source]\nfactory = "live:make"\n')
    (tmp_path / "desk.toml").write_text(PLAN)
    return tmp_path


def check_replay(job: Path, summary: dict[str, Any]) -> None:
    """The desk trains what the job trained in its steps 3 and 4, and every mode the same."""
    replay = run_json("run", "--config", "desk.toml", "--bundle", "recorded", "--passes", "1", cwd=job)
    for key in ("digests", "denominators"):
        assert replay[key] == summary[key][2:4], key
    assert replay["warnings"] == []


@pytest.mark.slow
@pytest.mark.timeout(500)
def test_steps_of_a_live_job_are_replayed_with_their_digests_and_denominators(job: Path) -> None:
    summary = run_json(
        "run", "--config", "job.toml", "--steps", "6", "--record", "recorded", "--record-steps", "3:4", cwd=job
    )
    assert summary["warnings"] == []
    assert summary["recorded"]["steps"] == [3, 4]
    assert summary["recorded"]["path"] == str(job / "recorded")
    check_replay(job, summary)
    lines = [json.loads(line) for line in (Path(summary["out"]) / "steps.jsonl").read_text().splitlines()]
    manifest = json.loads((job / "recorded" / "manifest.json").read_text())
    trained = sorted(name for line in lines[2:4] for name in line["trajectory_ids"])
    assert sorted(entry["id"] for entry in manifest["trajectories"]) == trained


@pytest.mark.slow
@pytest.mark.timeout(500)
def test_a_job_whose_processes_are_killed_meanwhile_records_the_same(job: Path) -> None:
    process = start(
        "run", "--config", "job.toml", "--steps", "7", "--record", "recorded", "--record-steps", "3:4", "--out", "out",
        "--checkpoint-every", "2", "--restart-backoff-s", "0.05", "--json", cwd=job,
    )  # fmt: skip
    wait_for_step(process, 2)
    kill_role(process, job / "out", "trainer")
    wait_for_step(process, 3)
    kill_role(process, job / "out", "orchestrator")
    code, out, err = finish(process)
    assert code == 0, err
    summary = json.loads(out)
    assert summary["recorded"]["steps"] == [3, 4], summary["warnings"]
    check_replay(job, summary)
    assert not (job / ".recorded.recording").exists()


def test_compare_does_not_record_whatever_a_jobs_file_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[Settings] = []

    def asked(settings: Settings, *rest: object) -> dict[str, Any]:
        given.append(settings)
        raise RunFailedError("enough is seen")

    monkeypatch.setattr(compare, "run_reference", asked)
    with pytest.raises(RunFailedError, match="enough"):
        compare.compare(Settings(run="r", out=tmp_path, record=tmp_path / "there", record_steps="1:2"))
    assert [(settings.record, settings.record_steps) for settings in given] == [(None, "")]


def test_the_reference_loop_plans_what_was_recorded_as_the_job_did(tmp_path: Path) -> None:
    plan = {"rows": 4, "tokens": 16, "microbatches_per_step": 1, "max_real_tokens": 20}
    recording = Recording(tmp_path / "recorded", {}, goes_on=False)
    for number, lengths in enumerate(((12, 8), (9, 7), (3,))):  # the third would have room in the second
        trajectories = [
            Trajectory(
                trajectory_id=f"t{number}.{length}", tokens=[1] * length, loss_mask=[1] * length,  # type: ignore[arg-type]
                advantages=[1] * length, old_logprobs=[0] * length,  # type: ignore[arg-type]
            )
            for length in lengths
        ]  # fmt: skip
        recording.write(number + 1, 0, number, trajectories, "d")
    recording.finish([1, 2, 3], {"settings": plan})
    recording.close()
    settings = Settings(bundle=tmp_path / "recorded", passes=1, **plan)  # type: ignore[arg-type]
    layout = layout_of(load_input(settings).first, settings, late=())
    packed = [microbatch for _, step in steps_of(settings, layout) for microbatch in step]
    assert [int((each["segment_ids"] > 0).sum()) for each in packed] == [20, 16, 3]


@pytest.mark.slow
def test_what_cannot_be_recorded_is_refused_before_anything_is_started(tmp_path: Path) -> None:
    (tmp_path / "there").mkdir()
    record = ("--record", "there", "--record-steps", "1:2")
    code, _, err = finish(start("run", *record, "--out", "out", cwd=tmp_path))
    assert code == 2
    assert "there exists; a bundle is never overwritten: choose another --record" in err
    assert not (tmp_path / "out").exists()
    code, _, err = finish(start("launch", "--local-cluster", *record, cwd=tmp_path))
    assert code == 2
    assert "launch does not record" in err
    code, _, err = finish(start("compare", *record, cwd=tmp_path))
    assert code == 2
    assert "--record: compare runs every mode from the start; leave it out" in err
