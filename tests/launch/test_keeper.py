"""The launcher's loop without processes: who is started again, when, and when it is over."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from shmstage.errors import BudgetError, EngineError, PeerLostError, ShmstageError, StoppedError, WaitTimeoutError
from shmstage.launch.keeper import NOTICE_S, ORDERLY_S, ChildProcess, Keeper
from shmstage.launch.supervisor import PROGRESS_STEPS
from shmstage.testing.fake_clock import FakeClock

GRACE_S = 20.0
BACKOFF_S = 4.0


class FakeChild:
    """Ends when the test says so."""

    def __init__(self, role: str, pid: int, epoch: int) -> None:
        self.role = role
        self.pid = pid
        self.epoch = epoch
        self.code: int | None = None
        self.was_ended = False

    def exit_code(self) -> int | None:
        return self.code

    def describe_end(self) -> str:
        return f"{self.how_it_ended()}; see {self.role}.log"

    def how_it_ended(self) -> str:
        return f"ended with {self.code}"

    def end(self, grace_s: float) -> None:
        self.was_ended = True
        self.code = 0 if self.code is None else self.code


class FakeWorld:
    """A clock, children made on demand, and a record of what was done to them."""

    def __init__(self) -> None:
        self.clock = FakeClock()
        self.started: list[FakeChild] = []
        self.words: dict[str, ShmstageError] = {}
        self.complete = False
        self.step = 0
        self.said: list[str] = []
        self.changes: list[tuple[int, dict[str, int | None], dict[str, int]]] = []

    def start(self, role: str, epoch: int) -> ChildProcess:
        self.words.pop(role, None)
        self.started.append(FakeChild(role, 100 + len(self.started), epoch))
        return self.started[-1]

    def told(self, role: str) -> ShmstageError | None:
        return self.words.get(role)

    def is_complete(self) -> bool:
        return self.complete

    def reached(self) -> int:
        return self.step

    def changed(self, keeper: Keeper) -> None:
        self.changes.append((keeper.epoch, keeper.pids, keeper.restarts))

    def say(self, text: str) -> None:
        self.said.append(text)

    def latest(self, role: str) -> FakeChild:
        return [child for child in self.started if child.role == role][-1]

    def roles_started(self) -> Sequence[str]:
        return [child.role for child in self.started]


@pytest.fixture
def world() -> FakeWorld:
    return FakeWorld()


def begun(world: FakeWorld, max_restarts: int = 3) -> Keeper:
    keeper = Keeper(world, max_restarts=max_restarts, backoff_s=BACKOFF_S, grace_s=GRACE_S, clock=world.clock)
    keeper.begin()
    assert not keeper.look()
    return keeper


def test_both_are_started_and_an_orderly_end_of_both_is_the_end(world: FakeWorld) -> None:
    keeper = begun(world)
    assert world.roles_started() == ["trainer", "orchestrator"]
    world.latest("trainer").code = 0
    assert not keeper.look()
    world.latest("orchestrator").code = 0
    assert keeper.look()
    assert keeper.is_done
    assert keeper.failure is None
    assert keeper.restarts == {"trainer": 0, "orchestrator": 0}
    assert not keeper.anyone_died


def test_a_killed_trainer_is_started_again_after_the_back_off_in_the_same_epoch(world: FakeWorld) -> None:
    keeper = begun(world)
    world.latest("trainer").code = -9
    assert not keeper.look()
    assert world.said == ["trainer (pid 100) ended with -9; restarting, 1 of 3"]
    assert keeper.pids == {"trainer": None, "orchestrator": 101}
    world.clock.advance(BACKOFF_S - 0.01)
    keeper.look()
    assert len(world.started) == 2
    world.clock.advance(0.01)
    keeper.look()
    assert world.latest("trainer").pid == 102
    assert world.latest("trainer").epoch == 1
    assert world.changes[-1] == (1, {"trainer": 102, "orchestrator": 101}, {"trainer": 1, "orchestrator": 0})
    assert world.started[0].was_ended  # reaped, its pipe closed
    assert keeper.anyone_died


def test_a_killed_orchestrator_is_started_again_with_the_next_epoch(world: FakeWorld) -> None:
    keeper = begun(world)
    world.latest("orchestrator").code = -9
    keeper.look()
    world.clock.advance(BACKOFF_S)
    keeper.look()
    assert world.latest("orchestrator").epoch == 2
    assert world.changes[-1][0] == 2
    world.latest("trainer").code = -9
    keeper.look()
    world.clock.advance(BACKOFF_S)
    keeper.look()
    assert world.latest("trainer").epoch == 2


def test_restarts_end_with_an_error_that_names_role_pid_number_and_log(world: FakeWorld) -> None:
    keeper = begun(world, max_restarts=2)
    for _ in range(2):
        world.latest("trainer").code = -11
        assert not keeper.look()
        world.clock.advance(100.0)
        assert not keeper.look()
    world.latest("trainer").code = -11
    assert keeper.look()
    assert isinstance(keeper.failure, PeerLostError)
    assert str(keeper.failure) == (
        "the trainer (pid 103) ended with -11; see trainer.log; restarted 2 times in vain; raise max_restarts if "
        "another try could help"
    )


def test_each_role_has_restarts_of_its_own_and_progress_gives_them_back(world: FakeWorld) -> None:
    keeper = begun(world, max_restarts=1)
    for role in ("trainer", "orchestrator"):
        world.latest(role).code = -9
        assert not keeper.look()
        world.clock.advance(100.0)
        assert not keeper.look()
    world.step = PROGRESS_STEPS
    world.latest("trainer").code = -9
    assert not keeper.look()
    assert keeper.restarts == {"trainer": 2, "orchestrator": 1}


@pytest.mark.parametrize("role", ["trainer", "orchestrator"])
@pytest.mark.parametrize(
    ("code", "error"),
    [(2, BudgetError("too much")), (5, EngineError("NaN")), (130, StoppedError("s")), (6, WaitTimeoutError("w"))],
)
def test_who_says_why_it_ended_is_not_started_again(
    role: str, code: int, error: ShmstageError, world: FakeWorld
) -> None:
    keeper = begun(world)
    world.latest(role).code = code
    world.words[role] = error
    keeper.look()
    world.clock.advance(NOTICE_S + 100.0)
    assert keeper.look()
    assert world.roles_started() == ["trainer", "orchestrator"]
    assert world.said == []


def test_a_failed_orchestrator_leaves_the_trainer_a_moment_to_say_what_it_knows(world: FakeWorld) -> None:
    keeper = begun(world)
    world.latest("orchestrator").code = 5
    world.words["orchestrator"] = EngineError("echo")
    assert not keeper.look()
    world.clock.advance(NOTICE_S)
    assert not keeper.look()
    world.clock.advance(0.01)
    assert keeper.look()


def test_bad_input_ends_it_at_once(world: FakeWorld) -> None:
    keeper = begun(world)
    world.latest("orchestrator").code = 2
    world.words["orchestrator"] = BudgetError("too much")
    assert keeper.look()


def test_a_trainer_that_dies_during_the_back_off_of_the_orchestrator_comes_back_too(world: FakeWorld) -> None:
    keeper = begun(world)
    world.latest("orchestrator").code = -9
    keeper.look()
    world.latest("trainer").code = -9
    keeper.look()
    world.clock.advance(BACKOFF_S)
    keeper.look()
    assert sorted(world.roles_started()[2:]) == ["orchestrator", "trainer"]


def test_a_trainer_that_dies_when_all_is_done_changes_nothing(world: FakeWorld) -> None:
    keeper = begun(world)
    world.latest("trainer").code = -9
    world.latest("orchestrator").code = 0
    assert keeper.look()
    assert keeper.is_done
    assert keeper.failure is None
    assert world.said == []


def test_nothing_is_started_again_for_a_run_that_has_failed(world: FakeWorld) -> None:
    keeper = begun(world)
    world.latest("trainer").code = -9
    keeper.look()
    world.latest("orchestrator").code = 5
    world.words["orchestrator"] = EngineError("NaN")
    world.clock.advance(BACKOFF_S)
    keeper.look()
    assert len(world.started) == 2


def test_an_orchestrator_killed_after_its_summary_had_nothing_left_to_do(world: FakeWorld) -> None:
    keeper = begun(world)
    world.latest("trainer").code = 0
    world.complete = True
    world.latest("orchestrator").code = -9
    assert keeper.look()
    assert keeper.is_done
    assert world.said == []


def test_a_trainer_told_to_end_by_an_orchestrator_that_then_died_is_started_again(world: FakeWorld) -> None:
    keeper = begun(world)
    world.latest("trainer").code = 0
    world.latest("orchestrator").code = -9
    keeper.look()
    world.clock.advance(BACKOFF_S)
    keeper.look()
    assert sorted(world.roles_started()[2:]) == ["orchestrator", "trainer"]


def test_a_trainer_that_ended_unasked_is_started_again_for_a_living_orchestrator(world: FakeWorld) -> None:
    keeper = begun(world, max_restarts=1)
    for expected in ([], ["trainer"]):
        world.latest("trainer").code = 0
        assert not keeper.look()
        assert world.roles_started()[2:] == expected
        world.clock.advance(ORDERLY_S)
        if expected:
            break
        assert not keeper.look()
        world.clock.advance(BACKOFF_S)
        assert not keeper.look()
    assert keeper.look()  # and not without end
    assert "ended with 0" in str(keeper.failure)


def test_the_orchestrator_is_ended_first(world: FakeWorld, monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[str] = []
    monkeypatch.setattr(FakeChild, "end", lambda self, grace_s: order.append(f"{self.role} {grace_s}"))
    begun(world).end()
    assert order == [f"orchestrator {GRACE_S}", f"trainer {GRACE_S}"]
