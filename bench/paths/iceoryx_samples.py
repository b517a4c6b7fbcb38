"""iceoryx2: a loaned sample (a slice of bytes) is filled and sent; an event wakes the subscriber."""

from __future__ import annotations

import ctypes
import os
import shutil
import tempfile
import time
from pathlib import Path
from typing import Any

import iceoryx2
import numpy as np

from paths.ends import DEADLINE_S, Arrays, span_nbytes
from paths.ends import Receiver as ReceiverEnd
from paths.ends import Sender as SenderEnd
from shmstage.memory.layout import Layout

_ALIGNMENT = 64


class _Node:
    """Services below a directory and a prefix of our own, so that nothing is left behind and nobody is met."""

    def __init__(self, directory: str, prefix: str) -> None:
        iceoryx2.set_log_level(iceoryx2.LogLevel.Error)
        config = iceoryx2.config.default()
        config.global_cfg.root_path = iceoryx2.Path.new(directory)
        config.global_cfg.prefix = iceoryx2.FileName.new(prefix)
        builder = iceoryx2.NodeBuilder.new().config(config)
        self._node = builder.signal_handling_mode(iceoryx2.SignalHandlingMode.Disabled).create(iceoryx2.ServiceType.Ipc)
        self._name = iceoryx2.ServiceName.new("handoff")

    def samples(self) -> Any:
        builder = self._node.service_builder(self._name).publish_subscribe(iceoryx2.Slice[ctypes.c_uint8])
        builder = builder.payload_alignment(iceoryx2.Alignment.new(_ALIGNMENT)).max_publishers(1).max_subscribers(1)
        builder = builder.history_size(0).subscriber_max_buffer_size(1).subscriber_max_borrowed_samples(1)
        return builder.open_or_create()

    def event(self) -> Any:
        return self._node.service_builder(self._name).event().open_or_create()


class Sender(SenderEnd):
    def __init__(self, layout: Layout, private: Any, peer: Any) -> None:
        self._layout = layout
        self._nbytes = span_nbytes(layout)
        self._directory = tempfile.mkdtemp(prefix="handoff")
        self._prefix = f"handoff{os.getpid()}_"
        node = _Node(self._directory, self._prefix)
        samples, event = node.samples(), node.event()
        publisher = samples.publisher_builder().initial_max_slice_len(self._nbytes).max_loaned_samples(1)
        # What iceoryx2 would prepare for is 192 samples; with one loaned and one read, two are in use at most.
        self._publisher = publisher.override_sample_preallocation(2).create()
        self._notifier = event.notifier_builder().create()
        self._node: Any = (node, samples, event)
        self._loaned: Any = None
        self._filled: set[int] = set()

    def said(self) -> tuple[str, str]:
        return self._directory, self._prefix

    def connect(self, said: Any) -> None:
        self._publisher.update_connections()

    def place(self, *, fresh: bool) -> tuple[Arrays, bool]:
        self._loaned = self._publisher.loan_slice_uninit(self._nbytes)
        address = self._loaned.payload_ptr
        filled = address in self._filled
        self._filled.add(address)
        return _views(self._layout, self._nbytes, address), filled

    def send(self) -> None:
        self._loaned.assume_init().send()
        self._notifier.notify()
        self._loaned = None

    def close(self) -> None:
        for port in (self._publisher, self._notifier):
            port.delete()
        self._loaned = self._node = None
        shutil.rmtree(self._directory, ignore_errors=True)
        for each in Path("/dev/shm").glob(f"{self._prefix}*"):  # its node management stays there
            each.unlink(missing_ok=True)


class Receiver(ReceiverEnd):
    def __init__(self, layout: Layout, said: tuple[str, str], inherited: Any) -> None:
        self._layout = layout
        self._nbytes = span_nbytes(layout)
        node = _Node(*said)
        samples, event = node.samples(), node.event()
        self._listener = event.listener_builder().create()
        self._subscriber = samples.subscriber_builder().create()
        self._node: Any = (node, samples, event)
        self._sample: Any = None

    def receive(self) -> tuple[Arrays, int]:
        deadline = time.monotonic() + DEADLINE_S
        while (sample := self._subscriber.receive()) is None:
            if time.monotonic() > deadline:
                raise TimeoutError("nothing came")
            self._listener.timed_wait(iceoryx2.Duration.from_secs(1))
        self._sample = sample
        return _views(self._layout, self._nbytes, sample.payload_ptr), time.monotonic_ns()

    def release(self) -> None:
        self._sample.delete()
        self._sample = None

    def close(self) -> None:
        for port in (self._subscriber, self._listener):
            port.delete()
        self._node = None


def _views(layout: Layout, nbytes: int, address: int) -> Arrays:
    memory = (ctypes.c_uint8 * nbytes).from_address(address)
    return layout.views(np.frombuffer(memory, np.uint8), 0)
