"""``shmstage.WeightsReader``: the newest parameters a trainer has published, as read-only views. Imports no jax.

    reader = WeightsReader(published)          # the value of a weights ticket, or what a hook was told
    with reader.take() as weights:
        load(weights.version, weights.arrays)
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from types import TracebackType
from typing import Any, final

import numpy as np

from shmstage.errors import ProtocolError, SlotStateError, WaitTimeoutError
from shmstage.memory.identity import ProcessIdentity
from shmstage.memory.layout import Layout
from shmstage.memory.reader import PoolReader


@final
class WeightsReader:
    """One reader's place in the trainer's weights pool. For one thread.

    The trainer goes on publishing while weights are held here; it writes where nobody reads. A trainer that starts
    again makes another pool: give its first publication to ``follow``; until then the old weights stay readable. A
    reader that dies gives its place up.
    """

    def __init__(self, published: Mapping[str, Any], *, identity: ProcessIdentity | None = None) -> None:
        """``published`` has the keys ``run_id``, ``pool``, ``epoch`` and ``layout``.

        ``identity`` is this process's in that run, made here if ``None``. Raises ``PoolError`` if the pool is gone,
        ``EndpointBusyError`` if it has all its readers, ``ProtocolError`` for a value that is not a publication.
        """
        with ExitStack() as undo:
            run_id = _fact(published, "run_id", str)
            self._run_id = run_id
            self._own_identity = ProcessIdentity.create(run_id, "weights reader") if identity is None else None
            if self._own_identity is not None:
                undo.callback(self._own_identity.close)
            self._identity = identity or self._own_identity
            self._open: Weights | None = None
            self._closed = False
            self._attach(published)
            undo.pop_all()

    @property
    def pool(self) -> str:
        """The name of the pool that is read."""
        return self._reader.name

    def take(self) -> Weights:
        """The newest version there is; end it before the next is taken.

        Raises ``WaitTimeoutError`` if the trainer has taken all its versions back, ``SlotStateError`` if what was taken
        before has not been ended.
        """
        self._check_nothing_is_open()
        slot = self._cell.take()
        if slot is None:
            raise WaitTimeoutError(f"no version is published in {self._reader.name} now; take one after the next sync")
        try:
            self._open = Weights(self, self._reader, slot)
        except BaseException:
            self._cell.put_back()
            raise
        return self._open

    def follow(self, published: Mapping[str, Any]) -> None:
        """Go over to the pool of a later publication; nothing happens if it is the same one. Raises as the constructor.

        If that fails, the old weights stay readable.
        """
        self._check_nothing_is_open()
        if _fact(published, "pool", str) == self._reader.name:
            return
        if _fact(published, "run_id", str) != self._run_id:
            raise ProtocolError(f"weights of run {published['run_id']!r}; this reader is of run {self._run_id!r}")
        old_cell, old_reader = self._cell, self._reader
        self._attach(published)
        old_cell.release()
        old_reader.close()

    def close(self) -> None:
        """Give the place up; what was taken is ended. Idempotent."""
        if self._open is not None:
            self._open.end()
        with ExitStack() as stack:
            if self._own_identity is not None:
                stack.callback(self._own_identity.close)  # last: a reader without it is a dead one
            stack.callback(self._reader.close)
            if not self._closed:
                self._closed = True
                self._cell.release()

    def __enter__(self) -> WeightsReader:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _attach(self, published: Mapping[str, Any]) -> None:
        assert self._identity is not None
        layout = Layout.from_wire(_fact(published, "layout", list))
        name, epoch = _fact(published, "pool", str), _fact(published, "epoch", int)
        reader = PoolReader.attach(name, run_id=self._run_id, epoch=epoch)
        try:
            reader.register(layout)
            cell = reader.claim_cell(self._identity)
        except BaseException:
            reader.close()
            raise
        self._reader, self._cell = reader, cell

    def _check_nothing_is_open(self) -> None:
        if self._open is not None:
            raise SlotStateError(f"version {self._open.version} is still held; end it first")

    def _ended(self) -> None:
        self._open = None
        self._cell.put_back()


@final
class Weights:
    """Parameters of one version; they stay as they are until ``end``. As a context manager it ends itself."""

    def __init__(self, owner: WeightsReader, reader: PoolReader, slot: int) -> None:
        """Made by ``WeightsReader.take``."""
        handle = reader.published_in(slot)
        self.version = handle.step
        self._owner: WeightsReader | None = owner
        self._lease = reader.lease(handle)

    @property
    def arrays(self) -> dict[str, np.ndarray[Any, Any]]:
        """Parameter path → read-only array in shared memory. Raises ``SlotStateError`` after ``end``."""
        if self._owner is None:
            raise SlotStateError(f"version {self.version} was read after it was ended")
        return self._lease.views

    def end(self) -> None:
        """The arrays are not read any more: copy what has to outlive it. Idempotent."""
        if self._owner is not None:
            owner, self._owner = self._owner, None
            del self._lease  # not ended: nobody ends the lease that keeps a version published
            owner._ended()

    def __enter__(self) -> Weights:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.end()


def _fact(published: Mapping[str, Any], key: str, kind: type) -> Any:
    value = published.get(key)
    if type(value) is not kind:
        raise ProtocolError(f"a publication of weights has {key} = {value!r:.80}; want {kind.__name__}")
    return value
