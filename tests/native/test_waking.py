"""Who sleeps in ``claim`` is woken by whatever frees a slot: on real headers what the walk found on a model."""

from __future__ import annotations

import os
import threading
from pathlib import Path

from shmstage import _native

NBYTES = _native.POOL_HEADER_NBYTES + _native.SLOT_HEADER_NBYTES


def _sleeps(thread: threading.Thread) -> bool:
    stat = Path(f"/proc/self/task/{thread.native_id}/stat").read_text()
    return stat.rpartition(")")[2].split()[0] == "S"


def test_a_publication_for_nobody_wakes_a_claim_that_sleeps_in_the_kernel() -> None:
    """The slot is free at once, and no lease's end will say so."""
    headers = _native.Headers(bytearray(NBYTES), 1, 1, 1)
    assert headers.claim(0, 1, 0) == 0
    claimed: list[int] = []
    sleeper = threading.Thread(target=lambda: claimed.append(headers.claim(0, 1, 600_000_000_000)))
    sleeper.start()
    while not headers.waiter_count() or not _sleeps(sleeper):
        os.sched_yield()
    headers.publish(0, 1, 1, 0, 0, 0)
    sleeper.join(20)
    woken = not sleeper.is_alive()
    headers.wake_all()
    sleeper.join()
    assert woken and claimed == [0]
