"""An engine of your own, without OptaxEngine: a table of bigram logits, trained in numpy by a gradient made by hand.

`python examples/models/train_engine.py` trains it in all boundary modes and in the reference loop and compares; for a
run of its own: `shmstage run --engine train_engine:BigramEngine`. What a method owes stands in `shmstage.TrainEngine`.
"""

import json
import os
import sys
from collections import namedtuple
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from shmstage.cli import main


class BigramEngine:
    def __init__(self, settings):  # the table [engine] of the TOML file and checkpoint_dir
        self.directory, self.rate = Path(settings["checkpoint_dir"] or "."), settings.get("learning_rate", 10.0)
        self.logits, self.sums, self.last = np.zeros((256, 256), np.float32), (0.0, 0.0, 0.0), {}

    def shardings(self, layout):
        return {field.name: jax.sharding.SingleDeviceSharding(jax.local_devices()[0]) for field in layout.fields}

    def fwd_bwd(self, batch):  # adds sums, undivided; the work is done when it returns, so there is no token
        ids, segments = np.asarray(batch["completion_ids"]), np.asarray(batch["segment_ids"])
        better = np.asarray(batch["completion_mask"]) * (np.asarray(batch["advantages"]) > 0)
        weight = better[:, 1:] * (segments[:, 1:] == segments[:, :-1])
        pairs = np.bincount((256 * ids[:, :-1] + ids[:, 1:]).ravel(), weight.ravel(), 256 * 256).reshape(256, 256)
        logps = self.logits - np.log(np.exp(self.logits).sum(axis=1, keepdims=True))
        grads = pairs.sum(axis=1, keepdims=True) * np.exp(logps) - pairs
        self.sums = tuple(map(np.add, self.sums, (grads, -np.sum(pairs * logps), weight.sum())))

    def update(self):
        (grads, loss, denominator), self.sums = self.sums, (0.0, 0.0, 0.0)
        grads, loss = grads / max(denominator, 1.0), loss / max(denominator, 1.0)
        self.logits = (self.logits - self.rate * grads).astype(np.float32)  # a new array: snapshots keep the old one
        self.last = {"loss": loss, "grad_norm": np.linalg.norm(grads), "denominator": denominator}

    def metrics(self):
        return {name: jnp.float32(value) for name, value in self.last.items()}

    def weights(self):
        return {"logits": jnp.array(self.logits)}

    def save(self, step, metadata):
        return Snapshot(self.directory / f"{step}.npz", self.logits, metadata)

    def restore(self, at_most=None):
        self.sums, self.last = (0.0, 0.0, 0.0), {}
        saved = sorted(int(path.stem) for path in self.directory.glob("*.npz"))
        while saved and at_most is not None and saved[-1] > at_most:
            (self.directory / f"{saved.pop()}.npz").unlink()  # it is trained again: no later restart may take it
        if not saved:
            return None
        with np.load(self.directory / f"{saved[-1]}.npz") as file:
            self.logits = file["logits"]
            return {**json.loads(str(file["metadata"])), "step": saved[-1]}


class Snapshot(namedtuple("Snapshot", "path logits metadata")):
    def copy_to_host(self):
        pass  # it lies there

    def write(self):
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with open(partial := self.path.with_name(".partial"), "wb") as file:
            np.savez(file, logits=self.logits, metadata=json.dumps(dict(self.metadata)))
            file.flush()
            os.fsync(file.fileno())
        partial.replace(self.path)  # who is killed before this leaves no half checkpoint
        return {"path": str(self.path)}


if __name__ == "__main__":
    os.environ["PYTHONPATH"] = f"{Path(__file__).resolve().parent}:{os.environ.get('PYTHONPATH', '')}"
    sys.exit(main(["compare", "--engine", "train_engine:BigramEngine", *sys.argv[1:]]))
