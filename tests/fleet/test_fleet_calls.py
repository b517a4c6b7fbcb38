"""One command at a time on two or three hosts: who refuses, who fails, who is silent, and what that leaves behind."""

from __future__ import annotations

import select
import threading
from dataclasses import replace
from typing import Any

import pytest
from fleet.rig import FleetCase, FleetWorld, fleet_of

from shmstage.errors import (
    EngineError,
    PeerLostError,
    ProtocolError,
    StaleHandleError,
    StoppedError,
    TokenFailedError,
    TrainerError,
    UpdateDeferredError,
    WaitTimeoutError,
)
from shmstage.memory.handle import Handle
from shmstage.orchestrator import trainer_fleet
from shmstage.orchestrator.trainer_client import TrainerClient
from shmstage.testing.doubles_trainer import Script
from shmstage.testing.engines_refusing import RefusingEngine
from shmstage.testing.fault_plan import Effect, Fault, FaultPlan
from shmstage.trainer import preparation
from shmstage.transport.client import Client
from shmstage.wire.handles import handle_from_wire, handle_to_wire


def executed(world: FleetWorld, host: int) -> list[str]:
    """Commands that reached a host's worker, prepared ones apart."""
    return [str(record["command"]) for record in world.trainers[host].received if record["command"] != "prepare"]


def staged(world: FleetWorld) -> list[Any]:
    """What every host has staged, asked of each by itself."""
    own = world.fleet.each("get_step_timing", {"step": 1}, 10.0)
    assert len(own) == len(world.members)
    return [trainer._worker._gate.state.staged for trainer in world.trainers]


def lossy(*faults: Fault) -> FaultPlan:
    return FaultPlan(faults)


def never(frame: str) -> FaultPlan:
    return lossy(Fault(frame, Effect.LOSE, times=None))


def test_both_sides_agree_on_what_needs_no_agreement() -> None:
    """The orchestrator imports nothing of the trainer, so each has the list."""
    assert trainer_fleet.UNPREPARED == preparation.UNPREPARED


# --- prepare ------------------------------------------------------------------------------------------------


def test_a_refusal_by_one_in_prepare_leaves_every_host_as_it_was() -> None:
    refuses = {"prepare fwd_bwd 1.0": UpdateDeferredError("seeded: update 9 is deferred")}
    with fleet_of(3, scripts={1: Script(refuses=refuses)}) as world:
        handle = world.publish(1, 0, final=True)
        with pytest.raises(UpdateDeferredError) as caught:
            world.client.fwd_bwd(handle, defer_update=False)
        text = str(caught.value)
        assert "host 1 (node-1): seeded: update 9 is deferred" in text
        assert "host 0 (node-0) and host 2 (node-2) would have done it" in text
        assert "fwd_bwd 1.0@0:1 was not begun on any host" in text
        assert caught.value.from_peer
        assert all("fwd_bwd" not in executed(world, host) for host in range(3))
        refuses.clear()
        world.client.fwd_bwd(handle, defer_update=False)
        assert world.ticket(world.client.get_metrics(1)).ok


def test_a_slot_that_moved_on_at_one_host_is_found_before_anybody_trains() -> None:
    with fleet_of(2) as world:
        handle = world.publish(1, 0)
        part = world.book.parts(handle.request_id)[1]
        world.trainers[1]._worker._stepper.attachment.end_withdrawn([(part.slot, part.generation)])
        with pytest.raises(StaleHandleError, match=r"host 1 \(node-1\): .* has already ended this lease"):
            world.client.fwd_bwd(handle, defer_update=False)
        assert "fwd_bwd" not in executed(world, 0)


def test_a_host_in_another_state_is_named_with_the_difference() -> None:
    with fleet_of(3) as world:
        handle = world.publish(1, 0, final=True)
        world.client.stage_fwd_bwd(handle)
        own = world.book.parts(handle.request_id)[2].request_id
        assert world.members[2].client.call("drop_staged", {"request_id": own}, timeout_s=10.0) == {"dropped": True}
        with pytest.raises(TrainerError) as caught:
            world.client.get_metrics(0)
        assert type(caught.value) is TrainerError and caught.value.from_peer
        others = "host 0 (node-0) and host 1 (node-1)"
        assert f"host 2 (node-2): staged is None, on {others} it is '1.0, final, digest" in str(caught.value)
        assert all("get_metrics" not in executed(world, host) for host in range(3))


def test_micro_batches_of_different_content_are_not_trained_together() -> None:
    """The book refuses handles that differ; a host that was told another one by mistake is found by its state."""
    with fleet_of(2) as world:
        handle = world.publish(1, 0)
        other = [*handle_to_wire(world.book.parts(handle.request_id)[1])]
        other[3] = b"another digest.."
        for host, wire in enumerate((handle_to_wire(world.book.parts(handle.request_id)[0]), other)):
            arguments = {"handle": wire, "defer_update": False}
            reply = world.members[host].client.call(
                "prepare", {"command": "fwd_bwd", "arguments": arguments, "sequence": 100}, timeout_s=10.0
            )
            assert f"digest {wire[3].hex()}" in reply["state"]["microbatch"]  # type: ignore[union-attr]


def test_every_host_is_told_of_its_own_slot_and_of_the_loss_tokens_of_the_whole() -> None:
    """After a patch the whole's are the new ones, while a part is as it was published."""
    with fleet_of(2) as world:
        handle = replace(world.publish(1, 0), loss_tokens=5)
        told: list[Handle] = []

        def listen(client: Any) -> None:
            begin = client.begin

            def heard(command: str, arguments: Any) -> Any:
                if command == "fwd_bwd":
                    told.append(handle_from_wire(arguments["handle"]))
                return begin(command, arguments)

            client.begin = heard

        for member in world.members:
            listen(member.client)
        world.client.fwd_bwd(handle, defer_update=False)
        parts = world.book.parts(handle.request_id)
        assert parts[0].request_id != parts[1].request_id
        assert told == [replace(part, loss_tokens=5) for part in parts]


def test_commands_that_reach_a_host_in_another_order_are_refused() -> None:
    with fleet_of(2) as world:
        ahead = {"command": "info", "arguments": {}, "sequence": 50}
        world.members[1].client.call("prepare", ahead, timeout_s=10.0)
        with pytest.raises(ProtocolError, match=r"host 1 \(node-1\): prepare info: number \d+ comes after 50"):
            world.client.info()


def test_a_host_that_missed_a_command_is_named() -> None:
    """Evaluations leave no trace in the gate; a host that did not take part in one would wait in the next for ever."""
    with fleet_of(2, scripts={1: Script(refuses={"get_metrics 0": EngineError("seeded")})}) as world:
        with pytest.raises(TrainerError, match="seeded"):
            world.client.get_metrics(0)
        with pytest.raises(TrainerError, match=r"host 1 \(node-1\): executed is \d+, on host 0 \(node-0\) it is \d+"):
            world.client.info()


def test_what_was_not_prepared_is_refused_by_the_host_itself() -> None:
    with fleet_of(2) as world:
        handle = world.publish(1, 0)
        own = {"handle": handle_to_wire(world.book.parts(handle.request_id)[0]), "defer_update": False}
        with pytest.raises(ProtocolError, match="what was prepared as number 2 is nothing; prepare it on all hosts"):
            world.members[0].client.call("fwd_bwd", own, timeout_s=10.0)


def test_infos_and_compilations_go_through_the_same_door() -> None:
    with fleet_of(2) as world:
        assert world.client.info()["last_step"] == 0
        assert world.client.compile(world.layouts.train.layout_id, ["train"]) > 0
        digest = world.client.info(param_digest=True)["param_digest"]
        assert digest and world.client.shutdown(discard=False) == digest
        kinds = [str(record["command"]) for record in world.trainers[1].received]
        assert kinds.count("prepare") == 6 and kinds[-2:] == ["prepare", "shutdown"]


# --- after all have accepted --------------------------------------------------------------------------------


def test_a_failure_of_one_after_all_accepted_names_it_and_what_the_others_did() -> None:
    engines = {host: lambda inner, nth=nth: RefusingEngine(inner, "fwd_bwd", nth=nth) for host, nth in ((0, 9), (1, 1))}
    with fleet_of(2, engines=engines) as world:
        with pytest.raises(TrainerError) as caught:
            world.client.fwd_bwd(world.publish(1, 0), defer_update=False)
        text = str(caught.value)
        assert type(caught.value) is TrainerError and caught.value.from_peer
        assert text.startswith("fwd_bwd 1.0@0:1 failed after all hosts had accepted it: host 1 (node-1): fwd_bwd: ")
        assert text.endswith("host 0 (node-0) did it")
        with pytest.raises(TokenFailedError, match=r"host 1 \(node-1\)"):
            world.client.info()


def test_a_stage_that_fails_on_one_is_dropped_on_all_and_they_agree_again() -> None:
    refuses = {"stage_fwd_bwd 1.0": EngineError("seeded: out of device memory")}
    with fleet_of(3, scripts={1: Script(refuses=refuses)}) as world:
        with pytest.raises(EngineError) as caught:
            world.client.stage_fwd_bwd(world.publish(1, 0))
        assert caught.value.from_peer
        assert "host 1 (node-1): seeded: out of device memory" in str(caught.value)
        assert "host 0 (node-0) and host 2 (node-2) did it; it is staged on none" in str(caught.value)
        assert staged(world) == [None] * 3
        assert [executed(world, host).count("drop_staged") for host in range(3)] == [1, 1, 1]
        handle = world.publish(1, 1, final=True)
        world.client.stage_fwd_bwd(handle)
        assert world.client.fwd_bwd_staged(handle.request_id, defer_update=False).updated


def test_a_drop_that_was_not_heard_is_told_again_before_the_next_command() -> None:
    refuses = {"stage_fwd_bwd 1.0": EngineError("seeded")}
    faults = {0: lossy(Fault("request drop_staged *", Effect.LOSE, times=5))}
    with fleet_of(2, scripts={1: Script(refuses=refuses)}, faults=faults, call_timeout_s=7.0) as world:
        with pytest.raises(EngineError, match=r"it may still be staged on host 0 \(node-0\)"):
            world.client.stage_fwd_bwd(world.publish(1, 0))
        assert staged(world)[0] is not None
        world.client.info()
        assert staged(world) == [None, None]


@pytest.mark.parametrize("lost", ["request", "reply"])
def test_a_stage_without_an_answer_is_used_up_by_the_call_that_sends_it_whole(lost: str) -> None:
    """Where it arrived the slot is given back, and there is nothing to upload it from a second time."""
    with fleet_of(2, faults={1: never(f"{lost} stage_fwd_bwd 1.1")}, call_timeout_s=7.0) as world:
        world.client.fwd_bwd(world.publish(1, 0), defer_update=False)
        handle = world.publish(1, 1, final=True)
        with pytest.raises(WaitTimeoutError) as caught:
            world.client.stage_fwd_bwd(handle)
        assert not caught.value.from_peer
        world.client.info()  # though only one may have it
        assert world.client.fwd_bwd(handle, defer_update=False).updated
        assert staged(world) == [None] * 2
        assert world.ticket(world.client.get_metrics(1)).ok
        events = world.until(lambda e: e.kind == "update") if world.fleet.missing() else []
        assert events == [], "an event was told by one host only"
        one_sided = world.publish(2, 0)
        world.client.stage_fwd_bwd(one_sided)
        own = world.book.parts(one_sided.request_id)[0].request_id
        world.members[0].client.call("drop_staged", {"request_id": own}, timeout_s=7.0)
        with pytest.raises(TrainerError, match="staged is"):
            world.client.info()  # it was overlooked for that one stage only


@pytest.mark.slow
def test_a_silent_host_is_named_with_those_that_answered() -> None:
    with fleet_of(3, faults={1: never("reply fwd_bwd 1.0")}, call_timeout_s=7.0) as world:
        world.clock.jump_s = 0.0
        with pytest.raises(WaitTimeoutError) as caught:
            world.client.fwd_bwd(world.publish(1, 0), defer_update=False)
        text = str(caught.value)
        assert "host 1 (node-1): no answer to fwd_bwd (sequence" in text and "within 7 s; it answered a ping" in text
        assert text.endswith("host 0 (node-0) and host 2 (node-2) did it")
        assert not caught.value.from_peer


@pytest.mark.slow
def test_a_silent_host_in_prepare_keeps_the_others_from_beginning() -> None:
    with fleet_of(2, faults={1: never("re* prepare fwd_bwd 1.0")}, call_timeout_s=7.0) as world:
        world.clock.jump_s = 0.0
        with pytest.raises(WaitTimeoutError, match=r"host 1 \(node-1\): .*; host 0 \(node-0\) answered; fwd_bwd 1\.0"):
            world.client.fwd_bwd(world.publish(1, 0), defer_update=False)
        assert "fwd_bwd" not in executed(world, 0)


def test_when_one_has_failed_the_others_are_not_waited_for_until_the_deadline() -> None:
    """They may sit in a collective with the one that failed."""
    faults = {0: never("reply fwd_bwd 1.0")}
    scripts = {1: Script(refuses={"fwd_bwd 1.0": EngineError("seeded")})}
    with fleet_of(2, faults=faults, scripts=scripts, call_timeout_s=1e6, grace_s=3.0) as world:
        with pytest.raises(TrainerError) as caught:
            world.client.fwd_bwd(world.publish(1, 0), defer_update=False)
        assert "host 1 (node-1): seeded" in str(caught.value)
        assert "host 0 (node-0): WaitTimeoutError: no answer" in str(caught.value)
        assert "another host has failed, and it may wait for that one" in str(caught.value)
        assert caught.value.from_peer


@pytest.mark.slow
@pytest.mark.parametrize("at", ["prepare fwd_bwd 1.0", "fwd_bwd 1.0"])
def test_a_dead_host_is_named(at: str) -> None:
    with fleet_of(2, scripts={1: Script(dies_before=at)}) as world:
        with pytest.raises(PeerLostError, match=r"host 1 \(node-1\): .* is dead; it left no answer to"):
            world.client.fwd_bwd(world.publish(1, 0), defer_update=False)
        assert ("fwd_bwd" in executed(world, 0)) is (at == "fwd_bwd 1.0")
        with pytest.raises(PeerLostError, match=r"host 1 \(node-1\)"):
            for _ in range(3):  # what was told before is still given out
                world.fleet.events(5.0)


@pytest.mark.slow
def test_a_host_that_answers_no_ping_is_lost_long_before_the_deadline() -> None:
    with fleet_of(2, call_timeout_s=1e6) as world:
        handle = world.publish(1, 0)
        world.faulty[1].script.plan = never("*")  # every frame that is lost makes the clock jump by two seconds
        with pytest.raises(PeerLostError, match=r"host 1 \(node-1\): it has answered no ping for \d+ s") as caught:
            world.client.fwd_bwd(handle, defer_update=False)
        assert "dead, stopped or cut off" in str(caught.value)
        assert "fwd_bwd" not in executed(world, 0)


@pytest.mark.slow
def test_a_host_that_is_only_busy_is_not_lost() -> None:
    """It answers pings, however late its reply is."""
    busy = threading.Event()
    hears = lambda call: busy.wait(30.0) if call == "prepare info" else None  # noqa: E731
    with fleet_of(2, scripts={1: Script(hears=hears)}, call_timeout_s=1e6) as world:
        pongs = iter(range(40))

        def jump(name: str, effect: Effect) -> None:
            world.clock.ahead_s += 2.0
            if next(pongs, None) is None:
                busy.set()

        world.faulty[1]._passage._on_fault = jump
        world.faulty[1].script.plan = FaultPlan((Fault("pong", Effect.DOUBLE, times=None),))
        world.clock.ahead_s += 2.0
        assert world.client.info()["last_step"] == 0
        assert next(pongs, None) is None, "it never waited for long"


def test_a_stop_ends_the_wait() -> None:
    with fleet_of(2, faults={1: never("reply prepare info")}) as world:
        world.members[0].client._stop = world.members[1].client._stop = lambda: True
        with pytest.raises(StoppedError):
            world.client.info()


@pytest.mark.slow
def test_everybody_is_told_to_drop_everything_though_one_is_dead() -> None:
    with fleet_of(3, scripts={0: Script(dies_before="prepare info")}) as world:
        with pytest.raises(PeerLostError):
            world.client.info()
        with pytest.raises(PeerLostError, match=r"host 0 \(node-0\)"):
            world.client.shutdown(discard=True)
        for trainer in world.trainers[1:]:
            trainer.wait()
        assert [executed(world, host)[-1] for host in (1, 2)] == ["shutdown"] * 2


def test_hosts_with_different_engines_do_not_begin() -> None:
    class Other:
        def __init__(self, inner: Any) -> None:
            self._inner = inner

        def __getattr__(self, name: str) -> Any:
            return getattr(self._inner, name)

    with fleet_of(2, opened=False, engines={1: Other}) as world, pytest.raises(TrainerError) as caught:
        world.hello()
    assert "hello: engine is 'OptaxEngine' on host 0 (node-0) and 'Other' on host 1 (node-1)" in str(caught.value)


def test_a_hello_that_one_host_refuses_names_it() -> None:
    scripts = {1: Script(refuses={"hello": EngineError("seeded")})}
    refused = pytest.raises(EngineError, match=r"host 1 \(node-1\): seeded")
    with fleet_of(2, opened=False, scripts=scripts) as world, refused:
        world.hello()


@pytest.mark.slow
def test_of_several_errors_the_gravest_is_told_and_not_the_first_hosts() -> None:
    scripts = {1: Script(refuses={"hello": EngineError("seeded")})}
    refused = pytest.raises(EngineError, match=r"host 1 \(node-1\): seeded")
    with fleet_of(2, opened=False, scripts=scripts, faults={0: never("welcome")}) as world, refused:
        world.hello()
    with fleet_of(2, faults={0: never("reply ranges")}) as world:
        layout = {"layout": world.layouts.train.to_wire()}
        with pytest.raises(ProtocolError, match=r"host 1 \(node-1\)"):
            world.fleet.each("ranges", [layout, {}], 10.0)


# --- events -------------------------------------------------------------------------------------------------


def test_different_denominators_end_the_run_naming_both_hosts() -> None:
    def doubled(inner: Any) -> Any:
        class Doubled:
            def __getattr__(self, name: str) -> Any:
                return getattr(inner, name)

            def metrics(self) -> Any:
                metrics = inner.metrics()
                return {**metrics, "denominator": 2 * metrics["denominator"]}

        Doubled.__name__ = type(inner).__name__
        return Doubled()

    with fleet_of(2, engines={1: doubled}) as world:
        world.client.fwd_bwd(world.publish(1, 0, final=True), defer_update=False)
        number = world.client.get_metrics(1)
        with pytest.raises(TrainerError, match=r"is 32\.0 on host 0 \(node-0\) and 64\.0 on host 1 \(node-1\)"):
            world.ticket(number)


def test_an_upload_that_fails_later_on_one_host_is_told_and_dropped_on_all() -> None:
    with fleet_of(2) as world:
        handle = world.publish(1, 0, final=True)
        world.client.stage_fwd_bwd(handle)
        world.until(lambda e: e.kind == "staged")
        event = world.trainers[1]._worker.completions.upload_reporter(
            world.book.parts(handle.request_id)[1], "staged", 1
        )
        other = world.trainers[0]._worker.completions.upload_reporter(
            world.book.parts(handle.request_id)[0], "staged", 1
        )
        other(2, "")
        event(2, "seeded: the slot has moved on")
        failed = world.until(lambda e: e.kind == "staged")[-1]
        assert (failed.ok, failed.error) == (False, "host 1 (node-1): seeded: the slot has moved on")
        assert failed.request_id == handle.request_id
        world.client.info()
        assert staged(world) == [None, None]


def test_the_hosts_whose_events_are_missing_are_named() -> None:
    with fleet_of(2, faults={1: never("token update 1.0")}) as world:
        assert world.client.missing() == ""
        world.client.fwd_bwd(world.publish(1, 0, final=True), defer_update=False)
        world.until(lambda e: e.kind == "fwd_bwd")
        while "; missing: update 1.0 from host 1 (node-1)" not in world.client.missing():
            world.fleet.events(0.2)
        assert TrainerClient(world.members[0].client, timeout_s=1.0).missing() == ""


def test_a_wake_ends_a_wait_for_events_once() -> None:
    with fleet_of(2) as world:
        world.fleet.events(0.0)
        woken = threading.Timer(0.01, world.fleet.wake)
        woken.start()
        assert world.fleet.events(60.0) == []
        woken.join()
        world.fleet.wake()
        assert world.fleet.events(60.0) == []
        assert world.fleet.events(0.001) == []


def test_a_wake_that_comes_late_does_not_keep_the_next_wait_from_resting() -> None:
    with fleet_of(2) as world:
        world.fleet.events(0.0)
        world.fleet._waker.set()  # of a wake that ``events`` has answered already, in another thread between its lines
        rests: list[list[int]] = []
        world.fleet._rest = lambda wait_s, hosts, *more: rests.append(select.select(more, [], [], 0)[0])  # type: ignore
        assert world.fleet.events(0.001) == []
        assert rests and not any(rests), "it would return at once, again and again"


def test_a_fleet_of_one_is_a_trainer() -> None:
    with fleet_of(1) as world:
        world.client.fwd_bwd(world.publish(1, 0, final=True), defer_update=False)
        assert world.ticket(world.client.get_metrics(1)).value["denominator"] == 32.0


def test_what_each_host_answers_can_be_asked_for_without_agreement() -> None:
    with FleetWorld(FleetCase(mode="serial", hosts=3)) as world:
        world.hello()
        told = world.fleet.each("ranges", {"layout": world.layouts.train.to_wire()}, 10.0)
        assert [each["tiles"] for each in told] == [[1, 1]] * 3
        with pytest.raises(ProtocolError, match=r"host 0 \(node-0\)"):
            world.fleet.each("ranges", [{}, *[{"layout": world.layouts.train.to_wire()}] * 2], 10.0)


def test_the_sequence_is_that_of_host_zeros_last_request() -> None:
    with fleet_of(2) as world:
        assert isinstance(world.members[0].client, Client)
        before = world.fleet.sequence
        world.client.info()
        assert world.fleet.sequence == before + 2 == world.members[0].client.sequence
