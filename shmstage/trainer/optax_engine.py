"""The ready-made engine: your loss, an optax optimizer, gradients accumulated unreduced, one division per update.

    engine = OptaxEngine(loss_fn, params, optax.adam(1e-3))

``loss_fn(params, batch) -> (loss_sum f32[], denominator f32[], metrics)`` returns *sums* over the micro-batch's
tokens, never means: with packed rows a mean of means weighs tokens of short micro-batches many times too much.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec, SingleDeviceSharding

from shmstage.errors import CheckpointError, EngineError
from shmstage.memory.layout import Layout
from shmstage.trainer.checkpoints import CheckpointStore, OrbaxStore
from shmstage.trainer.engine import Batch
from shmstage.trainer.host_copy import host_copy
from shmstage.trainer.jax_seam import partition_spec, wait_ready

PyTree = Any
LossFn = Callable[[PyTree, Batch], tuple[jax.Array, jax.Array, dict[str, jax.Array]]]
LogpsFn = Callable[[PyTree, Batch], jax.Array]


@final
class OptaxEngine:
    """Nothing in it waits for the device inside a step; parameters, optimizer state and sums are donated.

    ``params`` are copied once, so the caller's arrays stay valid. ``metrics()`` after an update gives ``loss`` (summed
    loss / summed denominator), ``grad_norm`` (of the divided gradient), ``denominator``, and each sum of the loss
    function's own metrics divided by the denominator. A step whose denominator is 0 divides by 1.

    With a ``mesh`` parameters are replicated over it unless they already lie on it, and ``batch_spec`` (one
    ``PartitionSpec`` for all fields, or one per field name; longer than a field's rank it is cut) places micro-batches.
    ``checkpoint_dir`` keeps checkpoints through orbax, ``store`` in any other way.
    ``logps_fn(params, batch) -> f32[rows, tokens]`` makes ``per_token_logps`` work: role ``"actor"`` uses the current
    parameters, ``"reference"`` the ones the engine started with (kept only if ``logps_fn`` is given).
    """

    snapshots = True

    def __init__(
        self,
        loss_fn: LossFn,
        params: PyTree,
        optimizer: Any,
        mesh: jax.sharding.Mesh | None = None,
        batch_spec: PartitionSpec | Mapping[str, PartitionSpec] | None = None,
        checkpoint_dir: Path | str | None = None,
        *,
        store: CheckpointStore | None = None,
        logps_fn: LogpsFn | None = None,
    ) -> None:
        self._mesh = mesh
        self._batch_spec = batch_spec
        self._loss_fn = loss_fn
        self._store = store
        if store is None and checkpoint_dir is not None:
            self._store = OrbaxStore(Path(checkpoint_dir))
        self._params = jax.tree.map(self._own, params)
        self._reference = jax.tree.map(self._own, params) if logps_fn is not None else None
        # optimizer state lies where the parameter it belongs to lies; scalars are replicated
        programs = _programs(loss_fn, optimizer)
        self._opt_state = jax.tree.map(self._own, programs.init(self._params))
        self._sums: PyTree | None = None
        self._metrics: dict[str, jax.Array] = {}
        self._forward, self._update, self._evaluate = programs.forward, programs.update, programs.evaluate
        self._optimizer = optimizer
        self._compiled_for_mesh = False
        self._logps = jax.jit(logps_fn) if logps_fn is not None else None
        wait_ready((self._params, self._opt_state, self._reference))

    # --- placement ------------------------------------------------------------------------------------------

    def shardings(self, layout: Layout) -> dict[str, jax.sharding.Sharding]:
        """Per field: on the mesh by ``batch_spec``, or on the default device."""
        if self._mesh is None:
            device = SingleDeviceSharding(jax.local_devices()[0])
            return {field.name: device for field in layout.fields}
        mesh = self._mesh
        return {f.name: NamedSharding(mesh, self._spec(f.name, len(f.shape))) for f in layout.fields}

    def _spec(self, name: str, rank: int) -> PartitionSpec:
        spec = self._batch_spec.get(name) if isinstance(self._batch_spec, Mapping) else self._batch_spec
        return partition_spec(*tuple(spec or ())[:rank])

    def _own(self, leaf: Any) -> jax.Array:
        sharding = getattr(leaf, "sharding", None)
        if self._mesh is None:
            target: jax.sharding.Sharding = SingleDeviceSharding(jax.local_devices()[0])
        elif isinstance(sharding, NamedSharding) and sharding.mesh == self._mesh:
            target = sharding
        else:
            target = NamedSharding(self._mesh, partition_spec())
        # a copy first: on CPU device_put of an aligned numpy array would alias the caller's memory, and on a mesh a
        # large one must not go through the default device
        on_mesh = self._mesh is not None and not isinstance(leaf, jax.Array)
        copied = np.array(leaf) if on_mesh else jnp.array(leaf, copy=True)
        owned: jax.Array = jax.device_put(copied, target)
        return owned

    def _place(self, loaded: np.ndarray[Any, Any], like: jax.Array) -> jax.Array:
        source = loaded if self._mesh is not None else jnp.array(loaded, copy=True)
        placed: jax.Array = jax.device_put(source, like.sharding)
        return placed

    # --- a step ---------------------------------------------------------------------------------------------

    def fwd_bwd(self, batch: Batch) -> jax.Array:
        if self._sums is None:
            self._begin(batch)
        token: jax.Array
        self._sums, token = self._forward(self._params, self._sums, batch)
        return token

    def update(self) -> jax.Array:
        if self._sums is None:
            raise EngineError("update: no micro-batch was accumulated")
        state = (self._params, self._opt_state, self._sums)
        token: jax.Array
        self._params, self._opt_state, self._sums, self._metrics, token = self._update(*state)
        return token

    def metrics(self) -> dict[str, jax.Array]:
        return dict(self._metrics)

    def compile(self, example: Mapping[str, jax.ShapeDtypeStruct]) -> None:
        """Compile forward and update for one layout; the calls that follow find the programs in JAX's cache."""
        if self._sums is None:
            self._begin(example)
        self._forward.lower(self._params, self._sums, dict(example)).compile()
        self._update.lower(self._params, self._opt_state, self._sums).compile()

    def eval_step(self, batch: Batch) -> dict[str, jax.Array]:
        """Sums over one micro-batch: ``loss_sum``, ``denominator`` and the loss function's own."""
        loss_sum, denominator, metrics = self._evaluate(self._params, batch)
        return {"loss_sum": loss_sum, "denominator": denominator, **metrics}

    def per_token_logps(self, batch: Batch, role: str) -> jax.Array:
        if self._logps is None:
            raise NotImplementedError("OptaxEngine was made without logps_fn")
        scores: jax.Array = self._logps(self._params if role == "actor" else self._reference, batch)
        return scores

    def _begin(self, batch: Mapping[str, Any]) -> None:
        """Make the sums of a first step; their names come from the loss function, traced on the batch's shapes."""
        sums = self._zero_sums(batch)
        if self._mesh is not None and not self._compiled_for_mesh:
            self._compiled_for_mesh = True
            # outputs lie where the donated inputs lay: otherwise the second step would compile again
            at = jax.tree.map(lambda leaf: leaf.sharding, (self._params, self._opt_state, sums))
            forward, update = _forward_program(self._loss_fn), _update_program(self._optimizer)
            self._forward = jax.jit(forward, donate_argnums=1, out_shardings=(at[2], None))
            self._update = jax.jit(update, donate_argnums=(0, 1, 2), out_shardings=(*at, None, None))
        self._sums = sums

    def _zero_sums(self, batch: Mapping[str, Any]) -> PyTree:
        loss, denominator, metrics = jax.eval_shape(self._loss_fn, self._params, dict(batch))
        for name, value in {**metrics, "loss_sum": loss, "denominator": denominator}.items():
            if value.shape != ():
                raise EngineError(f"loss_fn returned {name} of shape {value.shape}; want a scalar sum")
        scalars = {name: jnp.zeros((), jnp.float32) for name in ("loss", "denominator")}
        own = {name: jnp.zeros((), jnp.float32) for name in metrics}
        grads = jax.tree.map(lambda p: _zeros_like(p), self._params)
        return {"grads": grads, **jax.tree.map(self._own, {**scalars, "metrics": own})}

    # --- state ----------------------------------------------------------------------------------------------

    def weights(self) -> dict[str, jax.Array]:
        leaves, _ = jax.tree_util.tree_flatten_with_path(self._params)
        return {jax.tree_util.keystr(path, simple=True, separator="/"): leaf for path, leaf in leaves}

    def save(self, step: int, metadata: Mapping[str, object]) -> OptaxSnapshot:
        if self._store is None:
            raise CheckpointError(f"checkpoint {step}: the engine was made without checkpoint_dir")
        return OptaxSnapshot(self._store, step, (self._params, self._opt_state), metadata)

    def restore(self) -> dict[str, object] | None:
        self._sums, self._metrics = None, {}
        steps = self._store.steps() if self._store is not None else []
        if self._store is None or not steps:
            return None
        state = (self._params, self._opt_state)
        template = jax.tree.map(lambda leaf: np.zeros(leaf.shape, leaf.dtype), state)
        loaded, metadata = self._store.load(steps[-1], template)
        placed = jax.tree.map(self._place, loaded, state)
        wait_ready(placed)
        self._params, self._opt_state = placed
        return metadata


@final
class OptaxSnapshot:
    """Parameters and optimizer state of one step on their way to disk."""

    def __init__(self, store: CheckpointStore, step: int, state: PyTree, metadata: Mapping[str, object]) -> None:
        self._store = store
        self._step = step
        self._state = state
        self._metadata = dict(metadata)

    def copy_to_host(self) -> None:
        self._state = jax.tree.map(host_copy, self._state)

    def write(self) -> dict[str, object]:
        path = self._store.save(self._step, self._state, self._metadata)
        self._state = None
        return {"step": self._step, "path": path}


def _zeros_like(param: jax.Array) -> jax.Array:
    # at least float32: a sum over many micro-batches in bfloat16 loses the small ones
    return jnp.zeros(param.shape, jnp.promote_types(param.dtype, jnp.float32), device=param.sharding)


@dataclass(frozen=True, slots=True)
class _Programs:
    init: Callable[..., Any]
    forward: Any
    update: Any
    evaluate: Any


@functools.lru_cache(maxsize=16)
def _programs(loss_fn: LossFn, optimizer: Any) -> _Programs:
    """Jitted once per loss and optimizer, so that a second engine over the same two compiles nothing again."""
    return _Programs(
        init=jax.jit(optimizer.init),
        forward=jax.jit(_forward_program(loss_fn), donate_argnums=1),
        update=jax.jit(_update_program(optimizer), donate_argnums=(0, 1, 2)),
        evaluate=jax.jit(loss_fn),
    )


def _forward_program(loss_fn: LossFn) -> Callable[..., Any]:
    def forward(params: PyTree, sums: PyTree, batch: Batch) -> tuple[PyTree, jax.Array]:
        def loss_sum(params: PyTree) -> tuple[jax.Array, Any]:
            loss, denominator, metrics = loss_fn(params, batch)
            return loss.astype(jnp.float32), (denominator, metrics)

        (loss, (denominator, metrics)), grads = jax.value_and_grad(loss_sum, has_aux=True)(params)
        new = {
            "grads": grads,
            "loss": loss,
            "denominator": denominator,
            "metrics": metrics,
        }
        # the token is an output of its own: the sums are donated to the next call and cannot be waited for
        return jax.tree.map(lambda total, part: total + part.astype(total.dtype), sums, new), loss

    return forward


def _update_program(optimizer: Any) -> Callable[..., Any]:
    def update(params: PyTree, opt_state: PyTree, sums: PyTree) -> tuple[Any, ...]:
        denominator = sums["denominator"]
        divisor = jnp.where(denominator > 0, denominator, 1.0)
        grads = jax.tree.map(lambda total, p: (total / divisor).astype(p.dtype), sums["grads"], params)
        squares = [jnp.sum(jnp.square(leaf.astype(jnp.float32))) for leaf in jax.tree.leaves(grads)]
        changes, opt_state = optimizer.update(grads, opt_state, params)
        params = jax.tree.map(lambda p, change: (p + change).astype(p.dtype), params, changes)
        metrics = {
            **{name: total / divisor for name, total in sums["metrics"].items()},
            "loss": sums["loss"] / divisor,
            "grad_norm": jnp.sqrt(sum(squares, jnp.float32(0))),
            # a copy, not the donated sum itself
            "denominator": denominator + 0,
        }
        token = divisor + 0
        return params, opt_state, jax.tree.map(jnp.zeros_like, sums), metrics, token

    return update
