"""``shmstage.DoubleBuffer``: micro-batches from a ``Consumer`` as pytrees of ``jax.Array``, uploaded ahead."""

from __future__ import annotations

import threading
import weakref
from collections import deque
from collections.abc import Callable
from types import TracebackType
from typing import Any, Generic, Protocol, TypeVar, cast, final, overload

import jax

from shmstage.errors import InputError, TrainerError, WaitTimeoutError
from shmstage.trainer.arrangement import Arrangement
from shmstage.trainer.device_buffers import DeviceBuffers, Readable, StagedBatch
from shmstage.trainer.host_buffers import HostBuffers
from shmstage.trainer.tokens import TokenWatcher

Tree = TypeVar("Tree")


class Receiver(Protocol):
    """What it needs of a ``shmstage.Consumer``."""

    def receive(self, timeout_s: float) -> Readable | None:
        """The next lease; ``None`` at the end of the stream; ``WaitTimeoutError`` if none came in time."""


@final
class _Uploaded:
    """A micro-batch whose upload has been issued; ``error`` is of the upload, once that is over."""

    batch: StagedBatch

    def __init__(self, arrangement: Arrangement) -> None:
        self.arrangement = arrangement
        self.error = ""
        self._over = threading.Event()

    def told(self, ready_ns: int, error: str) -> None:
        """On any thread: the upload is over, and the lease it was read from has ended."""
        self.error = error
        self._over.set()

    def wait_over(self, timeout_s: float) -> None:
        if not self._over.wait(timeout_s):
            raise WaitTimeoutError(
                f"the upload of micro-batch {self.batch.name} was not over within {timeout_s:g} s; if the device is "
                "only slow, ask again or raise timeout_s"
            )


@final
class DoubleBuffer(Generic[Tree]):
    """Iterate it: ``for batch in DoubleBuffer(consumer): token = step(batch)``.

    Each ``batch`` is a dict of field name → ``jax.Array``, or what ``into`` makes of it. The slot it came from is
    released as soon as its copy is proven over, not when you are done with the arrays; only then is the batch given
    out, so a program may have it donated. While you compute on one micro-batch, the next is uploaded if it has been
    published already; an error met there is raised once the micro-batches before it have been given out.

    ``sharding`` says where the arrays lie: one ``jax.sharding.Sharding`` (or device) for all, a tree prefix of them as
    ``jax.device_put`` takes it, or a callable that returns either and is called once per layout with the micro-batch's
    shapes, ``sharding(batch)``: the pytree that you will be given with a ``jax.ShapeDtypeStruct`` at every leaf.
    Default, also for a ``None`` in the prefix: the first device.

    ``into`` is called once per layout with the fields by name, ``into(**fields)``, and returns any registered pytree of
    them: a NamedTuple, a registered dataclass, a function that nests them in dicts. It arranges and computes nothing;
    a field that it leaves out is not uploaded.

    ``device_buffer_size`` micro-batches have a place on the devices: the one given out last and those ahead. On an
    accelerator those before, as long as you hold them, take memory besides: a loop's variable holds one until the next
    has come.
    ``host_buffer_size`` more wait in this process's memory: whenever you ask for the next, those that have been
    published are copied there, and their slots go on. It is for a producer with few slots or with several consumers;
    with 0 they wait in the pool's slots and are uploaded straight from there. (Grain's ``device_put`` has both sizes,
    the first as ``cpu_buffer_size``; what you compute on is not counted there.)

    On the CPU backend the arrays are private host buffers, ``device_buffer_size`` of them, used again when you have
    dropped the arrays and the programs reading them are over: holding on to more batches than that raises
    ``WaitTimeoutError`` after ``timeout_s`` (a loop's variable holds its batch until the next has come: give 3 there
    to have one ahead all the time). Everything is moved by explicit transfers: ``jax.transfer_guard`` may say
    ``"disallow"``.
    """

    @overload
    def __init__(
        self: DoubleBuffer[dict[str, jax.Array]],
        consumer: Receiver,
        sharding: Any = None,
        *,
        host_buffer_size: int = 0,
        device_buffer_size: int = 2,
        timeout_s: float = 600.0,
    ) -> None: ...

    @overload
    def __init__(
        self,
        consumer: Receiver,
        sharding: Any = None,
        *,
        into: Callable[..., Tree],
        host_buffer_size: int = 0,
        device_buffer_size: int = 2,
        timeout_s: float = 600.0,
    ) -> None: ...

    def __init__(
        self,
        consumer: Receiver,
        sharding: Any = None,
        *,
        into: Callable[..., Any] = dict,
        host_buffer_size: int = 0,
        device_buffer_size: int = 2,
        timeout_s: float = 600.0,
    ) -> None:
        """``next`` raises what ``consumer.receive`` raises, ``LayoutError`` if ``into`` or ``sharding`` does not fit
        the fields, ``WaitTimeoutError`` if an upload is not over in time and ``TrainerError`` if it failed.
        ``InputError`` for a size below 2 on the devices or below 0 on the host.
        """
        for name, size, least in (("host", host_buffer_size, 0), ("device", device_buffer_size, 2)):
            if size < least:
                raise InputError(f"{name}_buffer_size = {size}; give at least {least}")
        self._consumer = consumer
        self._sharding = sharding
        self._into = into
        self._timeout_s = timeout_s
        self._watcher = TokenWatcher("double-buffer", at_once=True)
        # a loop that was left early has nobody to close it
        weakref.finalize(self, self._watcher.close, 0.0).atexit = False
        self._buffers = DeviceBuffers(
            device_buffer_size, self._watcher.watch, timeout_s=timeout_s, count_name="device_buffer_size"
        )
        self._most_ahead = device_buffer_size - 1
        self._host = HostBuffers(host_buffer_size)
        self._arrangements: dict[int, Arrangement] = {}
        # in the order of the stream; an error lies in the place of the micro-batch that it was met at
        self._ahead: deque[_Uploaded | Exception] = deque()
        self._waiting: deque[Readable | Exception] = deque()
        self._over = False

    def __iter__(self) -> DoubleBuffer[Tree]:
        return self

    def __next__(self) -> Tree:
        if not self._ahead:
            uploaded = self._upload(self._timeout_s)
            if uploaded is None:
                self.close()
                raise StopIteration
            self._ahead.append(uploaded)
        if not isinstance(self._ahead[0], Exception):
            # donated or deleted before, its arrays would tell nobody when the slot has been read
            self._ahead[0].wait_over(self._timeout_s)
        taken = self._ahead.popleft()
        if isinstance(taken, Exception):
            raise taken
        batch, arrangement = taken.batch, taken.arrangement
        if taken.error:
            self._buffers.discard(batch)
            raise TrainerError(f"micro-batch {batch.name} was not uploaded: {taken.error}; the next may be asked for")
        # from here on only the arrays themselves say when the buffer is free
        self._buffers.settled(batch.buffer)
        self._buffers.resolver(batch.buffer)()
        self._upload_ahead()
        self._hold_ahead()
        # in no local name: the traceback of an error met ahead keeps this frame, and would keep the arrays
        return cast(Tree, arrangement.build(batch.take()))

    def close(self) -> None:
        """Drop what was uploaded ahead and end the thread; the consumer is yours to close. Idempotent."""
        for taken in self._ahead:
            if not isinstance(taken, Exception):
                self._buffers.discard(taken.batch)
        for lease in self._waiting:
            if not isinstance(lease, Exception):
                lease.end()
        self._ahead.clear()
        self._waiting.clear()
        self._over = True
        self._watcher.close()

    def __enter__(self) -> DoubleBuffer[Tree]:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _upload_ahead(self) -> None:
        while len(self._ahead) < self._most_ahead and self._buffers.retired():
            try:
                uploaded = self._upload(0.0)
            except WaitTimeoutError:
                return  # not published yet
            except Exception as error:
                self._ahead.append(error)  # what is on the device already must not go with it
                return
            if uploaded is None:
                return
            self._ahead.append(uploaded)

    def _hold_ahead(self) -> None:
        while self._host.room() and not self._over:
            try:
                lease = self._receive(0.0)
                if lease is not None:
                    self._waiting.append(self._host.hold(self._arranged(lease)[0]))
            except WaitTimeoutError:
                return
            except Exception as error:
                self._waiting.append(error)
                return

    def _receive(self, timeout_s: float) -> Readable | None:
        lease = None if self._over else self._consumer.receive(timeout_s)
        self._over = lease is None
        return lease

    def _arranged(self, lease: Readable) -> tuple[Readable, Arrangement]:
        layout_id = lease.handle.layout_id
        try:
            if layout_id not in self._arrangements:
                views = {**lease.views, **lease.late_views}
                self._arrangements[layout_id] = Arrangement.of(views, self._into, self._sharding)
            return self._arrangements[layout_id].chosen(lease), self._arrangements[layout_id]
        except BaseException:
            lease.end()  # as below
            raise

    def _upload(self, timeout_s: float) -> _Uploaded | None:
        lease = self._waiting.popleft() if self._waiting else self._receive(timeout_s)
        if lease is None:
            return None
        if isinstance(lease, Exception):
            raise lease
        chosen, arrangement = self._arranged(lease)
        try:
            uploaded = _Uploaded(arrangement)
            uploaded.batch = self._buffers.upload(chosen, arrangement.shardings, uploaded.told)
            return uploaded
        except WaitTimeoutError:
            self._waiting.appendleft(lease)  # no place for it; the next call tries again
            raise
        except BaseException:
            lease.end()  # nobody will ask for it again, and its producer must not wait for it
            raise
