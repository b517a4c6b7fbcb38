"""A forked child for the tests that must show what happens in one."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable


def exit_code_in_forked_child(body: Callable[[], int]) -> int:
    """What ``body()`` returns in a forked child: 99 if it raises, -14 if it has not come back after 20 s.

    Only the forking thread lives on in the child, so a lock that any other held is held there for ever: a body that
    waits for one must be ended, and must never reach pytest's own handlers.
    """
    child = os.fork()
    if child == 0:
        try:
            signal.signal(signal.SIGALRM, signal.SIG_DFL)
            signal.alarm(20)
            os._exit(body())
        except BaseException:
            os._exit(99)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
