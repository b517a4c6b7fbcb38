"""The orchestrator's end of one incarnation of the trainer: handshake, client, proof of its death."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, final

from shmstage.errors import PoolError, ShmstageError
from shmstage.events import NO_EVENTS, Events
from shmstage.memory.identity import PeerWatch, ProcessIdentity
from shmstage.memory.pool import Pool
from shmstage.orchestrator.trainer_client import Calls, TrainerClient
from shmstage.settings import Settings
from shmstage.transport.client import Client
from shmstage.transport.endpoints import endpoint_for
from shmstage.transport.zmq import ZmqChannel
from shmstage.wire.messages import PROTOCOL_VERSION, Hello

#: how long a trainer may take to answer that it drops everything
ABANDON_S = 10.0
#: the trainer's cell in every slot
TRAINER = 0
#: the launcher's longest back-off, as a multiple of the first
LONGEST_BACKOFF = 32


class Watch(Protocol):
    """Knows whether the other side lives."""

    def dead(self) -> bool: ...
    def close(self) -> None: ...


@dataclass
class Interrupt:
    """Ends a wait for the trainer when a stop is asked for; disarmed while the program stops in its own good order."""

    requested: Callable[[], bool]
    armed: bool = True

    def __call__(self) -> bool:
        return self.armed and self.requested()


@final
class Connection:
    """Made by a site; ``client`` talks, ``watch`` knows whether the trainer lives."""

    def __init__(self, client: Calls, watch: Watch, interrupt: Interrupt, timeout_s: float, events: Events) -> None:
        self.client = TrainerClient(client, timeout_s=timeout_s, events=events)
        self.watch = watch
        self._client = client
        self._interrupt = interrupt

    def stop_in_good_order(self) -> None:
        """From now on a stop no longer cuts waits short: the program looks for it between commands."""
        self._interrupt.armed = False

    def abandon(self) -> None:
        """Tell a living trainer to drop deferral, stage and gradients, and to end. Never raises: there is an error."""
        self.stop_in_good_order()
        if self.watch.dead():
            return
        try:
            self.client.shutdown(discard=True, timeout_s=ABANDON_S)
        except ShmstageError as error:
            print(f"the trainer could not be told to stop: {error}", flush=True)

    def close(self) -> None:
        self._client.close()
        self.watch.close()


def _held(pool: Pool) -> str:
    try:
        return pool.held_by(TRAINER)
    except PoolError as error:  # it must not hide that the trainer is dead
        return f"slots that cannot be told: {error}"


def connect(
    settings: Settings,
    identity: ProcessIdentity,
    *,
    epoch: int,
    pool: Pool | None,
    again: bool,
    stop_requested: Callable[[], bool],
    events: Events = NO_EVENTS,
) -> Connection:
    """Say hello until a trainer answers.

    Without a ``pool`` it only lets go of the one before. ``again``: it may have to be started first, or sit in a call
    of an orchestrator that is dead. Raises ``WaitTimeoutError``, ``StoppedError``, and what the trainer refuses with.
    """
    timeout_s = settings.start_timeout_s
    if again:
        timeout_s += max(settings.call_timeout_s, LONGEST_BACKOFF * settings.restart_backoff_s)
    interrupt = Interrupt(stop_requested)
    client = Client(ZmqChannel.connect(endpoint_for(settings.run, "trainer")), stop=interrupt)
    try:
        layouts = [layout.to_wire() for layout in pool.layouts.values()] if pool is not None else []
        welcome = client.hello(
            Hello(
                version=PROTOCOL_VERSION, run_id=settings.run, epoch=epoch, pool=pool.name if pool is not None else "",
                layouts=layouts, withdrawn=[], lock_path=identity.lock_path, pid=identity.pid,
                start_ticks=identity.start_ticks,
            ),
            timeout_s=timeout_s,
        )  # fmt: skip
        watch = PeerWatch(welcome.lock_path, welcome.pid, welcome.start_ticks)
    except BaseException:
        client.close()
        raise
    client.peer = watch
    if pool is not None:
        client.peer_held = lambda: _held(pool)
    return Connection(client, watch, interrupt, settings.call_timeout_s, events)
