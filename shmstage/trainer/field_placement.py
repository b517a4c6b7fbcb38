"""Where the fields of a micro-batch lie on the devices: a mesh, and one spec for all of them or one per name."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import final

import jax
from jax.sharding import NamedSharding, PartitionSpec, SingleDeviceSharding

from shmstage.memory.layout import Layout
from shmstage.packing.routing import DENSE, OFFSETS, PACKED, RAGGED, VALIDITY
from shmstage.trainer.jax_seam import partition_spec
from shmstage.trainer.ranges import LEADING

BatchSpec = PartitionSpec | Mapping[str, PartitionSpec] | None
#: axes of the encoded fields of routing, where they are not cut into tiles
RANKS = {PACKED: 4, VALIDITY: 2, RAGGED: 3, OFFSETS: 1}


@final
@dataclass(frozen=True, slots=True)
class FieldPlacement:
    """Without a mesh everything lies on the default device. A spec longer than a field's rank is cut."""

    mesh: jax.sharding.Mesh | None
    batch_spec: BatchSpec = None

    def shardings(self, layout: Layout) -> dict[str, jax.sharding.Sharding]:
        """Per field of ``layout``."""
        if self.mesh is None:
            device = SingleDeviceSharding(jax.local_devices()[0])
            return {field.name: device for field in layout.fields}
        return {f.name: NamedSharding(self.mesh, self.spec(f.name, len(f.shape))) for f in layout.fields}

    def on_mesh(self, name: str, rank: int) -> NamedSharding | None:
        """Of one field; ``None`` without a mesh."""
        return NamedSharding(self.mesh, self.spec(name, rank)) if self.mesh is not None else None

    def dense(self) -> NamedSharding | None:
        """Of decoded routing ``[rows, tokens, layers, top_k]``; ``None`` without a mesh."""
        return self.on_mesh(DENSE, 4)

    def spec(self, name: str, rank: int) -> PartitionSpec:
        if name in RANKS:
            if rank != RANKS[name] + 2:  # the first axis is no row: any device may need any token
                return partition_spec()
            name, rank = LEADING, 2  # tiles: two axes more, cut like rows and tokens
        spec = self.batch_spec.get(name) if isinstance(self.batch_spec, Mapping) else self.batch_spec
        return partition_spec(*tuple(spec or ())[:rank])
