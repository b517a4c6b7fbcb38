"""Late fields, hooks, evaluation and synchronous weights, from the command line with real processes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from command_line import run_json

from shmstage.demo.source import recorded_bundle

HOOK = '''
class Hook:
    def __init__(self, settings):
        self.last = settings["last"]

    def on_checkpoint(self, step, facts):
        print("judged", step, facts["eval"] is not None, flush=True)
        return step < self.last

    def on_step_end(self, line):
        raise OSError("exporter gone")


def make(settings):
    return Hook(settings)
'''


@pytest.mark.slow
def test_all_modes_train_the_same_with_recomputed_and_reference_log_probs(tmp_path: Path) -> None:
    verdict = run_json(
        "compare", "--steps", "3", "--microbatches-per-step", "2", "--recompute-old-logps", "--reference-logps",
        "--out", "all", cwd=tmp_path,
    )  # fmt: skip
    assert verdict["equal"], verdict["problems"]
    assert verdict["modes"]["staged_before_update"]["staged_boundaries"] == 2
    calls = verdict["modes"]["staged_before_update"]["trainer_calls"]
    boundary = calls.index("apply_deferred_update")
    assert calls[boundary - 1 : boundary + 5] == [
        "stage_fwd_bwd 2.0", "apply_deferred_update", "get_metrics 1", "per_token_logps 2.0 actor",
        "patch_staged 2.0", "fwd_bwd_staged 2.0",
    ]  # fmt: skip
    lines = [json.loads(line) for line in (tmp_path / "all/staged_before_update/steps.jsonl").read_text().splitlines()]
    digests = [sorted(micro) for line in lines for micro in line["late_digests"]]
    assert digests == [["old_per_token_logps", "ref_per_token_logps", "sampler_is_weights"]] * 6


@pytest.mark.slow
def test_a_hook_sees_evaluated_checkpoints_and_may_end_the_run(tmp_path: Path) -> None:
    (tmp_path / "my_hook.py").write_text(HOOK)
    (tmp_path / "run.toml").write_text(
        f'boundary = "staged_before_update"\nsteps = 9\ncheckpoint_every = 2\neval_every = 2\nweight_sync = "sync"\n'
        f'eval_bundle = "{recorded_bundle()}"\n[hooks]\nfactory = "my_hook:make"\nlast = 4\n'
    )
    summary = run_json("run", "--config", "run.toml", "--out", "out", cwd=tmp_path)
    assert summary["ended_by"] == "hook at checkpoint 4"
    assert summary["param_digest"] not in ("", summary["initial_param_digest"])
    assert summary["steps"] == 4
    assert summary["leaked_pools"] == 0
    out = tmp_path / "out"
    log = (out / "orchestrator.log").read_text()
    assert [line for line in log.splitlines() if line.startswith("judged")] == [
        "judged 0 False", "judged 2 True", "judged 4 True",
    ]  # fmt: skip
    assert log.count("on_step_end raised OSError: exporter gone") == 1
    calls = [json.loads(line) for line in (out / "trainer_calls.jsonl").read_text().splitlines()]
    # before the first step: compiled at its first use, the evaluation would lie inside a boundary
    assert [call["uses"] for call in calls if call["command"] == "compile"] == [["evaluate", "train"]]
    lines = [json.loads(line) for line in (out / "steps.jsonl").read_text().splitlines()]
    assert [line["eval"] is not None for line in lines] == [False, True, False, True]
    assert lines[1]["eval"]["denominator"] == lines[3]["eval"]["denominator"] > 0  # the last one is whole, too
    verdicts = [json.loads(line) for line in (out / "hooks.jsonl").read_text().splitlines()]
    assert [(v["step"], v["go_on"]) for v in verdicts] == [(0, True), (2, True), (4, False)]
