"""What a micro-batch carries; with rows and tokens it gives the layout that a pool's slots have."""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

import numpy as np

from shmstage.errors import SettingsError
from shmstage.memory.layout import Layout
from shmstage.packing.fields import (
    OPTIONAL_FIELDS,
    ROUTING,
    SAMPLER_IS_WEIGHTS,
    TOKEN_FIELDS,
    carried_fields,
    microbatch_layout,
)
from shmstage.packing.routing import Specs, token_nbits

#: segment ids and positions, which the plan adds
_PLAN_WORDS = 2
MANDATORY_WORDS = sum(not field.optional for field in TOKEN_FIELDS) + _PLAN_WORDS
MAX_WORDS = 64
_NAMED_EXTRA = (*(f.source for f in TOKEN_FIELDS if f.optional and f is not ROUTING), SAMPLER_IS_WEIGHTS)


@final
@dataclass(frozen=True, slots=True)
class MicrobatchFields:
    """`optional`, `layers`, `top_k`, `late` as `packing.fields.microbatch_layout` takes them; routing is there iff
    `layers` is. `extra`: names of further float32 fields `[rows, tokens]`. `encoding`, `experts`: how routing lies in
    the slot.
    """

    optional: frozenset[str] = frozenset()
    layers: int = 0
    top_k: int = 0
    experts: int = 0
    late: tuple[str, ...] = ()
    extra: tuple[str, ...] = ()
    encoding: str = "dense"

    @property
    def has_routing(self) -> bool:
        return self.layers > 0

    def layout(self, rows: int, tokens: int, capacity: int = 0) -> Layout:
        """The layout of a slot. `capacity`: most real tokens, where routing is ragged; 0: rows x tokens.

        Raises `LayoutError`.
        """
        routing = {ROUTING.source} if self.has_routing else frozenset[str]()
        layout = microbatch_layout(
            rows, tokens, optional=(self.optional - {ROUTING.source}) | routing, layers=self.layers, top_k=self.top_k,
            late=self.late, encoding=self.encoding, experts=self.experts, max_real_tokens=capacity,
        )  # fmt: skip
        if not self.extra:
            return layout
        specs: Specs = {field.name: (field.dtype, field.shape) for field in layout.fields}
        specs.update(dict.fromkeys(self.extra, ("float32", (rows, tokens))))
        return Layout.of(specs, late=self.late)

    @property
    def trajectory_nbits(self) -> int:
        """Bits of a trajectory's arrays per token, as they arrive: routing in int16."""
        return self._word_nbits + token_nbits("dense", layers=self.layers, top_k=self.top_k)

    @property
    def encoded_nbits(self) -> int:
        """Bits of a trajectory's arrays per token, as they wait: routing as in a slot of `encoding`."""
        return self._word_nbits + (
            token_nbits(self.encoding, layers=self.layers, top_k=self.top_k, experts=self.experts)
            if self.has_routing
            else 0
        )

    def waiting_nbytes(self, arrived_nbytes: int) -> int:
        """Bytes that trajectories take while they wait, of so many as they arrive."""
        return -(-arrived_nbytes * self.encoded_nbits // self.trajectory_nbits)

    @property
    def _word_nbits(self) -> int:
        carried = [field for field in carried_fields(self.optional) if field is not ROUTING]
        return sum(8 * np.dtype(field.dtype).itemsize for field in carried)


def words(count: int) -> tuple[frozenset[str], tuple[str, ...]]:
    """`optional` and `extra` of a micro-batch with `count` 4-byte fields per token: the mandatory ones first.

    Raises `SettingsError` for less than those, or for more than anybody carries.
    """
    if not MANDATORY_WORDS <= count <= MAX_WORDS:
        raise SettingsError(
            f"word_fields = {count}; a micro-batch has {MANDATORY_WORDS} mandatory 4-byte fields, give "
            f"{MANDATORY_WORDS} to {MAX_WORDS}"
        )
    left = count - MANDATORY_WORDS
    named = _NAMED_EXTRA[:left]
    unnamed = tuple(f"word_field_{number}" for number in range(MANDATORY_WORDS + len(named) + 1, count + 1))
    return frozenset(named) & OPTIONAL_FIELDS, (*(n for n in named if n not in OPTIONAL_FIELDS), *unnamed)
