"""Instead of flax.jax_utils.prefetch_to_device(batches, 2): loaded by another process, sharded over the devices."""
import subprocess
import sys

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from shmstage import Consumer, DoubleBuffer, Producer

if sys.argv[1:] == ["load"]:
    with Producer("images", {"image": ("float32", (64, 784)), "label": ("int32", (64,))}) as producer:
        for number in range(20):
            with producer.acquire() as slot:
                slot.views["image"][:], slot.views["label"][:] = np.full(784, number, np.float32), number % 10
                slot.publish()
else:
    loader = subprocess.Popen([sys.executable, __file__, "load"])
    over_devices = NamedSharding(Mesh(jax.devices(), "data"), PartitionSpec("data"))
    with Consumer("images") as consumer:
        for batch in DoubleBuffer(consumer, over_devices, device_buffer_size=2):
            print(f"label {batch['label'].mean():.0f}, pixels {batch['image'].mean():.0f}")
    sys.exit(loader.wait())
