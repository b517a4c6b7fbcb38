"""Five deliberate faults in the schedule, each of which the walk must find as a violation of the invariant named."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any
from unittest import mock

from shmstage.orchestrator import schedule_events, schedule_next
from shmstage.orchestrator.schedule import Config, Kind, State
from walk.cases import Case


@dataclass(frozen=True)
class SeededFault:
    """``module.name`` is what is replaced by ``spoiled(original)``; ``case`` is one in which it shows."""

    name: str
    invariants: tuple[str, ...]
    case: Case
    module: Any
    target: str
    spoiled: Callable[[Any], Any]

    @contextmanager
    def planted(self) -> Iterator[None]:
        with mock.patch.object(self.module, self.target, self.spoiled(getattr(self.module, self.target))):
            yield


def _forget_the_deferral(close_step: Any) -> Any:
    def spoiled(config: Config, state: State, deferred: bool) -> State:
        closed = close_step(config, state, deferred)
        return replace(closed, duties=tuple(d for d in closed.duties if d is not Kind.APPLY_DEFERRED))

    return spoiled


def _book_before_it_landed(due: Any) -> Any:
    def spoiled(config: Config, state: State) -> bool:
        return bool(due(config, replace(state, landed=state.step, metrics_of=state.step)))

    return spoiled


def _publish_old_weights_again(close_step: Any) -> Any:
    return lambda config, state, deferred: close_step(replace(config, weights_floor=0), state, deferred)


def _do_not_wait_for_the_hook(missing: Any) -> Any:
    return lambda state: False


def _wait_for_the_input(over: Any) -> Any:
    return lambda config, state: state.exhausted


BEFORE = "staged_before_update"
FAULTS = (
    SeededFault(
        "the deferred update is never applied", ("refused", "3 after", "left"),
        Case(BEFORE, 2, 2), schedule_events, "_close_step", _forget_the_deferral,
    ),
    SeededFault(
        "a step is booked before its update landed", ("books",),
        Case("pipelined", 2, 2), schedule_next, "_bookkeeping_is_due", _book_before_it_landed,
    ),
    SeededFault(
        "a replayed step publishes weights older than the published ones", ("weights",),
        Case("staged_after_update", 3, 1, sync="async", disturbances=frozenset({"crash"}), budget=1),
        schedule_events, "_close_step", _publish_old_weights_again,
    ),
    SeededFault(
        "an update does not wait for the hook's verdict", ("hook",),
        Case(BEFORE, 2, 2, checkpoint_every=1, hook=True), schedule_next, "_verdict_is_missing",
        _do_not_wait_for_the_hook,
    ),
    SeededFault(
        "a deferred update waits for the input, however long it takes", ("source",),
        Case(BEFORE, 2, 1), schedule_next, "_stage_wait_is_over", _wait_for_the_input,
    ),
)  # fmt: skip
