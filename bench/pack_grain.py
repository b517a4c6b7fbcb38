"""Grain's packer on the lengths of ``pack.py``: ``grain.experimental.FirstFitPackIterDataset``, one process.

It does something else, and both figures say so: it plans and copies at once, element by element in the order they come,
with as many open rows as it is told, and hands out rows that are fresh arrays, which batching copies once more; nothing
of it is in shared memory. Ours plans a whole window, longest first, and then writes each byte once, into the slot. It
gets the same fields, segment ids and positions once and not per field, no shuffling, and as many open rows as our plan
has, which is the most it could use.
"""

from __future__ import annotations

from collections.abc import Sequence

from shmstage.packing.fields import carried_fields
from shmstage.packing.trajectory import Trajectory


class GrainPacker:
    """Packs the same trajectories at each call; ``rows`` of the last call. Raises ``ImportError`` without Grain."""

    def __init__(self, trajectories: Sequence[Trajectory], optional: frozenset[str], *, rows: int, tokens: int) -> None:
        import grain
        from grain.experimental import FirstFitPackIterDataset

        names = [field.source for field in carried_fields(optional)]
        elements = [{name: getattr(one, name) for name in names} for one in trajectories]
        packed = FirstFitPackIterDataset(
            grain.MapDataset.source(elements).to_iter_dataset(),
            length_struct=dict.fromkeys(names, tokens),
            num_packing_bins=rows,
            shuffle_bins=False,
            meta_features=[name for name in names if name != "tokens"],
        )
        self._batches = packed.batch(rows)
        self.rows = 0

    def __call__(self) -> None:
        self.rows = 0
        for batch in self._batches:
            self.rows += len(batch["tokens"])

    def count(self) -> int:
        """Real tokens of all rows, to be compared with the input's: nothing was lost."""
        return sum(int((batch["tokens_segment_ids"] > 0).sum()) for batch in self._batches)
