"""64 MB of arrays from process to process, again and again, without a copy: python examples/transport.py"""

import os
import subprocess
import sys
import time

import numpy as np
import xxhash

from shmstage import Consumer, Producer

FIELDS = {"tokens": ("int32", (1024, 8192)), "logps": ("float32", (1024, 8192)), "sent_ns": ("int64", (1,))}
WARM_UP, BATCHES = 4, 16  # every slot is used once before memory is looked at: what follows is payload only


def write() -> None:
    name = f"transport-example-{os.getpid()}"
    reader = subprocess.Popen([sys.executable, __file__, name])
    with Producer(name, FIELDS, slots=3) as producer:
        for batch in range(BATCHES):
            if batch == WARM_UP:
                before_kib = anonymous_kib()
            slot = producer.acquire()
            slot.views["tokens"][...] = batch
            np.random.default_rng(batch).random(out=slot.views["logps"], dtype=np.float32)
            digest = hash_of(slot.views)
            slot.views["sent_ns"][0] = time.monotonic_ns()
            slot.publish(digest=digest)
        grown_kib = anonymous_kib() - before_kib
    sys.exit(report("writer", grown_kib) or reader.wait())


def read(name: str) -> None:
    handoff_us = []
    with Consumer(name) as consumer:
        asked_ns = time.monotonic_ns()
        for batch, lease in enumerate(consumer):
            # a batch that lay ready while the last one was hashed was not late: the later of both instants counts
            handoff_us.append((time.monotonic_ns() - max(asked_ns, int(lease.views["sent_ns"][0]))) / 1000)
            if batch == WARM_UP:
                before_kib = anonymous_kib()
            if hash_of(lease.views) != lease.handle.digest:
                sys.exit(f"batch {batch} arrived altered")
            asked_ns = time.monotonic_ns()
        grown_kib = anonymous_kib() - before_kib
    median_us = sorted(handoff_us)[len(handoff_us) // 2]
    print(f"reader: {len(handoff_us)} hashes right; hand-off, publish to readable arrays: {median_us:.0f} us median")
    sys.exit(report("reader", grown_kib))


def hash_of(arrays: dict[str, np.ndarray]) -> bytes:
    hasher = xxhash.xxh3_128(arrays["tokens"])
    hasher.update(arrays["logps"])
    return hasher.digest()


def anonymous_kib() -> int:
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) for line in status if line.startswith("RssAnon"))


def report(who: str, grown_kib: int) -> bool:
    print(f"{who}: {grown_kib} KiB more anonymous memory after {64 * (BATCHES - WARM_UP)} MB", flush=True)
    return grown_kib > 1024  # a copy was made somewhere


if __name__ == "__main__":
    read(sys.argv[1]) if len(sys.argv) > 1 else write()
