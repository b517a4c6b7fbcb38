"""A Grain pipeline in a process of its own feeds a trainer through shared memory: python examples/from_grain.py

Reading, shuffling and packing then take no time of the interpreter that trains: what Grain has batched is copied once,
into the slot that it is uploaded from.
"""

import itertools
import os
import subprocess
import sys
from typing import NamedTuple

import grain
import jax
import numpy as np

from shmstage import Consumer, DoubleBuffer, Producer


class Batch(NamedTuple):
    """What is trained on; any registered pytree will do."""

    tokens: object
    weight: object


def example(number: int) -> dict[str, np.ndarray]:
    return {"tokens": np.arange(number, number + 128, dtype=np.int32), "weight": np.float32(number % 2)}


def pipeline() -> grain.IterDataset:
    return grain.MapDataset.range(256).shuffle(seed=7).map(example).batch(16).to_iter_dataset()


def feed(name: str) -> None:
    batches = iter(pipeline())
    first = next(batches)  # dtypes and shapes of the first are those of all
    with Producer(name, first) as producer:
        for batch in itertools.chain([first], batches):
            with producer.acquire() as slot:
                for field, array in batch.items():
                    slot.views[field][...] = array
                slot.publish()


def train(name: str) -> int:
    @jax.jit
    def step(batch: Batch) -> jax.Array:
        return (batch.tokens.sum(axis=1) * batch.weight).sum()

    feeder = subprocess.Popen([sys.executable, __file__, name])
    with Consumer(name) as consumer:
        for batch in DoubleBuffer(consumer, into=Batch, device_buffer_size=2):
            print(step(batch))
    return feeder.wait()


if __name__ == "__main__":
    feed(sys.argv[1]) if len(sys.argv) > 1 else sys.exit(train(f"from-grain-{os.getpid()}"))
