"""Every outcome of every phase on two and three hosts, in every order in which the answers may arrive."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest

from shmstage.errors import (
    EngineError,
    PeerLostError,
    ShmstageError,
    StageOccupiedError,
    StaleHandleError,
    StoppedError,
    TrainerError,
    UpdateDeferredError,
    WaitTimeoutError,
)
from shmstage.orchestrator.fleet_answers import combined, differing
from shmstage.orchestrator.two_phases import Phase, TwoPhases

NAMES = ("host 0 (a)", "host 1 (b)", "host 2 (c)")
STATE = {"phase": "open", "staged": None, "closed_step": 3, "executed": 7}

PREPARED = ("accepts", "refuses", "differs", "is silent", "is dead")
COMMITTED = ("does it", "raises", "is silent", "is dead")
DROPPED = ("drops it", "is silent")


def answer(what: str, host: int) -> Any:
    """What a host answers; ``None``: nothing, until it is given up."""
    if what == "refuses":
        return from_peer(UpdateDeferredError(f"update 3 is deferred, says {host}"))
    if what == "raises":
        return from_peer(StaleHandleError(f"the slot has moved on, says {host}"))
    if what == "is dead":
        return PeerLostError(f"trainer {host} is dead")
    return {
        "accepts": {"state": STATE}, "differs": {"state": STATE | {"closed_step": 40 + host}},
        "does it": {"updated": True}, "drops it": {"dropped": True}, "is silent": None,
    }[what]  # fmt: skip


def from_peer(error: ShmstageError) -> ShmstageError:
    error.from_peer = True
    return error


@dataclass
class Ended:
    """What a walk came to: the phases that were asked of the hosts, and how it ended."""

    asked: tuple[Phase, ...]
    kind: type | None
    text: str
    from_peer: bool
    left_behind: bool
    results: int


def play(whats: dict[Phase, tuple[str, ...]], orders: Iterator[tuple[int, ...]], *, drops: bool) -> Ended:
    """One walk: each phase's answers arrive in the next of ``orders``; the silent are given up when all others came."""
    hosts = len(whats[Phase.PREPARE])
    phases = TwoPhases("stage 4.0" if drops else "fwd_bwd 4.0", NAMES[:hosts], drops=drops)
    asked = []
    while phases.phase is not Phase.OVER:
        asked.append(phases.phase)
        phase, gathering = phases.phase, phases.gathering
        for count, host in enumerate(next(orders)):
            assert phases.phase is phase, f"went on after {count} of {hosts} answers"
            outcome = answer(whats[phase][host], host)
            if outcome is not None:
                gathering.heard(host, outcome)
                gathering.heard(host, {"late": "and doubled"})
                assert host not in gathering.waiting
            phases.answered()
        if gathering.waiting:
            gathering.give_up({host: f"no answer from {host}" for host in gathering.waiting})
            phases.answered()
    error = phases.error
    return Ended(
        tuple(asked), None if error is None else type(error), str(error), error is not None and error.from_peer,
        phases.left_behind, len(phases.results),
    )  # fmt: skip


def every_order(hosts: int, phases: int) -> Iterator[list[tuple[int, ...]]]:
    return (list(each) for each in itertools.product(itertools.permutations(range(hosts)), repeat=phases))


@pytest.mark.parametrize("hosts", [2, pytest.param(3, marks=pytest.mark.slow)])
@pytest.mark.parametrize("drops", [False, True])
def test_nothing_runs_anywhere_unless_all_accept_in_the_same_state(hosts: int, drops: bool) -> None:
    done = ("does it",) * hosts
    for whats in itertools.product(PREPARED, repeat=hosts):
        ends = [
            play({Phase.PREPARE: whats, Phase.COMMIT: done}, iter(orders), drops=drops)
            for orders in every_order(hosts, 2)
        ]
        assert all(ended == ends[0] for ended in ends), f"{whats}: the order of the answers decided"
        ended = ends[0]
        if set(whats) <= {"accepts"}:
            assert (ended.asked, ended.kind, ended.results) == ((Phase.PREPARE, Phase.COMMIT), None, hosts)
            continue
        assert ended.asked == (Phase.PREPARE,), f"{whats}: dispatched though one refused"
        if "is dead" in whats:
            assert ended.kind is PeerLostError
        elif "refuses" in whats:
            assert ended.kind is UpdateDeferredError and ended.from_peer
        elif "is silent" in whats:
            assert ended.kind is WaitTimeoutError and not ended.from_peer
        else:
            assert ended.kind is TrainerError and ended.from_peer
        for host, what in enumerate(whats):
            # one that only differs is not compared while another refuses; each other trouble is told with its host
            if what in ("refuses", "is silent", "is dead"):
                assert NAMES[host] in ended.text
        if set(whats) == {"accepts", "differs"} and whats.count("differs") < whats.count("accepts"):
            odd = whats.index("differs")
            assert f"{NAMES[odd]}: closed_step is {40 + odd}, on " in ended.text
            assert f"{NAMES[odd]} it is" not in ended.text


@pytest.mark.parametrize("hosts", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_what_fails_on_one_after_all_accepted_names_it_and_what_the_others_did(hosts: int) -> None:
    accepted = ("accepts",) * hosts
    for whats in itertools.product(COMMITTED, repeat=hosts):
        ends = [
            play({Phase.PREPARE: accepted, Phase.COMMIT: whats}, iter(orders), drops=False)
            for orders in every_order(hosts, 2)
        ]
        assert all(ended == ends[0] for ended in ends), f"{whats}: the order of the answers decided"
        ended = ends[0]
        assert ended.asked == (Phase.PREPARE, Phase.COMMIT)
        if set(whats) == {"does it"}:
            assert ended.kind is None
            continue
        assert all(NAMES[host] in ended.text for host in range(hosts)), ended.text
        if "is dead" in whats:
            assert ended.kind is PeerLostError
        elif set(whats) == {"raises"}:
            assert ended.kind is StaleHandleError and ended.from_peer
        elif "raises" in whats:
            assert ended.kind is TrainerError and ended.from_peer
        else:
            assert ended.kind is WaitTimeoutError and not ended.from_peer
        if "does it" in whats:
            assert "did it" in ended.text


@pytest.mark.parametrize("hosts", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_a_stage_that_fails_on_one_is_dropped_on_all(hosts: int) -> None:
    accepted = ("accepts",) * hosts
    for committed, dropped in itertools.product(
        itertools.product(COMMITTED, repeat=hosts), itertools.product(DROPPED, repeat=hosts)
    ):
        whats = {Phase.PREPARE: accepted, Phase.COMMIT: committed, Phase.DROP: dropped}
        ends = [
            play(whats, iter([tuple(range(hosts)), order, order]), drops=True)
            for order in itertools.permutations(range(hosts))
        ]
        assert all(ended == ends[0] for ended in ends), f"{whats}: the order of the answers decided"
        ended = ends[0]
        if set(committed) == {"does it"}:
            assert ended.asked == (Phase.PREPARE, Phase.COMMIT) and ended.kind is None
            continue
        failed = "raises" in committed and "is dead" not in committed
        assert ended.from_peer == failed
        assert ended.asked == (Phase.PREPARE, Phase.COMMIT, *([Phase.DROP] if failed else []))
        assert ended.left_behind == (failed and "is silent" in dropped)
        if failed:
            assert ended.kind is StaleHandleError, "a stage keeps the class of what it failed with"


def test_the_silent_and_those_that_answered_are_named() -> None:
    whats = {Phase.PREPARE: ("accepts", "is silent", "accepts")}
    ended = play(whats, every_order(3, 1).__next__().__iter__(), drops=False)
    assert "host 1 (b): no answer from 1" in ended.text
    assert "host 0 (a) and host 2 (c) answered" in ended.text


def test_states_need_not_agree_for_what_ends_every_difference() -> None:
    phases = TwoPhases("restore_checkpoint", NAMES[:2], compares=False)
    for host, what in enumerate(("accepts", "differs")):
        phases.gathering.heard(host, answer(what, host))
    phases.answered()
    assert phases.phase is Phase.COMMIT


def test_a_stage_that_only_some_have_is_overlooked_and_no_other() -> None:
    for overlooks, goes_on in (("4.0", True), ("4.1", False), ("", False)):
        phases = TwoPhases("update", NAMES[:2], overlooks=overlooks)
        for host, staged in enumerate((None, "4.0, final, digest aa, 3 loss tokens")):
            phases.gathering.heard(host, {"state": STATE | {"staged": staged}})
        phases.answered()
        assert (phases.phase is Phase.COMMIT) is goes_on, overlooks


def test_a_stop_is_told_before_anything_else() -> None:
    phases = TwoPhases("update", NAMES[:2])
    phases.gathering.heard(0, from_peer(StageOccupiedError("no")))
    phases.gathering.heard(1, StoppedError("stopped"))
    phases.answered()
    assert isinstance(phases.error, StoppedError)


def test_whoever_differs_from_most_is_named() -> None:
    text = differing([STATE, STATE | {"staged": "4.0"}, STATE], NAMES)
    assert text == "host 1 (b): staged is '4.0', on host 0 (a) and host 2 (c) it is None"


# --- replies ------------------------------------------------------------------------------------------------


def test_a_reply_is_host_zeros_with_the_seconds_of_the_slowest() -> None:
    replies = [{"updated": True, "upload_s": 0.1, "payload_digest": "x"}, {"updated": True, "upload_s": 0.4}]
    assert combined("fwd_bwd", NAMES[:2], replies) == {"updated": True, "upload_s": 0.4, "payload_digest": "x"}


@pytest.mark.parametrize("key", ["updated", "step", "param_digest"])
def test_what_must_be_equal_and_is_not_names_both_hosts(key: str) -> None:
    with pytest.raises(TrainerError, match=rf"{key} is .* on host 0 \(a\) and .* on host 2 \(c\)"):
        combined("restore_checkpoint", NAMES, [{key: 1}, {key: 1}, {key: 2}])


def test_a_host_may_leave_the_digest_of_the_parameters_to_others() -> None:
    assert combined("shutdown", NAMES[:2], [{"param_digest": ""}, {"param_digest": "ab"}])["param_digest"] == "ab"
    assert combined("shutdown", NAMES[:1], [{"param_digest": ""}])["param_digest"] == ""


def test_a_unanimous_error_of_a_stage_and_of_a_forward_call_keeps_its_class() -> None:
    for drops in (False, True):
        phases = TwoPhases("x", NAMES[:2], drops=drops)
        for host in (0, 1):
            phases.gathering.heard(host, {"state": STATE})
        phases.answered()
        for host in (0, 1):
            phases.gathering.heard(host, from_peer(EngineError("the engine raised")))
        phases.answered()
        assert type(phases.error) is EngineError and phases.error.from_peer
