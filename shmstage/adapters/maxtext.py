"""MaxText trains: a ``TrainEngine`` around an object that keeps MaxText's training-engine contract.

    from maxtext.training_engine.maxtext_engine import MaxTextTrainingEngine
    from maxtext.utils.sharding import get_input_data_sharding

    def make_engine(settings):                      # the factory of [engine]
        config, mesh = ...                          # base_output_directory below settings["checkpoint_dir"]
        engine = MaxTextTrainingEngine(config, mesh).with_loss_fn(my_loss).with_gen_model_input_fn(dict)
        spec = get_input_data_sharding(config, mesh).spec
        return MaxTextEngine(engine, mesh=mesh, batch_spec=spec, checkpoint_dir=config.checkpoint_dir)

Read from ``maxtext`` 0.2.5, ``training_engine/abstract_engine.py`` and ``maxtext_engine.py``. Nothing of the package is
imported here; whatever has the methods of ``TrainingEngine`` will do. Two things of its configuration matter:
``max_inflight_computations`` (2) makes a call wait for the last but one, so give it more than a step has micro-batches;
and ``enable_checkpointing``, without which nothing is saved.
"""

from __future__ import annotations

import importlib
from collections import deque
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any, Protocol, final

import jax
import jax.numpy as jnp
import numpy as np

from shmstage.adapters.maxtext_checkpoints import MaxTextCheckpoints, MaxTextSnapshot
from shmstage.errors import EngineError
from shmstage.memory.layout import Layout
from shmstage.packing.fields import SEGMENT_IDS, SEGMENT_POSITIONS
from shmstage.packing.routing import is_encoded
from shmstage.trainer.decode import with_dense_routing
from shmstage.trainer.engine import TRAIN, Batch
from shmstage.trainer.field_placement import BatchSpec, FieldPlacement
from shmstage.trainer.jax_seam import wait_ready

LOSS, GRAD_NORMS = "loss", ("gradient_norm", "grad_norm")
Payload = Callable[[Batch], Any]
OfModel = Callable[[Any, Any], Any]
Put = Callable[[Mapping[str, np.ndarray[Any, Any]], Mapping[str, jax.sharding.Sharding]], dict[str, jax.Array]]
IDS, MASK = "completion_ids", "completion_mask"


class TrainingEngine(Protocol):
    """What is used of MaxText's ``AbstractTrainingEngine``.

    It may have besides: ``prepare_fwd_bwd_input(payload)``, which returns what ``fwd_bwd`` takes in the payload's place
    once it lies as the engine wants it; ``wait_for_device()``, which returns when all that was dispatched is over;
    ``micro_step_count``; ``fwd_only(fn, *args)``, for ``logps_fn`` and ``eval_fn``; ``model``, an ``nnx.Module``.
    """

    @property
    def train_step(self) -> int: ...
    def compile(self, dummy_data: Any) -> None: ...
    def fwd_bwd(self, payload: Any) -> None: ...
    def update(self) -> int: ...
    def get_metrics(self, clear_cache: bool = True) -> Any: ...
    def save_checkpoint(self, metadata: Any, **kwargs: Any) -> None: ...
    def restore_checkpoint(self, **kwargs: Any) -> Any: ...
    def prepare_weight_sync(self, **kwargs: Any) -> Any: ...
    def release_weight_sync(self, **kwargs: Any) -> Any: ...
    def close(self) -> None: ...


@final
class MaxTextEngine:
    """Drives ``engine``; parameters, optimizer, sums and checkpoints are its own.

    ``payload(batch)`` makes of the packed fields (device arrays) what its ``fwd_bwd`` takes; by default they are handed
    over as a dict, for an engine with a ``gen_model_input_fn``. ``causal_lm_inputs`` is one for MaxText's own loss.
    ``mesh`` and ``batch_spec`` place the fields, as in ``OptaxEngine``: what the engine gets lies there already, and if
    it has ``prepare_fwd_bwd_input``, that is called when the upload is issued, while the devices still compute.
    ``checkpoint_dir`` is where the engine keeps its checkpoints (``config.checkpoint_dir``). With
    ``logps_fn(model, payload) -> f32[rows, tokens]`` it scores under the policy as it is, with
    ``eval_fn(model, payload) -> named scalars`` it evaluates; both run through the engine's ``fwd_only``.
    """

    #: its forward pass moves random states on, and what it saves is the state as it is then
    snapshots = False
    decodes_routing = True

    def __init__(
        self,
        engine: TrainingEngine,
        *,
        payload: Payload = dict,
        mesh: jax.sharding.Mesh | None = None,
        batch_spec: BatchSpec = None,
        checkpoint_dir: Path | str | None = None,
        logps_fn: OfModel | None = None,
        eval_fn: OfModel | None = None,
    ) -> None:
        missing = [name for name in _METHODS if not callable(getattr(engine, name, None))]
        if missing:
            raise EngineError(
                f"{type(engine).__name__} is no training engine of MaxText: it has no {', '.join(missing)}; "
                "give MaxTextTrainingEngine or an object with its methods"
            )
        self._engine = engine
        self._payload = payload
        self._placement = FieldPlacement(mesh, batch_spec)
        self._logps_fn = logps_fn
        self._eval_fn = eval_fn
        self._prepare: Callable[[Any], Any] | None = getattr(engine, "prepare_fwd_bwd_input", None)
        self._prepared: deque[tuple[dict[str, jax.Array], Any]] = deque()
        self._compiled = False
        self._forwards = 0
        self._metrics: dict[str, jax.Array] = {}
        self._newest: jax.Array | None = None
        self._lent_weights = False
        self._checkpoints = MaxTextCheckpoints(engine, checkpoint_dir, self._wait_for_device)

    # --- placement ------------------------------------------------------------------------------------------

    def shardings(self, layout: Layout) -> dict[str, jax.sharding.Sharding]:
        """Per field: on the mesh by ``batch_spec``, or on the default device."""
        return self._placement.shardings(layout)

    @property
    def put(self) -> Put:
        """``put(views, shardings)`` of ``OptionalMethods``; there only if the engine has ``prepare_fwd_bwd_input``."""
        if self._prepare is None:
            raise AttributeError(f"{type(self._engine).__name__} has no prepare_fwd_bwd_input")
        return self._put

    def _put(
        self, views: Mapping[str, np.ndarray[Any, Any]], shardings: Mapping[str, jax.sharding.Sharding]
    ) -> dict[str, jax.Array]:
        """Issue the upload, and have the engine prepare its input from the arrays under way.

        From the arrays and not from ``views``: fields patched later, digests and the release of the slot go by them.
        """
        assert self._prepare is not None
        names = list(views)
        placed = jax.device_put([views[name] for name in names], [shardings[name] for name in names])
        batch = dict(zip(names, placed, strict=True))
        self._prepared.append((batch, self._prepare(self._payload(self._dense(batch)))))
        return dict(batch)

    def _dense(self, batch: Batch) -> Batch:
        return _decoded(batch, self._placement.dense()) if is_encoded(batch) else batch

    # --- a step ---------------------------------------------------------------------------------------------

    def compile(self, example: Mapping[str, jax.ShapeDtypeStruct], uses: Collection[str] = (TRAIN,)) -> None:
        """Have the engine compile for zeros that lie as micro-batches will; it compiles for training only."""
        if TRAIN in uses:
            zeros = {name: jax.device_put(np.zeros(x.shape, x.dtype), x.sharding) for name, x in example.items()}
            self._compile(self._payload(self._dense(zeros)))

    def fwd_bwd(self, batch: Batch) -> jax.Array | None:
        prepared = self._take_prepared(batch)
        if prepared is None:
            payload = self._payload(self._dense(batch))
            self._compile(payload)
            prepared = payload if self._prepare is None else self._prepare(payload)
        self._release_weights()
        self._engine.fwd_bwd(prepared)
        self._forwards += 1
        return self._token("fwd_bwd", (LOSS,))

    def update(self) -> jax.Array | None:
        if not self._forwards:
            raise EngineError("update: no micro-batch was accumulated")
        self._release_weights()
        self._engine.update()
        self._forwards = 0
        token = self._token("update", GRAD_NORMS)
        self._metrics = scalars_of(self._engine.get_metrics(clear_cache=True))
        return token

    def metrics(self) -> dict[str, jax.Array]:
        """``loss`` (summed loss / summed denominator), ``denominator``, ``grad_norm``, others as in ``scalars_of``."""
        return dict(self._metrics)

    def _compile(self, payload: Any) -> None:
        # an engine that was not compiled runs operation by operation: slow, and with other bits
        if not self._compiled:
            self._engine.compile(payload)
            self._compiled = True

    def _take_prepared(self, batch: Batch) -> Any:
        """What was prepared of these very arrays; ``None`` if nothing was, or late fields have replaced some since."""
        while self._prepared:
            arrays, prepared = self._prepared.popleft()
            if arrays.keys() == batch.keys() and all(arrays[name] is batch[name] for name in arrays):
                return prepared
        return None

    def _token(self, call: str, names: Collection[str]) -> jax.Array | None:
        """An output of the program just dispatched: the engine returns none, but notes them as metrics.

        Without one, ``wait_for_device``; ``None`` then says that the work is done.
        """
        noted = self._engine.get_metrics(clear_cache=False)
        for name in names:
            if name in noted.weighted_metrics:
                self._newest = noted.weighted_metrics[name].unreduced_sum
                return self._newest
            if name in noted.scalar_metrics:
                self._newest = noted.scalar_metrics[name]
                return self._newest
        wait = getattr(self._engine, "wait_for_device", None)
        if wait is None:
            found = sorted([*noted.weighted_metrics, *noted.scalar_metrics])
            raise EngineError(
                f"{call}: nothing says when it is over: {type(self._engine).__name__} has no wait_for_device, and "
                f"notes the metrics {found} but none of {', '.join(names)}; record one of these in {call}"
            )
        wait()
        return None

    def _wait_for_device(self) -> None:
        wait = getattr(self._engine, "wait_for_device", None)
        if wait is not None:
            wait()
        elif self._newest is not None:
            wait_ready(self._newest)

    # --- scores and evaluations -----------------------------------------------------------------------------

    @property
    def per_token_logps(self) -> Callable[[Batch, str], jax.Array]:
        """``per_token_logps(batch, role)`` of ``OptionalMethods``; there only with ``logps_fn``."""
        if self._logps_fn is None:
            raise AttributeError("this MaxTextEngine was made without logps_fn: it scores nothing")
        return self._score

    @property
    def eval_step(self) -> Callable[[Batch], Mapping[str, jax.Array]]:
        """``eval_step(batch)`` of ``OptionalMethods``; there only with ``eval_fn``."""
        if self._eval_fn is None:
            raise AttributeError("this MaxTextEngine was made without eval_fn: it evaluates nothing")
        return lambda batch: dict(self._of_model(self._eval_fn, batch))

    def _score(self, batch: Batch, role: str) -> jax.Array:
        if role != "actor":
            raise EngineError(
                f"per_token_logps: the role is {role}, and MaxText's engine keeps the parameters it trains and no "
                "others; score the reference where trajectories are made, as ref_logprobs"
            )
        scores: jax.Array = self._of_model(self._logps_fn, batch)
        return scores

    def _of_model(self, function: OfModel | None, batch: Batch) -> Any:
        fwd_only: Any = getattr(self._engine, "fwd_only", None)
        if fwd_only is None:
            raise EngineError(f"{type(self._engine).__name__} has no fwd_only, which logps_fn and eval_fn run through")
        return fwd_only(function, self._payload(self._dense(batch)))

    # --- state ----------------------------------------------------------------------------------------------

    def weights(self) -> dict[str, jax.Array]:
        """Of ``engine.model`` the ``nnx.Param`` by path; of an engine without it what ``prepare_weight_sync`` gives.

        The latter must be a pytree of arrays. It is released before the next call that could change them.
        """
        model = getattr(self._engine, "model", None)
        if model is not None:
            nnx: Any = importlib.import_module("flax.nnx")
            tree = nnx.to_pure_dict(nnx.state(model, nnx.Param))
        else:
            tree = self._engine.prepare_weight_sync()
            self._lent_weights = True
        leaves, _ = jax.tree_util.tree_flatten_with_path(tree)
        named = {jax.tree_util.keystr(path, simple=True, separator="/"): leaf for path, leaf in leaves}
        if not named or not all(isinstance(leaf, jax.Array) for leaf in named.values()):
            raise EngineError(
                f"the weights of {type(self._engine).__name__} are {type(tree).__name__} with {len(named)} leaves, and "
                "not arrays by name; give the engine a model, or a prepare_weight_sync that returns a pytree of arrays"
            )
        return named

    def _release_weights(self) -> None:
        if self._lent_weights:
            self._lent_weights = False
            self._engine.release_weight_sync()

    def save(self, step: int, metadata: Mapping[str, object]) -> MaxTextSnapshot:
        return self._checkpoints.save(step, metadata)

    def restore(self) -> dict[str, object] | None:
        """The newest checkpoint. MaxText has no way to go behind it, so this takes no ``at_most``."""
        self._prepared.clear()
        self._release_weights()
        begun, self._forwards, self._metrics = self._forwards > 0, 0, {}
        metadata = self._checkpoints.restore(half_a_step=begun)
        self._engine.get_metrics(clear_cache=True)
        return metadata

    def close(self) -> None:
        self._prepared.clear()
        self._release_weights()
        self._checkpoints.close(half_a_step=self._forwards > 0)


_METHODS = [name for name in vars(TrainingEngine) if not name.startswith("_") and name != "train_step"]


def scalars_of(buffer: Any) -> dict[str, jax.Array]:
    """Of a MaxText ``MetricsBuffer``, arrays of one value per micro-batch, scalars; dispatched, not waited for.

    Weighted metrics are sum / sum of denominators (0 divides as 1), the others means; ``denominator`` is the loss's.
    """
    weighted = {name: (metric.unreduced_sum, metric.denominator) for name, metric in buffer.weighted_metrics.items()}
    if LOSS not in weighted:
        raise EngineError(
            f"the step noted the weighted metrics {sorted(weighted)} and no {LOSS}: its sum and denominator are what "
            "steps are told by; return a WeightedMetric from the loss"
        )
    found: dict[str, jax.Array] = _scalars(weighted, dict(buffer.scalar_metrics))
    for name in GRAD_NORMS:
        if name in found:
            found["grad_norm"] = found.pop(name)
    return found


@jax.jit
def _scalars(weighted: dict[str, tuple[jax.Array, jax.Array]], others: dict[str, jax.Array]) -> dict[str, jax.Array]:
    totals = {name: (jnp.sum(value), jnp.sum(of).astype(jnp.float32)) for name, (value, of) in weighted.items()}
    found = {name: jnp.mean(jnp.asarray(value, jnp.float32)) for name, value in others.items()}
    found |= {name: value / jnp.where(of == 0, 1.0, of) for name, (value, of) in totals.items()}
    return {**found, "denominator": totals[LOSS][1]}


@jax.jit
def causal_lm_inputs(batch: Batch) -> dict[str, jax.Array]:
    """Packed fields as MaxText's own loss takes them: token t predicts t+1 of its segment if that is in the mask."""
    ids, segments, mask = batch[IDS], batch[SEGMENT_IDS], batch[MASK]
    counted = (mask[:, 1:] > 0) & (segments[:, 1:] == segments[:, :-1]) & (segments[:, 1:] > 0)
    return {
        "inputs": ids,
        "inputs_position": batch[SEGMENT_POSITIONS],
        "inputs_segmentation": segments,
        "targets": jnp.roll(ids, -1, axis=1),
        "targets_segmentation": jnp.pad(counted.astype(jnp.int32), ((0, 0), (0, 1))),
    }


_decoded: Any = jax.jit(with_dense_routing, static_argnums=1)
