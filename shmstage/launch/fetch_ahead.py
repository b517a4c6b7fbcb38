"""Fetches what planned micro-batches need from the stores, ahead of their packing, within bounds."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Protocol, final

import numpy as np
import numpy.typing as npt

from shmstage.errors import StoppedError, WaitTimeoutError
from shmstage.packing.parts import WindowPart
from shmstage.packing.pieces import Piece, decode_pieces, verify_whole

#: micro-batches that are fetched, or have been and wait to be packed
AHEAD = 4
#: what is asked for beyond is remembered, the oldest forgotten
REMEMBERED = 8
#: requests to stores at the same time
THREADS = 4
_LOOK_S = 0.05

Numbers = npt.NDArray[np.int64]


class Stores(Protocol):
    """The stores of all hosts, seen from one of them."""

    def pieces(self, store: int, numbers: Numbers, begins: Numbers, ends: Numbers) -> Sequence[npt.NDArray[np.uint8]]:
        """The parts of the pieces (`packing.pieces`), in memory of this host; blocks. Raises ``PeerLostError`` too."""


@final
@dataclass(frozen=True, slots=True)
class Fetched:
    """Segment of the part → its piece."""

    pieces: dict[int, Piece]
    nbytes: int


@dataclass
class _Wish:
    part: WindowPart
    estimate_nbytes: int
    #: one per store; ``None``: not begun
    requests: list[Future[tuple[dict[int, Piece], int]]] | None = None
    #: somebody waits for it, and gives its place up
    taken: bool = False


@final
class FetchAhead:
    """``want`` begins, ``take`` waits. Any thread."""

    def __init__(self, stores: Stores, *, limit_nbytes: int, verify_full: bool) -> None:
        """``limit_nbytes``: most bytes fetched ahead, as callers estimate; what is packed next comes anyway."""
        self._stores = stores
        self._limit_nbytes = limit_nbytes
        self._verify_full = verify_full
        self._lock = threading.Lock()
        self._wishes: dict[bytes, _Wish] = {}
        self._threads = ThreadPoolExecutor(THREADS, thread_name_prefix="fetch")

    def want(self, key: bytes, part: WindowPart, estimate_nbytes: int) -> None:
        """``key`` names the part; a known one changes nothing."""
        with self._lock:
            if key not in self._wishes:
                self._wishes[key] = _Wish(part, estimate_nbytes)
                waiting = [known for known, wish in self._wishes.items() if not wish.taken]
                for oldest in waiting[: max(0, len(waiting) - REMEMBERED)]:
                    self._drop(oldest)
                self._begin_what_fits()

    def take(self, key: bytes, part: WindowPart, *, deadline: float, given_up: Callable[[], bool]) -> Fetched:
        """What was wanted under ``key``, fetched now if nobody did; gives up its place.

        Raises ``WaitTimeoutError`` naming the stores that have not answered, and what a store or a check refused with.
        """
        with self._lock:
            wish = self._wishes.get(key)
            if wish is None:
                wish = self._wishes[key] = _Wish(part, 0)
            wish.taken = True
            requests = wish.requests if wish.requests is not None else self._begin(wish)
        try:
            pieces: dict[int, Piece] = {}
            nbytes = 0
            for wanted, request in zip(part.wanted(), requests, strict=True):
                found, size = self._wait(request, wanted.store, deadline, given_up)
                pieces |= found
                nbytes += size
            return Fetched(pieces, nbytes)
        finally:
            with self._lock:
                self._drop(key)
                self._begin_what_fits()

    def wanted(self, key: bytes) -> WindowPart | None:
        """What was wanted under ``key``, if it is still known."""
        with self._lock:
            wish = self._wishes.get(key)
            return wish.part if wish is not None else None

    def forget(self) -> None:
        """Nothing that was wanted is wanted any more."""
        with self._lock:
            for key in list(self._wishes):
                self._drop(key)

    def close(self) -> None:
        self.forget()
        self._threads.shutdown(wait=False, cancel_futures=True)

    # --- under the lock ----------------------------------------------------------------------------------------

    def _drop(self, key: bytes) -> None:
        wish = self._wishes.pop(key, None)
        for request in (wish.requests or ()) if wish is not None else ():
            request.cancel()

    def _begin_what_fits(self) -> None:
        begun = [wish for wish in self._wishes.values() if wish.requests is not None]
        count, nbytes = len(begun), sum(wish.estimate_nbytes for wish in begun)
        for wish in self._wishes.values():
            if wish.requests is not None:
                continue
            if count >= AHEAD or (count and nbytes + wish.estimate_nbytes > self._limit_nbytes):
                return
            self._begin(wish)
            count, nbytes = count + 1, nbytes + wish.estimate_nbytes

    def _begin(self, wish: _Wish) -> list[Future[tuple[dict[int, Piece], int]]]:
        wish.requests = [self._threads.submit(self._fetch, wanted) for wanted in wish.part.wanted()]
        return wish.requests

    # --- without it --------------------------------------------------------------------------------------------

    def _fetch(self, wanted: Any) -> tuple[dict[int, Piece], int]:
        parts = self._stores.pieces(wanted.store, wanted.numbers, wanted.begins, wanted.ends)
        pieces = decode_pieces(parts)
        if self._verify_full:
            for piece in pieces:
                verify_whole(piece)
        return wanted.matched(pieces), sum(part.nbytes for part in parts)

    def _wait(
        self, request: Future[tuple[dict[int, Piece], int]], store: int, deadline: float, given_up: Callable[[], bool]
    ) -> tuple[dict[int, Piece], int]:
        while True:
            left_s = deadline - time.monotonic()
            try:
                return request.result(max(0.0, min(left_s, _LOOK_S)))
            except CancelledError:
                raise StoppedError(f"pieces of store {store} are not wanted any more") from None
            except TimeoutError:
                if request.done():
                    raise
            if given_up():
                raise StoppedError(f"stopped while waiting for pieces of store {store}")
            if left_s <= 0:
                raise WaitTimeoutError(f"store {store} gave no pieces in time: it is dead, unreachable or slow")
