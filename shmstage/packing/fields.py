"""The one table of what a trajectory carries and what it is called once packed.

| `Trajectory`   | per trajectory          | packed                 | `[rows, tokens]`, dtype          | padding |
|----------------|-------------------------|------------------------|----------------------------------|---------|
| `tokens`       | `[n]`                   | `completion_ids`       | int32                            | 0       |
| (the plan)     |                         | `segment_ids`          | int32, 1..n from left to right   | 0       |
| (the plan)     |                         | `segment_positions`    | int32, restart in each segment   | 0       |
| `loss_mask`    | `[n]`, 0 or 1           | `completion_mask`      | float32                          | 0       |
| `advantages`   | `[n]`                   | `advantages`           | float32                          | 0       |
| `old_logprobs` | `[n]`                   | `old_per_token_logps`  | float32                          | 0       |
| `ref_logprobs` | `[n]`, optional         | `ref_per_token_logps`  | float32                          | 0       |
| `returns`      | `[n]`, optional         | `returns`              | float32                          | 0       |
| `old_values`   | `[n]`, optional         | `old_values`           | float32                          | 0       |
| `routing`      | `[n or n-1, l, k]`, opt.| `routed_experts`       | int16, `[rows, tokens, l, k]`    | -1      |

In a slot `routed_experts` may lie encoded (`packing/routing.py`); what trains sees it as above.

Packed arrays stand at the token they belong to; nothing is shifted. `completion_ids` holds prompt and completion.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, final

from shmstage.errors import LayoutError
from shmstage.memory.layout import Layout
from shmstage.packing.routing import Specs, routing_fields

if TYPE_CHECKING:
    from shmstage.packing.trajectory import Trajectory
    from shmstage.settings import Settings

OLD_LOGPS = "old_per_token_logps"
REF_LOGPS = "ref_per_token_logps"
SAMPLER_IS_WEIGHTS = "sampler_is_weights"
#: written after publication where old log-probs are recomputed; ``sampler_is_weights`` exists only then
RECOMPUTED = (OLD_LOGPS, "completion_mask", SAMPLER_IS_WEIGHTS)
SEGMENT_IDS = "segment_ids"
SEGMENT_POSITIONS = "segment_positions"


@final
@dataclass(frozen=True, slots=True)
class TokenField:
    """A per-token array: its name in `Trajectory`, its name once packed, its dtype, its padding byte.

    `pad_byte` fills every byte of the padding: 0 gives zeros, 255 gives -1.
    """

    source: str
    packed: str
    dtype: str
    optional: bool = False
    pad_byte: int = 0


ROUTING = TokenField("routing", "routed_experts", "int16", optional=True, pad_byte=255)
TOKEN_FIELDS: tuple[TokenField, ...] = (
    TokenField("tokens", "completion_ids", "int32"),
    TokenField("loss_mask", "completion_mask", "float32"),
    TokenField("advantages", "advantages", "float32"),
    TokenField("old_logprobs", "old_per_token_logps", "float32"),
    TokenField("ref_logprobs", "ref_per_token_logps", "float32", optional=True),
    TokenField("returns", "returns", "float32", optional=True),
    TokenField("old_values", "old_values", "float32", optional=True),
    ROUTING,
)
#: 4 bytes a token each; a trajectory's record has them in this order
WORD_FIELDS = TOKEN_FIELDS[:-1]
OPTIONAL_FIELDS = frozenset(field.source for field in TOKEN_FIELDS if field.optional)


def optional_fields(trajectory: Trajectory) -> frozenset[str]:
    """Names of the optional per-token fields that this trajectory carries."""
    return trajectory.optional


def carried_fields(optional: Iterable[str]) -> tuple[TokenField, ...]:
    """The rows of the table for trajectories with these optional fields, in table order."""
    chosen = frozenset(optional)
    return tuple(field for field in TOKEN_FIELDS if not field.optional or field.source in chosen)


def late_fields(settings: Settings) -> tuple[str, ...]:
    """The packed fields that are written after publication."""
    reference = (REF_LOGPS,) if settings.reference_logps else ()
    return (*reference, *(RECOMPUTED if settings.recompute_old_logps else ()))


def microbatch_layout(
    rows: int,
    tokens: int,
    *,
    optional: frozenset[str] = frozenset(),
    layers: int = 0,
    top_k: int = 0,
    late: Sequence[str] = (),
    encoding: str = "dense",
    experts: int = 0,
    max_real_tokens: int = 0,
    tiles: tuple[int, int] | None = None,
) -> Layout:
    """The layout of a micro-batch `[rows, tokens]`. `late` names the packed fields written after publication.

    `optional` holds `Trajectory`'s names of the optional fields; with `"routing"`, `layers`, `top_k`, `encoding` and
    what that needs of `experts`, `max_real_tokens` and `tiles` give the fields of `packing.routing`. Raises
    `LayoutError`.
    """
    unknown = optional - OPTIONAL_FIELDS
    if unknown:
        raise LayoutError(f"{sorted(unknown)} are no optional fields; these are: {sorted(OPTIONAL_FIELDS)}")
    if rows < 1 or tokens < 1:
        raise LayoutError(f"a micro-batch of {rows} rows x {tokens} tokens; give at least 1 x 1")
    if ROUTING.source in optional and (layers < 1 or top_k < 1):
        raise LayoutError(f"routing of {layers} layers x top-{top_k}; give layers and top_k of at least 1")
    specs: Specs = {}
    for field in carried_fields(optional):
        if field is ROUTING:
            routing = routing_fields(
                encoding, rows=rows, tokens=tokens, max_real_tokens=max_real_tokens, layers=layers, top_k=top_k,
                experts=experts, tiles=tiles,
            )  # fmt: skip
            specs.update(routing)
            continue
        specs[field.packed] = (field.dtype, (rows, tokens))
        if field.source == "tokens":
            specs[SEGMENT_IDS] = ("int32", (rows, tokens))
            specs[SEGMENT_POSITIONS] = ("int32", (rows, tokens))
    for name in late:  # last in a slot, whether trajectories carry them or not
        specs[name] = specs.pop(name, ("float32", (rows, tokens)))
    return Layout.of(specs, late=tuple(late))
