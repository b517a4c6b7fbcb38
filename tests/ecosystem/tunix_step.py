"""One micro-batch to tunix's own loss: packed by us and by tunix. Prints one JSON object; run by a test.

Rollouts are packed by shmstage into a slot, uploaded by ``DoubleBuffer`` and made a payload by the adapter; the same
ones go through tunix's ``pack_sequences``. Both payloads, and what an engine of ours is given, are compared by bytes,
and so is what one step of tunix's GRPO computes of them.
"""

from __future__ import annotations

import json
from importlib import metadata
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from tunix.rl import common
from tunix.rl.algo_core import grpo_loss_fn
from tunix.rl.grpo.grpo_learner import GRPOConfig
from tunix.rl.utils import pack_sequences

from shmstage import Consumer, DoubleBuffer, Producer
from shmstage.adapters.tunix import TunixPayload
from shmstage.errors import LayoutError
from shmstage.packing.fields import microbatch_layout
from shmstage.packing.fill import fill_microbatch
from shmstage.packing.plan import Planner, PlanSettings
from shmstage.packing.trajectory import Trajectory
from shmstage.trainer.optax_engine import OptaxEngine

ROWS, TOKENS = 4, 64
CONFIG = GRPOConfig(num_generations=2, beta=0.1, loss_agg_mode="token-mean")
CONFIG.temperature = 1.0  # the learner sets it, from its rollout configuration


def rollouts(seed: int) -> dict[int, Trajectory]:
    """Longest first, so that both packers take them in this order; lengths that fill a row but for some padding."""
    rng = np.random.default_rng(seed)
    found = {}
    for number, length in enumerate([30, 29, 28, 27, 26, 25, 24, 23]):
        prompt = int(rng.integers(3, 9))
        mask = (np.arange(length) >= prompt).astype(np.float32)
        old, ref, advantages = np.where(mask > 0, rng.standard_normal((3, length)), 0).astype(np.float32)
        found[number] = Trajectory(
            trajectory_id=f"t{number}", tokens=rng.integers(1, 256, length).astype(np.int32), loss_mask=mask,
            advantages=advantages, old_logprobs=old,
            ref_logprobs=ref,
        )
    return found


def packed_by_us(trajectories: dict[int, Trajectory]) -> tuple[dict[str, np.ndarray], dict[str, jax.Array], Any]:
    """The slot's content, the device arrays that came of it, and the plan."""
    planner = Planner(PlanSettings(ROWS, TOKENS))
    for arrival, trajectory in trajectories.items():
        planner.add(arrival, trajectory.length)
    (plan,) = planner.flush()
    layout = microbatch_layout(ROWS, TOKENS, optional=frozenset({"ref_logprobs"}))
    fields = {field.name: (field.dtype, field.shape) for field in layout.fields}
    with Producer("tunix", fields) as producer, Consumer("tunix") as consumer:
        with producer.acquire() as slot:
            fill_microbatch(plan, trajectories, slot.views)
            content = {name: np.array(view) for name, view in slot.views.items()}
            slot.publish()
        producer._ended = True  # one thread: it cannot wait for the consumer below
        with DoubleBuffer(consumer) as batches:
            return content, next(batches), plan


def packed_by_tunix(trajectories: dict[int, Trajectory], plan: Any) -> common.TrainExample:
    """Row by row, as tunix packs: a prompt and its completion of each, one budget of tokens."""
    rows = []
    for row in plan.rows:
        items = []
        for segment in row.segments:
            one = trajectories[segment.arrival]
            prompt = int((one.loss_mask == 0).sum())
            items.append(
                common.TrainExample(
                    prompt_ids=one.tokens[None, :prompt], prompt_mask=np.ones((1, prompt), np.int32),
                    completion_ids=one.tokens[None, prompt:], completion_mask=one.loss_mask[None, prompt:],
                    advantages=one.advantages[None, prompt:], ref_per_token_logps=one.ref_logprobs[None, prompt:],
                    old_per_token_logps=one.old_logprobs[None, prompt:],
                )
            )
        ((packed,),) = pack_sequences(iter([items]), TOKENS)
        rows.append(packed)
    return jax.tree.map(lambda *parts: np.concatenate([np.asarray(part) for part in parts]), *rows)


def differences(one: Any, other: Any) -> list[str]:
    """Paths of the leaves that are not the same bytes, dtype and shape."""
    found = []
    mine, theirs = (dict(jax.tree_util.tree_leaves_with_path(tree)) for tree in (one, other))
    for path in {**mine, **theirs}:
        a, b = (np.asarray(tree[path]) if path in tree else np.zeros(0, "V1") for tree in (mine, theirs))
        if a.dtype != b.dtype or a.shape != b.shape or a.tobytes() != b.tobytes():
            found.append(f"{jax.tree_util.keystr(path)}: {a.dtype}{a.shape} and {b.dtype}{b.shape}")
    return found


class Tiny(nnx.Module):
    """One layer of attention within segments, with tunix's call."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.tokens = nnx.Embed(256, 16, rngs=rngs)
        self.positions = nnx.Embed(TOKENS, 16, rngs=rngs)
        self.mix = nnx.Linear(16, 48, rngs=rngs)
        self.head = nnx.Linear(16, 256, rngs=rngs)

    def __call__(self, tokens: Any, positions: Any, cache: Any, attention_mask: Any, segment_ids: Any = None) -> Any:
        x = self.tokens(tokens) + self.positions(positions)
        q, k, v = jnp.split(self.mix(x), 3, axis=-1)
        seen = (segment_ids[:, :, None] == segment_ids[:, None, :]) & jnp.tri(tokens.shape[1], dtype=bool)
        weights = jax.nn.softmax(jnp.where(seen, jnp.einsum("bqd,bkd->bqk", q, k), -1e30))
        return self.head(x + jnp.einsum("bqk,bkd->bqd", weights, v)), cache


GRAPH, STATE = nnx.split(Tiny(nnx.Rngs(0)))


@jax.jit
def tunix_step(state: Any, example: common.TrainExample) -> Any:
    def loss(state: Any) -> Any:
        return grpo_loss_fn(nnx.merge(GRAPH, state), example, CONFIG, pad_id=0, eos_id=1)

    return jax.value_and_grad(loss, has_aux=True)(state)


def on_our_engine(batch: dict[str, jax.Array], to_payload: TunixPayload) -> dict[str, float]:
    """Tunix's loss as an engine's loss function: what it returns is a mean, so it is multiplied back."""

    def loss_fn(state: Any, batch: Any) -> Any:
        example = to_payload(batch)
        mean, _ = grpo_loss_fn(nnx.merge(GRAPH, state), example, CONFIG, pad_id=0, eos_id=1)
        count = example.completion_mask.sum()
        return mean * count, count, {}

    engine = OptaxEngine(loss_fn, STATE, optax.sgd(0.1))
    jax.block_until_ready(engine.fwd_bwd(batch))
    jax.block_until_ready(engine.update())
    return {name: float(value) for name, value in engine.metrics().items()}


def on_a_mesh(content: dict[str, np.ndarray]) -> dict[str, Any]:
    """Sharded arrays are handed over as they lie, and nothing is transferred that nobody asked for."""
    mesh = Mesh(np.array(jax.devices()).reshape(2, 2), ("fsdp", "context"))
    where = NamedSharding(mesh, PartitionSpec("fsdp", "context"))
    batch = {name: jax.device_put(array, where) for name, array in content.items()}
    to_payload = TunixPayload()
    with jax.transfer_guard("disallow"):
        example, again = to_payload(batch), to_payload(batch)
    prompts = example.prompt_ids
    return {
        "same": all(getattr(example, name) is array for name, array in batch.items()),
        "prompts": [list(prompts.shape), str(prompts.dtype), prompts.sharding == where],
        "made once": prompts is again.prompt_ids and prompts is not example.prompt_mask,
    }


def refused(to_payload: TunixPayload, batch: dict[str, Any]) -> str:
    try:
        to_payload(batch)
    except LayoutError as error:
        return str(error)
    return ""


def main() -> dict[str, Any]:
    trajectories = rollouts(7)
    content, batch, plan = packed_by_us(trajectories)
    to_payload = TunixPayload()
    example = to_payload(batch)
    theirs = packed_by_tunix(trajectories, plan)
    seen = jax.jit(lambda batch: dict(vars(to_payload(batch))))(batch)  # what a loss function of an engine is given
    (loss, metrics), gradients = tunix_step(STATE, example)
    # the same traced function: to_payload's arrays lie on the device as tunix's do
    tunix_own = tunix_step(STATE, jax.tree.map(jnp.asarray, theirs))
    with_returns = {**batch, "returns": batch["advantages"], "old_values": batch["advantages"]}
    return {
        "class": f"{type(example).__module__}.{type(example).__qualname__}",
        "version": metadata.version("google-tunix"),
        "fields": list(type(example).__dataclass_fields__),
        "rows": len(plan.rows),
        "slot": differences(content, {name: getattr(example, name) for name in content}),
        "handed over": [name for name, array in batch.items() if getattr(example, name) is not array],
        "traced": differences({name: seen[name] for name in content}, content),
        "packed by tunix": differences(example, theirs),
        "step": differences(((loss, metrics), gradients), tunix_own),
        "loss": float(loss),
        "trained": float(content["completion_mask"].sum()),
        "gradient": float(optax.global_norm(gradients)),
        "engine": on_our_engine(batch, to_payload),
        "refused": refused(to_payload, with_returns),
        "taken by ppo": type(TunixPayload("tunix.rl.ppo.ppo_learner:TrainExample")(with_returns)).__module__,
        "mesh": on_a_mesh(content),
    }


if __name__ == "__main__":
    print(json.dumps(main()))
