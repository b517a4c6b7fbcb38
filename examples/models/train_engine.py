"""An engine of your own, without OptaxEngine: a table of bigram logits, trained in numpy by a gradient made by hand.

It learns the completions that did better than the others of their prompt. `python examples/models/train_engine.py`
trains it in all boundary modes and in the reference loop and compares; for a run of its own, in this directory:
`shmstage run --engine train_engine:BigramEngine`. What each method owes stands in `shmstage.TrainEngine`.
"""

import json
import os
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from shmstage.cli import main


class BigramEngine:
    def __init__(self, settings):  # the table [engine] of the TOML file, and checkpoint_dir
        self.directory, self.rate = Path(settings["checkpoint_dir"] or "."), settings.get("learning_rate", 10.0)
        self.logits, self.sums, self.last = np.zeros((256, 256), np.float32), (0.0, 0.0, 0.0), {}

    def shardings(self, layout):
        return {field.name: jax.sharding.SingleDeviceSharding(jax.local_devices()[0]) for field in layout.fields}

    def fwd_bwd(self, batch):
        names = ("completion_ids", "segment_ids", "completion_mask", "advantages")
        ids, segments, mask, advantages = (np.asarray(batch[name]) for name in names)
        weight = ((mask * (advantages > 0))[:, 1:] * (segments[:, 1:] == segments[:, :-1])).ravel()
        before, token = ids[:, :-1].ravel(), ids[:, 1:].ravel()
        chances = np.exp(self.logits - self.logits.max(axis=1, keepdims=True))
        chances /= chances.sum(axis=1, keepdims=True)
        pairs = np.bincount(before * 256 + token, weight, 256 * 256).reshape(256, 256)
        grads = pairs.sum(axis=1, keepdims=True) * chances - pairs
        loss = -np.sum(weight * np.log(chances[before, token]))
        self.sums = tuple(map(np.add, self.sums, (grads, loss, weight.sum())))  # undivided; no token: it is done

    def update(self):
        grads, loss, denominator = self.sums
        grads = grads / max(denominator, 1.0)
        self.logits = (self.logits - self.rate * grads).astype(np.float32)  # a new array: snapshots keep the old one
        self.last = {"loss": loss / denominator, "grad_norm": np.linalg.norm(grads), "denominator": denominator}
        self.sums = (0.0, 0.0, 0.0)

    def metrics(self):
        return {name: jnp.float32(value) for name, value in self.last.items()}

    def weights(self):
        return {"logits": jnp.array(self.logits)}

    def save(self, step, metadata):
        return Snapshot(self.directory / f"{step}.npz", self.logits, metadata)

    def restore(self, at_most=None):
        self.sums, self.last = (0.0, 0.0, 0.0), {}
        saved = {int(path.stem): path for path in self.directory.glob("*.npz")}
        newest = max((step for step in saved if at_most is None or step <= at_most), default=None)
        if newest is None:
            return None
        for step in sorted(saved, reverse=True):
            if step > newest:
                saved[step].unlink()  # it is trained again: no later restart may take it
        with np.load(saved[newest]) as file:
            self.logits = file["logits"]
            return {**json.loads(str(file["metadata"])), "step": newest}


class Snapshot:
    def __init__(self, path, logits, metadata):
        self.path, self.logits, self.metadata = path, logits, metadata

    def copy_to_host(self):
        pass  # it lies there

    def write(self):
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with open(partial := self.path.with_suffix(".partial"), "wb") as file:
            np.savez(file, logits=self.logits, metadata=json.dumps(dict(self.metadata)))
            os.fsync(file.fileno())
        partial.replace(self.path)  # who is killed before this leaves no half checkpoint
        return {"path": str(self.path)}


if __name__ == "__main__":
    os.environ["PYTHONPATH"] = f"{Path(__file__).resolve().parent}:{os.environ.get('PYTHONPATH', '')}"
    sys.exit(main(["compare", "--engine", "train_engine:BigramEngine", *sys.argv[1:]]))
