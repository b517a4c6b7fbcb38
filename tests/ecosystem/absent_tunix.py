"""Stand-ins for what ``maxtext`` 0.2.5 imports from a revision of tunix that is not published (0.1.7 has none of it).

Four plain containers, with the fields that MaxText's training engine reads. To be imported before it.
"""

from __future__ import annotations

import os
import sys
import types

import flax.struct
import jax

os.environ.setdefault("DECOUPLE_GCLOUD", "TRUE")


@flax.struct.dataclass
class WeightedMetric:
    unreduced_sum: jax.Array
    denominator: jax.Array
    eps: float | None = flax.struct.field(default=None, pytree_node=False)
    min_denom: float | None = flax.struct.field(default=None, pytree_node=False)


@flax.struct.dataclass
class LossOutput:
    primary_loss: WeightedMetric
    aux_metrics: dict[str, WeightedMetric]


class TrainerPayload: ...


class RLTrainerPayload(TrainerPayload): ...


STAND_INS: dict[str, tuple[type, ...]] = {
    "tunix": (),
    "tunix.sft": (),
    "tunix.sft.utils": (WeightedMetric, LossOutput),
    "tunix.experimental": (),
    "tunix.experimental.common": (),
    "tunix.experimental.common.datatypes": (TrainerPayload, RLTrainerPayload),
}
for name, classes in STAND_INS.items():
    module = types.ModuleType(name)
    module.__path__ = []
    module.__dict__.update({each.__name__: each for each in classes})
    sys.modules[name] = module
