"""What hosts hold, from what their trainers say, and what stores say, read strictly."""

from __future__ import annotations

from typing import Any

import pytest

from shmstage.errors import LayoutError, ProtocolError, SettingsError, StoppedError, WaitTimeoutError
from shmstage.memory.layout import Layout
from shmstage.orchestrator.doors import Answer, Doors
from shmstage.orchestrator.fleet_layouts import check_cover, local_layout, read_ranges, the_same_on_all
from shmstage.orchestrator.reference_wire import groups_from_wire
from shmstage.packing.fields import REF_LOGPS, microbatch_layout
from shmstage.packing.window import Window
from shmstage.testing.memory_channel import MemoryServerChannel
from shmstage.wire.messages import PROTOCOL_VERSION, Hello

LAYOUT = Layout.of(
    {"completion_ids": ("int32", (4, 16)), "packed": ("uint8", (2, 2, 5)), REF_LOGPS: ("float32", (4, 16))},
    late=(REF_LOGPS,),
)
RANGES = {"completion_ids": [[2, 4], [8, 16]], "packed": [[1, 2], [1, 2], [0, 5]], REF_LOGPS: [[2, 4], [8, 16]]}
TRAJECTORY = [3, "t0", 0, 12, 96, 11, bytes(16), ["routing"], 8, [11, 2, 2]]


def test_a_hosts_layout_and_window_are_its_ranges_and_late_fields_stay_late() -> None:
    ranges = read_ranges({"ranges": RANGES, "tiles": [2, 2]}, LAYOUT, "host 1")
    local = local_layout(LAYOUT, ranges)
    assert {f.name: f.shape for f in local.fields} == {
        "completion_ids": (2, 8), "packed": (1, 1, 5), REF_LOGPS: (2, 8)
    }  # fmt: skip
    assert local.late_names == (REF_LOGPS,)
    assert ranges.window == Window(2, 4, 8, 16)


@pytest.mark.parametrize(
    "answer",
    [
        {}, {"ranges": RANGES}, {"ranges": RANGES, "tiles": [2]}, {"ranges": RANGES, "tiles": [0, 2]},
        {"ranges": {**RANGES, "more": []}, "tiles": [2, 2]},
        {"ranges": {**RANGES, "packed": [[1, 2], [1, 2]]}, "tiles": [2, 2]},
        {"ranges": {**RANGES, "packed": [[1, 2], [1, 2], [0, 6]]}, "tiles": [2, 2]},
        {"ranges": {**RANGES, "completion_ids": [[4, 2], [8, 16]]}, "tiles": [2, 2]},
        {"ranges": {**RANGES, "completion_ids": [[2.0, 4], [8, 16]]}, "tiles": [2, 2]},
    ],
)  # fmt: skip
def test_other_ranges_than_of_the_layout_are_refused(answer: dict[str, Any]) -> None:
    with pytest.raises(ProtocolError, match="host 1, ranges"):
        read_ranges(answer, LAYOUT, "host 1")


def test_hosts_that_hold_parts_of_different_shape_are_named() -> None:
    layouts = [microbatch_layout(2, 8), microbatch_layout(2, 8), microbatch_layout(1, 8)]
    assert the_same_on_all(layouts[:2], ["host 0", "host 1"]) == layouts[0]
    with pytest.raises(SettingsError, match=r"host 0 holds completion_ids \[2, 8\] and host 2 \[1, 8\]"):
        the_same_on_all(layouts, ["host 0", "host 1", "host 2"])


def test_every_place_of_a_microbatch_lies_on_a_host() -> None:
    check_cover([Window(0, 2, 0, 8), Window(0, 2, 8, 16), Window(2, 4, 0, 16)], 4, 16)
    check_cover([Window(0, 4, 0, 16)] * 2, 4, 16)
    with pytest.raises(LayoutError, match="row 2, token 8 "):
        check_cover([Window(0, 2, 0, 16), Window(2, 4, 0, 8)], 4, 16)


def test_a_group_comes_as_a_store_tells_it() -> None:
    (group,) = groups_from_wire([[7, "g7", 2, [TRAJECTORY]]], 1, "store 1")
    (found,) = group.trajectories
    assert (group.number, group.batch_index, found.key) == (7, 2, (1, 3))
    assert (found.group_id, found.length, found.nbytes, found.loss_tokens) == ("g7", 12, 96, 11)
    assert found.routing is not None and found.routing.shape == (11, 2, 2)


@pytest.mark.parametrize(
    ("place", "value"),
    [
        (0, -1), (0, True), (1, ""), (1, "a\nb"), (2, 0.0), (3, "12"), (4, None), (5, 13), (6, bytes(15)), (7, ["x"]),
        (7, []), (8, 1 << 60), (9, []), (9, [1, 2]),
    ],
)  # fmt: skip
def test_anything_else_from_a_store_is_refused_by_its_name(place: int, value: object) -> None:
    wrong = [*TRAJECTORY]
    wrong[place] = value
    with pytest.raises(ProtocolError, match="store 1: a trajectory wants"):
        groups_from_wire([[7, "g7", 2, [wrong]]], 1, "store 1")


@pytest.mark.parametrize(
    "value", [None, {}, [[7, "g7", 2]], [["7", "g7", 2, []]], [[7, "g7", 2, [[]]]], [[7, 7, 2, []]]]
)
def test_anything_else_than_groups_is_refused(value: object) -> None:
    with pytest.raises(ProtocolError, match="store 1"):
        groups_from_wire(value, 1, "store 1")


@pytest.mark.parametrize(("kind", "value"), [(int, True), (int, 1.0), (bool, 1), (float, "1"), (str, None)])
def test_an_answer_of_another_type_is_refused_by_name(kind: type, value: object) -> None:
    with pytest.raises(ProtocolError, match="host 1, pack: it wants"):
        Answer({"it": value}, "host 1, pack").take("it", kind)
    assert Answer({"it": 1}, "").take("it", float) == 1.0
    with pytest.raises(ProtocolError, match="it = -1"):
        Answer({"it": -1}, "host 1, pack").count("it")


def test_a_silent_host_is_named_and_a_stop_ends_the_wait() -> None:
    silent = MemoryServerChannel()
    doors = Doors("agent", ["host 0 (a)"], [silent.connect()])
    hello = Hello(PROTOCOL_VERSION, "r", 1, "", [], [], "", 0, 0)
    with pytest.raises(WaitTimeoutError, match=r"the agent of host 0 \(a\): no answer to hello"):
        doors.hello(hello, 0.01)
    doors.stop = lambda: True
    with pytest.raises(StoppedError):
        doors.hello(hello, 60.0)
    assert doors.nbytes > 0
    doors.close()
    silent.close()
