"""What is planned and packed in a fleet is what one host would plan and pack; whoever differs is named."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

sys.path.insert(0, str(Path(__file__).parent))
from fleet_doubles import DoubleHosts
from input_making import TOKENS, Given, Sized, group_lists, make_group, plan_settings

from shmstage.errors import PeerLostError, ProtocolError, SettingsError, StoppedError, TrajectoryError
from shmstage.memory.handle import Handle
from shmstage.memory.reader import PoolReader
from shmstage.orchestrator.doors import Doors
from shmstage.orchestrator.fleet_late import FleetLateFields
from shmstage.orchestrator.fleet_packer import FleetPacker
from shmstage.orchestrator.fleet_source import GROUPS_PER_READ, FleetSource
from shmstage.orchestrator.handle_book import HandleBook
from shmstage.orchestrator.intake import Intake, Planned, Upcoming
from shmstage.packing.fields import OLD_LOGPS, RECOMPUTED, SAMPLER_IS_WEIGHTS, microbatch_layout
from shmstage.packing.fill import microbatch_digest
from shmstage.packing.plan import PlanSettings
from shmstage.packing.trajectory import Group
from shmstage.packing.window import Window
from shmstage.testing.numpy_packer import pack_with_numpy
from shmstage.wire.messages import PROTOCOL_VERSION, Hello

RUN = "fleet-packing"
WAIT_S = 20.0
ROWS = 4
PLAN = PlanSettings(rows=ROWS, tokens=TOKENS)
HALVES = (Window(0, 2, 0, TOKENS), Window(2, 4, 0, TOKENS))
LAYOUT = microbatch_layout(2, TOKENS)
HELLO = Hello(PROTOCOL_VERSION, RUN, 1, "", [], [], "", 0, 0)
#: some groups empty, batches of different sizes, enough for several micro-batches
GROUPS = [make_group(i, i // 3, [(5 * i + j) % TOKENS + 1 for j in range((i + 2) % 4)]) for i in range(24)]


class Orchestrator:
    """The orchestrator's ends of the doors."""

    def __init__(self, hosts: DoubleHosts, *, passes: int | None = 1) -> None:
        self._stack = ExitStack()
        self.stores = Doors("store", hosts.names, [store.door.connect() for store in hosts.stores])
        self.feeds = Doors("agent", hosts.names, [agent.feed.connect() for agent in hosts.agents])
        self.auxes = Doors("agent", hosts.names, [agent.aux.connect() for agent in hosts.agents])
        for doors in (self.stores, self.feeds, self.auxes):
            self._stack.callback(doors.close)
        told = self.stores.hello(HELLO, WAIT_S)
        self.feeds.hello(HELLO, WAIT_S)
        self.auxes.hello(HELLO, WAIT_S)
        self.book = HandleBook(len(hosts.names))
        self.source = FleetSource(self.stores, told, passes=passes, timeout_s=WAIT_S)

    def open(
        self, windows: Sequence[Window] = HALVES, slots: int = 3, late: Sequence[str] = (), remembered: bool = False
    ) -> FleetPacker:
        layout = microbatch_layout(windows[0].rows, windows[0].tokens, late=late)
        bounds = [[[w.row_begin, w.row_end, w.token_begin, w.token_end]] for w in windows]
        asked = {"layouts": [layout.to_wire()], "tiles": [2, 1], "slots": slots, "aux_slots": 1}
        self.auxes.each("open_pool", [asked | {"windows": each} for each in bounds], timeout_s=WAIT_S)
        return FleetPacker(
            self.feeds, windows, layout.layout_id, self.book, rows=ROWS, tokens=TOKENS, nbytes=1, slots=slots,
            slot_timeout_s=WAIT_S, call_timeout_s=WAIT_S, remembered=remembered,
        )  # fmt: skip

    def close(self) -> None:
        self._stack.close()


@pytest.fixture
def hosts() -> Iterator[DoubleHosts]:
    with DoubleHosts(RUN, GROUPS) as hosts:
        yield hosts


@pytest.fixture
def orchestrator(hosts: DoubleHosts) -> Iterator[Orchestrator]:
    orchestrator = Orchestrator(hosts)
    yield orchestrator
    orchestrator.close()


def facts(planned: Planned) -> Any:
    trajectories = {number: arrival.trajectory for number, arrival in planned.arrivals.items()}
    named = [(a.pass_number, a.trajectory.trajectory_id) for a in planned.arrivals.values()]
    return planned.plan, microbatch_digest(planned.plan, trajectories), named, planned.state_after, planned.handed_out


def packed(packer: FleetPacker, planned: Planned, index: int = 0) -> Handle:
    return packer.pack(planned, step=1, index=index, is_final=False, stop=lambda: False).handle


# --- what comes in ------------------------------------------------------------------------------------------


@pytest.mark.slow
@settings(max_examples=15, deadline=None)
@given(
    groups=group_lists(), chosen=plan_settings, count=st.integers(1, 3), sized=st.booleans(), data=st.data(),
    order=st.sampled_from(["arrival", "prompt_batch"]),
)  # fmt: skip
def test_a_fleets_input_is_planned_as_one_hosts_from_any_cursor_in_any_pass(
    groups: list[Group], chosen: PlanSettings, count: int, order: Any, sized: bool, data: st.DataObject
) -> None:
    source = Sized(groups) if sized else Given(groups)
    want = [facts(planned) for planned in Intake(source, chosen, passes=2, order=order)]
    expected = source.expected_groups if isinstance(source, Sized) else None
    with DoubleHosts(RUN, groups, count, expected=expected) as hosts:
        orchestrator = Orchestrator(hosts, passes=2)
        try:
            fleet = orchestrator.source
            assert [facts(planned) for planned in Intake(fleet, chosen, passes=fleet.passes, order=order)] == want
            done = data.draw(st.integers(0, len(want) - 1))
            resumed = Intake(fleet, chosen, passes=2, order=order, resume=want[done][3])
            assert [facts(planned) for planned in resumed] == want[done + 1 :]
        finally:
            orchestrator.close()


def test_the_first_trajectory_is_that_of_the_first_group_that_has_one(orchestrator: Orchestrator) -> None:
    assert orchestrator.source.first.digest == GROUPS[0].trajectories[0].digest
    late = [make_group(0, 0, []), *(make_group(i, 0, [3]) for i in (1, 2))]
    with DoubleHosts(RUN, late) as hosts:  # the first store that has one has a later one
        other = Orchestrator(hosts)
        assert other.source.first.digest == late[1].trajectories[0].digest
        other.close()


def test_reading_begins_anew_wherever_it_is_told_and_whatever_was_read_before(orchestrator: Orchestrator) -> None:
    every = [(number, f"g{number}") for number in range(len(GROUPS))]

    def read(pass_number: int, cursor: int) -> list[tuple[int, str]]:
        return [(group.number, group.group_id) for group in orchestrator.source.groups_of_pass(pass_number, cursor)]

    broken_off = orchestrator.source.groups(0)
    for _ in range(5):
        next(broken_off)
    assert read(1, 2) == every[2:]
    assert read(1, 2) == every[2:]
    assert read(2, 0) == every


def test_an_evaluation_has_every_group_once_in_order_however_many_answers_it_takes() -> None:
    evaluated = [make_group(i, 0, [i % TOKENS + 1]) for i in range(3 * GROUPS_PER_READ)]
    with DoubleHosts(RUN, GROUPS, evaluated=evaluated) as hosts:
        orchestrator = Orchestrator(hosts)
        found = orchestrator.source.evaluation()
        assert found.first.digest == evaluated[0].trajectories[0].digest
        for begin in (0, 7):
            digests = [each.digest for group in found.groups(begin) for each in group.trajectories]
            assert digests == [each.digest for group in evaluated[begin:] for each in group.trajectories]
        orchestrator.close()


def test_a_batch_of_a_sharded_source_is_as_large_as_its_parts_together() -> None:
    told = iter([3, 4, 3, None, None, 4])
    with DoubleHosts(RUN, GROUPS, live=True, expected=lambda batch_index: next(told)) as hosts:
        orchestrator = Orchestrator(hosts)
        size_of = orchestrator.source.expected_groups
        assert size_of is not None
        # of a batch that one of them does not know, its end is where the next one begins
        assert [size_of(batch) for batch in (0, 1, 2)] == [7, None, None]
        assert [size_of(batch) for batch in (0, 1, 2)] == [7, None, None], "it was asked for again"
        orchestrator.close()


def test_an_input_without_a_trajectory_is_refused() -> None:
    with DoubleHosts(RUN, [make_group(0, 0, [])]) as hosts, pytest.raises(TrajectoryError, match="no trajectory"):
        Orchestrator(hosts)


def test_a_live_source_is_run_over_once() -> None:
    with DoubleHosts(RUN, GROUPS, live=True) as hosts, pytest.raises(SettingsError, match="passes = 2"):
        Orchestrator(hosts, passes=2)


def test_stores_let_go_of_what_a_durable_checkpoint_covers_and_of_nothing_else() -> None:
    groups = [make_group(i, i // 4, [TOKENS]) for i in range(100)]
    with DoubleHosts(RUN, groups) as hosts:
        orchestrator = Orchestrator(hosts)
        reading = iter(Intake(orchestrator.source, PLAN, passes=1))
        states = [next(reading).state_after for _ in range(6)]
        covered = states[3]
        orchestrator.source.release(covered.cursor, covered.pass_number)
        assert not any(store.released for store in hosts.stores), "only the thread that reads may talk to stores"
        list(reading)
        held = {t.trajectory_id for store in hosts.stores for t in store.held.values()}
        assert covered.cursor == 16
        assert held == {t.trajectory_id for group in groups[covered.cursor :] for t in group.trajectories}
        orchestrator.close()


def test_memory_of_a_live_source_goes_when_its_step_landed_and_its_journal_when_that_is_durable() -> None:
    groups = [make_group(i, i // 4, [TOKENS]) for i in range(100)]
    with DoubleHosts(RUN, groups, live=True) as hosts:
        orchestrator = Orchestrator(hosts, passes=1)
        reading = iter(orchestrator.source.groups(0))
        next(reading)
        orchestrator.source.landed(16, 1)
        for _ in range(40):
            next(reading)
        held = {t.trajectory_id for store in hosts.stores for t in store.held.values()}
        assert groups[16].trajectories[0].trajectory_id in held
        assert not held & {t.trajectory_id for group in groups[:16] for t in group.trajectories}
        assert not any(store.covered for store in hosts.stores)
        orchestrator.source.release(12, 1)
        list(reading)
        assert [store.covered for store in hosts.stores] == [[12], [12]]
        orchestrator.close()


def test_a_fleet_keeps_until_durable_only_what_its_source_cannot_give_again() -> None:
    for live in (False, True):
        with DoubleHosts(RUN, GROUPS, live=live) as hosts:
            orchestrator = Orchestrator(hosts, passes=1)
            assert Intake(orchestrator.source, PLAN, passes=1).until_durable is live
            orchestrator.close()


def test_a_second_pass_does_not_let_go_of_more_than_it_covers() -> None:
    with DoubleHosts(RUN, GROUPS) as hosts:
        orchestrator = Orchestrator(hosts, passes=2)
        reading = iter(Intake(orchestrator.source, PLAN, passes=2))
        state = next(reading).state_after
        while state.pass_number == 1:
            state = next(reading).state_after
        orchestrator.source.release(state.cursor, state.pass_number)
        list(orchestrator.source.groups_of_pass(3, 0))
        for rank, store in enumerate(hosts.stores):
            first_pass = sum(len(group.trajectories) for group in GROUPS[rank::2])
            second = [t for group in GROUPS[: state.cursor][rank::2] for t in group.trajectories]
            assert max(store.released) == 100 * rank + first_pass + len(second)
        orchestrator.close()


def test_a_wait_for_a_store_ends_when_reading_does(orchestrator: Orchestrator) -> None:
    groups = orchestrator.source.groups(0)
    next(groups)
    orchestrator.source.stop_reading()
    with pytest.raises(StoppedError):
        list(groups)


# --- what goes out ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "windows",
    [HALVES, (Window(0, 4, 0, 5), Window(0, 4, 5, 10)), (Window(0, 4, 0, TOKENS), Window(0, 4, 0, TOKENS))],
    ids=["rows", "tokens", "both hold all"],
)
def test_slots_hold_what_one_host_would_have_in_its_own(windows: Sequence[Window], hosts: DoubleHosts) -> None:
    tokens = max(window.token_end for window in windows)
    groups = [make_group(i, i // 3, [(5 * i + j) % tokens + 1 for j in range(3)]) for i in range(12)]
    with DoubleHosts(RUN, groups) as hosts:
        orchestrator = Orchestrator(hosts)
        packer = orchestrator.open(windows)
        plan = PlanSettings(rows=ROWS, tokens=tokens)
        layout = microbatch_layout(windows[0].rows, windows[0].tokens)
        here = Intake(Given(groups), plan, passes=1)
        count = 0
        for index, (local, fleet) in enumerate(zip(here, Intake(orchestrator.source, plan, passes=1), strict=True)):
            trajectories: Any = {number: arrival.trajectory for number, arrival in local.arrivals.items()}
            want = pack_with_numpy(local.plan, trajectories, tokens)
            handle = packed(packer, fleet, index)
            assert handle.digest == microbatch_digest(local.plan, trajectories)
            assert handle.loss_tokens == sum(t.loss_tokens for t in trajectories.values())
            parts = orchestrator.book.parts(handle.request_id)
            for agent, window, part in zip(hosts.agents, windows, parts, strict=True):
                assert agent.pool is not None
                reader = PoolReader.attach(agent.pool.name, run_id=RUN, epoch=1)
                reader.register(layout)
                with reader.lease(part) as lease:
                    for name, view in lease.views.items():
                        cut = want[name][window.row_begin : window.row_end, window.token_begin : window.token_end]
                        np.testing.assert_array_equal(view, cut, name)
                    del view
                reader.close()
                agent.pool.end_leases_of(0)
            count += 1
        assert count > 2
        orchestrator.close()


def test_a_host_that_packed_something_else_is_named_with_the_row(
    hosts: DoubleHosts, orchestrator: Orchestrator
) -> None:
    packer = orchestrator.open()
    planned = next(iter(Intake(orchestrator.source, PLAN, passes=1)))

    def other_row(answer: dict[str, Any]) -> None:
        answer["row_digests"] = answer["row_digests"][:16] + bytes(16)

    hosts.agents[1].spoil = other_row
    with pytest.raises(ProtocolError, match=r"host 1 \(node-1\), pack: row 3 of micro-batch 1\.0 has digest 0{32}"):
        packed(packer, planned)


@pytest.mark.parametrize("name", ["step", "digest", "loss_tokens"])
def test_a_handle_of_another_microbatch_is_refused(name: str, hosts: DoubleHosts, orchestrator: Orchestrator) -> None:
    packer = orchestrator.open()
    planned = next(iter(Intake(orchestrator.source, PLAN, passes=1)))
    place = {"step": 5, "digest": 3, "loss_tokens": 8}[name]

    def other(answer: dict[str, Any]) -> None:
        answer["handle"][place] = bytes(16) if name == "digest" else answer["handle"][place] + 1

    hosts.agents[0].spoil = other
    with pytest.raises(ProtocolError, match=r"host 0 \(node-0\), pack: micro-batch 1\.0 came back as"):
        packed(packer, planned)


def test_what_an_agent_refuses_is_told_under_its_hosts_name(hosts: DoubleHosts, orchestrator: Orchestrator) -> None:
    packer = orchestrator.open()
    planned = next(iter(Intake(orchestrator.source, PLAN, passes=1)))
    for number in list(hosts.stores[0].held):
        del hosts.stores[0].held[number]
    with pytest.raises(Exception, match=r"the agent of host 0 \(node-0\): KeyError"):
        packed(packer, planned)


def test_an_agent_that_was_stopped_is_lost_and_stops_nobody_else(
    hosts: DoubleHosts, orchestrator: Orchestrator
) -> None:
    def stops(answer: dict[str, Any]) -> None:
        raise StoppedError("stopped while waiting for pieces")

    packer = orchestrator.open()
    hosts.agents[1].spoil = stops
    planned = next(iter(Intake(orchestrator.source, PLAN, passes=1)))
    with pytest.raises(PeerLostError, match=r"the agent of host 1 \(node-1\) was stopped: stopped while waiting"):
        packed(packer, planned)


def test_agents_hear_of_plans_before_their_turn_and_of_each_once(
    hosts: DoubleHosts, orchestrator: Orchestrator
) -> None:
    groups = [make_group(i, 0, [TOKENS]) for i in range(5 * ROWS)]
    with DoubleHosts(RUN, groups) as hosts:
        orchestrator = Orchestrator(hosts)
        packer = orchestrator.open(slots=6)
        intake = Intake(orchestrator.source, PLAN, passes=1)
        for index, planned in enumerate(intake):
            this = Upcoming(planned.plan, {n: a.trajectory for n, a in planned.arrivals.items()})
            packer.ahead([this, *intake.upcoming(packer.looks_ahead - 1)])
            packed(packer, planned, index)
        for agent in hosts.agents:
            heard = [(command, given["plan"]) for command, given in agent.feed.heard]
            plans = [plan for command, plan in heard if command == "pack"]
            assert [plan for command, plan in heard if command == "prefetch"] == plans
            assert len(plans) == 5
            for position, plan in enumerate(plans[1:], 1):
                # told of before the one before it was packed
                assert heard.index(("prefetch", plan)) < heard.index(("pack", plans[position - 1]))
        orchestrator.close()


def test_a_plan_that_one_host_forgot_is_told_to_it_once_more(hosts: DoubleHosts, orchestrator: Orchestrator) -> None:
    packer = orchestrator.open(remembered=True)
    hosts.agents[1].forgets = True
    planned = next(iter(Intake(orchestrator.source, PLAN, passes=1)))
    packer.ahead([Upcoming(planned.plan, {n: a.trajectory for n, a in planned.arrivals.items()})])
    handle = packed(packer, planned)
    told = [[given["plan"] for command, given in agent.feed.heard if command == "pack"] for agent in hosts.agents]
    spelled = [next(given["plan"] for command, given in a.feed.heard if command == "prefetch") for a in hosts.agents]
    assert told == [[b""], [b"", spelled[1]]]
    assert len(orchestrator.book.parts(handle.request_id)) == 2


def test_each_host_writes_the_late_fields_of_its_own_slot(hosts: DoubleHosts, orchestrator: Orchestrator) -> None:
    packer = orchestrator.open(late=RECOMPUTED)
    ahead = hosts.agents[1].pool
    assert ahead is not None
    with ahead.acquire(next(iter(ahead.layouts.values())), timeout_s=WAIT_S) as slot:
        slot.publish()  # so that this host's next one is another slot than host 0's
    handle = packed(packer, next(iter(Intake(orchestrator.source, PLAN, passes=1))))
    one, two = parts = orchestrator.book.parts(handle.request_id)
    assert one.request_id != two.request_id
    late = FleetLateFields(orchestrator.auxes, orchestrator.book, sampler_is_cap=2.0, timeout_s=WAIT_S)
    late.before_scoring(handle)
    written = []
    for agent, part in zip(hosts.agents, parts, strict=True):
        assert agent.pool is not None
        written.append(agent.pool.late_views(part))
        written[-1][OLD_LOGPS][:] -= 0.5  # as its trainer does
    patch = late.after_scoring(handle)
    assert (patch.fields, patch.loss_tokens) == ((*RECOMPUTED,), handle.loss_tokens)
    digests = []
    for views in written:
        np.testing.assert_allclose(views[SAMPLER_IS_WEIGHTS], np.exp(-0.5) * views["completion_mask"], rtol=1e-6)
        digests.append(xxhash.xxh3_128_digest(views[SAMPLER_IS_WEIGHTS].tobytes()))
    assert patch.digests == ((SAMPLER_IS_WEIGHTS, xxhash.xxh3_128_hexdigest(b"".join(digests))),)
    del views
    written.clear()


def test_a_wait_for_a_slot_ends_at_a_stop(
    hosts: DoubleHosts, orchestrator: Orchestrator
) -> None:
    packer = orchestrator.open(slots=1)
    reading = iter(Intake(orchestrator.source, PLAN, passes=1))
    packed(packer, next(reading))
    second = next(reading)
    with pytest.raises(StoppedError):
        packer.pack(second, step=1, index=1, is_final=False, stop=lambda: True)
