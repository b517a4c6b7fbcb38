"""gRPC: one buffer as one message, or as a stream of pieces of 4 MB into a warm buffer.

As strong as it gets: no pickle, arrays are views of what was received; the layout is known to both in advance.
"""

from __future__ import annotations

import queue
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
import numpy as np

from paths.ends import DEADLINE_S, Arrays, span_nbytes
from paths.ends import Receiver as ReceiverEnd
from paths.ends import Sender as SenderEnd
from shmstage.memory.aligned import aligned_buffer
from shmstage.memory.layout import Layout

PIECE_NBYTES = 4_000_000
OPTIONS = [("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1)]


class Sender(SenderEnd):
    def __init__(self, layout: Layout, private: np.ndarray[Any, Any], peer: Any) -> None:
        self._views = layout.views(private, 0)
        self._bytes = memoryview(private)[: span_nbytes(layout)]
        self._unary = peer.name == "grpc_unary"
        self._channel: Any = None

    def said(self) -> bool:
        return self._unary

    def connect(self, said: int) -> None:
        self._channel = grpc.insecure_channel(f"127.0.0.1:{said}", options=OPTIONS)
        self._send = self._channel.unary_unary("/path/whole")
        self._stream = self._channel.stream_unary("/path/pieces")

    def place(self, *, fresh: bool) -> tuple[Arrays, bool]:
        return self._views, True

    def send(self) -> None:
        if self._unary:
            self._send(bytes(self._bytes), timeout=DEADLINE_S)
        else:
            self._stream(self._pieces(), timeout=DEADLINE_S)

    def _pieces(self) -> Iterator[bytes]:
        for start in range(0, len(self._bytes), PIECE_NBYTES):
            yield bytes(self._bytes[start : start + PIECE_NBYTES])

    def close(self) -> None:
        if self._channel is not None:
            self._channel.close()


class Receiver(ReceiverEnd):
    def __init__(self, layout: Layout, said: bool, inherited: Any) -> None:
        self._layout = layout
        self._buffer = aligned_buffer(0 if said else span_nbytes(layout))
        self._received: queue.SimpleQueue[tuple[Arrays, int]] = queue.SimpleQueue()
        methods = {
            "whole": grpc.unary_unary_rpc_method_handler(self._whole),
            "pieces": grpc.stream_unary_rpc_method_handler(self._pieces),
        }
        self._threads = ThreadPoolExecutor(2)
        self._server = grpc.server(self._threads, options=OPTIONS)
        self._server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("path", methods),))
        self._port = self._server.add_insecure_port("127.0.0.1:0")
        self._server.start()

    def said(self) -> int:
        return self._port

    def receive(self) -> tuple[Arrays, int]:
        return self._received.get(timeout=DEADLINE_S)

    def release(self) -> None:
        pass

    def close(self) -> None:
        self._server.stop(1.0).wait()
        self._threads.shutdown()

    def _whole(self, request: bytes, context: Any) -> bytes:
        self._readable(np.frombuffer(request, np.uint8))
        return b""

    def _pieces(self, requests: Iterator[bytes], context: Any) -> bytes:
        at, target = 0, memoryview(self._buffer)
        for piece in requests:
            target[at : at + len(piece)] = piece
            at += len(piece)
        self._readable(self._buffer)
        return b""

    def _readable(self, whole: np.ndarray[Any, Any]) -> None:
        arrays = self._layout.views(whole, 0)
        self._received.put((arrays, time.monotonic_ns()))
