"""Grain's ``SharedMemoryArray``: one object of shared memory per array, its description sent through a pipe.

Grain makes new ones for every batch, and who reads them unlinks them: so it is in the whole path. The hand-off alone
is given the same arrays again and again, which Grain has no protocol for.
"""

from __future__ import annotations

import time
from typing import Any

from grain.multiprocessing import SharedMemoryArray

from paths.ends import DEADLINE_S, Arrays
from paths.ends import Receiver as ReceiverEnd
from paths.ends import Sender as SenderEnd
from shmstage.memory.layout import Layout, numpy_dtype


def inherited(context: Any) -> Any:
    """Both ends of a pipe: the metadata are pickled, as Grain's own queue does."""
    return context.Pipe(duplex=False)


class Sender(SenderEnd):
    def __init__(self, layout: Layout, private: Any, peer: Any) -> None:
        self._fields = layout.fields
        self._pipe = peer.inherited[1]
        self._arrays: dict[str, Any] = {}
        self._ours = False

    def said(self) -> None:
        return None

    def place(self, *, fresh: bool) -> tuple[Arrays, bool]:
        if self._ours and not fresh:
            return self._arrays, True
        self._drop()
        self._arrays = {field.name: SharedMemoryArray(field.shape, numpy_dtype(field.dtype)) for field in self._fields}
        self._ours = not fresh
        return self._arrays, False

    def send(self) -> None:
        self._pipe.send(({name: array.metadata for name, array in self._arrays.items()}, not self._ours))

    def close(self) -> None:
        self._drop()

    def _drop(self) -> None:
        if self._ours:
            for array in self._arrays.values():
                array.unlink_on_del()
        self._arrays, self._ours = {}, False


class Receiver(ReceiverEnd):
    def __init__(self, layout: Layout, said: None, inherited: Any) -> None:
        self._pipe = inherited[0]

    def receive(self) -> tuple[Arrays, int]:
        if not self._pipe.poll(DEADLINE_S):
            raise TimeoutError("nothing came")
        metadata, unlinks = self._pipe.recv()
        arrays = {name: SharedMemoryArray.from_metadata(each) for name, each in metadata.items()}
        ready_ns = time.monotonic_ns()
        if unlinks:
            for array in arrays.values():
                array.unlink_on_del()
        return arrays, ready_ns

    def release(self) -> None:
        pass

    def close(self) -> None:
        pass
