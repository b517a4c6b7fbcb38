"""What every test of this folder asks of a reader of foreign bytes, and how many examples it tries.

`pytest tests/fuzz --fuzz-examples 5000` tries more than CI does; `--fuzz-seed 7` others. Without them the examples are
always the same.
"""

from __future__ import annotations

import os
import time
import tracemalloc
from collections.abc import Callable
from typing import Any, TypeVar

from hypothesis import HealthCheck, seed, settings

from shmstage.errors import ShmstageError

Result = TypeVar("Result")
Test = TypeVar("Test", bound=Callable[..., None])

EXAMPLES = int(os.environ.get("SHMSTAGE_FUZZ_EXAMPLES", "50"))
SEED = int(os.environ.get("SHMSTAGE_FUZZ_SEED", "0"))
#: an error is read by a person, in a line of a log; it may name two files, each as long as a path may be
MAX_TEXT = 10_000
#: of processor time, not of the clock: a loaded machine fails nothing. What takes longer would hang with more input.
#: What waits for ever takes no processor time: pytest's timeout ends that here, and ``CASE_TIMEOUT_S`` in a child.
MAX_CPU_S = 10.0

_settings = settings(
    max_examples=EXAMPLES,
    derandomize=not SEED,
    deadline=None,
    database=None,
    suppress_health_check=list(HealthCheck),
)


def fuzz(test: Test) -> Test:
    """``test`` with as many examples as asked for: the same ones each time, or those of the seed that was given."""
    return seed(SEED)(_settings(test)) if SEED else _settings(test)


def survives(
    act: Callable[[], Result], *fitting: type[ShmstageError], cap_nbytes: int, traced: bool = True
) -> Result | ShmstageError:
    """What ``act`` returns, or the error it raised if that is one of ``fitting``.

    Anything else it raises, an unreadable text, a lot of time, and, if ``traced``, allocations that were ever above
    ``cap_nbytes`` fail the test.
    """
    begin = time.thread_time()
    if traced:
        tracemalloc.start()
    outcome: Any
    try:
        outcome = act()
    except fitting as error:
        outcome = error
        check_text(str(error))
    finally:
        peak = 0
        if traced:
            _, peak = tracemalloc.get_traced_memory()
            tracemalloc.stop()
    assert peak <= cap_nbytes, f"{peak} bytes were allocated at once; the cap is {cap_nbytes}"
    took = time.thread_time() - begin
    assert took < MAX_CPU_S, f"it took {took:.1f} s of processor time"
    return outcome  # type: ignore[no-any-return]


def check_text(text: str) -> None:
    """One line that any terminal can show."""
    assert 0 < len(text) <= MAX_TEXT, f"an error text of {len(text)} characters: {text[:200]!r}"
    assert text.isprintable(), f"an error text that would garble a terminal: {text!r}"
