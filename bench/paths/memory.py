"""Memory: what may be taken, and the most that some processes took while something went on."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from types import TracebackType

from shmstage.memory.limits import read_limits
from shmstage.memory.usage import process_use

_SAMPLE_EVERY_S = 0.01
#: beside payloads: interpreters, sockets, what others take meanwhile
_SPARE_NBYTES = 600 << 20


def room_nbytes() -> int:
    """Of what the machine, the cgroup and /dev/shm leave, the least."""
    return min(limit.available_nbytes for limit in read_limits()) - _SPARE_NBYTES


def pss_nbytes(pids: Sequence[int]) -> int:
    """Proportional set size of all of them, so that memory that several map counts once."""
    uses = [process_use(pid, started_before_s=time.time()) for pid in pids]
    return sum(use.pss_nbytes for use in uses if use is not None)


class Peak:
    """As a context manager: the most that ``pids`` took within, sampled; reading it costs time, so nothing is timed
    within."""

    def __init__(self, pids: Sequence[int]) -> None:
        self.nbytes = 0
        self._pids = pids
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._sample, daemon=True)

    def __enter__(self) -> Peak:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._over.set()
        self._thread.join()
        self.nbytes = max(self.nbytes, pss_nbytes(self._pids))

    def _sample(self) -> None:
        while not self._over.wait(_SAMPLE_EVERY_S):
            self.nbytes = max(self.nbytes, pss_nbytes(self._pids))
