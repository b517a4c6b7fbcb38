"""Everything on this host: a pool in this process, one trainer beside it."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import asdict
from typing import Any, final

from shmstage.budget.check import check_before_pool
from shmstage.errors import PoolError
from shmstage.events import Events
from shmstage.memory.identity import PeerWatch, ProcessIdentity
from shmstage.memory.layout import Layout
from shmstage.memory.pool import Pool
from shmstage.memory.sweep import sweep
from shmstage.orchestrator.arrivals import Groups, InputGroups
from shmstage.orchestrator.connection import TRAINER, Connection, connect
from shmstage.orchestrator.input import evaluation_source, first_evaluated, load_input
from shmstage.orchestrator.late_fields import LateFields
from shmstage.orchestrator.layouts import Layouts, layouts_of
from shmstage.orchestrator.local_packer import LocalPacker
from shmstage.orchestrator.site import Evaluation, Workplace
from shmstage.packing.held_form import HeldForm
from shmstage.packing.reference import Described
from shmstage.settings import Settings


@final
class LocalSite:
    """Made with its input read as far as the first trajectory, before any memory is asked for."""

    def __init__(
        self,
        settings: Settings,
        *,
        epoch: int,
        stack: ExitStack,
        stop_requested: Callable[[], bool],
        events: Events,
    ) -> None:
        """Raises ``BundleError``, ``PluginError``, ``TrajectoryError``, or what the source's own factory raises."""
        self._settings = settings
        self._epoch = epoch
        self._stack = stack
        self._stop_requested = stop_requested
        self._events = events
        self._source, self._evaluation = load_input(settings), evaluation_source(settings)
        stack.callback(self._source.close)
        self._evaluated = first_evaluated(self._evaluation)
        self._layouts = layouts_of(settings, self._source.first, self._evaluated)
        self._identity: ProcessIdentity
        self._pool: Pool

    @property
    def first(self) -> Described:
        return self._source.first

    @property
    def layouts(self) -> Layouts:
        return self._layouts

    def open(self) -> None:
        settings = self._settings
        self._identity = ProcessIdentity.create(settings.run, "orchestrator")
        self._stack.callback(self._identity.close)
        if self._epoch > 1:
            # before memory is asked for: the trainer may still map the pool of the orchestrator before
            self._connected(None, again=True).close()
        sweep(settings.run)
        check_before_pool(settings, self._source.first, self._evaluated, restarted=self._epoch > 1)
        self._pool = Pool.create(
            settings.run, epoch=self._epoch, layouts=self._layouts.all, slots=settings.slots,
            aux_slots=settings.aux_slots, identity=self._identity, numa=settings.numa,
        )  # fmt: skip
        self._stack.callback(_close_pool, self._pool)

    def connect(self, *, again: bool) -> Connection:
        return self._connected(self._pool, again=again)

    def slot_layout_id(self, layout_id: int) -> int:
        return layout_id

    def workplace(self, trainer: Connection) -> Workplace:
        assert isinstance(trainer.watch, PeerWatch)
        return local_workplace(
            self._settings, self._source, self._evaluation, self._layouts, self._pool, trainer.watch
        )

    def failed(self, error: Exception) -> None:
        self._pool.record_error(f"{type(error).__name__}: {error}")

    def trainer_died(self) -> None:
        self._pool.end_leases_of(TRAINER)

    def warnings(self) -> list[str]:
        replay = self._source.replay
        if replay is None or not replay.differences:
            return []
        text = "; ".join(replay.differences)
        return [f"the bundle was recorded with other settings, so that its steps are not those of the run: {text}"]

    def summary(self, trained: int) -> dict[str, Any]:
        return {"pool_nbytes": self._pool.nbytes, "backing": asdict(self._pool.backing)}

    def _connected(self, pool: Pool | None, *, again: bool) -> Connection:
        return connect(
            self._settings, self._identity, epoch=self._epoch, pool=pool, again=again,
            stop_requested=self._stop_requested, events=self._events,
        )  # fmt: skip


def local_workplace(
    settings: Settings,
    source: InputGroups,
    evaluation: Groups | None,
    layouts: Layouts,
    pool: Pool,
    trainer: PeerWatch,
) -> Workplace:
    """Micro-batches in ``pool``, for the trainer that ``trainer`` watches."""

    def packer(layout: Layout, *, aux: bool) -> LocalPacker:
        return LocalPacker(pool, layout, slot_timeout_s=settings.slot_timeout_s, peers=[trainer], aux=aux)

    evaluated = None
    if evaluation is not None and layouts.evaluate is not None:
        form = HeldForm(settings.routing_encoding, layouts.eval_experts)
        evaluated = Evaluation(evaluation, packer(layouts.evaluate, aux=True), form)
    late = LateFields(pool, sampler_is_cap=settings.sampler_is_cap) if settings.recompute_old_logps else None
    return Workplace(
        source=source, packer=packer(layouts.train, aux=False), microbatch_nbytes=layouts.train.payload_nbytes,
        form=HeldForm(settings.routing_encoding, layouts.experts), evaluation=evaluated, late=late,
        heartbeat=pool.heartbeat,
    )  # fmt: skip


def _close_pool(pool: Pool) -> None:
    """The pool is unlinked in any case; that somebody still looks at it must not hide why the run ends."""
    try:
        pool.close()
    except PoolError as error:
        print(f"on closing the pool: {error}", flush=True)
