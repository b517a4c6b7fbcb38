from __future__ import annotations

import fcntl
import os
from pathlib import Path

import pytest

from shmstage.memory import locks
from shmstage.memory.locks import lock_exclusively


def test_whoever_only_looks_at_a_lock_keeps_nobody_from_taking_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "lock").touch()
    looker, taker = (os.open(tmp_path / "lock", os.O_RDWR) for _ in range(2))
    fcntl.flock(looker, fcntl.LOCK_SH)
    waits: list[float] = []

    def look_is_over(seconds: float) -> None:
        waits.append(seconds)
        fcntl.flock(looker, fcntl.LOCK_UN)

    monkeypatch.setattr(locks.time, "sleep", look_is_over)
    assert lock_exclusively(taker)
    assert len(waits) == 1
    os.close(looker)
    os.close(taker)


def test_a_lock_that_is_kept_is_given_up_on(tmp_path: Path) -> None:
    (tmp_path / "lock").touch()
    owner, taker = (os.open(tmp_path / "lock", os.O_RDWR) for _ in range(2))
    assert lock_exclusively(owner)
    assert not lock_exclusively(taker)
    os.close(owner)
    assert lock_exclusively(taker)
    os.close(taker)
