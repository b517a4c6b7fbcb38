"""A JAX profile of some steps: starts before the first forward call of the first one, ends when the last has landed.

Starting takes some milliseconds at most and is done in order: what is not yet traced could not be found later. Ending
writes files and is done on a thread of its own; the steps that follow share the host's cores with it. What goes wrong
is logged once and is no matter of the step's.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any, final

import jax

from shmstage.trainer.engine import TrainEngine
from shmstage.trainer.jax_seam import start_profile, stop_profile
from shmstage.trainer.tokens import failure_of

log = logging.getLogger(__name__)

#: longest wait, at the end of the run, for a profile that is being written, in seconds
WRITE_S = 60.0


@final
class ProfiledEngine:
    """``engine``, profiled into ``directory`` while it trains the steps ``first`` to ``last``, once.

    Everything else is the engine's own. Called on one thread, as every engine is.
    """

    def __init__(self, engine: TrainEngine, directory: Path, first: int, last: int) -> None:
        self._engine = engine
        self._directory = directory
        self._steps = range(first, last + 1)
        self._updated: jax.Array | None = None
        self._begun = False
        self._running = False
        self._writer: threading.Thread | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def annotate(self, what: str, step: int, request_id: str) -> AbstractContextManager[object]:
        """A range in the profile, named ``what`` and whose it is (``update 3``); nothing while none is taken."""
        if what == "fwd_bwd" and not self._begun and step in self._steps:
            self._start()
        if not self._running:
            return nullcontext()
        name = f"{what} {request_id}"
        if what == "stage":
            return jax.profiler.TraceAnnotation(name, step=step)
        ranged = jax.profiler.StepTraceAnnotation(name, step_num=step)
        return self._last(ranged) if what == "update" and step >= self._steps[-1] else ranged

    def update(self) -> jax.Array | None:
        self._updated = self._engine.update()
        return self._updated

    def close(self) -> None:
        """A profile that is still taken is written; then the engine's own ``close``."""
        if self._running:
            self._end_after(None)
        if self._writer is not None:
            self._writer.join(WRITE_S)
            if self._writer.is_alive():
                log.warning("the profile in %s was not written within %g s; not waited for", self._directory, WRITE_S)
        getattr(self._engine, "close", lambda: None)()

    @contextmanager
    def _last(self, ranged: AbstractContextManager[object]) -> Iterator[None]:
        with ranged:
            yield
        # now, not in ``update``: a range that has not ended when tracing does is not in the profile
        self._end_after(self._updated)

    def _start(self) -> None:
        self._begun = True
        try:
            start_profile(self._directory)
        except Exception:
            log.exception("no profile is taken; the run goes on")
        else:
            self._running = True
            log.info("profile of steps %d to %d begun", self._steps[0], self._steps[-1])

    def _end_after(self, token: jax.Array | None) -> None:
        self._running, self._updated = False, None
        self._writer = threading.Thread(target=self._end, args=(token,), name="shmstage-profile", daemon=True)
        self._writer.start()

    def _end(self, token: jax.Array | None) -> None:
        failure_of(token)  # whoever trains hears of its failure elsewhere
        try:
            stop_profile()
            log.info("profile written to %s", self._directory)
        except Exception:
            log.exception("the profile could not be written to %s; the run goes on", self._directory)
