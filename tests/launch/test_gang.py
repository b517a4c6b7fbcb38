"""Who ended, and what follows: a death means all anew, an answer is the end, an echo waits for the better word."""

from __future__ import annotations

from typing import Any

import pytest

from shmstage.errors import EngineError, PeerLostError, RunFailedError, SettingsError, TrainerError
from shmstage.launch.gang import Again, Ended, Gang, Over
from shmstage.launch.keeper import NOTICE_S, ORDERLY_S
from shmstage.launch.supervisor import Ending

HOST_0, HOST_1 = "host 0 (a)", "host 1 (b)"


def gang(max_restarts: int = 2) -> Gang:
    made = Gang(max_restarts=max_restarts, backoff_s=1.0)
    made.begin()
    return made


def killed(role: str = "trainer", where: str = HOST_1, at_s: float = 10.0, **changes: Any) -> Ended:
    how = "was killed by signal 9" if role != "host" else "is lost"
    values = {"role": role, "where": where, "how": how, "ending": Ending.DIED, "at_s": at_s, "pid": 7, "exit_code": -9}
    return Ended(**{**values, **changes})


def said(told: Any, role: str = "orchestrator", where: str = "", at_s: float = 10.0) -> Ended:
    ending = Ending.DIED if isinstance(told, PeerLostError) else Ending.FAILED
    return Ended(role, where, "ended with exit code 5", ending, at_s, pid=8, told=told, exit_code=5)


def finished(role: str, where: str = "", at_s: float = 10.0) -> Ended:
    return Ended(role, where, "ended with exit code 0", Ending.FINISHED, at_s, pid=9, exit_code=0)


def judged(made: Gang, now_s: float, *ended: Ended, step: int = 0, is_complete: bool = False) -> Any:
    for each in ended:
        made.note(each)
    return made.judge(now_s, step, is_complete=is_complete)


def test_nothing_is_decided_while_nobody_has_ended() -> None:
    assert judged(gang(), 10.0) is None


@pytest.mark.parametrize("role", ["trainer", "agent", "store", "orchestrator", "host"])
def test_a_death_of_anybody_means_all_anew_at_once(role: str) -> None:
    made = gang()
    verdict = judged(made, 10.0, killed(role))
    assert isinstance(verdict, Again)
    assert (verdict.cause.role, verdict.restart.at_s) == (role, 11.0)
    assert made.restarts[role] == sum(made.restarts.values()) == 1
    assert made.anyone_died


def test_the_host_is_named_and_not_what_fell_with_it() -> None:
    fallen = [killed("trainer", HOST_0, 9.0), killed("agent"), killed("host"), killed("orchestrator", "")]
    verdict = judged(gang(), 10.0, *fallen)
    assert isinstance(verdict, Again)
    assert verdict.cause.describe() == "host 1 (b) is lost"


def test_an_abort_is_named_only_if_nobody_else_died() -> None:
    aborted = killed("trainer", HOST_0, 9.0, exit_code=-6, how="was killed by signal 6")
    made = gang()
    assert judged(made, 9.0, aborted) is None
    verdict = judged(made, 9.5, killed())
    assert isinstance(verdict, Again)
    assert verdict.cause.describe() == "host 1 (b): the trainer (pid 7) was killed by signal 9"
    alone = gang()
    judged(alone, 9.0, aborted)
    verdict = judged(alone, 9.0 + NOTICE_S)
    assert isinstance(verdict, Again) and verdict.cause is aborted


@pytest.mark.parametrize("told", [TrainerError("a collective failed"), RunFailedError("stuck")])
@pytest.mark.parametrize("first", ["echo", "death"])
def test_an_error_within_a_moment_of_a_death_is_its_echo(told: Exception, first: str) -> None:
    made = gang()
    echo, death = said(told), killed(at_s=10.0 + 0.9 * NOTICE_S)
    if first == "echo":
        assert judged(made, 10.0, echo) is None
        verdict = judged(made, 10.0 + 0.9 * NOTICE_S, death)
    else:
        verdict = judged(made, 10.0, death, echo)
    assert isinstance(verdict, Again) and verdict.cause is death


def test_an_error_that_no_death_explains_is_the_answer() -> None:
    made = gang()
    told = TrainerError("loss is NaN")
    assert judged(made, 10.0, said(told)) is None
    assert judged(made, 10.0 + NOTICE_S) == Over(told)
    assert not made.anyone_died


def test_what_a_trainer_says_itself_counts_for_more_than_what_was_heard_of_it() -> None:
    made = gang()
    own = EngineError("out of device memory")
    judged(made, 10.0, said(TrainerError("host 1: the command failed")), said(own, "trainer", HOST_1, 11.0))
    assert judged(made, 12.0) == Over(own)


def test_bad_input_ends_the_run_at_once_even_beside_a_death() -> None:
    told = SettingsError("rows = 3 over 2 hosts")
    assert judged(gang(), 10.0, killed(), said(told, "trainer", HOST_0)) == Over(told)


def test_a_host_lost_only_by_the_orchestrators_word_is_named_in_it() -> None:
    made = gang()
    lost = PeerLostError("host 1 (b): the trainer answers no ping")
    assert judged(made, 10.0, said(lost)) is None
    verdict = judged(made, 10.0 + NOTICE_S)
    assert isinstance(verdict, Again)
    assert verdict.cause.told is lost


def test_the_run_is_over_when_the_orchestrator_has_finished_whatever_becomes_of_the_others() -> None:
    assert judged(gang(), 10.0, killed(), finished("orchestrator")) == Over()
    assert judged(gang(), 10.0, killed("orchestrator", ""), is_complete=True) == Over()


def test_trainers_that_were_told_to_end_leave_the_orchestrator_time_to_end() -> None:
    made = gang()
    judged(made, 10.0, finished("trainer", HOST_0), finished("trainer", HOST_1))
    assert judged(made, 10.0 + 0.9 * ORDERLY_S) is None
    assert judged(made, 10.0 + 0.95 * ORDERLY_S, finished("orchestrator")) == Over()
    alone = gang()
    judged(alone, 10.0, finished("trainer", HOST_1))
    verdict = judged(alone, 10.0 + ORDERLY_S)
    assert isinstance(verdict, Again) and verdict.cause.role == "trainer"


def test_after_too_many_deaths_without_progress_the_last_one_is_named() -> None:
    made = gang(max_restarts=1)
    assert isinstance(judged(made, 10.0, killed(), step=3), Again)
    made.begin()
    over = judged(made, 20.0, killed("agent"), step=5)
    assert isinstance(over, Over) and isinstance(over.failure, PeerLostError)
    assert str(over.failure) == (
        "host 1 (b): the agent (pid 7) was killed by signal 9; restarted 1 time in vain; raise max_restarts if another "
        "try could help"
    )


def test_progress_forgets_the_restarts_before_it() -> None:
    made = gang(max_restarts=1)
    assert isinstance(judged(made, 10.0, killed(), step=3), Again)
    made.begin()
    assert isinstance(judged(made, 20.0, killed(), step=30), Again)


def test_a_new_attempt_does_not_remember_who_ended_in_the_one_before() -> None:
    made = gang()
    judged(made, 10.0, killed())
    made.begin()
    assert judged(made, 20.0) is None
