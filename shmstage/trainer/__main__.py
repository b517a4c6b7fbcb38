"""``python -m shmstage.trainer``: a child of the launcher. Its standard streams are logs only."""

from __future__ import annotations

import argparse
import logging
import secrets
import sys
import traceback
from contextlib import ExitStack

from shmstage.errors import ShmstageError
from shmstage.events import write_failure
from shmstage.memory.identity import ProcessIdentity
from shmstage.memory.lifeline import Lifeline
from shmstage.memory.sweep import sweep
from shmstage.settings import Settings
from shmstage.trainer.load import load_engine
from shmstage.trainer.worker import Worker
from shmstage.transport.endpoints import endpoint_for
from shmstage.transport.server import Pending, Server
from shmstage.transport.zmq import ZmqServerChannel
from shmstage.wire.messages import PROTOCOL_VERSION, Welcome

log = logging.getLogger("shmstage.trainer")

#: longest the loop sits without looking whether it has to stop, in seconds
POLL_S = 0.1


def serve(settings: Settings, lifeline: Lifeline) -> None:
    """Answer commands until ``shutdown`` or a stop; everything made here is gone afterwards."""
    with ExitStack() as stack:
        identity = ProcessIdentity.create(settings.run, "trainer")
        stack.callback(identity.close)
        sweep(settings.run)
        engine = load_engine(settings.engine, settings.engine_settings, settings.out_dir / "checkpoints")
        server = Server(ZmqServerChannel.bind(endpoint_for(settings.run, "trainer")), incarnation=_new_incarnation())
        stack.callback(server.close)
        server.start()
        worker = Worker(
            engine,
            emit=server.emit,
            device_buffers=settings.device_buffers,
            verify=settings.verify,
            calls_path=settings.out_dir / "trainer_calls.jsonl",
            identity=identity,
            incarnation=server.incarnation,
            timeout_s=settings.call_timeout_s,
            cancelled=lambda: server.hello_waiting or lifeline.stop_requested(),
        )
        stack.callback(worker.close)
        while not worker.finished and not lifeline.stop_requested():
            pending = server.next_request(POLL_S)
            if pending is not None:
                _answer(pending, worker, server, identity)


def _answer(pending: Pending, worker: Worker, server: Server, identity: ProcessIdentity) -> None:
    try:
        if pending.hello is not None:
            info = worker.attach(pending.hello)
            me = (identity.pid, identity.start_ticks, identity.lock_path)
            pending.welcome(Welcome(PROTOCOL_VERSION, server.incarnation, *me, info))
        else:
            pending.reply(worker.execute(pending.command, pending.arguments))
    except ShmstageError as error:
        kind = type(error).__name__
        log.warning("%s refused or failed: %s: %s", pending.command, kind, error, exc_info=error.__cause__)
        pending.fail(error)


def _new_incarnation() -> int:
    return secrets.randbelow(2**48) + 1


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m shmstage.trainer")
    parser.add_argument("--settings", required=True, help="the settings as JSON")
    parser.add_argument("--lifeline", action="store_true", help="stop at the end of standard input")
    args = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(levelname)s %(message)s")
    for noisy in ("jax", "absl", "orbax"):
        logging.getLogger(noisy).setLevel(logging.WARNING)
    settings = Settings.model_validate_json(args.settings)
    lifeline = Lifeline(watch_stdin=args.lifeline)
    try:
        serve(settings, lifeline)
        return 0
    except ShmstageError as error:
        if error.__cause__ is not None and not isinstance(error.__cause__, ImportError):
            traceback.print_exception(error.__cause__)  # somebody's own code: where it raised is what they need
        print(f"{type(error).__name__}: {error}", file=sys.stderr, flush=True)
        return write_failure(settings.out_dir, "trainer", error)
    except Exception as error:
        traceback.print_exc()
        return write_failure(settings.out_dir, "trainer", error)


if __name__ == "__main__":
    sys.exit(main())
