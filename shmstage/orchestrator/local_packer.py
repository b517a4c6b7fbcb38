"""Packs straight into a slot of this host's pool: one native call, no copy in between."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import cast, final

from shmstage.memory.identity import PeerWatch
from shmstage.memory.layout import Layout
from shmstage.memory.pool import Pool
from shmstage.orchestrator.intake import Planned, Upcoming
from shmstage.orchestrator.packer import Filled
from shmstage.packing.fill import fill_microbatch, microbatch_digest
from shmstage.packing.slot_fields import views_to_fill
from shmstage.packing.trajectory import Trajectory


@final
class LocalPacker:
    """``aux``: into the slots that training never takes. ``peers``: who may hold slots; their death ends a wait."""

    looks_ahead = 0

    def __init__(
        self,
        pool: Pool,
        layout: Layout,
        *,
        slot_timeout_s: float,
        peers: Sequence[PeerWatch],
        aux: bool = False,
    ) -> None:
        self._pool = pool
        self._layout = layout
        self._slot_timeout_s = slot_timeout_s
        self._peers = tuple(peers)
        self._aux = aux

    def ahead(self, upcoming: Sequence[Upcoming]) -> None:
        pass

    def pack(self, planned: Planned, *, step: int, index: int, is_final: bool, stop: Callable[[], bool]) -> Filled:
        # an input of this host gives trajectories with their arrays
        trajectories = cast(
            Mapping[int, Trajectory], {number: arrival.trajectory for number, arrival in planned.arrivals.items()}
        )
        begun_ns = time.monotonic_ns()
        slot = self._pool.acquire(
            self._layout, aux=self._aux, timeout_s=self._slot_timeout_s, peers=self._peers, stop=stop
        )
        acquired_ns = time.monotonic_ns()
        with slot:
            views = views_to_fill(next(iter(trajectories.values()), None), slot.views, self._layout.late_names)
            filled = fill_microbatch(planned.plan, trajectories, views)
            filled_ns = time.monotonic_ns()
            handle = slot.publish(
                digest=microbatch_digest(planned.plan, trajectories),
                rows=len(planned.plan.rows),
                step=step,
                index=index,
                is_final=is_final,
                loss_tokens=filled.loss_tokens,
                segments=filled.segments,
            )
        return Filled(
            handle=handle, real_tokens=filled.real_tokens, nbytes=self._layout.payload_nbytes, begun_ns=begun_ns,
            acquired_ns=acquired_ns, filled_ns=filled_ns, published_ns=time.monotonic_ns(),
        )  # fmt: skip

    def free_slot_count(self) -> int:
        return self._pool.free_slot_count()
