"""The most that fits, and what would make it fit: for any run and any limit, every answer holds."""

from __future__ import annotations

import sys
from dataclasses import replace
from fractions import Fraction
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

sys.path.insert(0, str(Path(__file__).parent))
import budget_making
from budget_making import GOLDEN, ROUTED, small

from shmstage.budget.fields import MicrobatchFields
from shmstage.budget.formula import Inputs, forecast
from shmstage.budget.report import as_json, report_on
from shmstage.budget.search import LEAST, MOST, apply, fits, most_that_fits, suggestions
from shmstage.budget.verdict import Bound, judge
from shmstage.settings import Settings

ENCODINGS = ("dense", "ragged", "ragged_packed")


@st.composite
def runs(draw: st.DrawFn) -> Inputs:
    routed = draw(st.booleans())
    layers, top_k, experts = (draw(st.integers(1, 60)), draw(st.integers(1, 8)), draw(st.integers(8, 512)))
    fields = MicrobatchFields(
        optional=frozenset(draw(st.sets(st.sampled_from(["returns", "old_values"])))),
        layers=layers if routed else 0, top_k=top_k if routed else 0, experts=experts if routed else 0,
        encoding=draw(st.sampled_from(ENCODINGS)) if routed else "dense",
    )  # fmt: skip
    return Inputs(
        rows=draw(st.integers(1, 300)), tokens=draw(st.integers(2, 70_000)), fields=fields,
        fill=Fraction(draw(st.integers(1, 100)), 100), slots=draw(st.integers(2, 9)), aux_slots=draw(st.integers(0, 3)),
        device_buffers=draw(st.integers(2, 4)), weight_sync=draw(st.booleans()),
        max_real_tokens=draw(st.sampled_from([0, 1000, 1 << 20])), param_nbytes=draw(st.integers(0, 1 << 30)),
        hosts=draw(st.integers(1, 4)), platform=draw(st.sampled_from(["cpu", "accelerator"])),
        journaled=draw(st.booleans()), replay=draw(st.booleans()),
    )  # fmt: skip


@st.composite
def runs_and_bounds(draw: st.DrawFn) -> tuple[Inputs, list[Bound]]:
    """Limits from far too small to far too large, on either side of what is needed."""
    inputs = draw(runs())
    need = forecast(inputs).total("restart", "shm", "host", "device")
    part = st.integers(1, 400)
    bounds = [Bound("ram", "ram", need * draw(part) // 100), Bound("mount", "mount", need * draw(part) // 100)]
    return inputs, [*bounds, Bound("device", "device", need * draw(part) // 100)][: draw(st.integers(1, 3))]


@settings(max_examples=60, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
@given(runs_and_bounds())
@pytest.mark.slow
def test_every_suggestion_holds_and_one_more_than_the_most_does_not(case: tuple[Inputs, list[Bound]]) -> None:
    inputs, bounds = case
    verdict = judge(forecast(inputs), bounds).verdict
    for name in ("slots", "rows", "tokens"):
        most = most_that_fits(inputs, bounds, name)
        if most:
            assert fits(replace(inputs, **{name: most}), bounds)
        if most < MOST[name]:
            assert not fits(replace(inputs, **{name: max(most + 1, LEAST[name])}), bounds)
        assert (most >= getattr(inputs, name)) == (verdict != "does not fit")
    found = suggestions(inputs, bounds)
    assert not found or verdict != "fits"
    for suggestion in found:
        judged = judge(forecast(apply(inputs, suggestion.change)), bounds)
        assert judged.verdict == suggestion.verdict != "does not fit"
        assert judged.binding.headroom_nbytes == suggestion.headroom_nbytes >= 0
        if verdict == "low headroom":
            assert judged.verdict == "fits"
        for key, value in suggestion.change.items():
            if key in ("rows", "tokens", "slots", "aux_slots", "device_buffers"):
                assert value < getattr(inputs, key)


@settings(max_examples=60, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
@given(runs_and_bounds())
@pytest.mark.slow
def test_who_could_fit_with_the_least_of_everything_gets_a_suggestion(case: tuple[Inputs, list[Bound]]) -> None:
    inputs, bounds = case
    least = replace(inputs, rows=1, tokens=2, slots=2, aux_slots=0, device_buffers=2, weight_sync=False)
    if judge(forecast(inputs), bounds).verdict == "does not fit" and fits(replace(least, rows=1), bounds):
        smaller = replace(least, rows=inputs.rows), replace(least, tokens=inputs.tokens)
        if any(fits(each, bounds) for each in smaller):
            assert suggestions(inputs, bounds)


def test_the_golden_run_on_too_small_a_machine_is_told_what_fits() -> None:
    inputs = Inputs(**GOLDEN, fields=ROUTED)
    need = forecast(inputs).total("steady", "shm", "host")
    report = report_on(inputs, budget_making.given(need - 1))
    texts = [suggestion.text for suggestion in report.suggestions]
    assert "routing_encoding = ragged_packed" in texts
    assert any(text.startswith("rows = ") for text in texts)
    assert report.most["slots"] == 2
    assert report.most["rows"] == 63


@pytest.mark.parametrize("hosts", [1, 2])
def test_a_limit_on_what_is_held_is_suggested_down_to_one_step(hosts: int) -> None:
    """In the golden run trajectories are half of all: capping them is enough, and the most that fits is said."""
    inputs = Inputs(**GOLDEN, fields=ROUTED, hosts=hosts)
    step = inputs.step_nbytes
    need = forecast(inputs).total("steady", "shm", "host")
    bounds = budget_making.given(need - step // 2)
    well = need - step // 2 - (need - step // 2) // 10
    found = {key: value for each in suggestions(inputs, bounds) for key, value in each.change.items()}
    assert step <= found["max_held_bytes"] <= 2 * step - (need - well) < found["max_held_bytes"] + 20
    assert fits(apply(inputs, {"max_held_bytes": found["max_held_bytes"]}), bounds, well=True)
    # less than a step cannot be trained, and a bundle is held whole whatever the limit
    rest = need - 2 * step
    tight = budget_making.given(rest + step - 1)
    assert not any("max_held_bytes" in each.change for each in suggestions(inputs, tight))
    bundle = replace(inputs, held_input_nbytes=2 * step)
    assert not any("max_held_bytes" in each.change for each in suggestions(bundle, bounds))


def test_fewer_checkpoints_are_tried_alone_and_with_all_else() -> None:
    """Of those after the first three host copies can pile up; a run that just saves less often may fit."""
    often = small(param_nbytes=10**9, optimizer_nbytes=2 * 10**9, checkpoint_every=1, aux_slots=0, slots=2)
    once = forecast(replace(often, checkpoint_every=0)).total("checkpoint", "shm", "host")
    (found,) = suggestions(often, budget_making.given(once * 10 // 9 + 1))
    assert (found.change, found.text, found.verdict) == ({"checkpoint_every": 0}, "checkpoint_every = 0", "fits")
    (both,) = suggestions(replace(often, weight_sync=True), budget_making.given(once * 10 // 9 + 1))
    assert both.change == {"weight_sync": "off", "checkpoint_every": 0}
    assert suggestions(often, budget_making.given(once - 10**6)) == []
    # one of several that are enough, each alone
    publishing = replace(often, weight_sync=True)
    need = forecast(publishing).total("checkpoint", "shm", "host")
    texts = [each.text for each in suggestions(publishing, budget_making.given(need - 1))]
    assert texts == ["checkpoint_every = 0", "weight_sync = off"]


def test_tokens_are_not_suggested_below_the_longest_trajectory() -> None:
    """A trajectory is not split over rows; where the longest is not known, the suggestion says what has to hold."""
    inputs = Inputs(rows=4, tokens=4096)
    bounds = budget_making.given(forecast(inputs).total("steady", "shm", "host") // 2)
    plain = {each.text for each in suggestions(inputs, bounds) if "tokens" in each.change}
    (text,) = plain
    tokens = int(text.removeprefix("tokens = ").removesuffix(", if no trajectory is longer"))
    assert text.endswith(", if no trajectory is longer")
    held = suggestions(replace(inputs, longest=tokens), bounds)
    assert f"tokens = {tokens}" in [each.text for each in held]
    longer = suggestions(replace(inputs, longest=tokens + 1), bounds)
    assert longer
    assert not any("tokens" in each.change for each in longer)


def test_one_setting_is_suggested_where_one_is_enough() -> None:
    inputs = small(slots=6)
    found = suggestions(inputs, budget_making.given(forecast(inputs).total("steady", "shm", "host") * 9 // 10))
    assert found
    assert all(len(suggestion.change) == 1 for suggestion in found)


def test_several_are_suggested_where_one_is_not() -> None:
    inputs = small(rows=1, tokens=2, slots=9, aux_slots=3, device_buffers=8)
    least = {"slots": 2, "aux_slots": 0, "device_buffers": 2}
    bounds = budget_making.given(forecast(replace(inputs, **least)).total("steady", "shm", "host"))
    (found,) = suggestions(inputs, bounds)
    assert found.change == least
    assert found.headroom_nbytes == 0


def test_where_that_is_not_enough_it_is_that_with_fewer_rows() -> None:
    # 4096 slots of a single page are too many, and 2 slots of 64 rows too large
    inputs = Inputs(rows=64, tokens=4096, slots=4096, aux_slots=0)
    bounds = [Bound("mount", "mount", 10_000_000)]
    assert [most_that_fits(inputs, bounds, name) for name in ("rows", "tokens", "slots")] == [0, 0, 0]
    (found,) = suggestions(inputs, bounds)
    assert found.change.keys() == {"slots", "rows"}
    assert found.change["slots"] == 2
    assert fits(apply(inputs, found.change), bounds)


def test_an_encoding_is_suggested_with_the_limit_that_makes_slots_smaller() -> None:
    inputs = Inputs(**GOLDEN, fields=ROUTED, fill=Fraction(1, 4))
    need = forecast(inputs).total("steady", "shm", "host")
    change = suggestions(inputs, budget_making.given(need * 8 // 10))[0].change
    assert change == {"routing_encoding": "ragged_packed", "max_real_tokens": 64 * 65536 // 4}


def test_what_fits_well_needs_no_suggestion_and_what_never_fits_gets_none() -> None:
    assert suggestions(small(), budget_making.given(10**12)) == []
    assert suggestions(small(param_nbytes=10**9), budget_making.given(10**6)) == []
    assert most_that_fits(small(param_nbytes=10**9), budget_making.given(10**6), "rows") == 0


def test_slots_are_not_promised_beyond_what_a_setting_may_say() -> None:
    """The most is bounded by the settings, too: 4096 slots, 2**20 rows."""
    assert most_that_fits(small(), budget_making.given(1 << 62), "slots") == 4096
    assert most_that_fits(small(), budget_making.given(1 << 62), "rows") == 1 << 20


def test_the_least_and_the_most_are_those_of_the_settings() -> None:
    for name in LEAST:
        Settings(**{name: LEAST[name]})
        Settings(**{name: MOST[name]})
        for beyond in (LEAST[name] - 1, MOST[name] + 1):
            with pytest.raises(ValueError, match=name):
                Settings(**{name: beyond})


def test_the_json_of_a_report_has_its_fixed_keys_and_whole_bytes() -> None:
    """L3: every size in it is an integer number of bytes."""
    found = as_json(report_on(Inputs(**GOLDEN, fields=ROUTED), budget_making.given(10**12), ["nothing"]))
    fixed = {"needs", "fields", "totals", "limits", "binding", "verdict", "most", "suggestions", "assumed"}
    assert fixed <= found.keys()
    assert {"slot_payload", "slot", "pool"} <= found["needs"].keys()
    assert {"name", "dtype", "shape", "nbytes", "share"} == found["fields"][0].keys()
    assert found["totals"].keys() == {"steady", "checkpoint", "restart"}
    assert all(scopes.keys() == {"shm", "host", "device", "disk"} for scopes in found["totals"].values())
    assert found["most"].keys() == {"slots", "rows"}
    sizes = [*found["needs"].values(), *(v for scopes in found["totals"].values() for v in scopes.values())]
    assert all(type(size) is int for size in sizes)
    assert sum(field["share"] for field in found["fields"]) == pytest.approx(1, abs=1e-5)
