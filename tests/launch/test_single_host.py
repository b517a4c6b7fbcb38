"""Who is blamed: the launcher tells the cause, not its echo."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from shmstage.errors import BudgetError, EngineError, PeerLostError
from shmstage.launch.single_host import failure_of
from shmstage.records import write_failure


class Child:
    def __init__(self, role: str, code: int | None) -> None:
        self.pid = os.getpid()
        self._code = code

    def exit_code(self) -> int | None:
        return self._code

    def describe_end(self) -> str:
        return f"ended with {self._code}"


def failure(
    out: Path, trainer: int | None, orchestrator: int | None, given_up: PeerLostError | None = None
) -> BaseException | None:
    both: dict[str, Any] = {"trainer": Child("trainer", trainer), "orchestrator": Child("orchestrator", orchestrator)}
    return failure_of(out, both, given_up)


def test_an_orderly_end_of_both_is_no_failure(tmp_path: Path) -> None:
    assert failure(tmp_path, 0, 0) is None


@pytest.mark.parametrize(
    ("trainer", "orchestrator", "said"), [(2, 0, "the trainer"), (None, 130, "the orchestrator")]
)
def test_the_child_that_ended_without_a_word_is_named(
    trainer: int | None, orchestrator: int | None, said: str, tmp_path: Path
) -> None:
    error = failure(tmp_path, trainer, orchestrator)
    assert isinstance(error, PeerLostError)
    assert str(error).startswith(said)


def test_restarts_in_vain_are_told_with_their_number(tmp_path: Path) -> None:
    write_failure(tmp_path, "orchestrator", PeerLostError("the trainer is dead"))
    given_up = PeerLostError("the trainer (pid 7) was killed; restarted 3 times in vain")
    assert failure(tmp_path, -9, 6, given_up) is given_up


def test_an_error_names_the_log_that_says_more(tmp_path: Path) -> None:
    write_failure(tmp_path, "orchestrator", EngineError("compile: KeyError: 'tokens'"))
    assert str(failure(tmp_path, 0, 5)) == f"compile: KeyError: 'tokens'; see {tmp_path}/trainer.log"


def test_a_childs_own_words_beat_its_peers_echo(tmp_path: Path) -> None:
    write_failure(tmp_path, "trainer", PeerLostError("the orchestrator is dead"))
    write_failure(tmp_path, "orchestrator", BudgetError("too much"))
    assert isinstance(failure(tmp_path, 6, 2), BudgetError)
