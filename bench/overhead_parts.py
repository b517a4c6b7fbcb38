"""What a micro-batch cannot do without, each measured alone: the bounds that ``overhead.py`` shows."""

from __future__ import annotations

import queue
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import zmq
from results import spread

from shmstage.memory.handle import Handle
from shmstage.testing.engines_simulated import SimulatedEngine, SimulatedSettings, SimulatedSharding
from shmstage.transport.client import Client
from shmstage.transport.endpoints import endpoint_for
from shmstage.transport.zmq import ZmqChannel
from shmstage.wire.handles import handle_to_wire
from shmstage.wire.messages import PROTOCOL_VERSION, Hello

#: of a micro-batch without routing: packed int32 and float32 fields
FIELDS = {
    "completion_ids": np.int32, "segment_ids": np.int32, "segment_positions": np.int32, "completion_mask": np.float32,
    "advantages": np.float32, "old_per_token_logps": np.float32,
}  # fmt: skip
#: of all samples, left out: what is touched for the first time
WARM_UP = 10

ECHO = """
import sys, zmq
echo = zmq.Context().socket(zmq.REP)
echo.connect(sys.argv[1])
for _ in range(int(sys.argv[2])):
    echo.send(echo.recv())
"""

# the trainer's threads without a trainer: one answers, one hears that something is over and says so
SERVE = """
import queue, sys, threading
from shmstage.transport.endpoints import endpoint_for
from shmstage.transport.server import Server
from shmstage.transport.zmq import ZmqServerChannel
from shmstage.wire.messages import PROTOCOL_VERSION, TokenEvent, Welcome

server = Server(ZmqServerChannel.bind(endpoint_for(sys.argv[1], "trainer")), incarnation=1)
server.start()
over = queue.SimpleQueue()

def tell():
    while (kind := over.get()) is not None:
        stamps = {"dispatch_begin_ns": 1, "dispatch_end_ns": 2, "ready_ns": 3}
        server.emit(TokenEvent(0, kind, "1.0@0:2", 1, 0, True, "", stamps))

threading.Thread(target=tell, daemon=True).start()
command = ""
while command != "shutdown":
    pending = server.next_request(1.0)
    if pending is None:
        continue
    command = pending.command
    if pending.hello is not None:
        pending.welcome(Welcome(PROTOCOL_VERSION, 1, 1, 1, "", {}))
        continue
    pending.reply({"request_id": "1.0@0:2", "updated": False, "upload_s": 0.0, "snapshot_wait_s": 0.0,
                   "payload_digest": ""})
    over.put(command)
server.close()
"""


def timed(act: Callable[[], object], count: int) -> dict[str, float]:
    """Seconds of one ``act``."""
    samples = []
    for _ in range(count + count // WARM_UP):
        began = time.perf_counter()
        act()
        samples.append(time.perf_counter() - began)
    return spread(samples[count // WARM_UP :])


def round_trip(work: Path, count: int = 2000) -> dict[str, float]:
    """A bare ZeroMQ round trip between two processes, 200 bytes each way."""
    address = f"ipc://{work}/echo"
    context = zmq.Context()
    asking = context.socket(zmq.REQ)
    asking.bind(address)
    echo = subprocess.Popen([sys.executable, "-c", ECHO, address, str(count + count // WARM_UP)])

    def ask() -> None:
        asking.send(bytes(200))
        asking.recv()

    try:
        return timed(ask, count)
    finally:
        echo.wait(60)
        context.destroy(linger=0)


def calls(run: str, count: int = 1000) -> dict[str, float]:
    """The two calls and two events of a staged micro-batch through our client and server, with nothing behind them."""
    serving = subprocess.Popen([sys.executable, "-c", SERVE, run])
    client = Client(ZmqChannel.connect(endpoint_for(run, "trainer")))
    handle = handle_to_wire(Handle(0, 2, 1, b"\1" * 16, 4, 1, 0, False, 500, 12))
    staged = {"request_id": "1.0@0:2", "defer_update": False}

    def ask() -> None:
        client.call("stage_fwd_bwd", {"handle": handle}, timeout_s=30.0)
        client.events()
        client.call("fwd_bwd_staged", staged, timeout_s=30.0)
        client.events()

    try:
        client.hello(Hello(PROTOCOL_VERSION, run, 1, "", [], [], "", 1, 1), 30.0)
        found = timed(ask, count)
        client.call("shutdown", {}, timeout_s=30.0)
        serving.wait(30)
        return found
    finally:
        serving.kill()  # nothing happens if it has ended
        serving.wait()
        client.close()


def hand_over(count: int = 2000) -> dict[str, float]:
    """From one Python thread to another and back, divided by two."""
    there: queue.SimpleQueue[int | None] = queue.SimpleQueue()
    back: queue.SimpleQueue[int] = queue.SimpleQueue()

    def answer() -> None:
        while (item := there.get()) is not None:
            back.put(item)

    def ask() -> None:
        there.put(1)
        back.get()

    thread = threading.Thread(target=answer)
    thread.start()
    found = timed(ask, count)
    there.put(None)
    thread.join()
    return {name: value if name == "samples" else value / 2 for name, value in found.items()}


def engine_alone(rows: int, tokens: int, per_step: int, steps: int = 100) -> dict[str, Any]:
    """The simulated engine driven by its own thread, per micro-batch: upload, forward, wait; seconds and processor."""
    engine = SimulatedEngine(SimulatedSettings())
    views = {name: np.zeros((rows, tokens), dtype) for name, dtype in FIELDS.items()}
    shardings = dict.fromkeys(views, SimulatedSharding())
    samples = []
    began_cpu = 0.0
    for step in range(steps + WARM_UP):
        if step == WARM_UP:
            began_cpu = time.process_time()
        for _ in range(per_step):
            began = time.perf_counter()
            token: Any = engine.fwd_bwd(engine.put(views, shardings))
            token.block_until_ready()
            samples.append(time.perf_counter() - began)
        engine.update()
    engine.close()
    cpu_s = (time.process_time() - began_cpu) / (steps * per_step)
    return {**spread(samples[WARM_UP * per_step :]), "cpu_s": cpu_s}
