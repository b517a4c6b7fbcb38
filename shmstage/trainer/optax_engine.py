"""The ready-made engine: your loss, an optax optimizer, gradients accumulated unreduced, one division per update.

    engine = OptaxEngine(loss_fn, params, optax.adam(1e-3))

``loss_fn(params, batch) -> (loss_sum f32[], denominator f32[], metrics)`` returns *sums* over the micro-batch's
tokens, never means: with packed rows a mean of means weighs tokens of short micro-batches many times too much.

A loss that may drop tokens (experts with a capacity) is replayed where it did:

    engine = OptaxEngine(loss_fn, params, optimizer, replay_loss_fn=dropless_loss_fn)
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any, final

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, NamedSharding, SingleDeviceSharding

from shmstage.errors import CheckpointError, EngineError
from shmstage.memory.layout import Layout
from shmstage.packing.fields import OLD_LOGPS
from shmstage.trainer.checkpoints import CheckpointStore, OrbaxStore
from shmstage.trainer.decode import decoding
from shmstage.trainer.distributed import check_replicated, copied_over_hosts, said_by_first, spans_processes
from shmstage.trainer.engine import EVALUATE, SCORE, TRAIN, Batch, Snapshot
from shmstage.trainer.field_placement import BatchSpec, FieldPlacement
from shmstage.trainer.host_copy import host_copy
from shmstage.trainer.jax_seam import partition_spec, wait_ready
from shmstage.trainer.model_tree import check_trainable, named_leaves, state_shardings, with_keys, without_keys
from shmstage.trainer.optax_programs import LossFn, PyTree, metric_names, programs_of, programs_on_mesh
from shmstage.trainer.replays import Replays

LogpsFn = Callable[[PyTree, Batch], jax.Array]


@final
class OptaxEngine:
    """Nothing in it waits for the device inside a step; parameters, optimizer state and sums are donated.

    ``params`` are copied once, so the caller's arrays stay valid. ``metrics()`` after an update gives ``loss`` (summed
    loss / summed denominator), ``grad_norm`` (of the divided gradient), ``denominator``, and each sum of the loss
    function's own metrics divided by the denominator. A step whose denominator is 0 divides by 1.

    ``params`` is any pytree of floating-point arrays: dicts, dataclasses, what equinox and flax nnx make of a model.
    With a ``mesh`` parameters are replicated over it unless they already lie on it, gradients and optimizer state lie
    where their parameter lies, and ``batch_spec`` (one ``PartitionSpec`` for all fields, or one per field name; longer
    than a field's rank it is cut) places micro-batches.
    Over a mesh that spans processes parameters and optimizer state are replicated, and process 0 writes checkpoints.
    ``checkpoint_dir`` keeps checkpoints through orbax, ``store`` in any other way.
    ``logps_fn(params, batch) -> f32[rows, tokens]`` makes ``per_token_logps`` work: role ``"actor"`` uses the current
    parameters, ``"reference"`` the ones the engine started with (kept only if ``logps_fn`` is given).

    With ``replay_loss_fn``, which drops nothing and returns what a loss function returns, ``loss_fn`` returns a fourth
    value, ``overflow bool[]``: where it is true nothing of that attempt counts, and ``settle`` runs ``replay_loss_fn``
    over the same arrays. Additions have one order whoever settles: that of the micro-batches, each replay after the
    first attempt of the micro-batch that follows it. Evaluations use ``replay_loss_fn``.
    """

    snapshots = True
    decodes_routing = True

    def __init__(
        self,
        loss_fn: LossFn,
        params: PyTree,
        optimizer: Any,
        mesh: jax.sharding.Mesh | None = None,
        batch_spec: BatchSpec = None,
        checkpoint_dir: Path | str | None = None,
        *,
        store: CheckpointStore | None = None,
        logps_fn: LogpsFn | None = None,
        replay_loss_fn: LossFn | None = None,
    ) -> None:
        self._mesh = mesh
        self._spans_hosts = mesh is not None and spans_processes(mesh)
        if jax.process_count() > 1 and not self._spans_hosts:
            raise EngineError(
                f"this trainer spans {jax.process_count()} hosts, and the engine's mesh {mesh} one of them; give "
                "OptaxEngine a mesh of the devices of all (jax.devices()) and a batch_spec"
            )
        self._explicit = mesh is not None and AxisType.Explicit in mesh.axis_types
        self._placement = FieldPlacement(mesh, batch_spec)
        loss_fn = self._loss_fn = self._decoding(loss_fn)
        if replay_loss_fn is not None:
            replay_loss_fn = self._decoding(replay_loss_fn)
        self._replay_loss_fn = replay_loss_fn
        self._replays = Replays() if replay_loss_fn is not None else None
        self._store = store
        if store is None and checkpoint_dir is not None:
            self._store = OrbaxStore(Path(checkpoint_dir))
        check_trainable(params)
        self._params = jax.tree.map(self._own, params)
        self._reference = jax.tree.map(self._own, params) if logps_fn is not None else None
        self._programs = programs_of(loss_fn, optimizer, replay_loss_fn)
        self._opt_state = self._initial_state(optimizer)
        self._sums: PyTree | None = None
        self._metrics: dict[str, jax.Array] = {}
        self._optimizer = optimizer
        self._compiled_for_mesh = False
        self._logps = self._scoring(logps_fn) if logps_fn is not None else None
        if self._spans_hosts:
            check_replicated((self._params, self._opt_state))
        wait_ready((self._params, self._opt_state, self._reference))

    # --- placement ------------------------------------------------------------------------------------------

    def shardings(self, layout: Layout) -> dict[str, jax.sharding.Sharding]:
        """Per field: on the mesh by ``batch_spec``, or on the default device."""
        return self._placement.shardings(layout)

    def _decoding(self, function: Callable[..., Any]) -> Callable[..., Any]:
        return decoding(function, self._placement.dense())

    def _scoring(self, logps_fn: LogpsFn) -> Any:
        function = self._decoding(logps_fn)
        if self._mesh is None or not self._spans_hosts:
            return jax.jit(function)
        # where the late fields lie: each host writes the scores of its own rows and tokens
        return jax.jit(function, out_shardings=self._placement.on_mesh(OLD_LOGPS, 2))

    def _initial_state(self, optimizer: Any) -> PyTree:
        """Of its own: what the optimizer merely passes on of the parameters is copied."""
        if self._mesh is None:
            return jax.tree.map(self._own, self._programs.init(self._params))
        # on a mesh every leaf is made where it stays: as zeros on one device first it may not fit there
        replicated = NamedSharding(self._mesh, partition_spec())
        at = state_shardings(jax.eval_shape(optimizer.init, self._params), self._params, replicated)
        state = jax.jit(optimizer.init, out_shardings=at)(self._params)
        passed_on = {id(leaf) for leaf in jax.tree.leaves(self._params)}
        return jax.tree.map(lambda leaf: self._own(leaf) if id(leaf) in passed_on else leaf, state)

    def _own(self, leaf: Any) -> jax.Array:
        sharding = getattr(leaf, "sharding", None)
        if self._mesh is None:
            target: jax.sharding.Sharding = SingleDeviceSharding(jax.local_devices()[0])
        elif isinstance(sharding, NamedSharding) and sharding.mesh == self._mesh:
            target = sharding
        else:
            target = NamedSharding(self._mesh, partition_spec())
        if self._spans_hosts:
            return copied_over_hosts(leaf, target)
        # a copy first: on CPU device_put of an aligned numpy array would alias the caller's memory, and on a mesh a
        # large one must not go through the default device
        on_mesh = self._mesh is not None and not isinstance(leaf, jax.Array)
        copied = np.array(leaf) if on_mesh else jnp.array(leaf, copy=True)
        owned: jax.Array = jax.device_put(copied, target)
        # a weak type, of a Python number, would be gone after the first update, and all compiled again
        return owned.astype(owned.dtype) if getattr(owned, "weak_type", False) else owned  # a random key has none

    def _place(self, loaded: np.ndarray[Any, Any], like: jax.Array) -> jax.Array:
        if self._spans_hosts:
            return copied_over_hosts(loaded, like.sharding)
        source = loaded if self._mesh is not None else jnp.array(loaded, copy=True)
        placed: jax.Array = jax.device_put(source, like.sharding)
        return placed

    # --- a step ---------------------------------------------------------------------------------------------

    def fwd_bwd(self, batch: Batch) -> jax.Array:
        if self._sums is None:
            self._begin(batch)
        token: jax.Array
        if self._replays is None:
            self._sums, token = self._programs.forward(self._params, self._sums, batch)
            return token
        # for a caller that never settles; in the worker it is done by now
        self._settle(self._replays.attempts - 1)
        self._sums, token, overflow = self._programs.forward(self._params, self._sums, batch)
        self._replays.attempted(batch, overflow)
        return token

    @property
    def settle(self) -> Callable[[int], dict[int, jax.Array]]:
        """``settle(upto)`` of ``OptionalMethods``; there only with ``replay_loss_fn``."""
        if self._replays is None:
            raise AttributeError("this OptaxEngine was made without replay_loss_fn: nothing overflows")
        return self._settle

    def _settle(self, upto: int) -> dict[int, jax.Array]:
        return {} if self._replays is None else self._replays.settle(upto, self._replay)

    def _replay(self, batch: Batch) -> jax.Array:
        token: jax.Array
        self._sums, token = self._programs.replay(self._params, self._sums, batch)
        return token

    def update(self) -> jax.Array:
        if self._sums is None:
            raise EngineError("update: no micro-batch was accumulated")
        if self._replays is not None:
            self._settle(self._replays.attempts)
            self._replays.clear()
        state = (self._params, self._opt_state, self._sums)
        token: jax.Array
        self._params, self._opt_state, self._sums, self._metrics, token = self._programs.update(*state)
        return token

    def metrics(self) -> dict[str, jax.Array]:
        return dict(self._metrics)

    def compile(self, example: Mapping[str, jax.ShapeDtypeStruct], uses: Collection[str] = (TRAIN,)) -> None:
        """Compile what one layout is used for; the calls that follow find the programs in JAX's cache."""
        if TRAIN in uses:
            if self._sums is None:
                self._begin(example)
            for program in (self._programs.forward, self._programs.replay):
                if program is not None:
                    program.lower(self._params, self._sums, dict(example)).compile()
            self._programs.update.lower(self._params, self._opt_state, self._sums).compile()
        if EVALUATE in uses:
            self._programs.evaluate.lower(self._params, dict(example)).compile()
        if SCORE in uses and self._logps is not None:  # the reference policy has the same shapes
            self._logps.lower(self._params, dict(example)).compile()

    def eval_step(self, batch: Batch) -> dict[str, jax.Array]:
        """Sums over one micro-batch: ``loss_sum``, ``denominator`` and the loss function's own."""
        loss_sum, denominator, metrics = self._programs.evaluate(self._params, batch)
        return {"loss_sum": loss_sum, "denominator": denominator, **metrics}

    @property
    def per_token_logps(self) -> Callable[[Batch, str], jax.Array]:
        """``per_token_logps(batch, role)`` of ``OptionalMethods``; there only with ``logps_fn``."""
        if self._logps is None:
            raise AttributeError("this OptaxEngine was made without logps_fn: it scores nothing")
        return self._score

    def _score(self, batch: Batch, role: str) -> jax.Array:
        assert self._logps is not None
        scores: jax.Array = self._logps(self._params if role == "actor" else self._reference, batch)
        return scores

    def _begin(self, batch: Mapping[str, Any]) -> None:
        """Make the sums of a first step; their names come from the loss function, traced on the batch's shapes."""
        try:
            sums = self._zero_sums(batch)
        except Exception as error:
            if isinstance(error, EngineError) or not self._explicit:
                raise
            raise EngineError(
                f"loss_fn on {self._mesh}: {type(error).__name__}: {error}; these axes are Explicit, as jax.make_mesh "
                "makes them unless told otherwise: have loss_fn say where such a result lies, or make the mesh with "
                "axis_types=(AxisType.Auto,) * n and XLA will choose"
            ) from error
        if self._mesh is not None and not self._compiled_for_mesh:
            self._compiled_for_mesh = True
            state = (self._params, self._opt_state, sums)
            self._programs = programs_on_mesh(self._loss_fn, self._optimizer, self._replay_loss_fn, state)
        self._sums = sums

    def _zero_sums(self, batch: Mapping[str, Any]) -> PyTree:
        names = metric_names(self._loss_fn, self._params, batch, may_overflow=self._replays is not None)
        if self._replay_loss_fn is not None:
            again = metric_names(self._replay_loss_fn, self._params, batch)
            if again != names:
                raise EngineError(f"replay_loss_fn returned the metrics {again}; loss_fn returns {names}")
        scalars = {name: jnp.zeros((), jnp.float32) for name in ("loss", "denominator")}
        own = {name: jnp.zeros((), jnp.float32) for name in names}
        grads = jax.tree.map(lambda p: _zeros_like(p), self._params)
        return {"grads": grads, **jax.tree.map(self._own, {**scalars, "metrics": own})}

    # --- state ----------------------------------------------------------------------------------------------

    def weights(self) -> dict[str, jax.Array]:
        return dict(named_leaves(self._params))

    def save(self, step: int, metadata: Mapping[str, object]) -> Snapshot:
        if self._store is None:
            raise CheckpointError(f"checkpoint {step}: the engine was made without checkpoint_dir")
        if self._spans_hosts and jax.process_index():
            return _WrittenElsewhere(step)
        return OptaxSnapshot(self._store, step, without_keys((self._params, self._opt_state)), metadata)

    def restore(self, at_most: int | None = None) -> dict[str, object] | None:
        self._sums, self._metrics = None, {}
        if self._replays is not None:
            self._replays.clear()
        step = self._newest(at_most)
        if self._store is None or step is None:
            return None
        state = (self._params, self._opt_state)
        plain = without_keys(state)
        template = jax.tree.map(lambda leaf: np.zeros(leaf.shape, leaf.dtype), plain)
        loaded, metadata = self._store.load(step, template)
        placed = with_keys(jax.tree.map(self._place, loaded, plain), state)
        wait_ready(placed)
        self._params, self._opt_state = placed
        # their steps are trained again, perhaps with other settings: no later restore may take them
        if not (self._spans_hosts and jax.process_index()):
            getattr(self._store, "discard_above", lambda step: None)(step)
        return metadata

    def _newest(self, at_most: int | None) -> int | None:
        """The step to restore, the same on every host: the first one's, which alone writes checkpoints."""
        steps = self._store.steps() if self._store is not None else []
        within = [step for step in steps if at_most is None or step <= at_most]
        newest = within[-1] if within else -1 if steps else None
        if self._spans_hosts:
            newest = said_by_first("restore", newest)
        if newest == -1:
            raise CheckpointError(f"no checkpoint of step {at_most} or before is left; start anew with another --out")
        return newest


@final
class OptaxSnapshot:
    """Parameters and optimizer state of one step on their way to disk."""

    def __init__(self, store: CheckpointStore, step: int, state: PyTree, metadata: Mapping[str, object]) -> None:
        self._store = store
        self._step = step
        self._state = state
        self._metadata = metadata

    def copy_to_host(self) -> None:
        self._state = jax.tree.map(host_copy, self._state)

    def write(self) -> dict[str, object]:
        path = self._store.save(self._step, self._state, self._metadata)
        self._state = None
        return {"step": self._step, "path": path}


@final
class _WrittenElsewhere:
    """The snapshot of a host that keeps nothing: all hosts have the same state, and the first one writes it."""

    def __init__(self, step: int) -> None:
        self._step = step

    def copy_to_host(self) -> None:
        """Nothing to copy."""

    def write(self) -> dict[str, object]:
        return {"step": self._step, "path": ""}


def _zeros_like(param: jax.Array) -> jax.Array:
    # at least float32: a sum over many micro-batches in bfloat16 loses the small ones
    return jnp.zeros(param.shape, jnp.promote_types(param.dtype, jnp.float32), device=param.sharding)
