"""``shmstage.DoubleBuffer``: micro-batches from a ``Consumer`` as dicts of ``jax.Array``, uploaded one ahead."""

from __future__ import annotations

from collections.abc import Mapping
from types import TracebackType
from typing import Protocol, final

import jax
from jax.sharding import SingleDeviceSharding

from shmstage.errors import WaitTimeoutError
from shmstage.trainer.device_buffers import DeviceBuffers, Readable, StagedBatch
from shmstage.trainer.tokens import TokenWatcher


class Receiver(Protocol):
    """What it needs of a ``shmstage.Consumer``."""

    def receive(self, timeout_s: float) -> Readable | None:
        """The next lease; ``None`` at the end of the stream; ``WaitTimeoutError`` if none came in time."""


@final
class DoubleBuffer:
    """Iterate it: ``for batch in DoubleBuffer(consumer): token = step(batch)``.

    Each ``batch`` is a dict of field name → ``jax.Array``. The slot it came from is released as soon as its copy is
    proven over, not when you are done with the arrays. While you compute on one micro-batch, the next is uploaded if it
    has been published already; an error met there is raised by the following ``next``. ``sharding`` places every field
    (or names one per field); default: the first device.

    On the CPU backend the arrays are private host buffers, ``device_buffers`` of them, used again when you have dropped
    the arrays and the programs reading them are over: holding on to more batches than that raises ``WaitTimeoutError``
    after ``timeout_s``.
    """

    def __init__(
        self,
        consumer: Receiver,
        sharding: jax.sharding.Sharding | Mapping[str, jax.sharding.Sharding] | None = None,
        device_buffers: int = 2,
        *,
        timeout_s: float = 600.0,
    ) -> None:
        self._consumer = consumer
        self._sharding = sharding if sharding is not None else SingleDeviceSharding(jax.local_devices()[0])
        self._timeout_s = timeout_s
        self._watcher = TokenWatcher("double-buffer", at_once=True)
        self._buffers = DeviceBuffers(device_buffers, self._watcher.watch, timeout_s=timeout_s)
        self._ahead: StagedBatch | None = None
        self._ahead_error: Exception | None = None
        self._unplaced: Readable | None = None
        self._over = False

    def __iter__(self) -> DoubleBuffer:
        return self

    def __next__(self) -> dict[str, jax.Array]:
        if self._ahead_error is not None:
            error, self._ahead_error = self._ahead_error, None
            raise error
        if self._ahead is None and not self._over:
            self._ahead = self._upload(self._timeout_s)
        batch, self._ahead = self._ahead, None
        if batch is None:
            self.close()
            raise StopIteration
        # from here on only the arrays themselves say when the buffer is free
        self._buffers.settled(batch.buffer)
        self._buffers.resolver(batch.buffer)()
        if not self._over and self._buffers.retired():
            try:
                self._ahead = self._upload(0.0)
            except WaitTimeoutError:
                pass  # not published yet
            except Exception as error:
                self._ahead_error = error  # this batch is on the device already and must not go with it
        return batch.take()

    def close(self) -> None:
        """Drop what was uploaded ahead and end the thread; the consumer is yours to close. Idempotent."""
        if self._ahead is not None:
            self._buffers.discard(self._ahead)
            self._ahead = None
        if self._unplaced is not None:
            self._unplaced.end()
            self._unplaced = None
        self._ahead_error = None
        self._over = True
        self._watcher.close()

    def __enter__(self) -> DoubleBuffer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _upload(self, timeout_s: float) -> StagedBatch | None:
        lease = self._unplaced or self._consumer.receive(timeout_s)
        self._unplaced = None
        if lease is None:
            self._over = True
            return None
        sharding = self._sharding
        if not isinstance(sharding, Mapping):
            sharding = dict.fromkeys([*lease.views, *lease.late_views], sharding)
        try:
            return self._buffers.upload(lease, sharding)
        except WaitTimeoutError:
            self._unplaced = lease  # no place for it; the next call tries again
            raise
        except BaseException:
            lease.end()  # nobody will ask for it again, and its producer must not wait for it
            raise
