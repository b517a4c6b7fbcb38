"""Many hand-offs between two real processes: do memory, file descriptors or /dev/shm grow?

    python bench/soak.py [--handoffs N] [--payload BYTES] [--json]

A producer and a consumer process are measured after a warm-up and again after N more hand-offs, both times at rest.
Two arms: a ``Consumer`` that reads the views (N hand-offs) and a ``DoubleBuffer`` that uploads them to the device of
JAX (a fortieth of N). Growth is of the process and the arm that grew most; shared memory is what the run has in
/dev/shm. Exit 1 if something grew by more than what is printed as its limit.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np

from shmstage import Consumer, Producer
from shmstage.memory.names import SHM_DIR, list_objects, new_name

ARMS = ("consumer", "double_buffer")
DOUBLE_BUFFER_SHARE = 40
MOST_WARM_UP = 20_000
SAMPLE_EVERY = 8
#: what counts as flat: an allocator may keep a few pages more, a leak of 16 bytes a hand-off is 3.2 MB in 200,000
LIMITS = {"rss_growth_bytes": 1_500_000, "fd_growth": 0, "shm_growth": 0}
PAUSE_DEADLINE_S = 600.0
LEAK_NBYTES = 16384


@dataclass(frozen=True)
class Use:
    """Of one process at rest: resident bytes, its proportional share of them, open descriptors."""

    rss: int
    pss: int
    fds: int


def use_of(pid: int) -> Use:
    rollup = dict(
        line.split(":", 1) for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()[1:]
    )
    kib = {key: int(rollup[key].split()[0]) for key in ("Rss", "Pss")}
    return Use(kib["Rss"] * 1024, kib["Pss"] * 1024, len(os.listdir(f"/proc/{pid}/fd")))


def shm_nbytes(run: str) -> int:
    return sum(os.stat(os.path.join(SHM_DIR, name)).st_blocks * 512 for name in list_objects(run))


# --- the two processes: they speak in lines and go on when they are told to -----------------------------------


def pause(said: object) -> None:
    print(json.dumps(said), flush=True)
    if not sys.stdin.readline():
        sys.exit("the bench that started this process is gone")


class Leak:
    """What a broken producer would keep at every hand-off; with it the bench proves that it would notice."""

    def __init__(self, kind: str, name: str) -> None:
        self._kind, self._name = kind, name
        self._kept: list[object] = []

    def drip(self) -> None:
        if self._kind == "memory":
            self._kept.append(np.ones(LEAK_NBYTES, np.uint8))
        elif self._kind == "fd":
            self._kept.append(os.open(os.devnull, os.O_RDONLY))
        elif self._kind == "shm":
            Path(SHM_DIR, new_name(self._name)).write_bytes(bytes(4096))


def produce(name: str, counts: list[int], payload: int, leak: str) -> None:
    words = payload // 4
    leaking = Leak(leak, name)
    with Producer(name, {"words": ("int32", (words,))}, slots=3) as producer:
        number = 0
        for count in counts:
            for _ in range(count):
                number += 1
                with producer.acquire() as slot:
                    slot.views["words"][...] = number
                    slot.publish(step=time.monotonic_ns(), index=number)
                leaking.drip()
            pause({})


def consume(name: str, counts: list[int]) -> None:
    with Consumer(name) as consumer:
        number = 0
        for count in counts:
            waits_ns = np.zeros(count // SAMPLE_EVERY + 1, np.int64)
            begin = time.monotonic()
            for done in range(count):
                lease = consumer.receive()
                assert lease is not None
                if done % SAMPLE_EVERY == 0:
                    waits_ns[done // SAMPLE_EVERY] = time.monotonic_ns() - lease.handle.step
                with lease:
                    number += 1
                    words = lease.views["words"]
                    if words[0] != number or words[-1] != number:
                        sys.exit(f"hand-off {number} reads {words[0]} and {words[-1]}")
                    del words
            elapsed_s = time.monotonic() - begin
            pause({"median_us": round(float(np.median(waits_ns[:-1])) / 1e3, 1), "elapsed_s": round(elapsed_s, 2)})


def consume_with_double_buffer(name: str, counts: list[int]) -> None:
    import jax
    import jax.numpy as jnp

    from shmstage import DoubleBuffer

    @jax.jit
    def checked(words: jax.Array) -> jax.Array:
        return jnp.stack([words[0], words.min(), words.max()])

    with Consumer(name) as consumer, DoubleBuffer(consumer) as batches:
        number = 0
        for count in counts:
            begin = time.monotonic()
            for _ in range(count):
                number += 1
                batch = next(batches)
                seen = checked(batch["words"]).tolist()
                if seen != [number] * 3:
                    sys.exit(f"micro-batch {number} reads {seen} on the device")
                del batch
            pause({"elapsed_s": round(time.monotonic() - begin, 2)})


# --- the bench ------------------------------------------------------------------------------------------------


class Process:
    """One of the two, as seen from here."""

    def __init__(self, role: str, name: str, counts: list[int], payload: int, leak: str) -> None:
        command = [sys.executable, __file__, "--role", role, "--name", name, "--payload", str(payload)]
        command += ["--leak", leak] if leak else []
        self._process = subprocess.Popen(
            [*command, "--counts", *map(str, counts)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
            env={**os.environ, "JAX_PLATFORMS": "cpu"},
        )  # fmt: skip
        self.role = role
        self.pid = self._process.pid

    def _pipe(self, which: IO[str] | None) -> IO[str]:
        assert which is not None
        return which

    def at_rest(self) -> dict[str, Any]:
        line = self._pipe(self._process.stdout).readline()
        if not line:
            raise SystemExit(f"the {self.role} ended early, with {self._process.wait()}")
        said: dict[str, Any] = json.loads(line)
        return said

    def go_on(self) -> None:
        self._pipe(self._process.stdin).write("\n")
        self._pipe(self._process.stdin).flush()

    def end(self) -> None:
        if code := self._process.wait(PAUSE_DEADLINE_S):
            raise SystemExit(f"the {self.role} ended with {code}")

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()


def run_name(arm: str) -> str:
    return f"soak-{arm}-{os.getpid()}"


def run_arm(arm: str, handoffs: int, payload: int, leak: str = "") -> dict[str, Any]:
    name = run_name(arm)
    counts = [max(SAMPLE_EVERY, min(handoffs // 5, MOST_WARM_UP)), handoffs]
    processes = [Process(role, name, counts, payload, leak) for role in ("producer", arm)]
    try:
        measured: list[dict[str, Use]] = []
        shm: list[int] = []
        said: dict[str, Any] = {}
        for _ in counts:
            for process in processes:
                said = {**said, **process.at_rest()}
            measured.append({process.role: use_of(process.pid) for process in processes})
            shm.append(shm_nbytes(name))
            for process in processes:
                process.go_on()
        for process in processes:
            process.end()
    finally:
        for process in processes:
            process.kill()
    left = shm_nbytes(name)
    first, last = measured
    growth = {
        role: {key: getattr(last[role], key) - getattr(first[role], key) for key in ("rss", "pss", "fds")}
        for role in first
    }
    return {
        "arm": arm, "handoffs": handoffs, "warm_up": counts[0], **said, "growth": growth,
        "at_the_end": {role: asdict(use) for role, use in last.items()}, "shm_nbytes": shm, "left_in_shm": left,
    }  # fmt: skip


def summarise(arms: list[dict[str, Any]]) -> dict[str, Any]:
    def most(key: str) -> int:
        return max(each[key] for arm in arms for each in arm["growth"].values())

    figures = {
        "rss_growth_bytes": most("rss"),
        "fd_growth": most("fds"),
        "shm_growth": max(max(arm["shm_nbytes"][1] - arm["shm_nbytes"][0], arm["left_in_shm"]) for arm in arms),
    }
    flat = all(figures[key] <= limit for key, limit in LIMITS.items())
    median_us = {arm["arm"]: arm["median_us"] for arm in arms if "median_us" in arm}
    return {"flat": flat, **figures, "pss_growth_bytes": most("pss"), "limits": LIMITS, "median_us": median_us,
            "arms": arms}  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--handoffs", type=int, default=200_000, help="after the warm-up")
    parser.add_argument("--payload", type=int, default=64 * 1024, help="bytes of a slot")
    parser.add_argument("--json", action="store_true", help="print one object")
    parser.add_argument("--role", choices=("producer", *ARMS), help=argparse.SUPPRESS)
    parser.add_argument("--name", help=argparse.SUPPRESS)
    parser.add_argument("--counts", type=int, nargs="*", help=argparse.SUPPRESS)
    parser.add_argument("--leak", choices=("memory", "fd", "shm"), default="", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.handoffs < DOUBLE_BUFFER_SHARE or arguments.payload < 4:
        parser.error(f"--handoffs from {DOUBLE_BUFFER_SHARE}, --payload from 4 bytes")
    if arguments.role == "producer":
        produce(arguments.name, arguments.counts, arguments.payload, arguments.leak)
        return 0
    if arguments.role:
        consumers = {"consumer": consume, "double_buffer": consume_with_double_buffer}
        consumers[arguments.role](arguments.name, arguments.counts)
        return 0
    arms = []
    for arm, handoffs in zip(ARMS, (arguments.handoffs, arguments.handoffs // DOUBLE_BUFFER_SHARE), strict=True):
        print(f"{arm}: {handoffs} hand-offs of {arguments.payload} bytes", file=sys.stderr)
        arms.append(run_arm(arm, handoffs, arguments.payload))
    found = summarise(arms)
    for arm in arms:
        median_us = f", median hand-off {arm['median_us']} µs" if "median_us" in arm else ""
        print(f"{arm['arm']}: {arm['elapsed_s']} s{median_us}; growth {arm['growth']}", file=sys.stderr)
    if arguments.json:
        print(json.dumps(found))
    else:
        for key, limit in LIMITS.items():
            print(f"{key:<18} {found[key]:>10}  (limit {limit})")
    return 0 if found["flat"] else 1


if __name__ == "__main__":
    sys.exit(main())
