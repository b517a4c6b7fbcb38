"""MaxText's own training engine in its smallest shape; runs where ``adapters_venv.py`` put the package."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import maxtext
from absent_tunix import WeightedMetric  # before the engine, which imports it from tunix
from jax.sharding import Mesh
from maxtext.configs import pyconfig
from maxtext.training_engine.maxtext_engine import MaxTextTrainingEngine
from maxtext.utils.maxtext_utils import create_device_mesh
from maxtext.utils.sharding import get_input_data_sharding

from shmstage.adapters.maxtext import MaxTextEngine

VOCABULARY = 256
SMALLEST = {
    "run_name": "small",
    "model_name": "default",
    "base_emb_dim": 16,
    "base_num_query_heads": 2,
    "base_num_kv_heads": 2,
    "head_dim": 8,
    "base_mlp_dim": 32,
    "base_num_decoder_layers": 1,
    "vocab_size": VOCABULARY,
    "dtype": "float32",
    "weight_dtype": "float32",
    "attention": "dot_product",
    "hardware": "cpu",
    "dataset_type": "synthetic",
    "enable_dropout": "false",
    "learning_rate": 0.01,
    "warmup_steps_fraction": 0.0,
    "steps": 100,
    "max_inflight_computations": 32,
    "checkpoint_period": 1,
    "skip_jax_distributed_system": "true",
    "log_config": "false",
    "profiler_steps": 0,  # else its engine traces micro-batches 1 to 5
    "enable_tensorboard": "false",
}


def configuration(rows: int, tokens: int, directory: Path | str | None) -> Any:
    asked: dict[str, object] = {
        **SMALLEST,
        "per_device_batch_size": rows // jax.device_count(),
        "max_target_length": tokens,
        "base_output_directory": directory or tempfile.gettempdir(),
        "enable_checkpointing": str(directory is not None).lower(),
    }
    base = Path(maxtext.__file__).parent / "configs" / "base.yml"
    return pyconfig.initialize(["maxtext", str(base), *[f"{key}={value}" for key, value in asked.items()]])


def policy_sums(model: Any, batch: Mapping[str, jax.Array]) -> tuple[jax.Array, jax.Array]:
    """Sums of an importance-weighted policy loss over packed fields, and of its weights."""
    ids, segments = batch["completion_ids"], batch["segment_ids"]
    logits = model(
        decoder_input_tokens=ids,
        decoder_positions=batch["segment_positions"],
        decoder_segment_ids=segments,
        enable_dropout=False,
    )
    logps = jax.nn.log_softmax(logits[:, :-1].astype(jnp.float32))
    taken = jnp.take_along_axis(logps, ids[:, 1:, None], -1)[..., 0]
    weight = batch["completion_mask"][:, 1:] * (segments[:, 1:] == segments[:, :-1])
    ratio = jnp.exp(taken - batch["old_per_token_logps"][:, 1:])
    return -(ratio * batch["advantages"][:, 1:] * weight).sum(), weight.sum()


def policy_loss(model: Any, **batch: jax.Array) -> WeightedMetric:
    total, weight = policy_sums(model, batch)
    return WeightedMetric(unreduced_sum=total, denominator=weight)


def adapted(config: Any, loss: Any = policy_loss) -> tuple[MaxTextEngine, MaxTextTrainingEngine, Mesh]:
    mesh = Mesh(create_device_mesh(config), config.mesh_axes)
    engine = MaxTextTrainingEngine(config, mesh).with_loss_fn(loss).with_gen_model_input_fn(dict)
    spec = get_input_data_sharding(config, mesh).spec
    kept = config.checkpoint_dir if config.enable_checkpointing else None
    return MaxTextEngine(engine, mesh=mesh, batch_spec=spec, checkpoint_dir=kept), engine, mesh


def make_engine(settings: Mapping[str, Any]) -> MaxTextEngine:
    config = configuration(settings["rows"], settings["tokens"], settings.get("checkpoint_dir"))
    return adapted(config)[0]
