from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from shmstage.errors import BundleError, TrajectoryError
from shmstage.packing.bundle import Bundle, read_bundle
from shmstage.packing.import_bundle import import_bundle


def line(**changes: Any) -> dict[str, Any]:
    plain = {"tokens": [1, 2, 3], "loss_mask": [0, 1, 1], "advantages": [1, 2, 3], "old_logprobs": [0, -1.5, -2]}
    return {key: value for key, value in {**plain, **changes}.items() if value is not ...}


def imported(tmp_path: Path, *lines: dict[str, Any] | str) -> Bundle:
    texts = [given if isinstance(given, str) else json.dumps(given) for given in lines]
    (tmp_path / "in.jsonl").write_text("\n".join(texts))
    return import_bundle(tmp_path / "in.jsonl", tmp_path / "out").bundle


def test_a_line_becomes_a_trajectory(tmp_path: Path) -> None:
    given = line(
        trajectory_id="a",
        group_id="g",
        batch_index=3,
        policy_version=2,
        ref_logprobs=[0, 1, 2],
        returns=[3, 4, 5],
        old_values=[6, 7, 8],
        routing=[[[0, 1]], [[2, 1]]],
        experts=4,
    )
    imported(tmp_path, given)
    (trajectory,) = read_bundle(tmp_path / "out").trajectories
    for name, value in given.items():
        got = getattr(trajectory, name)
        assert (got.tolist() if hasattr(got, "tolist") else got) == value


def test_a_number_stands_for_all_tokens(tmp_path: Path) -> None:
    (trajectory,) = imported(tmp_path, line(advantages=0.5, loss_mask=1)).trajectories
    assert trajectory.advantages.tolist() == [0.5] * 3
    assert trajectory.loss_mask.tolist() == [1.0] * 3


def test_missing_ids_come_from_the_line_number(tmp_path: Path) -> None:
    bundle = imported(tmp_path, line(), "", line(), line(trajectory_id=17))
    assert [(t.trajectory_id, t.group_id) for t in bundle.trajectories] == [
        ("line-1", "line-1"),
        ("line-3", "line-3"),
        ("17", "17"),
    ]


def test_a_missing_batch_is_that_of_the_group_else_sixty_four_lines_make_one(tmp_path: Path) -> None:
    lines = [line(group_id="g") if number in (1, 66) else line() for number in range(1, 131)]
    bundle = imported(tmp_path, *lines)
    batches = [trajectory.batch_index for trajectory in bundle.trajectories]
    assert batches[:64] == [0] * 64
    assert batches[64:67] == [1, 0, 1], "line 66 belongs to the group of line 1"
    assert batches[128:] == [2, 2]


@pytest.mark.parametrize(
    ("wrong", "match"),
    [
        (line(tokens=...), "wants tokens"),
        (line(old_logprobs=...), r"wants old_logprobs, got only .*write \"old_logprobs\": \[\.\.\]"),
        (line(loss_mask=...), r"wants loss_mask, .*write \"loss_mask\": 1"),
        (line(advantages=...), "wants advantages"),
        (line(advantages=None), "advantages wants an array of float32, got None"),
        (line(old_logprobs=0), "old_logprobs wants an array of float32, got 0"),
        (line(advantages=[1, 2]), r"advantages wants shape \[3\], one per token, got shape \[2\]"),
        (line(advantages=[1, 2, "3"]), "advantages wants dtype float32"),
        (line(loss_mask=2), r"loss_mask wants 0 or 1 for each token, got 2\.0"),
        (line(tokens=[1, 2, 2**31]), r"tokens wants values from .*2147483648"),
        (line(tokens="abc"), "tokens wants an array of int32"),
        (line(tokens=[1.0, 2.0, 3.0]), "tokens wants dtype int32, got dtype float64"),
        (line(batch_index=-1), "batch_index wants an integer"),
        (line(batch_index=True), "batch_index wants an integer"),
        (line(group_id=[]), "group_id wants 1 to 200 printable"),
        (line(trajectory_id=""), "trajectory_id wants 1 to 200 printable"),
        (line(reward=1), "unknown key 'reward'; known are tokens, loss_mask"),
        (line(digest="x"), "unknown key 'digest'"),
        (line(routing=[[[0, 0]], [[1, 2]]]), r"routing wants distinct expert ids .*got \[0, 0\] at \[0, 0\]"),
        ("[1, 2]", r"wants a JSON object, got \[1, 2\]"),
        ('{"tokens": [1', "not a JSON object"),
        ('{"tokens": [1], "tokens": [1]}', "a key occurs twice"),
        (json.dumps(line(advantages=float("nan"))), "NaN is not a number in JSON"),
        (json.dumps(line(advantages=7)).replace("7", "1e999"), "advantages wants finite float32 values, got inf"),
        ("[" * 100_000, "not a JSON object"),
    ],
    ids=lambda value: value[:60] if isinstance(value, str) else None,
)
def test_a_wrong_line_is_named_with_field_want_and_got(tmp_path: Path, wrong: Any, match: str) -> None:
    with pytest.raises(TrajectoryError, match=rf"in\.jsonl, line 2: .*{match}"):
        imported(tmp_path, line(), wrong)
    assert not (tmp_path / "out").exists()


def test_lines_that_are_no_text_are_named(tmp_path: Path) -> None:
    (tmp_path / "in.jsonl").write_bytes(json.dumps(line()).encode() + b"\n\xff\xfe\n")
    with pytest.raises(TrajectoryError, match="line 2: not a JSON object"):
        import_bundle(tmp_path / "in.jsonl", tmp_path / "out")


def test_files_without_lines_or_without_permission_to_exist_are_refused(tmp_path: Path) -> None:
    (tmp_path / "empty.jsonl").write_text("\n\n")
    with pytest.raises(TrajectoryError, match=r"empty\.jsonl holds 0 trajectories"):
        import_bundle(tmp_path / "empty.jsonl", tmp_path / "out")
    with pytest.raises(TrajectoryError, match=r"nowhere cannot be read: No such file"):
        import_bundle(tmp_path / "nowhere", tmp_path / "out")


def test_the_same_id_on_two_lines_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BundleError, match="trajectory_id 'a' occurs twice"):
        imported(tmp_path, line(trajectory_id="a"), line(trajectory_id="a"))
