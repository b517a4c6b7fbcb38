"""One module per way from the orchestrator to the trainer, each with a ``Sender`` and a ``Receiver`` (``ends.py``)."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass


@dataclass(frozen=True)
class Path:
    """What is known of a path from how it is built.

    ``copied_payloads``: how often a hand-off moves each byte, in user space or in the kernel; ``copies`` says where.
    ``peak_payloads``: memory of both processes, in payloads, on top of one private packed buffer; what is planned with.
    """

    name: str
    title: str
    module: str
    package: str
    copied_payloads: int
    copies: str
    peak_payloads: float
    limit_nbytes: int = 1 << 62

    @property
    def missing(self) -> bool:
        return bool(self.package) and importlib.util.find_spec(self.package) is None


_PATHS = (
    Path("ours", "shmstage", "slots", "", 0, "none: the slot is mapped by both", 1),
    Path(
        "grpc_unary", "gRPC unary", "grpc_messages", "grpc", 5,
        "bytes(buffer), into the core's slice, socket in, socket out, slices joined to bytes", 6, (1 << 31) - (1 << 20),
    ),
    Path(
        "grpc_stream", "gRPC stream, 4 MB", "grpc_messages", "grpc", 6,
        "bytes(piece), into the core's slice, socket in, socket out, to bytes, into the warm buffer", 2,
    ),
    Path(
        "queue", "multiprocessing.Queue", "mp_queue", "", 6,
        "tobytes, into the pickle, pipe in, pipe out, into one buffer, out of the pickle", 5,
    ),
    Path("zmq", "ZeroMQ, payload", "zmq_frames", "zmq", 2, "socket in, socket out", 1.5),
    Path("ray", "Ray put + get", "ray_objects", "ray", 1, "put, into the object store", 2.3),
    Path("grain", "Grain SharedMemoryArray", "grain_arrays", "grain", 0, "none: each array is mapped by both", 2),
    Path("iceoryx2", "iceoryx2", "iceoryx_samples", "iceoryx2", 0, "none: the loaned sample is mapped by both", 2),
)  # fmt: skip

#: in the order in which they take turns
PATHS = {path.name: path for path in _PATHS}
