"""``python -m shmstage.trainer``: a child of the launcher, or of a host's agent. Its standard streams are logs only."""

from __future__ import annotations

import logging
import os
import secrets
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from functools import cache, partial
from pathlib import Path
from typing import final

from shmstage.child import Lifeline, run_child
from shmstage.errors import PoolError, ShmstageError
from shmstage.events import Events, open_events
from shmstage.memory.identity import PeerWatch, ProcessIdentity
from shmstage.memory.sweep import sweep
from shmstage.memory.usage import own_use
from shmstage.records import write_json
from shmstage.settings import Settings
from shmstage.trainer.attachment import Attachment
from shmstage.trainer.distributed import join, leave
from shmstage.trainer.load import load_engine
from shmstage.trainer.profile import ProfiledEngine
from shmstage.trainer.timing_log import StepTimingLog
from shmstage.trainer.worker import Worker
from shmstage.transport.curve import ServerAuth
from shmstage.transport.endpoints import endpoint_for
from shmstage.transport.peers_file import HostFile, read_host_file
from shmstage.transport.server import Pending, Server
from shmstage.transport.zmq import ZmqServerChannel
from shmstage.wire.handles import named_by
from shmstage.wire.messages import PROTOCOL_VERSION, Hello, TicketEvent, TokenEvent, Welcome

log = logging.getLogger("shmstage.trainer")

Emit = Callable[[TokenEvent | TicketEvent], None]

#: longest the loop sits without looking whether it has to stop, in seconds
POLL_S = 0.1
#: of call_timeout_s, what the worker itself waits: the client's clock starts first, and an answer that says what was
#: waited for has to arrive before the client gives up without knowing
WORKER_PATIENCE = 0.9
#: answered before their watchers are woken
HOT = ("stage_fwd_bwd", "fwd_bwd_staged", "fwd_bwd")


def serve(settings: Settings, lifeline: Lifeline, epoch: int, peers_file: Path | None) -> None:
    """Answer commands until ``shutdown`` or a stop; everything made here is gone afterwards.

    One of several hosts ends at once when it is told to stop: it may wait in a collective for a host that is gone.
    """
    host = _host(peers_file)
    directory = _directory(settings, peers_file)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(levelname)s %(message)s")
    for noisy in ("jax", "absl", "orbax"):
        logging.getLogger(noisy).setLevel(logging.WARNING)
    with ExitStack() as stack:
        identity = ProcessIdentity.create(settings.run, "trainer")
        stack.callback(identity.close)
        sweep(settings.run)
        if host is not None:
            lifeline.exit_at_once()
            join(host.coordinator, rank=host.rank, hosts=host.hosts, bind=host.bind, timeout_s=settings.start_timeout_s)
        engine = load_engine(settings.engine, settings.engine_settings, settings.out_dir / "checkpoints")
        if settings.profile_range is not None:
            engine = ProfiledEngine(engine, directory / "profile", *settings.profile_range)
        if lifeline.stop_requested():
            return  # the launcher has gone while this was being imported; another one may have come
        channel = _bound(settings, host)
        server = Server(channel, incarnation=_new_incarnation())
        stack.callback(server.close)
        server.start()
        if host is not None:
            write_json(Path(host.endpoint_file), {"endpoint": channel.endpoint, "pid": os.getpid()})
        events = open_events(settings, "trainer", server.incarnation, own_use, directory)
        stack.callback(events.close)
        ending = _Ending(lifeline, settings.stop_grace_s)
        stack.callback(ending.close)
        emit: Emit = server.emit
        if settings.step_timing_log:
            emit = timing_log = StepTimingLog(server.emit)
            stack.callback(timing_log.close)
        worker = Worker(
            engine,
            emit=emit,
            device_buffers=settings.device_buffers,
            verify=settings.verify,
            calls_path=directory / "trainer_calls.jsonl",
            identity=identity,
            incarnation=server.incarnation,
            timeout_s=WORKER_PATIENCE * settings.call_timeout_s,
            cancelled=lambda: server.hello_waiting or ending.is_due(),
            numa=settings.numa,
            attach=partial(Attachment, host_register=settings.host_register, events=events),
            events=events,
        )
        stack.callback(worker.close)
        while not worker.finished and not ending.is_due():
            pending = server.next_request(POLL_S)
            if pending is None or pending.hello is not None:  # who asks for something else lives
                ending.notice_death(worker.orchestrator_held)
            if pending is not None:
                _answer(pending, worker, server, identity, ending, events)


@final
class _Ending:
    """When to end after a stop was asked for: not while a living orchestrator may still want a deferred update applied.

    The launcher interrupts the orchestrator first, which closes the step and says ``shutdown``, and the trainer only
    when the orchestrator has ended. But a signal to both, or the launcher's death, reaches both at once: only if the
    orchestrator is dead, never came, or takes longer than ``grace_s`` does the trainer end by itself.
    """

    def __init__(self, lifeline: Lifeline, grace_s: float) -> None:
        self._lifeline = lifeline
        self._grace_s = grace_s
        self._asked_at: float | None = None
        self._orchestrator: PeerWatch | None = None
        self._noticed = False

    def orchestrator_is(self, hello: Hello) -> None:
        self.close()
        if not hello.lock_path:
            return  # it is on another host, and cannot be watched from here
        try:
            self._orchestrator = PeerWatch(hello.lock_path, hello.pid, hello.start_ticks)
            self._noticed = False
        except PoolError as error:
            log.warning("the orchestrator cannot be watched: %s", error)

    def notice_death(self, held: Callable[[], str]) -> None:
        """Say once, in the log, that the orchestrator is dead and what it had in hand; another one may come."""
        if self._orchestrator is None or self._noticed or not self._orchestrator.dead():
            return
        self._noticed = True
        log.warning("%s is dead; %s; waiting for the next", self._orchestrator.describe(), held() or "it held no slot")

    def is_due(self) -> bool:
        if not self._lifeline.stop_requested():
            return False
        now = time.monotonic()
        if self._asked_at is None:
            self._asked_at = now
        if self._orchestrator is None or self._orchestrator.dead():
            return True
        return now - self._asked_at > self._grace_s

    def close(self) -> None:
        if self._orchestrator is not None:
            self._orchestrator.close()
            self._orchestrator = None


def _answer(
    pending: Pending, worker: Worker, server: Server, identity: ProcessIdentity, ending: _Ending, events: Events
) -> None:
    begun_ns = time.monotonic_ns()
    step, index, request_id = named_by(pending.arguments)
    note = partial(events.note, step=step, index=index, request_id=request_id)
    note("received", begun_ns, command=pending.command, sequence=pending.sequence)
    try:
        if pending.hello is not None:
            info = worker.attach(pending.hello)
            ending.orchestrator_is(pending.hello)
            me = (identity.pid, identity.start_ticks, identity.lock_path)
            pending.welcome(Welcome(PROTOCOL_VERSION, server.incarnation, *me, info))
        else:
            if pending.command in HOT:
                worker.completions.hold()
            pending.reply(worker.execute(pending.command, pending.arguments))
    except ShmstageError as error:
        kind = type(error).__name__
        log.warning("%s refused or failed: %s: %s", pending.command, kind, error, exc_info=error.__cause__)
        pending.fail(error)
    finally:
        answered_ns = time.monotonic_ns()
        worker.completions.release()
        note("executed", begun_ns, answered_ns, command=pending.command, sequence=pending.sequence)


def _new_incarnation() -> int:
    return secrets.randbelow(2**48) + 1


@cache
def _host(peers_file: Path | None) -> HostFile | None:
    return None if peers_file is None else read_host_file(peers_file)


def _directory(settings: Settings, peers_file: Path | None) -> Path:
    """Where this trainer's records go: OUT, or a place of its own on one of several hosts."""
    host = _host(peers_file)
    return settings.out_dir if host is None else Path(host.directory)


def _bound(settings: Settings, host: HostFile | None) -> ZmqServerChannel:
    if host is None:
        return ZmqServerChannel.bind(endpoint_for(settings.run, "trainer"))
    return ZmqServerChannel.bind_tcp(host.bind, ServerAuth(host.keys, frozenset(host.allowed)))


if __name__ == "__main__":
    code = run_child("trainer", serve, _directory)
    leave(code)
    sys.exit(code)
