"""The report in headless Chromium: it renders, asks for nothing, fits a phone, obeys the keyboard, says the truth."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from browser import DESK, PHONE, chromium
from made_runs import MS, Made, Plan, made, write_run

from shmstage.cli import main

pytestmark = pytest.mark.slow

MODES = ("serial", "pipelined", "staged_after_update", "staged_before_update")
#: the page is wider than what is seen of it
OVERFLOW = "() => document.documentElement.scrollWidth - document.documentElement.clientWidth"
BACKGROUND = "() => getComputedStyle(document.body).backgroundColor"


def plan(mode: str = "serial", **more: Any) -> Plan:
    return Plan(mode=mode, steps=8, upload=37 * MS, bookkeeping=40 * MS, jitter=0.1, checkpoint_every=3, **more)


def report(tmp_path: Path, *outs: Path) -> Path:
    page = tmp_path / "report.html"
    assert main(["report", *map(str, outs), "--out", str(page), "--json"]) == 0
    return page


@pytest.fixture
def one(tmp_path: Path) -> Path:
    return write_run(tmp_path / "one", made(plan()))


def figures(page: Any, within: str = "") -> dict[str, float]:
    """What the page says, exactly."""
    found = page.eval_on_selector_all(
        f"{within} [data-figure]", "all => all.map(e => [e.dataset.figure, e.dataset.value, e.textContent])"
    )
    return {name: float(value) for name, value, _ in found}


def assert_quiet(browser: Any, page: Path) -> None:
    """It asked for nothing but itself, and nothing was wrong."""
    assert set(browser.requests) <= {page.as_uri(), "data:,"}
    assert browser.said == []


@pytest.mark.parametrize("size", [DESK, PHONE], ids=["desk", "phone"])
@pytest.mark.parametrize("colours", ["light", "dark"])
def test_it_renders_asks_for_nothing_and_fits(one: Path, tmp_path: Path, size: tuple[int, int], colours: str) -> None:
    page_file = report(tmp_path, one)
    with chromium() as browser:
        page = browser.open(page_file, size, colours)
        assert page.locator("#panels svg rect.idle-box").count() >= 1
        for holder in ("#idle-chart", "#panels", "#legs-charts", "#memory-charts"):
            chart = page.locator(f"{holder} svg[role=img]").first
            box = chart.bounding_box()
            assert 0 < box["width"] <= size[0] and box["height"] > 60
            assert chart.get_attribute("aria-label")
        assert page.evaluate(OVERFLOW) == 0
        for table in page.locator("details.table").all():
            table.locator("summary").click()
            table.locator("tbody tr").nth(3).wait_for()  # made when it is opened, a turn of the browser's later
        page.click("#view-range")
        assert page.evaluate(OVERFLOW) == 0
        assert sum(map(int, page.evaluate(BACKGROUND)[4:-1].split(", "))) < 150 or colours == "light"
        assert_quiet(browser, page_file)


def test_its_figures_are_those_of_the_summary(one: Path, tmp_path: Path) -> None:
    summary = json.loads((one / "summary.json").read_text())
    with chromium() as browser:
        page = browser.open(report(tmp_path, one))
        assert figures(page) == {
            "boundary_idle_s.median": summary["boundary_idle_s"]["median"],
            "boundary_idle_s.max": summary["boundary_idle_s"]["max"],
            "step_s.median": summary["step_s"]["median"],
            "step_s.max": summary["step_s"]["max"],
            "staged_boundaries": summary["staged_boundaries"],
            "steps": summary["steps"],
        }
        median_ms = summary["boundary_idle_s"]["median"] * 1e3
        assert f"{median_ms:.3g} ms" in page.locator('[data-figure="boundary_idle_s.median"]').inner_text()
        assert f"median {median_ms:.3g} ms" in page.locator("#idle-chart svg").text_content()
        assert page.locator(".warnings").count() == 0


def test_the_idle_is_drawn_to_scale(one: Path, tmp_path: Path) -> None:
    """Of every boundary: what is drawn as idle is as long, beside the update, as the device says it was."""
    with chromium() as browser:
        page = browser.open(report(tmp_path, one))
        for step in page.eval_on_selector_all("#pick option", "all => all.map(o => o.value)"):
            page.select_option("#pick", step)
            idle_ns = int(page.locator(".panel").get_attribute("data-idle"))
            spans = page.evaluate("step => data.runs[0].boundaries[step].lanes.device[0]", step)
            update = next(span for span in spans if span[2] == "update")
            drawn = page.locator("#panels .idle-box")
            wide = sum(drawn.nth(k).bounding_box()["width"] for k in range(drawn.count()))
            update_wide = page.locator("#panels rect.k-update").first.bounding_box()["width"]
            # strokes are a pixel or two
            assert wide / idle_ns == pytest.approx(update_wide / (update[1] - update[0]), rel=0.08)


def test_the_keyboard_walks_through_the_boundaries(one: Path, tmp_path: Path) -> None:
    with chromium() as browser:
        page = browser.open(report(tmp_path, one))
        page.select_option("#pick", "4")
        page.evaluate("() => document.activeElement.blur()")
        seen = []
        for key in ("ArrowRight", "ArrowRight", "ArrowLeft"):
            page.keyboard.press(key)
            seen.append(page.locator("#panels h3").inner_text().split(":")[0])
            assert page.locator("#said").text_content().startswith(f"made, boundary {seen[-1].split()[1]} to ")
        assert seen == ["step 4 → 5", "step 5 → 6", "step 4 → 5"]
        page.keyboard.press("Alt+ArrowRight")
        page.focus("#pick")
        page.keyboard.press("ArrowRight")
        assert page.locator("#panels h3").inner_text().startswith(("step 4 → 5", "step 5 → 6")), "one step at most"
        page.focus("#previous")
        for _ in range(9):  # more than there are: the button keeps the focus
            page.keyboard.press("Enter")
        assert page.locator("#previous").get_attribute("aria-disabled") == "true"
        assert page.evaluate("() => document.activeElement.id") == "previous"
        assert page.locator("#panels h3").inner_text().startswith("step 1 → 2")
        page.focus("#worst")
        page.keyboard.press("Space")
        most = page.evaluate("() => Math.max(...Object.values(data.runs[0].boundaries).map(own => own.idle))")
        assert int(page.locator(".panel").get_attribute("data-idle")) == most
        assert_quiet(browser, tmp_path / "report.html")


def test_tab_reaches_every_control_and_shows_where_it_is(one: Path, tmp_path: Path) -> None:
    with chromium() as browser:
        page = browser.open(report(tmp_path, one))
        reached: list[str] = []
        for _ in range(30):
            page.keyboard.press("Tab")
            focused = page.evaluate(
                "() => { const e = document.activeElement, s = getComputedStyle(e);"
                " return [e.id || e.tagName + '.' + e.className, s.outlineStyle, parseFloat(s.outlineWidth)]; }"
            )
            reached.append(focused[0])
            assert focused[0] == "BODY." or (focused[1] == "solid" and focused[2] >= 2), focused
            if focused[0] == "BODY.":
                break
        wanted = ("theme", "previous", "pick", "next", "worst", "view-window", "view-range", "A.skip", "DIV.scroll")
        assert set(wanted) <= set(reached)


def test_the_toggle_overrules_the_system(one: Path, tmp_path: Path) -> None:
    with chromium() as browser:
        page = browser.open(report(tmp_path, one), colours="dark")
        seen = [page.evaluate(BACKGROUND)]
        for _ in range(3):
            page.click("#theme")
            seen.append(page.evaluate(BACKGROUND))
        assert seen[0] == seen[2] == seen[3] != seen[1] == "rgb(255, 255, 255)"


@pytest.mark.parametrize("size", [DESK, PHONE], ids=["desk", "phone"])
def test_runs_side_by_side_share_one_scale(tmp_path: Path, size: tuple[int, int]) -> None:
    outs = [write_run(tmp_path / mode, made(plan(mode)), run=mode) for mode in MODES]
    page_file = report(tmp_path, *outs)
    with chromium() as browser:
        page = browser.open(page_file, size)
        assert page.locator(".panel").count() == 4
        axes = page.eval_on_selector_all(
            "#panels svg", "all => all.map(svg => svg.querySelector('.zero-line').getBoundingClientRect().x)"
        )
        assert max(axes) - min(axes) < 1
        for number, out in enumerate(outs):
            summary = json.loads((out / "summary.json").read_text())
            told = figures(page, f'[data-run="{number}"]')
            assert told["boundary_idle_s.median"] == summary["boundary_idle_s"]["median"]
            assert told["step_s.max"] == summary["step_s"]["max"]
        assert page.locator("#idle-chart path.curve").count() == 4
        assert page.evaluate(OVERFLOW) == 0
        assert_quiet(browser, page_file)


def test_a_run_without_steps_events_or_an_end_has_a_page_too(tmp_path: Path) -> None:
    cut = made(plan())
    half = sorted(event.t for event in cut.events)[len(cut.events) // 2]
    killed = Made(cut.plan, [e for e in cut.events if max(e.t, e.end) <= half], lines=cut.lines[:3])
    outs = [
        write_run(tmp_path / "bare", made(plan()), run="bare", events=False),
        write_run(tmp_path / "killed", killed, run="killed", finished=False),
        write_run(tmp_path / "empty", Made(plan()), run="empty", events=False, finished=False),
    ]
    failure = {"kind": "EngineError", "text": "the loss is <b>gone</b>"}
    (outs[1] / "trainer.failure.json").write_text(json.dumps(failure))
    with chromium() as browser:
        for chosen in (outs, outs[:1], outs[1:2], outs[2:]):
            page_file = report(tmp_path, *chosen)
            for size in (DESK, PHONE):
                page = browser.open(page_file, size)
                assert page.evaluate(OVERFLOW) == 0
                assert page.locator(".warnings li").count() >= 1
            if outs[1] in chosen:
                assert "the loss is <b>gone</b>" in page.locator(".warnings").inner_text()
            assert_quiet(browser, page_file)
            browser.requests.clear()


def test_hostile_names_stay_text(tmp_path: Path) -> None:
    hostile = '"><img src=x onerror=alert(1)></script><script>alert(2)</script>'
    run = made(plan())
    for event in run.events:
        if "command" in event.figures:
            event.figures["command"] = hostile  # type: ignore[index]
    outs = [write_run(tmp_path / "bad", run, run=hostile), write_run(tmp_path / "two", made(plan()))]
    page_file = report(tmp_path, *outs)
    with chromium() as browser:
        page = browser.open(page_file)
        page.click("#spans-table summary")
        page.locator("#spans-table tbody tr").first.wait_for()
        assert page.locator("img").count() == 0 and page.locator("script").count() == 2
        assert hostile in page.locator("#panels h3").first.inner_text()
        assert hostile in page.locator("#spans-table").inner_text()
        assert_quiet(browser, page_file)
