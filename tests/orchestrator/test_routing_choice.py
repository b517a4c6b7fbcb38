"""Which form routing takes in a run's slots, and what is refused before anything is trained."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from input_making import Given

from shmstage.errors import PluginError, SettingsError, TrajectoryError
from shmstage.memory.layout import Layout
from shmstage.orchestrator.intake import Intake
from shmstage.orchestrator.layouts import Layouts, layout_of
from shmstage.orchestrator.session import check_engine_can
from shmstage.packing.fields import microbatch_layout
from shmstage.packing.held_form import HeldForm
from shmstage.packing.held_routing import HeldRouting
from shmstage.packing.plan import PlanSettings
from shmstage.packing.trajectory import Group, Trajectory
from shmstage.settings import RoutingEncoding, Settings


def trajectory(**changes: Any) -> Trajectory:
    fields: dict[str, Any] = {
        "trajectory_id": "t", "tokens": [1, 2, 3], "loss_mask": [0, 1, 1], "advantages": [0.0] * 3,
        "old_logprobs": [0.0] * 3,
    }  # fmt: skip
    return Trajectory(**{**fields, **changes})


def shapes(layout: Layout) -> dict[str, tuple[int, ...]]:
    return {field.name: field.shape for field in layout.fields}


@pytest.mark.parametrize("encoding", ["ragged", "ragged_packed"])
def test_encoded_routing_is_refused_to_an_engine_that_would_not_see_it(encoding: RoutingEncoding) -> None:
    settings = Settings(routing_encoding=encoding, experts=8, engine="mine:make")
    routed = frozenset({"routing"})
    plain = microbatch_layout(2, 8)
    encoded = microbatch_layout(2, 8, optional=routed, layers=2, top_k=2, encoding=encoding, experts=8)
    for layouts in (Layouts(encoded, None), Layouts(plain, encoded)):
        with pytest.raises(PluginError, match="engine mine:make does not decode routing; let it .* or use dense"):
            check_engine_can(settings, ["eval_step"], layouts)
        check_engine_can(settings, ["decodes_routing"], layouts)
    dense = microbatch_layout(2, 8, optional=routed, layers=2, top_k=2)
    check_engine_can(settings, [], Layouts(dense, None))
    check_engine_can(settings, [], Layouts(plain, None))


def test_a_layout_has_routing_as_the_settings_say_and_the_trajectory_knows() -> None:
    routing = np.zeros((3, 2, 1), np.int16)
    first = trajectory(routing=routing, experts=9)
    settings = Settings(rows=2, tokens=8, routing_encoding="ragged_packed", max_real_tokens=9)
    assert shapes(layout_of(first, settings, late=()))["routed_experts_packed"] == (2, 2, 1, 4)
    wider = settings.model_copy(update={"experts": 300})
    assert (shapes(layout_of(first, wider, late=())))["routed_experts_packed"] == (2, 2, 1, 9)
    unknown = trajectory(routing=routing)
    with pytest.raises(SettingsError, match="needs the number of experts, which trajectory 't' does not say"):
        layout_of(unknown, settings, late=())
    with pytest.raises(SettingsError, match="experts = 4: trajectory 't' chooses from 9; set experts = 9"):
        layout_of(first, settings.model_copy(update={"experts": 4}), late=())
    assert layout_of(trajectory(), settings, late=()) == microbatch_layout(2, 8)


def test_an_id_beyond_the_number_of_experts_is_refused_by_the_intake() -> None:
    routing = np.full((3, 2, 1), 7, np.int16)
    one = trajectory(routing=routing)
    source = Given([Group("g", 0, (one,))])
    assert len(list(Intake(source, PlanSettings(rows=1, tokens=8), passes=1, form=HeldForm(experts=8)))) == 1
    with pytest.raises(TrajectoryError, match="'t': routing wants expert ids below experts = 7, got 7"):
        list(Intake(source, PlanSettings(rows=1, tokens=8), passes=1, form=HeldForm(experts=7)))


@pytest.mark.parametrize("reads_ahead", [False, True])
def test_what_waits_is_packed_and_held_bytes_are_those_of_what_waits(reads_ahead: bool) -> None:
    """Of three trajectories one is dropped: what was admitted, let go and packed comes to nothing held."""
    routing = np.full((3, 2, 4), [1, 2, 3, 4], np.int16)
    raw = [trajectory(trajectory_id=name, routing=routing, experts=512) for name in "ab"]
    zeros = [0.0] * 9
    long = trajectory(
        trajectory_id="long", tokens=[1] * 9, loss_mask=zeros, advantages=zeros, old_logprobs=zeros,
        routing=np.full((9, 2, 4), [1, 2, 3, 4], np.int16), experts=512,
    )  # fmt: skip
    source = Given([Group(one.trajectory_id, 0, (one,)) for one in (*raw, long)])
    plan = PlanSettings(rows=1, tokens=8, on_overlong="drop")
    intake = Intake(source, plan, passes=1, max_held_bytes=10**6, form=HeldForm("ragged_packed", 512))
    reader = intake.read_ahead() if reads_ahead else None
    try:
        (planned,) = intake
        waiting = [arrival.trajectory for arrival in planned.arrivals.values()]
        assert [one.digest for one in waiting] == [one.digest for one in raw]
        assert all(isinstance(one.routing, HeldRouting) for one in waiting)
        # one group of 8 tokens: 9 bits an id, one validity bit per token and layer
        words = raw[0].nbytes - routing.nbytes
        assert planned.nbytes == 2 * (words + 2 * 4 * 9 + 2)
        if reader is not None:
            assert intake._held_bytes.total == planned.nbytes
            reader.queue.packed(1, planned.nbytes, is_final=True)
            reader.queue.landed(1)
            assert intake._held_bytes.total == 0
    finally:
        if reader is not None:
            reader.close()
    assert isinstance(raw[0].routing, np.ndarray)
