"""What the arms of ``boundary.py`` need at their peak, and a refusal while nothing has been allocated yet."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from boundary_arms import ROUTING_NBYTES, WORDS_NBYTES, Rig

from shmstage.budget.inputs import PROCESS_NBYTES
from shmstage.errors import BudgetError
from shmstage.memory.limits import Limit, format_nbytes

#: pieces of a stream on their way: the transport's windows and queues, both ends
STREAM_NBYTES = 128_000_000
#: pickled in one message: the pickle and gRPC's own copy at each end
UNARY_COPIES = 4
#: what a protobuf-sized message may have; gRPC takes no more in one
MAX_MESSAGE_NBYTES = 2**31 - 1


def source_nbytes(rig: Rig) -> int:
    """Trajectories as they lie in memory; routing is shared beyond ``routings`` of them."""
    source = rig.source
    rows = source.microbatches * source.rows
    return source.tokens * (rows * WORDS_NBYTES + min(source.routings or rows, rows) * ROUTING_NBYTES)


def amounts_of(rig: Rig, path: str, mode: str) -> dict[str, int]:
    """Bytes by what they are for, of all processes of one arm together."""
    payload, staged = rig.payload_nbytes, mode != "serial"
    amounts = {"processes": PROCESS_NBYTES, "trajectories": source_nbytes(rig)}
    if rig.keeps == "copies":
        amounts["device buffers"] = rig.device_buffers * payload
    if path == "shm":
        return {**amounts, "slots": rig.slots * payload}
    amounts["packing buffers"] = (3 if staged else 1) * payload
    if path == "unary":
        return {**amounts, "messages": UNARY_COPIES * payload, "unpickled": (rig.device_buffers + 1) * payload}
    return {**amounts, "receiving buffers": (rig.device_buffers + staged) * payload, "stream": STREAM_NBYTES}


def check_memory(rig: Rig, arms: Iterable[tuple[str, str, str]], limits: Sequence[Limit]) -> None:
    """``arms`` are (name, path, mode). Raises ``BudgetError`` naming value, limit and remedy for the first too large.

    The expected hashes, which need a packed micro-batch and the trajectories, never need more than an arm.
    """
    for name, path, mode in arms:
        amounts = amounts_of(rig, path, mode)
        for limit in limits:
            # a mount bounds what lies in shared memory alone
            counted = {"slots": amounts.get("slots", 0)} if limit.kind == "mount" else amounts
            need = sum(counted.values())
            if need > limit.available_nbytes:
                parts = ", ".join(f"{what} {format_nbytes(nbytes)}" for what, nbytes in counted.items() if nbytes)
                remedy = "--slots 2, " if path == "shm" and rig.slots > 2 else ""
                raise BudgetError(
                    f"arm {name} needs {format_nbytes(need)} ({parts}); {limit.name} leaves "
                    f"{format_nbytes(limit.available_nbytes)}; use {remedy}a larger --scale, a smaller --payload or "
                    "other --arms"
                )
        if path == "unary" and rig.payload_nbytes > MAX_MESSAGE_NBYTES:
            raise BudgetError(
                f"arm {name} sends {format_nbytes(rig.payload_nbytes)} in one message; gRPC takes "
                f"{format_nbytes(MAX_MESSAGE_NBYTES)}; use --serial-over stream, or a larger --scale"
            )
