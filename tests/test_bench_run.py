"""``make bench``: every script runs, whatever the ones before it did, and the closing table says how it went."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

BENCH = Path(__file__).parents[1] / "bench"
KEEPS = """
import json, pathlib, sys
target = {"name": "speed", "value": 3.0, "target": 2.0, "met": %s}
pathlib.Path(sys.argv[1]).write_text(json.dumps({"targets": [target], "problems": %s}))
"""


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Any]:
    monkeypatch.syspath_prepend(BENCH)
    return importlib.import_module


@pytest.mark.slow
def test_a_failing_script_stops_nothing_and_a_missed_target_is_no_failure(
    bench: Callable[[str], Any], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    run = bench("run")
    scripts = {
        "missing_its_target": KEEPS % ("False", "[]"),
        "inexact": KEEPS % ("True", "['two different things']"),
        "crashing": "raise SystemExit(3)",
        "keeping_nothing": "",
        "printing": "print('{\"flat\": true}')",
        "hanging": "import signal; signal.pause()",
        "good": KEEPS % ("True", "[]"),
    }
    for name, text in scripts.items():
        (tmp_path / f"{name}.py").write_text(text)
    for name in ("good", "keeping_nothing", "crashing"):
        (tmp_path / f"{name}.json").write_text('{"targets": [{"name": "of the run before"}]}')
    outcomes = run.run_all(
        [
            run.Script(name, str(tmp_path / f"{name}.json"), 1.0 if name == "hanging" else 60.0, name != "printing")
            for name in scripts
        ],
        tmp_path,
        tmp_path,
    )
    assert {each.script.name: each.problem for each in outcomes} == {
        "missing_its_target": "", "inexact": "FAILED: two different things", "crashing": "FAILED, exit code 3",
        "keeping_nothing": "FAILED, it kept no result", "printing": "", "hanging": "FAILED, not done within 1 s",
        "good": "",
    }  # fmt: skip
    assert [[target["name"] for target in each.targets] for each in outcomes] == [["speed"], ["speed"]] + 4 * [[]] + [
        ["speed"]
    ]
    assert '"flat": true' in (tmp_path / "printing.json").read_text()
    run.print_closing_table(outcomes, 90.0)
    out = capfd.readouterr().out
    assert "MISSED  speed" in out and "2 of 3 targets met, 4 scripts failed" in out and "1.5 minutes" in out


@pytest.mark.parametrize("suite", ["quick", "full"])
def test_the_suites_name_scripts_that_exist(bench: Callable[[str], Any], suite: str) -> None:
    missing = [script.name for script in bench("run").SUITES[suite] if not (BENCH / f"{script.name}.py").is_file()]
    assert not missing


def test_the_quick_suite_is_the_five_measuring_scripts(bench: Callable[[str], Any]) -> None:
    run = bench("run")
    assert [script.name for script in run.SUITES["quick"]] == ["boundary", "handoff", "pack", "memory", "overhead"]
    boundary = run.SUITES["quick"][0].arguments
    assert "--microbatches 3" in boundary and "A0,A0',A2,A3" in boundary
