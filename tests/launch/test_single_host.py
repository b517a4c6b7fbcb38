"""Who ended how: the launcher tells the cause, not its echo."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from shmstage.errors import BudgetError, EngineError, PeerLostError
from shmstage.events import write_failure
from shmstage.launch.single_host import _failure, _Stop, _watch
from shmstage.settings import Settings


class Child:
    """Ends after so many looks at it."""

    def __init__(self, role: str, code: int | None, after: int = 0) -> None:
        self.pid = 7
        self.log = Path(f"{role}.log")
        self._code = code
        self._after = after

    def exit_code(self) -> int | None:
        self._after -= 1
        return self._code if self._after < 0 else None

    def wait(self, timeout_s: float) -> int | None:
        return self.exit_code()

    def describe_end(self) -> str:
        return f"ended with {self._code}"


class Quiet:
    def poll(self) -> None:
        return


def children(trainer: Child, orchestrator: Child) -> dict[str, Any]:
    return {"trainer": trainer, "orchestrator": orchestrator}


def failure(out: Path, trainer: int | None, orchestrator: int | None) -> BaseException | None:
    return _failure(out, children(Child("trainer", trainer), Child("orchestrator", orchestrator)))


def test_an_orderly_end_of_both_is_no_failure(tmp_path: Path) -> None:
    assert failure(tmp_path, 0, 0) is None


def test_an_orchestrator_that_takes_its_time_after_the_trainers_orderly_end_is_waited_for(tmp_path: Path) -> None:
    both = children(Child("trainer", 0), Child("orchestrator", 0, after=50))
    _watch(both, Quiet(), _Stop(), Settings(stop_grace_s=60.0))
    assert _failure(tmp_path, both) is None


@pytest.mark.parametrize(
    ("trainer", "orchestrator", "said"),
    [(-9, 0, "the trainer"), (-9, 6, "the trainer"), (None, -9, "the orchestrator"), (0, -11, "the orchestrator")],
)
def test_the_child_that_died_is_named(
    trainer: int | None, orchestrator: int | None, said: str, tmp_path: Path
) -> None:
    error = failure(tmp_path, trainer, orchestrator)
    assert isinstance(error, PeerLostError)
    assert str(error).startswith(said)


def test_an_error_names_the_log_that_says_more(tmp_path: Path) -> None:
    write_failure(tmp_path, "orchestrator", EngineError("compile: KeyError: 'tokens'"))
    assert str(failure(tmp_path, 0, 5)) == f"compile: KeyError: 'tokens'; see {tmp_path}/trainer.log"


def test_a_childs_own_words_beat_its_peers_echo(tmp_path: Path) -> None:
    write_failure(tmp_path, "trainer", PeerLostError("the orchestrator is dead"))
    write_failure(tmp_path, "orchestrator", BudgetError("too much"))
    assert isinstance(failure(tmp_path, 6, 2), BudgetError)
