"""Routing as a waiting trajectory keeps it: packed as `ragged_packed` has it in a slot, about a third of int16."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, final

import numpy as np
import numpy.typing as npt

from shmstage import _native


@final
@dataclass(frozen=True, slots=True, eq=False)
class HeldRouting:
    """Expert ids `[tokens, layers, top_k]`, packed. Whoever asks it for an array gets them as they came, int16.

    `data`: groups of 8 tokens, uint8 `[groups, layers, top_k, bits]`, then their validity `[groups, layers]`.
    """

    data: bytes
    shape: tuple[int, int, int]
    bits: int

    @classmethod
    def of(cls, routing: npt.NDArray[np.int16], bits: int) -> HeldRouting:
        """`routing` int16 `[tokens, layers, top_k]`, C-contiguous, ids below `2**bits`, or -1 for a whole top-k."""
        tokens, layers, top_k = routing.shape
        return cls(_native.pack_routing(routing, layers, top_k, bits), (tokens, layers, top_k), bits)

    @property
    def nbytes(self) -> int:
        return len(self.data)

    def __len__(self) -> int:
        return self.shape[0]

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> npt.NDArray[Any]:
        if copy is False:
            raise ValueError("packed routing has to be unpacked into a new array")
        dense = np.empty(self.shape, np.int16)
        _native.unpack_routing(dense, self.data, *self.shape[1:], self.bits)
        return dense if dtype is None else dense.astype(dtype, copy=False)
