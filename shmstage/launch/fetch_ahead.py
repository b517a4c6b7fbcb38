"""Fetches what planned micro-batches need from the stores, ahead of their packing, within bounds."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Protocol, final

import numpy as np
import numpy.typing as npt

from shmstage.errors import StoppedError, WaitTimeoutError
from shmstage.packing.parts import Wanted, WindowPart
from shmstage.packing.pieces import Piece, decode_pieces, verify_whole

#: micro-batches that are fetched, or have been and wait to be packed
AHEAD = 4
#: what is asked for beyond is remembered, the oldest forgotten
REMEMBERED = 8
_LOOK_S = 0.05

class Answers(Protocol):
    """What stores were asked for."""

    def get(self) -> list[list[npt.NDArray[np.uint8]]]:
        """The parts of the pieces of each (`packing.pieces`), in memory of this host; blocks. Raises ``PeerLostError``,
        ``WaitTimeoutError`` and what a store refused with.
        """

    def unanswered(self) -> list[str]:
        """Names of the hosts whose stores have not answered yet."""


class Stores(Protocol):
    """The stores of all hosts, seen from one of them."""

    def ask(self, wanted: Sequence[Wanted]) -> Answers:
        """Asks for all at once and returns at once. Raises ``PeerLostError``."""


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
    #: ``None``: not begun
    request: Future[Fetched] | None = None
    answers: Answers | None = None
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
        #: what each busy thread waits for
        self._asked: dict[Answers, None] = {}
        self._threads = ThreadPoolExecutor(AHEAD, thread_name_prefix="fetch")

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
            request = wish.request if wish.request is not None else self._begin(wish)
        try:
            return self._wait(wish, request, deadline, given_up)
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
        if wish is not None and wish.request is not None:
            wish.request.cancel()

    def _begin_what_fits(self) -> None:
        begun = [wish for wish in self._wishes.values() if wish.request is not None]
        count, nbytes = len(begun), sum(wish.estimate_nbytes for wish in begun)
        for wish in self._wishes.values():
            if wish.request is not None:
                continue
            if count >= AHEAD or (count and nbytes + wish.estimate_nbytes > self._limit_nbytes):
                return
            self._begin(wish)
            count, nbytes = count + 1, nbytes + wish.estimate_nbytes

    def _begin(self, wish: _Wish) -> Future[Fetched]:
        wish.request = self._threads.submit(self._fetch, wish)
        return wish.request

    # --- without it --------------------------------------------------------------------------------------------

    def _fetch(self, wish: _Wish) -> Fetched:
        wanted = wish.part.wanted()
        answers = wish.answers = self._stores.ask(wanted)
        self._asked[answers] = None
        try:
            came = answers.get()
        finally:
            del self._asked[answers]
        found: dict[int, Piece] = {}
        nbytes = 0
        for each, parts in zip(wanted, came, strict=True):
            pieces = decode_pieces(parts)
            if self._verify_full:
                for piece in pieces:
                    verify_whole(piece)
            found |= each.matched(pieces)
            nbytes += sum(part.nbytes for part in parts)
        return Fetched(found, nbytes)

    def _wait(
        self, wish: _Wish, request: Future[Fetched], deadline: float, given_up: Callable[[], bool]
    ) -> Fetched:
        while True:
            left_s = deadline - time.monotonic()
            try:
                return request.result(max(0.0, min(left_s, _LOOK_S)))
            except CancelledError:
                raise StoppedError("pieces are not wanted any more") from None
            except TimeoutError:
                if request.done():  # just now, or with a TimeoutError of its own
                    return request.result()
            if given_up():
                raise StoppedError("stopped while waiting for pieces")
            if left_s <= 0:
                raise WaitTimeoutError(self._why_late(wish))

    def _why_late(self, wish: _Wish) -> str:
        """One that has not been asked for waits for a thread, and with it for what others were asked for."""
        asked = [wish.answers] if wish.answers is not None else list(self._asked)
        late = dict.fromkeys(name for answers in asked for name in answers.unanswered())
        if not late:
            return "pieces were not made ready in time: this host is slow"
        return f"no pieces in time from the store of {', '.join(late)}: dead, unreachable or slow"
