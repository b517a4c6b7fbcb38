"""A tiny mixture of experts that really drops tokens over its capacity, on the packed fields, for overflow replay.

    engine = "shmstage.testing.engines_moe:make_moe_engine"
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, fields
from typing import Any, final

import jax
import jax.numpy as jnp
import numpy as np

from shmstage.demo.model import has_prediction
from shmstage.errors import MissingExtraError, SettingsError
from shmstage.trainer.checkpoints import CheckpointStore
from shmstage.trainer.optax_engine import OptaxEngine

Batch = Mapping[str, jax.Array]
Params = dict[str, jax.Array]

VOCABULARY = 256
#: what the engine adds to a micro-batch's fields: tokens that each expert takes in this attempt, int32[]
CAPACITY = "expert_capacity"


@dataclass(frozen=True)
class MoeSettings:
    """The ``[engine]`` table.

    ``overflow``: which micro-batches of every step overflow: ``"all"``, ``"none"``, their indexes (``"0,2"``), or
    ``"capacity"``: those in which an expert gets more than ``capacity_factor`` times an even share of ``rows`` x
    ``tokens``. A chosen one has room for one token per expert, so it overflows if it holds more real tokens than there
    are experts.
    """

    overflow: str = "capacity"
    capacity_factor: float = 1.25
    seed: int = 0
    learning_rate: float = 1e-2
    optimizer: str = "adamw"
    d_model: int = 16
    d_ff: int = 32
    experts: int = 4
    checkpoint_dir: str | None = None

    def __post_init__(self) -> None:
        self.chosen  # noqa: B018 - refuses what is not a list of indexes
        if not 0 < self.capacity_factor < math.inf:
            raise SettingsError(f"engine setting capacity_factor = {self.capacity_factor}: must be above 0")
        if self.optimizer not in ("adamw", "sgd"):
            raise SettingsError(f"engine setting optimizer = {self.optimizer!r}: want adamw or sgd")

    @property
    def chosen(self) -> frozenset[int]:
        """The indexes named one by one."""
        if self.overflow in ("all", "none", "capacity"):
            return frozenset()
        try:
            return frozenset(int(index) for index in self.overflow.split(","))
        except ValueError:
            raise SettingsError(
                f'engine setting overflow = {self.overflow!r}: want all, none, capacity or indexes such as "0,2"'
            ) from None


def make_moe_engine(settings: Mapping[str, Any]) -> MoeEngine:
    """The factory; keys are ``MoeSettings``'s."""
    kinds: dict[str, Any] = {"int": int, "float": float}
    wanted = {field.name: kinds.get(str(field.type), str) for field in fields(MoeSettings)}
    unknown = sorted(set(settings) - set(wanted))
    if unknown:
        raise SettingsError(f"unknown engine settings {unknown}; known are {sorted(wanted)}")
    given = {name: wanted[name](value) for name, value in settings.items() if value is not None}
    return MoeEngine(MoeSettings(**given))


@final
class MoeEngine:
    """``OptaxEngine`` over the model below; decides by a micro-batch's index in its step how much room experts have."""

    def __init__(self, settings: MoeSettings, *, store: CheckpointStore | None = None) -> None:
        self.inner = OptaxEngine(
            _loss_with_capacity,
            initial_params(settings),
            _optimizer(settings),
            checkpoint_dir=settings.checkpoint_dir,
            store=store,
            logps_fn=per_token_logps,
            replay_loss_fn=_dropless_loss,
        )
        self._settings = settings
        self._index = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def fwd_bwd(self, batch: Batch) -> jax.Array:
        token = self.inner.fwd_bwd({**batch, CAPACITY: self._capacity(batch["segment_ids"])})
        self._index += 1
        return token

    def update(self) -> jax.Array:
        self._index = 0
        return self.inner.update()

    def restore(self, at_most: int | None = None) -> Mapping[str, object] | None:
        self._index = 0
        return self.inner.restore(at_most)

    def compile(self, example: Mapping[str, jax.ShapeDtypeStruct], uses: Collection[str] = ("train",)) -> None:
        ids = example["segment_ids"]
        capacity: Any = jax.ShapeDtypeStruct((), jnp.int32, sharding=ids.sharding)  # type: ignore[no-untyped-call]
        self.inner.compile({**example, CAPACITY: capacity}, uses)

    def _capacity(self, like: jax.Array) -> jax.Array:
        settings, places = self._settings, like.size
        if settings.overflow == "capacity":
            room = math.ceil(settings.capacity_factor * places / settings.experts)
        else:
            chosen = settings.overflow == "all" or self._index in settings.chosen
            room = 1 if chosen else places
        capacity: jax.Array = jax.device_put(np.int32(room), like.sharding)
        return capacity


def initial_params(settings: MoeSettings) -> Params:
    """float32 parameters drawn from ``seed``."""
    d, ff, experts = settings.d_model, settings.d_ff, settings.experts
    shapes = {
        "embedding": (VOCABULARY, d),
        "router": (d, experts),
        "expert_in": (experts, d, ff),
        "expert_out": (experts, ff, d),
        "unembedding": (d, VOCABULARY),
    }
    keys = jax.random.split(jax.random.key(settings.seed), len(shapes))
    return {
        name: jax.random.normal(key, shape, jnp.float32) * shape[-2] ** -0.5
        for key, (name, shape) in zip(keys, shapes.items(), strict=True)
    }


def token_logps(params: Params, batch: Batch, capacity: jax.Array | int) -> tuple[jax.Array, jax.Array]:
    """Log-probs float32 ``[rows, tokens]`` of each token given the one before, and whether an expert was over capacity.

    Zero where nothing predicts. Each real token goes to one expert; those an expert has no room for, in the order of
    rows and tokens, pass by it unchanged.
    """
    ids, segments = batch["completion_ids"], batch["segment_ids"]
    x = params["embedding"][jnp.clip(ids, 0, VOCABULARY - 1)].reshape(-1, params["embedding"].shape[1])
    real = (segments != 0).reshape(-1)
    gates = jax.nn.softmax(x @ params["router"], axis=-1)
    expert = jnp.argmax(gates, axis=-1)
    routed = jax.nn.one_hot(expert, gates.shape[-1], dtype=jnp.int32) * real[:, None]
    place = jnp.sum((jnp.cumsum(routed, axis=0) - 1) * routed, axis=-1)
    kept = real & (place < capacity)
    hidden = jax.nn.gelu(jnp.einsum("td,edf->etf", x, params["expert_in"]))
    outputs = jnp.einsum("etf,efd->etd", hidden, params["expert_out"])
    chosen = jnp.take_along_axis(outputs, expert[None, :, None], axis=0)[0]
    gate = jnp.max(gates, axis=-1, keepdims=True)
    x = x + jnp.where(kept[:, None], gate * chosen, 0.0)
    scores = jax.nn.log_softmax(x @ params["unembedding"], axis=-1).reshape(*ids.shape, VOCABULARY)
    taken = jnp.take_along_axis(scores[:, :-1], ids[:, 1:, None], axis=-1, mode="clip")[..., 0]
    logps = jnp.where(has_prediction(segments), jnp.pad(taken, ((0, 0), (1, 0))), 0.0)
    return logps, jnp.any(real & ~kept)


def per_token_logps(params: Params, batch: Batch) -> jax.Array:
    """``token_logps`` without a limit."""
    return token_logps(params, batch, batch["segment_ids"].size)[0]


def policy_gradient(
    params: Params, batch: Batch, capacity: jax.Array | int
) -> tuple[jax.Array, jax.Array, dict[str, jax.Array], jax.Array]:
    """Summed policy-gradient loss, its denominator, a sum to report, and the overflow flag."""
    logps, overflow = token_logps(params, batch, capacity)
    weights = jnp.where(has_prediction(batch["segment_ids"]), batch["completion_mask"], 0.0)
    ratio = jnp.exp(jnp.clip(jnp.where(weights != 0, logps - batch["old_per_token_logps"], 0.0), -20.0, 20.0))
    per_token = -ratio * batch["advantages"] * batch.get("sampler_is_weights", jnp.float32(1))
    return jnp.sum(per_token * weights), jnp.sum(weights), {"ratio": jnp.sum(ratio * weights)}, overflow


def _loss_with_capacity(params: Params, batch: Batch) -> tuple[Any, ...]:
    return policy_gradient(params, batch, batch[CAPACITY])


def _dropless_loss(params: Params, batch: Batch) -> tuple[Any, ...]:
    return policy_gradient(params, batch, batch["segment_ids"].size)[:3]


_OPTIMIZERS: dict[tuple[str, float], Any] = {}


def _optimizer(settings: MoeSettings) -> Any:
    """One object per kind: engines over the same functions share compiled programs."""
    try:
        import optax
    except ModuleNotFoundError as error:
        raise MissingExtraError("make_moe_engine needs optax; pip install 'shmstage[train]'") from error
    key = (settings.optimizer, settings.learning_rate)
    make = optax.adamw if settings.optimizer == "adamw" else optax.sgd
    return _OPTIMIZERS.setdefault(key, make(settings.learning_rate))
