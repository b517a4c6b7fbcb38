"""What fills one host's slots: owns the local pool, fetches the host's part of each micro-batch, packs it.

Knows no Ray and no socket: commands come through doors (``launch.door``), trajectories through ``Stores``.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any, final

import xxhash

from shmstage.errors import PeerLostError, PoolError, ProtocolError, shown
from shmstage.launch.door import Arguments, Command
from shmstage.launch.fetch_ahead import FetchAhead, Stores
from shmstage.memory.identity import ProcessIdentity
from shmstage.memory.layout import Layout
from shmstage.memory.pool import Pool
from shmstage.orchestrator.late_fields import LateFields
from shmstage.packing.parts import WindowPart, read_part, row_digests
from shmstage.packing.slot_fields import views_to_fill
from shmstage.packing.window import Window
from shmstage.packing.window_fill import fill_window
from shmstage.settings import Settings
from shmstage.wire.handles import handle_from_wire, handle_to_wire
from shmstage.wire.messages import Hello

#: fetched ahead at most: two slots' worth, but no less than this
AHEAD_NBYTES = 256 << 20


@dataclass(frozen=True)
class _Open:
    """A pool, and what its slots hold of whole micro-batches."""

    pool: Pool
    layouts: Mapping[int, Layout]
    windows: Mapping[int, Window]
    ahead: FetchAhead
    late: LateFields

    @property
    def training(self) -> int:
        """The id of the first layout."""
        return next(iter(self.layouts))


@final
class HostAgent:
    """``commands`` may be given to any number of doors. ``trainer_lost()`` says in words why the trainer is no more."""

    def __init__(
        self,
        settings: Settings,
        *,
        rank: int,
        hosts: int,
        name: str,
        epoch: int,
        identity: ProcessIdentity,
        stores: Stores,
        trainer_lost: Callable[[], str | None] = lambda: None,
    ) -> None:
        self._settings = settings
        self._info = {"rank": rank, "hosts": hosts, "name": name, "remembers_plans": True}
        self._name = name
        self._epoch = epoch
        self._identity = identity
        self._stores = stores
        self._trainer_lost = trainer_lost
        self._lock = threading.Lock()
        self._open: _Open | None = None
        self.commands: dict[str, Command] = {
            "open_pool": self._open_pool,
            "prefetch": self._prefetch,
            "pack": self._pack,
            "late_before": self._late_before,
            "late_after": self._late_after,
            "close_pool": self._close_pool,
        }

    def welcome(self, hello: Hello) -> dict[str, Any]:
        """What a hello is answered with."""
        return dict(self._info)

    def close_pool(self) -> None:
        """Give the pool's memory back; whoever waits for a slot leaves with ``PoolError``."""
        with self._lock:
            opened, self._open = self._open, None
        if opened is not None:
            opened.ahead.close()
            opened.pool.close()

    # --- commands ----------------------------------------------------------------------------------------------

    def _open_pool(self, arguments: Arguments, given_up: Callable[[], bool]) -> dict[str, Any]:
        layouts = [Layout.from_wire(wire) for wire in arguments.take("layouts", list)]
        windows = [_window(bounds) for bounds in arguments.take("windows", list)]
        if not layouts or len(windows) != len(layouts):
            raise ProtocolError(
                f"open_pool: {len(layouts)} layouts, {len(windows)} windows; give one window per layout"
            )
        slots, aux_slots = arguments.take("slots", int), arguments.take("aux_slots", int)
        self.close_pool()
        pool = Pool.create(
            self._settings.run, epoch=self._epoch, layouts=layouts, slots=slots, aux_slots=aux_slots,
            identity=self._identity, numa=self._settings.numa,
        )  # fmt: skip
        ahead = FetchAhead(
            self._stores,
            limit_nbytes=max(AHEAD_NBYTES, 2 * max(layout.payload_nbytes for layout in layouts)),
            verify_full=self._settings.verify == "full",
        )
        opened = _Open(
            pool,
            {layout.layout_id: layout for layout in layouts},
            {layout.layout_id: window for layout, window in zip(layouts, windows, strict=True)},
            ahead,
            LateFields(pool, sampler_is_cap=self._settings.sampler_is_cap),
        )
        with self._lock:
            self._open = opened
        return {"pool": pool.name, "nbytes": pool.nbytes, "backing": asdict(pool.backing)}

    def _prefetch(self, arguments: Arguments, given_up: Callable[[], bool]) -> dict[str, Any]:
        opened = self._opened()
        key, part = self._part(opened, opened.training, arguments)  # evaluations are not fetched ahead
        if part is not None:
            opened.ahead.want(key, part, opened.layouts[opened.training].payload_nbytes)
        return {}

    def _pack(self, arguments: Arguments, given_up: Callable[[], bool]) -> dict[str, Any]:
        opened, take = self._opened(), arguments.take
        layout_id, timeout_s = take("layout_id", int), take("timeout_s", float)
        step, index, loss_tokens, segments = (take(name, int) for name in ("step", "index", "loss_tokens", "segments"))
        is_final, aux, digest = take("is_final", bool), take("aux", bool), take("digest", bytes)
        key, part = self._part(opened, layout_id, arguments)
        if part is None:
            return {"unknown_plan": True}
        begun = time.monotonic()
        fetched = opened.ahead.take(key, part, deadline=begun + timeout_s, given_up=lambda: self._stop(given_up))
        fetched_at = time.monotonic()
        slot = opened.pool.acquire(
            opened.layouts[layout_id], timeout_s=max(0.0, begun + timeout_s - fetched_at), aux=aux,
            stop=lambda: self._stop(given_up),
        )  # fmt: skip
        acquired_at = time.monotonic()
        with slot:
            first = next(iter(fetched.pieces.values()), None)
            late = opened.layouts[layout_id].late_names
            fill_window(part, fetched.pieces, views_to_fill(first, slot.views, late))
            handle = slot.publish(
                digest=digest, rows=part.window.rows, step=step, index=index, is_final=is_final,
                loss_tokens=loss_tokens, segments=segments,
            )  # fmt: skip
        return {
            "handle": handle_to_wire(handle),
            "row_digests": row_digests(part),
            "fetch_s": fetched_at - begun,
            "slot_wait_s": acquired_at - fetched_at,
            "pack_s": time.monotonic() - acquired_at,
            "fetched_nbytes": fetched.nbytes,
            "free_slots": opened.pool.free_slot_count(),
        }

    def _late_before(self, arguments: Arguments, given_up: Callable[[], bool]) -> dict[str, Any]:
        self._opened().late.before_scoring(handle_from_wire(arguments.any("handle")))
        return {}

    def _late_after(self, arguments: Arguments, given_up: Callable[[], bool]) -> dict[str, Any]:
        patch = self._opened().late.after_scoring(handle_from_wire(arguments.any("handle")))
        return {
            "fields": list(patch.fields),
            "loss_tokens": patch.loss_tokens,
            "digests": [list(pair) for pair in patch.digests],
        }

    def _close_pool(self, arguments: Arguments, given_up: Callable[[], bool]) -> dict[str, Any]:
        self.close_pool()
        return {}

    # --- what they share ---------------------------------------------------------------------------------------

    def _opened(self) -> _Open:
        with self._lock:
            if self._open is None:
                raise PoolError(f"{self._name} has no pool; open_pool comes first")
            return self._open

    def _part(self, opened: _Open, layout_id: int, arguments: Arguments) -> tuple[bytes, WindowPart | None]:
        """The part that the arguments hold, or name by ``plan_key``; ``None``: it is known no more."""
        window = opened.windows.get(layout_id)
        if window is None:
            raise ProtocolError(f"{self._name}: layout {layout_id} is none of the pool's {sorted(opened.windows)}")
        named = arguments.get("plan_key", bytes, b"")
        if named:
            return named, opened.ahead.wanted(named)
        plan, digests = arguments.take("plan", bytes), arguments.take("digests", bytes)
        key = xxhash.xxh3_128_digest(plan + digests)
        if layout_id != opened.training:
            key += b"%d" % layout_id
        known = opened.ahead.wanted(key)
        return key, known if known is not None else read_part(plan, digests, window)

    def _stop(self, given_up: Callable[[], bool]) -> bool:
        lost = self._trainer_lost()
        if lost is not None:
            raise PeerLostError(f"{self._name}: {lost}")
        return given_up()


def _window(bounds: object) -> Window:
    if type(bounds) is not list or len(bounds) != 4 or any(type(bound) is not int for bound in bounds):
        raise ProtocolError(f"open_pool: a window wants [rows from, to, tokens from, to], got {shown(bounds)}")
    return Window(*bounds)
