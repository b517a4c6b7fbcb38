"""``make_engine``: the demo model, its loss and AdamW behind ``OptaxEngine``."""

from __future__ import annotations

import dataclasses
import difflib
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import optax
from jax.sharding import AxisType, PartitionSpec

from shmstage.demo.loss import LossConfig, clipped_policy_gradient
from shmstage.demo.model import ModelConfig, Params, config_of, init, per_token_logps
from shmstage.demo.policy import read_policy
from shmstage.demo.source import recorded_bundle
from shmstage.errors import SettingsError
from shmstage.trainer.jax_seam import partition_spec
from shmstage.trainer.optax_engine import OptaxEngine

RECORDED, FRESH = "recorded", "fresh"
_SIZES = tuple(field.name for field in dataclasses.fields(ModelConfig))


@dataclass(frozen=True)
class EngineSettings:
    """The ``[engine]`` table of the demo.

    ``policy``: ``"recorded"`` starts from the policy that sampled the shipped bundle, a path from the one of
    the bundle recorded there, ``"fresh"`` from random parameters drawn from ``seed``. ``None`` among the model's
    sizes: as recorded, or the default for a fresh policy.
    """

    policy: str = RECORDED
    seed: int = 0
    learning_rate: float = 1e-4
    weight_decay: float = 0.0
    clip_low: float = 0.2
    clip_high: float = 0.2
    kl_coefficient: float = 0.0
    routing_weight: float = 0.0
    checkpoint_dir: str | None = None
    vocabulary: int | None = None
    d_model: int | None = None
    layers: int | None = None
    heads: int | None = None
    d_ff: int | None = None

    def __post_init__(self) -> None:
        if self.seed < 0:
            raise SettingsError(f"engine setting seed = {self.seed}: must not be negative")
        # Written so that NaN fails too.
        if not 0.0 < self.learning_rate < math.inf:
            raise SettingsError(
                f"engine setting learning_rate = {self.learning_rate}: must be greater than 0"
            )
        if not 0.0 <= self.weight_decay < math.inf:
            raise SettingsError(f"engine setting weight_decay = {self.weight_decay}: must not be negative")

    @property
    def sizes(self) -> dict[str, int]:
        return {name: getattr(self, name) for name in _SIZES if getattr(self, name) is not None}

    @property
    def loss(self) -> LossConfig:
        return LossConfig(self.clip_low, self.clip_high, self.kl_coefficient, self.routing_weight)


def make_engine(settings: Mapping[str, object]) -> OptaxEngine:
    """The factory behind ``engine = "shmstage.demo.engine:make_engine"``; keys are ``EngineSettings``'s.

    Raises ``SettingsError`` naming key, value and what is wanted; ``BundleError`` if the recorded policy is missing or
    altered.
    """
    parsed = parse(settings)
    loss = parsed.loss

    def loss_fn(
        params: Params, batch: Mapping[str, jax.Array]
    ) -> tuple[jax.Array, jax.Array, dict[str, jax.Array]]:
        return clipped_policy_gradient(params, batch, loss)

    return OptaxEngine(
        loss_fn,
        initial_params(parsed),
        optax.adamw(parsed.learning_rate, weight_decay=parsed.weight_decay),
        *_over_all_hosts(),
        checkpoint_dir=parsed.checkpoint_dir,
        logps_fn=per_token_logps,
    )


def _over_all_hosts() -> tuple[jax.sharding.Mesh | None, PartitionSpec | None]:
    """Mesh and batch spec: rows over the devices of all hosts, or one device where there is one host."""
    if jax.process_count() == 1:
        return None, None
    mesh = jax.make_mesh((jax.device_count(),), ("data",), axis_types=(AxisType.Auto,))
    return mesh, partition_spec("data")


def initial_params(settings: EngineSettings) -> Params:
    """The float32 parameters that training starts from."""
    if settings.policy == FRESH:
        return init(jax.random.key(settings.seed), ModelConfig(**settings.sizes))
    params = read_policy(recorded_bundle() if settings.policy == RECORDED else Path(settings.policy))
    recorded = dataclasses.asdict(config_of(params))
    for name, value in settings.sizes.items():
        if value != recorded[name]:
            raise SettingsError(
                f'engine setting {name} = {value}: the recorded policy has {recorded[name]}; add policy = "{FRESH}" '
                "to train a model of another size from random parameters"
            )
    return params


def parse(settings: Mapping[str, object]) -> EngineSettings:
    """Check names and types; a string from the command line or the environment is read as its field's type."""
    wanted = {"float": float, "int": int, "str": str}
    known = {
        field.name: wanted[str(field.type).partition(" ")[0]] for field in dataclasses.fields(EngineSettings)
    }
    found: dict[str, Any] = {}
    for name, value in settings.items():
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            hint = f"did you mean {near[0]}?" if near else f"known are {', '.join(sorted(known))}"
            raise SettingsError(f"unknown engine setting {name} = {value!r}; {hint}")
        if value is None:
            continue
        if isinstance(value, bool) or not isinstance(value, (int, float, str)):
            raise SettingsError(f"engine setting {name} = {value!r}: must be a {known[name].__name__}")
        try:
            converted = known[name](value)
        except ValueError:
            converted = None
        if converted is None or (isinstance(value, (int, float)) and converted != value):
            raise SettingsError(f"engine setting {name} = {value!r}: must be a {known[name].__name__}")
        found[name] = converted
    return EngineSettings(**found)
