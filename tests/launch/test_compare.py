"""``shmstage compare`` says equal when all is equal, and says what is not."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from command_line import run_json

from shmstage.settings import BOUNDARIES, Settings
from shmstage.testing import compare
from shmstage.testing.boundary_table import expected_calls
from shmstage.testing.compare import problems_of


@pytest.mark.slow
def test_all_modes_and_the_reference_loop_are_equal(tmp_path: Path) -> None:
    verdict = run_json(
        "compare", "--steps", "3", "--microbatches-per-step", "2", "--checkpoint-every", "2", "--out", "out",
        cwd=tmp_path,
    )  # fmt: skip
    assert verdict["equal"], verdict["problems"]
    assert set(verdict["modes"]) == set(BOUNDARIES)
    assert [verdict["modes"][mode]["staged_boundaries"] for mode in BOUNDARIES] == [0, 0, 2, 2]
    digests = {mode["param_digest"] for mode in verdict["modes"].values()} | {verdict["reference"]["param_digest"]}
    assert len(digests) == 1
    assert verdict["reference"]["param_digest"] != verdict["reference"]["initial_param_digest"]


ROUTED = """rows = 2
steps = 2
microbatches_per_step = 2
max_real_tokens = 400
[source]
factory = "shmstage.demo.source:make_source"
routing_layers = 3
routing_top_k = 2
routing_experts = 24
[engine]
routing_weight = 0.5
"""


@pytest.mark.slow
def test_packed_routing_gives_the_digests_and_parameters_of_dense(tmp_path: Path) -> None:
    """The reference loop has dense routing from numpy, and every id counts in the demo's loss."""
    (tmp_path / "routed.toml").write_text(ROUTED)
    config = ("--config", "routed.toml", "--routing-encoding")
    verdict = run_json("compare", *config, "ragged_packed", "--out", "packed", cwd=tmp_path)
    assert verdict["equal"], verdict["problems"]
    dense = run_json("run", *config, "dense", "--verify", "full", "--out", "dense", cwd=tmp_path)
    for result in verdict["modes"].values():
        for key in ("digests", "payload_digests", "denominators"):
            assert result[key] == dense[key], key
    steps = {out: (tmp_path / out / "steps.jsonl").read_text().splitlines() for out in ("packed/serial", "dense")}
    nbytes = {out: json.loads(lines[0])["bytes"] // 2 for out, lines in steps.items()}
    # per micro-batch of 2 x 256 tokens: 6 words per token; routing of 512 tokens dense, of 400 packed in 5 bits
    assert nbytes["dense"] == 512 * (6 * 4 + 3 * 2 * 2)
    assert nbytes["packed/serial"] == 512 * 6 * 4 + 50 * 3 * 2 * 5 + 50 * 3 + 3 * 4


SETTINGS = Settings(steps=2, microbatches_per_step=1)
REFERENCE: dict[str, Any] = {
    "payload_digests": [["a"], ["b"]], "denominators": [1.0, 2.0], "losses": [0.5, 0.25],
    "initial_param_digest": "i", "param_digest": "p", "steps": 2,
}  # fmt: skip
GOOD: dict[str, Any] = {
    **REFERENCE, "staged_boundaries": 1, "leaked_pools": 0,
    "trainer_calls": expected_calls("staged_before_update", microbatches=[1, 1], microbatches_per_step=1),
}  # fmt: skip


def test_a_good_result_has_no_problems() -> None:
    assert problems_of("staged_before_update", GOOD, REFERENCE, SETTINGS) == []


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"payload_digests": [["a"], ["c"]]}, "payload_digests differ"),
        ({"denominators": [1.0, 3.0]}, "denominators differ"),
        ({"losses": [0.5, 0.26]}, "losses differ"),
        ({"param_digest": "q"}, "param_digest differ"),
        ({"staged_boundaries": 0}, "0 staged boundaries, wanted 1"),
        ({"leaked_pools": 1}, "1 leaked"),
        ({"trainer_calls": GOOD["trainer_calls"][:-1]}, "was nothing, wanted save_checkpoint 2"),
        (
            {"trainer_calls": [c.replace("apply_deferred_update", "update") for c in GOOD["trainer_calls"]]},
            "was update, wanted apply_deferred_update",
        ),
    ],
)
def test_every_difference_is_a_problem(change: dict[str, Any], said: str) -> None:
    problems = problems_of("staged_before_update", {**GOOD, **change}, REFERENCE, SETTINGS)
    assert len(problems) == 1
    assert said in problems[0]


def test_missing_payload_digests_are_a_problem() -> None:
    reference = {**REFERENCE, "payload_digests": [[""], [""]]}
    assert problems_of("serial", {**GOOD, **reference}, reference, SETTINGS)


@pytest.mark.parametrize("columns", ["79", "40"])
def test_table_and_verdict_are_the_output_and_fit_a_terminal(
    columns: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of no terminal's width where there is none: a pipe gets every column whole."""
    monkeypatch.setenv("COLUMNS", columns)
    result = {
        "step_s": {"median": 12.3456}, "boundary_idle_s": {"median": 0.3998, "max": None}, "staged_boundaries": 998,
        "steps": 999, "param_digest": "0123456789",
    }  # fmt: skip
    problems = ["serial: losses differ from [the] reference loop"]
    verdict = {
        "equal": False, "problems": problems, "steps": 999, "microbatches_per_step": 16,
        "modes": dict.fromkeys(BOUNDARIES, result), "reference": {"param_digest": "0123456789"},
    }  # fmt: skip
    monkeypatch.setattr(compare, "compare", lambda settings, say: verdict)
    assert compare.main([]) == 1
    shown = capsys.readouterr()
    assert shown.err == ""
    lines = [line.rstrip() for line in shown.out.splitlines()]
    assert max(map(len, lines)) <= 79
    assert lines[1].split() == ["mode", "step", "ms", "idle", "ms", "max", "idle", "ms", "staged", "params", "equal"]
    assert [line.split() for line in lines[2:6]] == [
        [mode, "12345.6", "399.8", "-", "998/998", "01234567", "no" if mode == "serial" else "yes"]
        for mode in BOUNDARIES
    ]
    assert lines[7:] == [*problems, "NOT EQUAL"]
    assert compare.main(["--json"]) == 1
    assert json.loads(capsys.readouterr().out) == verdict
