"""Readers that a fault could kill, run in a process that may die of it: `hostile_child.py TARGET SEED FIRST COUNT`.

Address space is limited, so an allocation out of proportion fails here and does not bring the machine down. The number
of the case is on standard output before the case is tried: the last one is the one that killed.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import resource
import sys
from collections.abc import Callable
from pathlib import Path

from fuzzing import check_text, survives
from mutations import NUMBERS, Rng, mutated

from shmstage.errors import BundleError, MemoryProtocolError, PoolError, ProtocolError, ShmstageError
from shmstage.memory.cells import Cells
from shmstage.memory.facts import read_facts
from shmstage.memory.handle import Handle
from shmstage.memory.identity import ProcessIdentity
from shmstage.memory.inspect import read_pools
from shmstage.memory.layout import PAGE_NBYTES, Layout
from shmstage.memory.names import SHM_DIR, new_name
from shmstage.memory.pool import Pool
from shmstage.memory.reader import PoolReader
from shmstage.memory.sweep import sweep

EXTRA_NBYTES = 384 << 20
CASE_TIMEOUT_S = 60
RUN = f"hostile-{os.getpid()}"
LAYOUT = Layout.of({"x": ("int32", (16,)), "late": ("float32", (16,))}, late=["late"])


class Crafted:
    """A file in /dev/shm that once was a sound pool with one published slot, and is made into something else."""

    def __init__(self, identity: ProcessIdentity) -> None:
        pool = Pool.create(RUN, epoch=1, layouts=[LAYOUT], slots=2, aux_slots=1, consumers=2, identity=identity)
        self.handle = pool.acquire(LAYOUT, timeout_s=1).publish(step=3)
        pool.cells.announce(self.handle.slot)
        self.sound = Path(SHM_DIR + pool.name).read_bytes()
        pool.close()
        self.header_nbytes = len(self.sound) - 3 * LAYOUT.nbytes
        self.path = os.path.join(SHM_DIR, new_name(RUN))
        self.name = "/" + os.path.basename(self.path)
        self.descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)

    def write(self, data: bytes) -> None:
        os.ftruncate(self.descriptor, 0)
        os.pwrite(self.descriptor, data, 0)

    def scribble(self, rng: Rng, begin: int, end: int) -> None:
        """A few words of 4 or 8 bytes, where a word may stand."""
        for _ in range(rng.randint(1, 6)):
            nbytes = rng.choice((4, 8))
            at = rng.randrange(begin, end - 8) // nbytes * nbytes
            os.pwrite(self.descriptor, (rng.choice(NUMBERS) % (1 << 8 * nbytes)).to_bytes(nbytes, "little"), at)

    def close(self) -> None:
        os.close(self.descriptor)
        os.unlink(self.path)


def pool_case(crafted: Crafted, rng: Rng) -> None:
    """Headers of any content, before and after a reader has attached."""
    crafted.write(crafted.sound)
    # half of the time the words that are looked at, else anything
    if rng.random() < 0.5:
        crafted.scribble(rng, 0, 128)
    elif rng.random() < 0.5:
        crafted.scribble(rng, 128, crafted.header_nbytes)
    else:
        crafted.write(mutated(crafted.sound[: crafted.header_nbytes], rng) + crafted.sound[crafted.header_nbytes :])
    if rng.random() < 0.1:
        os.ftruncate(crafted.descriptor, rng.choice((0, 100, 4096, 8192, len(crafted.sound) + 4096, 1 << 40)))
    read_facts(crafted.descriptor)
    read_pools(RUN)
    sweep(RUN, dry_run=True)
    try:
        reader = PoolReader.attach(crafted.name, run_id=RUN, epoch=1, writes_late=True)
    except PoolError as error:
        check_text(str(error))
        return
    try:
        reader.register(LAYOUT)
        use(reader, crafted, rng)
        crafted.scribble(rng, PAGE_NBYTES, crafted.header_nbytes)
        crafted.scribble(rng, 80, PAGE_NBYTES)
        use(reader, crafted, rng)
        read_pools(RUN)
        sweep(RUN, dry_run=True)
    finally:
        with contextlib.suppress(PoolError):
            reader.close()


def use(reader: PoolReader, crafted: Crafted, rng: Rng) -> None:
    lies = [Handle(rng.choice(NUMBERS), rng.choice(NUMBERS), LAYOUT.layout_id) for _ in range(4)]
    for handle in [crafted.handle, Handle(rng.randrange(3), rng.randrange(6), LAYOUT.layout_id), *lies]:
        with contextlib.suppress(MemoryProtocolError, ProtocolError):
            lease = reader.lease(handle)
            generation, mask, layout_id, *_ = reader._headers.slot_state(handle.slot)
            assert handle.generation == generation and generation and not generation % 2, (handle, generation)
            assert mask & 1 and layout_id == LAYOUT.layout_id, (handle, mask, layout_id)
            lease.views["x"].sum()
            lease.late_views["late"][:] = 1
            lease.commit_late("late")
            lease.end()
            del lease
        with contextlib.suppress(ProtocolError):
            reader.end_lease(handle.slot, handle.generation)
        with contextlib.suppress(ProtocolError):
            reader.published_in(handle.slot)
    reader.held_by_owner()
    reader.owner.dead()
    Cells(reader._headers, RUN, lambda: None).readers()
    slot = reader._headers.latest() & 0xFFFF
    with contextlib.suppress(ProtocolError):
        reader.published_in(slot - 1 if slot else 0)


def frame_case(_: object, rng: Rng) -> None:
    """S88: what a frame announces is not believed, in memory that the interpreter does not count either."""
    from test_frames import FRAMES, decode

    heads = [b"\xdd", b"\xdf", b"\xdb", b"\xc6", b"\xc9", b"\xdc", b"\xde"]
    body = b"".join(
        rng.choice(heads) + rng.choice((1 << 20, 1 << 16, 1 << 31, (1 << 32) - 1, 5000)).to_bytes(4, "big")
        for _ in range(rng.choice((1, 10, 1000)))
    )
    filler = rng.choice((b"\xc0", b"\x90", b"\xa0", b"\x80")) * rng.choice((0, 1000, 1_000_000))
    frame = (rng.choice(FRAMES) + body + filler)[: (1 << 20) + 1]
    frame = mutated(frame, rng) if rng.random() < 0.5 else (body + filler)[: 1 << 20]
    survives(lambda: decode(frame), ProtocolError, cap_nbytes=0, traced=False)


def shard_case(_: object, rng: Rng) -> None:
    """The library that reads shards is not Python: what it allocates and how it dies is seen only from outside."""
    import json
    import struct

    from mutations import hostile_json
    from test_trajectory_files import OPTIONAL, SHARD, TRAJECTORIES, decode_shard

    length = struct.unpack_from("<Q", SHARD)[0]
    header = json.loads(SHARD[8 : 8 + length])
    for entry in header.values():
        if "shape" in entry and rng.random() < 0.3:
            entry["shape"] = [rng.choice(NUMBERS) for _ in range(rng.randint(0, 4))]
        if "data_offsets" in entry and rng.random() < 0.3:
            entry["data_offsets"] = [rng.choice(NUMBERS) for _ in range(2)]
    text = hostile_json(header, rng) if rng.random() < 0.5 else json.dumps(header).encode()
    announced = len(text) if rng.random() < 0.75 else rng.choice(NUMBERS)
    data = struct.pack("<Q", announced) + text + SHARD[8 + length :]
    data = mutated(SHARD, rng) if rng.random() < 0.3 else data
    entries = [{"id": t.trajectory_id, "group": "g", "batch": 0, "policy_version": 0} for t in TRAJECTORIES]
    survives(
        lambda: decode_shard(data, entries, sorted(OPTIONAL), 16, Path("x")), BundleError, cap_nbytes=0, traced=False
    )


TARGETS: dict[str, Callable[..., None]] = {"pool": pool_case, "frame": frame_case, "shard": shard_case}


def main(target: str, seed: int, first: int, count: int) -> None:
    faulthandler.enable()
    identity = ProcessIdentity.create(RUN, "hostile")
    crafted = Crafted(identity)
    try:
        with open("/proc/self/statm") as statm:
            now_nbytes = int(statm.read().split()[0]) * PAGE_NBYTES
        resource.setrlimit(resource.RLIMIT_AS, (now_nbytes + EXTRA_NBYTES,) * 2)
        for case in range(first, first + count):
            print(case, flush=True)
            faulthandler.dump_traceback_later(CASE_TIMEOUT_S, exit=True)
            try:
                TARGETS[target](crafted, Rng(seed * 1_000_000 + case))
            except ShmstageError as error:
                raise AssertionError(f"case {case}: {error!r} is of no fitting class") from error
        faulthandler.cancel_dump_traceback_later()
    finally:
        crafted.close()
        identity.close()


if __name__ == "__main__":
    main(sys.argv[1], *map(int, sys.argv[2:]))
