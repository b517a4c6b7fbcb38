"""How pieces cross Ray: what an agent asks each store for, and the one object that answers it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import Any, final

import numpy as np
import numpy.typing as npt

from shmstage.errors import PeerLostError, ProtocolError, RunFailedError, ShmstageError, WaitTimeoutError
from shmstage.launch.trajectory_store import TrajectoryStore
from shmstage.packing.parts import Wanted

Bytes = npt.NDArray[np.uint8]

#: a buffer that is larger Ray copies with six threads that it starts for it, which costs more than it saves
CHUNK_NBYTES = 1 << 20


def answer(store: TrajectoryStore, asked: bytes) -> list[Bytes]:
    """In the store's actor: what Ray gathers in its object store, from where the asking host fetches it as one object.

    `asked`: int64 `[3, n]` of numbers, begins and ends. Raises as ``TrajectoryStore.pieces``.
    """
    return chunked(store.pieces(*np.frombuffer(asked, np.int64).reshape(3, -1)))


def chunked(parts: Iterable[Bytes]) -> list[Bytes]:
    """Each part in chunks of `CHUNK_NBYTES`, of which the last is shorter; nothing is copied."""
    return [part[at : at + CHUNK_NBYTES] for part in parts for at in range(0, len(part) + 1, CHUNK_NBYTES)]


def joined(chunks: Iterable[Any]) -> list[Bytes]:
    """The inverse of `chunked`, of any buffers. Chunks that lie in a row, as Ray leaves them, are not copied.

    Raises ``ProtocolError`` for chunks that no part has.
    """
    found: list[Bytes] = []
    own: list[Bytes] = []
    for chunk in chunks:
        own.append(np.frombuffer(chunk, np.uint8))
        if len(own[-1]) < CHUNK_NBYTES:
            found.append(_one(own))
            own = []
        elif len(own[-1]) > CHUNK_NBYTES:
            raise ProtocolError(f"a chunk of {len(own[-1])} bytes; each has {CHUNK_NBYTES} at most")
    if own:
        raise ProtocolError(f"part {len(found)} came without its last chunk, which is shorter than the others")
    return found


@final
class _Span:
    """Memory from the first chunk to the end of the last; holds them."""

    def __init__(self, chunks: list[Bytes], address: int) -> None:
        self._chunks = chunks
        shape = (sum(map(len, chunks)),)
        self.__array_interface__ = {"version": 3, "typestr": "|u1", "shape": shape, "data": (address, True)}


def _one(chunks: list[Bytes]) -> Bytes:
    if len(chunks) == 1:
        return chunks[0]
    addresses = [chunk.__array_interface__["data"][0] for chunk in chunks]
    if all(after - before == CHUNK_NBYTES for before, after in pairwise(addresses)):
        return np.asarray(_Span(chunks, addresses[0]))
    return np.concatenate(chunks)


@final
class RayStores:
    """All stores, as an agent asks them."""

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._actors: list[Any] = []
        self._names: list[str] = []

    def know(self, actors: list[Any], names: list[str]) -> None:
        """Both by index."""
        self._actors, self._names = actors, names

    def ask(self, wanted: Sequence[Wanted]) -> RayAnswers:
        """One call for each, all at once. Raises ``PeerLostError`` for a store that there is not."""
        for each in wanted:
            if each.store >= len(self._actors):
                raise PeerLostError(f"there is no store {each.store}; there are {len(self._actors)}")
        # one argument of bytes: an array would be pickled, which costs as much as all the rest of a call
        asked = [
            self._actors[each.store].pieces.remote(np.stack((each.numbers, each.begins, each.ends)).tobytes())
            for each in wanted
        ]
        return RayAnswers(asked, [self._names[each.store] for each in wanted], self._timeout_s)


@final
class RayAnswers:
    """What was asked for, on its way."""

    def __init__(self, asked: list[Any], names: list[str], timeout_s: float) -> None:
        self._asked = asked
        self._names = names
        self._timeout_s = timeout_s

    def get(self) -> list[list[Bytes]]:
        """The parts from each store, in memory of this host; blocks.

        Raises what a store refused with, ``PeerLostError`` or ``WaitTimeoutError`` naming one that is dead or slow.
        """
        import ray

        try:
            found = ray.get(self._asked, timeout=self._timeout_s)
        except Exception as error:  # whose it is, each alone says
            found = self._what_came(error)
        return [self._joined(chunks, name) for chunks, name in zip(found, self._names, strict=True)]

    def unanswered(self) -> list[str]:
        """The names of the hosts whose stores have not answered."""
        import ray

        _, late = ray.wait(self._asked, num_returns=len(self._asked), timeout=0)
        return [name for asked, name in zip(self._asked, self._names, strict=True) if asked in late]

    def _what_came(self, error: Exception) -> list[Any]:
        """After ``error``: raises one that has come, or names all that have not; neither if the last came just now."""
        import ray
        from ray.exceptions import GetTimeoutError

        came, late = ray.wait(self._asked, num_returns=len(self._asked), timeout=0)
        names = dict(zip(self._asked, self._names, strict=True))
        found = {asked: _gotten(asked, names[asked]) for asked in came}
        if late:
            who = f"the store of {', '.join(names[asked] for asked in self._asked if asked in late)}"
            if not isinstance(error, GetTimeoutError):  # an object that is lost does not come, not even as its error
                raise PeerLostError(f"no pieces come from {who}: {type(error).__name__}") from None
            raise WaitTimeoutError(f"no pieces within {self._timeout_s:g} s from {who}")
        return [found[asked] for asked in self._asked]

    def _joined(self, chunks: Any, name: str) -> list[Bytes]:
        try:
            return joined(chunks)
        except ProtocolError as error:
            raise ProtocolError(f"the store of {name}: {error}") from None


def _gotten(asked: Any, name: str) -> Any:
    import ray
    from ray.exceptions import ObjectLostError, RayActorError, RayTaskError

    try:
        return ray.get(asked, timeout=10.0)
    except RayTaskError as error:
        if isinstance(error.cause, ShmstageError):
            raise error.cause from None
        raise RunFailedError(f"the store of {name} failed: {' '.join(str(error).split())[-500:]}") from None
    except (RayActorError, ObjectLostError) as error:
        raise PeerLostError(f"the store of {name} is dead: {type(error).__name__}") from None
