"""What is common practice: the micro-batch packed into private memory and sent to the trainer over gRPC.

The baseline of ``boundary.py``. The trainer runs the same simulated engine as ours, in a process of its own, with as
many device buffers and no JAX in the way; the client is a plain loop in each of the four orders. Made as strong as it
gets: payloads travel as 4 MB pieces of one buffer (``stream``) or pickled in one message (``unary``), as fast as gRPC
takes them on this machine; packing is native, buffers on both sides are warm and used again, the staged orders fetch
their metrics without waiting for them. An engine that settles overflow is asked to where ours is.

    python bench/grpc_path.py TRAINER_SETTINGS_AS_JSON     (the trainer; prints its port)
"""

from __future__ import annotations

import json
import pickle
import queue
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import cycle
from pathlib import Path
from typing import Any

import grpc
import numpy as np
from packed_input import PackedInput

from shmstage.memory.aligned import aligned_buffer
from shmstage.memory.layout import Layout
from shmstage.testing.simulated_input import InputSettings

PIECE_NBYTES = 4_000_000
OPTIONS = [("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1)]
DEADLINE_S = 600.0

Arrays = Mapping[str, Any]
Release = Callable[[], None]


# --- the trainer ------------------------------------------------------------------------------------------------


class Trainer:
    """Commands by name; each returns plain values. A payload's memory is given back (``release``) when its upload,
    which reads it, is over."""

    def __init__(self, engine: Any, device_buffers: int) -> None:
        self._engine = engine
        self._settle = getattr(engine, "settle", None)
        self._device_buffers = device_buffers
        #: of each payload, seconds from the begin of its sending until all of it was here
        self._arrivals: list[float] = []
        self._trained = 0
        self._lock = threading.Lock()
        self._training: deque[Any] = deque()
        self._staged: Any = None
        self._writing = ThreadPoolExecutor(1)
        self._uploading = ThreadPoolExecutor(1)

    def fwd_bwd(self, arrays: Arrays, release: Release, *, final: bool, defer: bool) -> dict[str, Any]:
        return self._train(self._uploaded(arrays, release), final=final, defer=defer)

    def stage_fwd_bwd(self, arrays: Arrays, release: Release) -> dict[str, Any]:
        self._staged = self._uploaded(arrays, release)
        return {}

    def fwd_bwd_staged(self, *, final: bool, defer: bool) -> dict[str, Any]:
        return self._train(self._staged, final=final, defer=defer)

    def update(self) -> dict[str, Any]:
        with self._lock:
            self._update()
        return {}

    def _update(self) -> None:
        if self._settle is not None:
            self._settle(self._trained)
        self._engine.update()
        self._trained = 0

    def arrived(self, sent_ns: int) -> None:
        self._arrivals.append((time.monotonic_ns() - sent_ns) / 1e9)

    def arrivals(self) -> dict[str, Any]:
        return {"arrival_s": self._arrivals}

    def get_metrics(self) -> dict[str, Any]:
        with self._lock:
            metrics = self._engine.metrics()
        return {name: float(np.asarray(value)) for name, value in metrics.items()}

    def save_checkpoint(self, *, step: int) -> dict[str, Any]:
        with self._lock:
            snapshot = self._engine.save(step, {})
        snapshot.copy_to_host()
        self._writing.submit(snapshot.write)
        return {}

    def prepare_weight_sync(self) -> dict[str, Any]:
        with self._lock:
            weights = self._engine.weights()
        return {"nbytes": sum(np.array(array).nbytes for array in weights.values())}

    def param_digest(self) -> dict[str, Any]:
        from shmstage.trainer.digests import param_digest

        return {"param_digest": param_digest(self._engine)}

    def shutdown(self) -> dict[str, Any]:
        self._writing.shutdown()
        self._uploading.shutdown()
        self._engine.close()
        return {}

    def _uploaded(self, arrays: Arrays, release: Release) -> Any:
        while len(self._training) >= self._device_buffers:
            self._training.popleft().block_until_ready()
        batch = self._engine.put(arrays, {})
        token = next(iter(batch.values())).until
        self._uploading.submit(lambda: (token.block_until_ready(), release()))
        return batch

    def _train(self, batch: Any, *, final: bool, defer: bool) -> dict[str, Any]:
        with self._lock:
            self._training.append(self._engine.fwd_bwd(batch))
            self._trained += 1
            if self._settle is not None and self._trained > 1:
                self._settle(self._trained - 1)
            if final and not defer:
                self._update()
        return {}


class Receiving:
    """Warm places to receive into."""

    def __init__(self, count: int) -> None:
        self._count = count
        self._free: queue.SimpleQueue[np.ndarray[Any, Any]] = queue.SimpleQueue()
        self._made = 0

    def take(self, nbytes: int) -> np.ndarray[Any, Any]:
        if self._made < self._count:
            self._made += 1
            return aligned_buffer(nbytes)
        return self._free.get(timeout=DEADLINE_S)

    def give_back(self, buffer: np.ndarray[Any, Any]) -> None:
        self._free.put(buffer)


def serve(settings: dict[str, Any]) -> None:
    """Answer until ``shutdown``; prints the port it listens on."""
    from shmstage.testing.engines_simulated import make_engine

    trainer = Trainer(make_engine(settings["engine"]), settings["device_buffers"])
    receiving, over = Receiving(settings["receiving"]), threading.Event()

    def answered(said: dict[str, Any], *payload: Any) -> bytes:
        reply = getattr(trainer, said["command"])(*payload, **said["arguments"])
        if said["command"] == "shutdown":
            over.set()
        return json.dumps(reply).encode()

    def call(request: bytes, context: Any) -> bytes:
        return answered(json.loads(request))

    def send(requests: Iterator[bytes], context: Any) -> bytes:
        said = json.loads(next(requests))
        layout = Layout.from_wire(said["layout"])
        buffer = receiving.take(layout.nbytes)
        at, target = 0, memoryview(buffer)
        for piece in requests:
            target[at : at + len(piece)] = piece
            at += len(piece)
        trainer.arrived(said["sent_ns"])
        return answered(said, layout.views(buffer, 0), lambda: receiving.give_back(buffer))

    def send_pickled(request: bytes, context: Any) -> bytes:
        said, arrays = pickle.loads(request)
        trainer.arrived(said["sent_ns"])
        return answered(said, arrays, lambda: None)

    server = grpc.server(ThreadPoolExecutor(4), options=OPTIONS)
    methods = {
        "call": grpc.unary_unary_rpc_method_handler(call),
        "send": grpc.stream_unary_rpc_method_handler(send),
        "send_pickled": grpc.unary_unary_rpc_method_handler(send_pickled),
    }
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("rig", methods),))
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    print(port, flush=True)
    # whoever started this has gone when its end of the pipe is closed
    threading.Thread(target=lambda: (sys.stdin.read(), over.set()), daemon=True).start()
    over.wait()
    server.stop(1.0).wait()


# --- the orchestrator -------------------------------------------------------------------------------------------


class Packer:
    """Micro-batches in order, each packed into one of a few warm buffers."""

    def __init__(self, settings: InputSettings, buffers: int) -> None:
        self.input = PackedInput(settings)
        self._buffers = cycle([aligned_buffer(self.input.layout.nbytes) for _ in range(buffers)])

    def pack(self) -> np.ndarray[Any, Any]:
        buffer = next(self._buffers)
        self.input.pack_into(buffer)
        return buffer


class Client:
    def __init__(self, port: int, layout: Layout, *, unary: bool) -> None:
        self._channel = grpc.insecure_channel(f"127.0.0.1:{port}", options=OPTIONS)
        self._call = self._channel.unary_unary("/rig/call")
        self._send = self._channel.stream_unary("/rig/send")
        self._send_pickled = self._channel.unary_unary("/rig/send_pickled")
        self._layout = layout
        self._unary = unary

    def call(self, command: str, **arguments: Any) -> dict[str, Any]:
        return dict(json.loads(self._call(_said(command, arguments), timeout=DEADLINE_S)))

    def begin(self, command: str, **arguments: Any) -> Any:
        """As ``call``, without waiting for the reply."""
        return self._call.future(_said(command, arguments), timeout=DEADLINE_S)

    def send(self, buffer: np.ndarray[Any, Any], command: str, **arguments: Any) -> None:
        if self._unary:
            arrays = self._layout.views(buffer, 0)
            said = {"command": command, "arguments": arguments, "sent_ns": time.monotonic_ns()}
            self._send_pickled(pickle.dumps((said, arrays), protocol=5), timeout=DEADLINE_S)
            return
        self._send(self._pieces(buffer, command, arguments), timeout=DEADLINE_S)

    def _pieces(self, buffer: np.ndarray[Any, Any], command: str, arguments: dict[str, Any]) -> Iterator[bytes]:
        yield _said(command, arguments, layout=self._layout.to_wire(), sent_ns=time.monotonic_ns())
        whole = memoryview(buffer)
        for start in range(0, self._layout.nbytes, PIECE_NBYTES):
            yield bytes(whole[start : min(start + PIECE_NBYTES, self._layout.nbytes)])

    def close(self) -> None:
        self._channel.close()


def _said(command: str, arguments: Mapping[str, Any], **more: Any) -> bytes:
    return json.dumps({"command": command, "arguments": arguments, **more}).encode()


@dataclass(frozen=True)
class Plan:
    """What one run does."""

    mode: str
    steps: int
    microbatches: int
    checkpoint_and_sync: bool
    bookkeeping_s: float
    device_buffers: int = 2

    @property
    def packing(self) -> int:
        """Buffers to pack into: a serial loop has sent one before it packs the next."""
        return 1 if self.mode == "serial" else 3

    @property
    def receiving(self) -> int:
        """Buffers to receive into, which uploads read."""
        return self.device_buffers + (self.mode != "serial")


def run(plan: Plan, source: InputSettings, engine: dict[str, Any], *, unary: bool = False) -> dict[str, Any]:
    """One run to its end; ``engine`` is the ``[engine]`` table, its ``record`` is read by the caller."""
    settings = {"engine": engine, "device_buffers": plan.device_buffers, "receiving": plan.receiving}
    child = subprocess.Popen(
        [sys.executable, str(Path(__file__)), json.dumps(settings)],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        packer = Packer(source, plan.packing)
        assert child.stdout is not None
        client = Client(int(child.stdout.readline()), packer.input.layout, unary=unary)
        metrics = drive(plan, packer, client)
        digest, arrivals = client.call("param_digest")["param_digest"], client.call("arrivals")["arrival_s"]
        client.call("shutdown")
        client.close()
        child.wait(60)
    finally:
        if child.poll() is None:
            child.kill()
        child.wait()
        for pipe in (child.stdin, child.stdout):
            assert pipe is not None
            pipe.close()
    return {
        "param_digest": digest,
        "arrival_s": arrivals,
        "pack_s": packer.input.pack_s,
        "losses": [m["loss"] for m in metrics],
        "denominators": [m["denominator"] for m in metrics],
    }


def drive(plan: Plan, packer: Packer, client: Client) -> list[dict[str, float]]:
    """The loop of an orchestrator, in the order of ``plan.mode``."""
    ahead: queue.Queue[Any] = queue.Queue(maxsize=1)
    total = plan.steps * plan.microbatches
    serial, staged = plan.mode == "serial", plan.mode.startswith("staged")
    if not serial:
        threading.Thread(target=lambda: [ahead.put(packer.pack()) for _ in range(total)], daemon=True).start()
    take = packer.pack if serial else ahead.get
    metrics: list[dict[str, float]] = []
    pending: list[Any] = []
    on_device = False
    for step in range(1, plan.steps + 1):
        for index in range(plan.microbatches):
            final = index == plan.microbatches - 1
            defer = final and plan.mode == "staged_before_update" and step < plan.steps
            if on_device:
                client.call("fwd_bwd_staged", final=final, defer=defer)
            else:
                client.send(take(), "fwd_bwd", final=final, defer=defer)
            on_device = False
            if index == 0 and step > 1 and not serial:
                time.sleep(plan.bookkeeping_s)  # step k's, now that F is on its way
            if staged and not (final and step == plan.steps):
                client.send(take(), "stage_fwd_bwd")
                on_device = True
            if defer:
                client.call("update")
        if staged:
            pending.append(client.begin("get_metrics"))
        else:
            metrics.append(client.call("get_metrics"))  # type: ignore[arg-type]
        if plan.checkpoint_and_sync:
            ask = client.begin if staged else client.call
            ask("save_checkpoint", step=step)
            ask("prepare_weight_sync")
        if serial:
            time.sleep(plan.bookkeeping_s)
    return metrics + [json.loads(each.result()) for each in pending]


if __name__ == "__main__":
    serve(json.loads(sys.argv[1]))
