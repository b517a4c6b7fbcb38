"""Two results are compared by their spreads, in the direction that their units give."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

BENCH = Path(__file__).parents[1] / "bench"


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Any]:
    monkeypatch.syspath_prepend(BENCH)
    return importlib.import_module


def between(median: float, least: float, greatest: float) -> dict[str, float]:
    return {"median": median, "min": least, "max": greatest, "samples": 5}


def result(figures: object, **more: object) -> dict[str, Any]:
    return {"script": "x", "machine": {"cpu": "one", "load": 0.1}, "figures": figures, "targets": [], **more}


def verdicts(found: dict[str, Any]) -> dict[str, str]:
    return {name: figure["verdict"] for name, figure in found["figures"].items()}


A = {"fill_ms": between(10.0, 9.0, 12.0), "rate_gbps": between(2.0, 1.8, 2.2)}


@pytest.mark.parametrize(
    ("fill_ms", "rate_gbps", "fill", "rate"),
    [
        (11.9, 1.9, "same", "same"),  # within A's spread, 19 % slower as it is
        (13.0, 1.5, "regression", "regression"),
        (8.0, 3.0, "better", "better"),
        (12.1, 2.2, "regression", "same"),
    ],
)
def test_a_figure_is_a_regression_only_beyond_the_spread_of_the_first(
    bench: Callable[[str], Any], fill_ms: float, rate_gbps: float, fill: str, rate: str
) -> None:
    b = {"fill_ms": between(fill_ms, 0.0, 99.0), "rate_gbps": between(rate_gbps, 0.0, 99.0)}
    found = bench("compare").compare(result(A), result(b), 0.05)
    assert verdicts(found) == {"fill_ms": fill, "rate_gbps": rate}
    assert [each["met"] for each in found["targets"]] == [fill != "regression", rate != "regression"]


def test_worse_by_less_than_the_tolerance_is_no_regression(bench: Callable[[str], Any]) -> None:
    compare = bench("compare").compare
    tight, a_little_more = {"x_s": between(1.0, 1.0, 1.0)}, {"x_s": between(1.04, 1.0, 1.1)}
    assert verdicts(compare(result(tight), result(a_little_more), 0.05)) == {"x_s": "same"}
    assert verdicts(compare(result(tight), result(a_little_more), 0.03)) == {"x_s": "regression"}


@pytest.mark.parametrize(
    ("path", "better"),
    [
        (("idle_s",), "lower"),
        (("ms", "fill"), "lower"),
        (("step_s", "9"), "lower"),
        (("peak_over_nbytes",), "lower"),
        (("of_payload",), "lower"),
        (("of_memcpy",), "higher"),
        (("times_numpy",), "higher"),
        (("lists", "gsm8k", "efficiency"), "higher"),
        (("whole_path_ms", "times_grpc"), "higher"),  # the innermost name that has one
        (("rows",), None),
        (("microbatches_per_step",), None),
    ],
)
def test_what_is_better_follows_from_the_unit(
    bench: Callable[[str], Any], path: tuple[str, ...], better: str | None
) -> None:
    found = bench("compare").direction(path)
    assert (found and found[0]) == better


def test_zero_is_compared_as_the_least_that_is_told_apart(bench: Callable[[str], Any]) -> None:
    idle = [{"idle_s": between(value, value, value)} for value in (0.0, 0.0, 1e-7, 1e-3)]
    compare = bench("compare").compare
    assert [verdicts(compare(result(idle[0]), result(b), 0.05))["idle_s"] for b in idle] == [
        "same", "same", "same", "regression",
    ]  # fmt: skip


def test_items_of_a_list_are_matched_by_name_and_not_by_place(bench: Callable[[str], Any]) -> None:
    one = {"list": "gsm8k", "ms": {"fill": between(1.0, 1.0, 1.0)}}
    other = {"list": "codeio", "ms": {"fill": between(50.0, 50.0, 50.0)}}
    found = bench("compare").compare(result({"lists": [one, other]}), result({"lists": [other, one]}), 0.05)
    assert {name: figure["ratio"] for name, figure in found["figures"].items()} == {
        "lists / gsm8k / ms / fill": 1.0, "lists / codeio / ms / fill": 1.0,
    }  # fmt: skip


def test_a_plain_number_has_no_spread_to_be_judged_by(bench: Callable[[str], Any]) -> None:
    found = bench("compare").compare(result({"per_step_s": 1.0}), result({"per_step_s": 3.0}), 0.05)
    assert verdicts(found) == {"per_step_s": "not judged"} and found["figures"]["per_step_s"]["ratio"] == 3.0
    assert not found["targets"]


def test_a_target_that_was_met_and_is_missed_is_a_regression(bench: Callable[[str], Any]) -> None:
    targets = [[{"name": "t", "value": value, "target": 1.0, "met": value <= 1.0}] for value in (0.5, 1.5)]
    before, after = (result(A, targets=each) for each in targets)
    compare = bench("compare").compare
    assert [each["met"] for each in compare(before, after, 0.05)["targets"]] == [True, True, False]
    assert all(each["met"] for each in compare(after, before, 0.05)["targets"])


def test_other_machines_packages_and_settings_are_told(bench: Callable[[str], Any]) -> None:
    other = result(A, steps=9)
    other["machine"] = {"cpu": "two", "load": 7.0, "packages": {"jax": "0.9"}}
    notes = bench("compare").compare(result(A, steps=4), other, 0.05)["notes"]
    assert "another machine: cpu one and two" in notes and "another package: jax None and 0.9" in notes
    assert "another setting: steps 4 and 9" in notes and "other work on the cores: load 0.1 and 7.0" in notes


def run_compare(folder: Path, a: object, b: object, *options: str) -> subprocess.CompletedProcess[str]:
    paths = [folder / "a.json", folder / "b.json"]
    for path, content in zip(paths, (a, b), strict=True):
        path.write_text(content if isinstance(content, str) else json.dumps(content))
    return subprocess.run(
        [sys.executable, str(BENCH / "compare.py"), *map(str, paths), "--results", str(folder / "out"), *options],
        capture_output=True, text=True, timeout=60,
    )  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(
    ("other", "says"),
    [
        ("no json", "Expecting value"),
        ({"machine": {}}, "no figures"),
        ([1, 2], "no figures"),
        (result(A, script="y"), "of x and of y"),
        (result({"other_s": between(1.0, 1.0, 1.0)}), "no figure in common"),
    ],
)
def test_files_that_cannot_be_compared_are_bad_input(tmp_path: Path, other: object, says: str) -> None:
    done = run_compare(tmp_path, result(A), other)
    assert done.returncode == 2 and says in done.stderr and not done.stdout


@pytest.mark.slow
def test_a_regression_is_a_negative_verdict_and_is_kept(tmp_path: Path) -> None:
    worse = {"fill_ms": between(20.0, 19.0, 21.0), "rate_gbps": A["rate_gbps"]}
    done = run_compare(tmp_path, result(A), result(worse), "--json")
    assert done.returncode == 1, done.stderr
    found = json.loads(done.stdout)
    assert {"machine", "figures", "targets"} <= found.keys() and found["regressions"] == 1
    assert found["figures"]["fill_ms"]["ratio"] == 2.0
    assert json.loads((tmp_path / "out" / "compare.json").read_text())["figures"] == found["figures"]
    table = run_compare(tmp_path, result(A), result(A))
    assert table.returncode == 0 and "0 regressions" in table.stdout
