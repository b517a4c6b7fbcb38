"""When a child process has to stop: on a signal, or when the launcher that holds its standard input is gone."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from types import FrameType
from typing import final


@final
class Lifeline:
    """``stop_requested`` turns true on SIGINT, SIGTERM or, with ``watch_stdin``, at the end of standard input.

    The launcher keeps the writing end of each child's standard input and never writes: the kernel closes it however
    the launcher ends, so a child outlives it by no more than one poll.
    """

    def __init__(self, *, watch_stdin: bool, on_stop: Callable[[], None] = lambda: None) -> None:
        self._stop = threading.Event()
        self._on_stop = on_stop
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self._on_signal)
        if watch_stdin:
            threading.Thread(target=self._wait_for_end, name="lifeline", daemon=True).start()

    def stop_requested(self) -> bool:
        return self._stop.is_set()

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self._request()

    def _wait_for_end(self) -> None:
        while os.read(0, 4096):
            pass
        self._request()

    def _request(self) -> None:
        self._stop.set()
        self._on_stop()
