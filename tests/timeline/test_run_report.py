"""What a report says: figures of summary.json, legs of all boundaries, what is left out of a large run, what is odd."""

from __future__ import annotations

import json
from dataclasses import replace
from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from made_runs import MS, Made, Plan, made

from shmstage.orchestrator.summary import summarise
from shmstage.timeline.page import embedded, filled, page_of
from shmstage.timeline.run_record import RunRecord, figures_of, step_figures
from shmstage.timeline.run_report import report_of
from shmstage.timeline.sampling import BOUNDARIES_KEPT, POINTS, groups, kept, thinned

HOSTILE = '</script><img src=x onerror="alert(1)">{{data}} & "quoted" \u2028'


def record(made_up: Made, /, **more: Any) -> RunRecord:
    figures = [line for raw in made_up.lines if (line := step_figures(raw)) is not None]
    facts: dict[str, Any] = {
        "run": "made", "out": "/runs/made", "state": "finished", "verdict": "it has made all its steps",
        "boundary": made_up.plan.mode, "steps_planned": made_up.plan.steps, "lines": figures,
        "summary": summarise(made_up.lines), "processes": made_up.processes(),
    }  # fmt: skip
    return RunRecord(**(facts | more))


@pytest.mark.parametrize("mode", ["serial", "staged_before_update"])
def test_figures_are_those_of_the_summary_and_agree_with_events_and_lines(mode: str) -> None:
    run = made(Plan(mode=mode, steps=7, jitter=0.2))
    report = report_of(record(run))
    summary = summarise(run.lines)
    assert report.figures.idle_median == summary["boundary_idle_s"]["median"]
    assert report.figures.step_max == summary["step_s"]["max"]
    assert report.figures.staged_boundaries == summary["staged_boundaries"]
    assert report.figures.source == "summary.json"
    assert report.warnings == []
    assert (report.measured, report.with_events) == (6, 6)
    assert sum(leg.idle_s for leg in report.legs) == pytest.approx(sum(run.truth.values()) / 1e9, abs=1e-9)


def test_a_summary_that_says_something_else_is_said() -> None:
    run = made(Plan())
    told = {**summarise(run.lines), "steps": 7, "step_s": {"median": 1.0, "max": None}}
    figures, odd = figures_of(record(run, summary=told))
    assert figures.steps == 7 and figures.step_median == 1.0
    assert [text.split(":")[0] for text in odd] == ["steps", "median step time", "longest step"]


def test_without_a_summary_figures_are_the_lines_so_far() -> None:
    run = made(Plan(steps=4))
    figures = report_of(record(run, summary=None, state="running")).figures
    assert figures.source == "steps.jsonl"
    assert figures.idle_median == summarise(run.lines)["boundary_idle_s"]["median"]


def test_without_events_boundaries_are_drawn_from_the_lines() -> None:
    run = made(Plan(steps=5))
    report = report_of(record(run, processes=[]))
    assert (report.measured, report.with_events) == (4, 0)
    assert {step: b["idle"] for step, b in report.boundaries.items()} == {k + 1: ns for k, ns in run.truth.items()}
    assert set(report.boundaries[3]["lanes"]) == {"uploads", "device", "idle"}


def test_a_run_killed_before_its_first_line_shows_what_its_events_tell() -> None:
    run = made(Plan(steps=4))
    report = report_of(record(replace(run, lines=[]), summary=None, state="killed"))
    assert report.measured == 3 and set(report.boundaries) == {2, 3, 4}
    assert "4" in page_of([report])


def test_events_that_lack_a_step_give_way_to_its_line() -> None:
    run = made(Plan(steps=5))
    run.events = [e for e in run.events if not (e.event == "staged" and e.step == 3)]
    report = report_of(record(run))
    assert (report.measured, report.with_events) == (4, 3)


def test_an_attempt_that_was_rolled_back_is_not_drawn_for_the_one_that_counts() -> None:
    first = made(Plan(steps=5))
    again = made(Plan(first_step=3, steps=4, begin=first.end + 50 * MS, upload=90 * MS))
    lines = [line for line in first.lines if line["step"] < 3] + [{**line, "attempt": 2} for line in again.lines]
    run = Made(first.plan, lines=lines)
    report = report_of(record(run, processes=[*first.processes(1), *again.processes(2)]))
    assert report.attempts == [(1, 1, 2), (2, 3, 6)]
    assert {s: b["idle"] for s, b in report.boundaries.items()} == {
        2: first.truth[1], **{k + 1: ns for k, ns in again.truth.items()},
    }  # fmt: skip


def test_what_is_odd_is_said() -> None:
    run = made(Plan(steps=3))
    run.lines[2]["boundary_idle_s"] = 9.0
    processes = run.processes()
    processes[1].dropped, processes[0].unread, processes[0].beginning_lost = 5, 2, True
    report = report_of(
        record(run, processes=processes, failures={"trainer": "EngineError: boom"}, notes=["odd"], state="failed")
    )
    text = "\n".join(report.warnings)
    for wanted in (
        "the trainer failed: EngineError: boom", "odd", "5 could not be written, or came faster", "2 lines are damaged",
        "made room",
    ):  # fmt: skip
        assert wanted in text
    assert "another idle than the step line" in text and "at step 3" in text


def test_integers_that_no_float_can_be_are_not_known() -> None:
    line = {"step": 1, "attempt": 1, "step_s": 10**400, "upload_s": 2, "instants_ns": {"ready": [10**400, 5]}}
    figures = step_figures(line)
    assert figures is not None and figures.seconds == {"upload_s": 2.0}
    assert figures.instants is not None and list(figures.instants.microbatches) == [1]


def test_lanes_add_up_and_lie_in_their_range() -> None:
    report = report_of(record(made(Plan(mode="pipelined", scoring=5 * MS, checkpoint_every=1))))
    for boundary in report.boundaries.values():
        assert sum(boundary["legs"]) == boundary["idle"]
        assert sum(end - begin for row in boundary["lanes"]["idle"] for begin, end, _, _ in row) == boundary["idle"]
        begin, end = boundary["range"]
        for rows in boundary["lanes"].values():
            for row in rows:
                assert all(begin <= span[0] < span[1] <= end for span in row)
                assert all(a[1] <= b[0] for a, b in pairwise(row)), "rows do not overlap"
        (device,) = boundary["lanes"]["device"]
        assert [label for *_, label in device][:2] == [f"{boundary['step'] - 1}.0", f"{boundary['step'] - 1}.1"]
        assert begin <= boundary["window"][0] < boundary["window"][1] <= end


# --- large runs ---------------------------------------------------------------------------------------------


@given(st.integers(0, 5000), st.integers(1, 500))
def test_groups_hold_every_position_once_and_are_few(count: int, points: int) -> None:
    found = groups(count, points)
    assert [k for group in found for k in group] == list(range(count))
    assert len(found) <= points


@given(st.lists(st.floats(0, 9), max_size=700))
def test_boundaries_with_the_most_idle_are_kept(idle: list[float]) -> None:
    found = kept(idle)
    assert len(found) == len(set(found)) == min(len(idle), len(found)) <= max(BOUNDARIES_KEPT, 0)
    if idle:
        assert max(idle) == idle[found[0]]
        assert {0, len(idle) - 1} <= set(found)


def test_a_peak_is_never_thinned_out() -> None:
    samples = [(t, 1000 if t == 777 else t % 5) for t in range(5000)]
    thin = thinned(samples)
    assert len(thin) <= 300 and (777, 1000) in thin


@pytest.mark.slow
def test_ten_thousand_steps_make_a_small_page() -> None:
    run = made(Plan(mode="staged_after_update", steps=3, upload=100 * MS))
    figures = [line for raw in run.lines if (line := step_figures(raw)) is not None]
    lines = [replace(figures[1 + k % 2], step=k + 1) for k in range(10_000)]
    for k, line in enumerate(lines):
        assert line.instants is not None
        lines[k] = replace(line, instants=replace(line.instants, step=k + 1))
    report = report_of(record(run, lines=lines, processes=[], summary=None))
    assert len(report.series["steps"]) <= POINTS and len(report.series["legs"]) <= POINTS
    assert report.series["grouped"] and len(report.boundaries) <= BOUNDARIES_KEPT
    page = page_of([report])
    assert len(page) < 1 << 20
    assert f"summed up in {POINTS} groups" in page and "Kept here: " in page
    idle = [line.idle_s for line in lines if line.idle_s is not None]
    first = report.series["steps"][0]
    assert first[0] == 1 and first[2] == round(median(idle[: first[1]]), 9) and first[3] == round(max(idle), 9)


# --- the page's text ----------------------------------------------------------------------------------------


class _Elements(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        self.text.append(data)


@pytest.mark.parametrize("runs", [1, 2])
def test_text_from_files_never_becomes_markup(runs: int) -> None:
    run = made(Plan(mode="serial", steps=3))
    for line in run.lines:
        line |= {"mode": HOSTILE, "latch": {"level": HOSTILE, "reason": HOSTILE}, "not_staged_because": HOSTILE}
    run.events = [
        replace(e, id=HOSTILE, figures={k: HOSTILE if k in ("command", "kind") else v for k, v in e.figures.items()})
        if e.event in ("called", "executed", "ticketed") else e
        for e in run.events
    ]  # fmt: skip
    hostile = record(
        run, run=HOSTILE, out=HOSTILE, state=HOSTILE, verdict=HOSTILE, failures={HOSTILE: HOSTILE}, notes=[HOSTILE],
        restarts={HOSTILE: 2},
    )  # fmt: skip
    page = page_of([report_of(hostile)] * runs, [HOSTILE])
    parser = _Elements()
    parser.feed(page)
    assert [tag for tag, _ in parser.tags].count("script") == 2
    assert "img" not in [tag for tag, _ in parser.tags]
    assert not any(name.startswith("on") for _, attributes in parser.tags for name in attributes)
    assert any(HOSTILE in text for text in parser.text), "it is still shown"
    (data,) = [text for text in parser.text if text.startswith('{"legs"')]
    assert json.loads(data)["runs"][0]["name"] == HOSTILE


@given(st.text())
def test_embedded_text_comes_back_as_it_was(text: str) -> None:
    raw = embedded({"text": text})
    assert not set(raw) & set("<>&\u2028\u2029") and json.loads(raw) == {"text": text}


def test_what_a_part_says_is_not_read_as_a_marker() -> None:
    assert filled("{{a}}{{b}}", {"a": "{{b}}", "b": "x"}) == "{{b}}x"


def test_the_page_names_no_other_address() -> None:
    page = page_of([report_of(record(made(Plan(steps=3))))])
    links = [a for _, a in _parsed(page).tags if "href" in a or "src" in a]
    assert [a.get("href") for a in links] == ["data:,", "#boundary"]
    assert "http" not in page.replace("http-equiv", "").replace("http://www.w3.org/2000/svg", "")


def _parsed(page: str) -> _Elements:
    parser = _Elements()
    parser.feed(page)
    return parser


def test_the_parts_of_the_page_are_part_of_the_package() -> None:
    text = (Path(__file__).parents[2] / "pyproject.toml").read_text()
    for suffix in ("html", "css", "js"):
        assert f'"timeline/page*.{suffix}"' in text
