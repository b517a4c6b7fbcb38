"""One of the two is killed: the other notices within a second and says in its log which slots the dead one held."""

from __future__ import annotations

import os
import re
import signal
import time
from pathlib import Path

import pytest
from command_line import finish, is_running, living_pid, start, wait_for_step

from shmstage.memory import pool
from shmstage.memory.names import list_objects
from shmstage.trainer.__main__ import POLL_S as TRAINER_LOOKS_EVERY_S
from shmstage.transport import client, consumer

pytestmark = pytest.mark.slow

#: a second, and what a busy machine may add to it; all other waits of a run are of minutes
NOTICED_S = 5.0
RUN = ("run", "--rows", "2", "--microbatches-per-step", "2", "--restart-backoff-s", "600", "--steps", "100000")


def test_nobody_who_waits_looks_at_its_peer_less_often_than_every_second() -> None:
    """S50: how long a death may go unnoticed, and how long the dead one's last frames are waited for."""
    assert max(pool._LOOK_EVERY_S, TRAINER_LOOKS_EVERY_S) < 1
    assert max(module._POLL_S + module._DRAIN_S for module in (client, consumer)) < 1


def wait_for_words(log: Path, words: re.Pattern[str], writer: int) -> None:
    """Until the log has them. Gives up when its writer has ended, or has long had time to write them."""
    deadline = time.monotonic() + 4 * NOTICED_S
    while True:
        still_writes = is_running(writer)
        text = log.read_text()
        if words.search(text):
            return
        assert still_writes and time.monotonic() < deadline, f"not a word of {words.pattern!r} in {text[-2000:]}"
        os.sched_yield()


@pytest.mark.parametrize(
    ("killed", "left", "says"),
    [
        (
            "trainer", "orchestrator",
            r"trainer {pid} \(lock .*\) is dead; "
            r"(it left no answer to .*; it held (slot \d generation \d+ \(micro-batch|no slot)|slot \d .*is held by)",
        ),
        (
            "orchestrator", "trainer",
            r"orchestrator {pid} \(lock .*\) is dead; "
            r"(slot \d (generation|was being written)|it held no slot).*waiting",
        ),
    ],
)  # fmt: skip
def test_whoever_is_left_says_who_died_and_what_it_held(killed: str, left: str, says: str, tmp_path: Path) -> None:
    """S50: both are stopped first, so that nobody can end in good order; then one is killed and the other goes on."""
    out = tmp_path / "out"
    process = start(*RUN, "--out", "out", "--run", f"deaths-{os.getpid()}-{killed}", cwd=tmp_path)
    try:
        wait_for_step(process, 2)
        survivor, dead = living_pid(out, left), living_pid(out, killed)
        os.kill(survivor, signal.SIGSTOP)
        os.kill(dead, signal.SIGKILL)
        log = out / f"{left}.log"
        os.kill(survivor, signal.SIGCONT)
        begin = time.monotonic()
        wait_for_words(log, re.compile(says.format(pid=dead)), survivor)
        assert time.monotonic() - begin < NOTICED_S
        assert is_running(survivor)  # the next one may come: nobody else's memory is touched
        process.send_signal(signal.SIGINT)
        code, _, err = finish(process)
        assert code == 130, err
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGINT)
            finish(process)
    assert list_objects(f"deaths-{os.getpid()}-{killed}") == []
