"""The trainer's process: one per path for the whole run, told what to do over a pipe.

It ends when it is told to, and when the process that started it is gone, whatever it is doing then.
"""

from __future__ import annotations

import importlib
import multiprocessing
import os
import signal
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.connection import Connection, wait
from typing import Any

from paths import Path
from paths.ends import DEADLINE_S, Receiver
from paths.proof import digest, where
from shmstage.memory.layout import Layout

#: the receiver is told to wait; whatever is sent within this time might find it not waiting yet
SETTLE_S = 0.002


class PathError(Exception):
    """A path failed; the text says which and how."""


class ProcessPeer:
    """Starts the process, asks, and ends it."""

    def __init__(self, path: Path, largest_nbytes: int) -> None:
        context = multiprocessing.get_context("spawn")
        self.name = path.name
        make = getattr(importlib.import_module(f"paths.{path.module}"), "inherited", None)
        self.inherited = make(context) if make else None
        self._control, other = context.Pipe()
        arguments = (path.module, other, self.inherited)
        self._process = context.Process(target=serve, args=arguments, name=f"peer-{path.name}", daemon=True)
        self._process.start()
        other.close()

    def begin(self) -> None:
        """Waits until it has imported what it needs."""
        self._answer()

    def pids(self) -> list[int]:
        assert self._process.pid is not None
        return [self._process.pid]

    def open(self, layout: Layout, said: Any) -> Any:
        return self._ask("open", layout.to_wire(), said)

    def expect(self) -> None:
        """The receiver waits from now on."""
        self._control.send(("receive",))
        time.sleep(SETTLE_S)

    def report(self) -> dict[str, Any]:
        """What the receiver says of what it received."""
        return dict(self._answer())

    def close(self) -> None:
        self._ask("close")

    def stop(self) -> None:
        """Ends it, whatever it is doing; harmless twice."""
        self._control.close()  # a peer that waits for commands ends by itself
        if self._process.ident is not None:
            self._process.join(2.0)
            if self._process.is_alive():
                self._process.kill()
                self._process.join()

    def _ask(self, *command: Any) -> Any:
        self._control.send(command)
        return self._answer()

    def _answer(self) -> Any:
        try:
            if not self._control.poll(DEADLINE_S):
                raise PathError(f"{self.name}: the trainer's process did not answer within {DEADLINE_S:g} s")
            kind, value = self._control.recv()
        except (EOFError, OSError):
            self._process.join(2.0)
            code = self._process.exitcode
            raise PathError(f"{self.name}: the trainer's process is gone, exit code {code}") from None
        if kind == "error":
            raise PathError(f"{self.name}: in the trainer's process: {value}")
        return value


def serve(module: str, control: Connection[Any, Any], inherited: Any) -> None:
    """In the child."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # meant for all of us; the orchestrator ends us, in its order
    os.dup2(2, 1)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    try:
        ends = importlib.import_module(f"paths.{module}")
        control.send(("ready", None))
        _answer_until_closed(control, lambda layout, said: ends.Receiver(Layout.from_wire(layout), said, inherited))
    except Exception:
        with suppress(OSError):  # nobody is there any more: it was told to stop
            control.send(("error", traceback.format_exc()))


def _answer_until_closed(control: Connection[Any, Any], make: Callable[[Any, Any], Receiver]) -> None:
    receiver: Receiver | None = None
    try:
        while True:
            command, *arguments = control.recv()
            if command == "open":
                receiver = make(*arguments)
                control.send(("opened", receiver.said()))
                continue
            assert receiver is not None
            if command == "receive":
                control.send(("received", received(receiver)))
            else:
                receiver.close()
                receiver = None
                control.send(("closed", None))
    finally:
        if receiver is not None:
            receiver.close()


def received(receiver: Receiver) -> dict[str, Any]:
    arrays, ready_ns = receiver.receive()
    report = {"ready_ns": ready_ns, "where": where(arrays)}
    begin = time.monotonic()
    report["digest"] = digest(arrays)
    report["read_s"] = time.monotonic() - begin
    del arrays
    receiver.release()
    return report


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    wait([parent.sentinel])
    os._exit(1)
