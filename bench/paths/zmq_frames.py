"""ZeroMQ with the payload: one multipart message over ``ipc://``, a frame per array, no copy in user space."""

from __future__ import annotations

import shutil
import tempfile
import time
from typing import Any

import numpy as np
import zmq

from paths.ends import DEADLINE_S, Arrays
from paths.ends import Receiver as ReceiverEnd
from paths.ends import Sender as SenderEnd
from shmstage.memory.layout import Layout, numpy_dtype

SOCKET_NBYTES = 4 << 20


def _socket(kind: int) -> Any:
    socket = zmq.Context.instance().socket(kind)
    socket.setsockopt(zmq.LINGER, 0)
    for option in (zmq.SNDBUF, zmq.RCVBUF):
        socket.setsockopt(option, SOCKET_NBYTES)
    for option in (zmq.SNDTIMEO, zmq.RCVTIMEO):
        socket.setsockopt(option, int(1e3 * DEADLINE_S))
    return socket


class Sender(SenderEnd):
    def __init__(self, layout: Layout, private: np.ndarray[Any, Any], peer: Any) -> None:
        self._views = layout.views(private, 0)
        self._directory = tempfile.mkdtemp(prefix="handoff")
        self._address = f"ipc://{self._directory}/s"
        self._socket = _socket(zmq.PUSH)
        self._socket.bind(self._address)

    def said(self) -> str:
        return self._address

    def place(self, *, fresh: bool) -> tuple[Arrays, bool]:
        return self._views, True

    def send(self) -> None:
        self._socket.send_multipart(list(self._views.values()), copy=False)

    def close(self) -> None:
        self._socket.close()
        shutil.rmtree(self._directory, ignore_errors=True)


class Receiver(ReceiverEnd):
    def __init__(self, layout: Layout, said: str, inherited: Any) -> None:
        self._fields = [(field.name, numpy_dtype(field.dtype), field.shape) for field in layout.fields]
        self._socket = _socket(zmq.PULL)
        self._socket.connect(said)

    def receive(self) -> tuple[Arrays, int]:
        frames = self._socket.recv_multipart(copy=False)
        arrays = {
            name: np.frombuffer(frame.buffer, dtype).reshape(shape)
            for (name, dtype, shape), frame in zip(self._fields, frames, strict=True)
        }
        return arrays, time.monotonic_ns()

    def release(self) -> None:
        pass

    def close(self) -> None:
        self._socket.close()
