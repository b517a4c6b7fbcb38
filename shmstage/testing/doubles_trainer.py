"""A trainer that goes wrong where it is told to: the real worker and server, around any engine, on a thread.

As a process: ``python -m shmstage.testing.doubles_trainer RUN --checkpoints DIR --dies-at "fwd_bwd 2.0"``.
"""

from __future__ import annotations

import argparse
import os
import signal
import threading
from collections.abc import Callable, Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, final

from shmstage.errors import ShmstageError, TransportError
from shmstage.memory.identity import ProcessIdentity
from shmstage.testing.doubles_device import Device
from shmstage.testing.fault_plan import call_name
from shmstage.trainer.arguments import for_the_record
from shmstage.trainer.worker import Worker
from shmstage.transport.channel import ServerChannel
from shmstage.transport.server import Pending, Server
from shmstage.wire.messages import PROTOCOL_VERSION, Welcome

POLL_S = 0.05


@final
@dataclass(frozen=True)
class Script:
    """What goes wrong. Calls are named as in ``fault_plan``: ``stage_fwd_bwd 2.0``, ``get_metrics 1``, ``update``.

    ``refuses``: answered with that error, not executed. ``dies_before`` and ``dies_after`` a call is executed, without
    an answer. ``hears``: told of each call as it arrives, before anything else; it may wait.
    """

    refuses: Mapping[str, ShmstageError] = field(default_factory=dict)
    dies_before: str = ""
    dies_after: str = ""
    hears: Callable[[str], None] = lambda call: None


@final
class DoubleTrainer:
    """Serves ``channel`` until told to shut down, or dead. ``received`` are the commands executed or refused by itself.

    ``die`` is how it dies: by default its lifetime lock goes and its channel closes, as when the kernel clears up after
    a killed process.
    """

    def __init__(
        self,
        run_id: str,
        engine: Any,
        channel: ServerChannel,
        *,
        script: Script | None = None,
        device: Device | None = None,
        incarnation: int = 1,
        device_buffers: int = 2,
        die: Callable[[], None] | None = None,
    ) -> None:
        self.script = script or Script()
        self.received: list[dict[str, Any]] = []
        self.dead = threading.Event()
        self.failure: BaseException | None = None
        self._device = device
        self._die = die or self._let_go
        self._stopping = False
        self._identity = ProcessIdentity.create(run_id, "trainer")
        self._server = Server(channel, incarnation=incarnation)
        self._worker = Worker(
            engine,
            emit=self._server.emit,
            device_buffers=device_buffers,
            verify="full",
            identity=self._identity,
            incarnation=incarnation,
            timeout_s=30.0,
            cancelled=self._waits_for_a_buffer,
        )
        self._thread = threading.Thread(target=self.serve, name="double-trainer", daemon=True)

    def start(self) -> None:
        self._server.start()
        self._thread.start()

    def serve(self) -> None:
        """The trainer's loop, on the calling thread; its ``start`` runs it on one of its own."""
        try:
            while not (self._stopping or self._worker.finished or self.dead.is_set()):
                pending = self._server.next_request(POLL_S)
                if pending is not None:
                    self._answer(pending)
        except BaseException as error:  # told by ``close``: nobody joins this thread for its result
            self.failure = error

    def wait(self) -> None:
        """Return when it has shut down or is dead."""
        self._thread.join()

    def close(self) -> None:
        """End it in good order, dead or alive. Raises what ended its thread, if that was not meant."""
        self._stopping = True
        if self._device is not None:
            self._device.end_all_but(0)
        if self._thread.ident is not None:
            self._thread.join(30.0)
        with ExitStack() as stack:
            stack.callback(self._identity.close)
            stack.callback(self._server.close)
            stack.callback(self._worker.close)
        if self.failure is not None and not self.dead.is_set():
            raise self.failure

    def _answer(self, pending: Pending) -> None:
        call = call_name(pending.command, pending.arguments)
        if pending.hello is None:
            self.received.append(for_the_record(pending.command, pending.arguments))
        if self._device is not None:
            self._device.heard(call)
        self.script.hears(call)
        if call == self.script.dies_before:
            self._end()
            return
        try:
            refusal = self.script.refuses.get(call)
            if refusal is not None:
                raise refusal
            if pending.hello is not None:
                info = self._worker.attach(pending.hello)
                me = (self._identity.pid, self._identity.start_ticks, self._identity.lock_path)
                answer: Callable[[], None] = lambda: pending.welcome(  # noqa: E731
                    Welcome(PROTOCOL_VERSION, self._server.incarnation, *me, info)
                )
            else:
                result = self._worker.execute(pending.command, pending.arguments)
                answer = lambda: pending.reply(result)  # noqa: E731
        except ShmstageError as error:
            pending.fail(error)
            return
        if call == self.script.dies_after:
            self._end()
            return
        answer()

    def _end(self) -> None:
        self.dead.set()
        self._die()

    def _let_go(self) -> None:
        with suppress(TransportError):
            self._server.close()
        self._identity.close()

    def _waits_for_a_buffer(self) -> bool:
        if self._device is not None:
            self._device.nudged()
        return self._server.hello_waiting or self._stopping


def main() -> None:
    """One trainer over a packed toy engine, in this process; SIGKILL is its death."""
    from shmstage.testing.engines_packed import PackedToyEngine
    from shmstage.trainer.checkpoints import OrbaxStore
    from shmstage.transport.endpoints import endpoint_for
    from shmstage.transport.zmq import ZmqServerChannel

    parser = argparse.ArgumentParser(prog="python -m shmstage.testing.doubles_trainer", description=main.__doc__)
    parser.add_argument("run")
    parser.add_argument("--checkpoints", type=Path, required=True)
    parser.add_argument("--incarnation", type=int, default=1)
    parser.add_argument("--dies-at", default="", help="the call it dies of, not executed")
    parser.add_argument("--dies-after", default="", help="the call it dies of, executed and not answered")
    args = parser.parse_args()
    trainer = DoubleTrainer(
        args.run,
        PackedToyEngine(store=OrbaxStore(args.checkpoints)),
        ZmqServerChannel.bind(endpoint_for(args.run, "trainer")),
        script=Script(dies_before=args.dies_at, dies_after=args.dies_after),
        incarnation=args.incarnation,
        die=lambda: os.kill(os.getpid(), signal.SIGKILL),
    )
    trainer.start()
    trainer.wait()
    trainer.close()


if __name__ == "__main__":
    main()
