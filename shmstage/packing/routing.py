"""The three encodings of `routed_experts` in a slot: which fields they are, of which dtype and shape.

| encoding        | fields                                                                                           |
|-----------------|--------------------------------------------------------------------------------------------------|
| `dense`         | `routed_experts` int16 `[rows, tokens, layers, top_k]`, -1 = unset                               |
| `ragged`        | `routed_experts_ragged` int16 `[capacity, layers, top_k]`, real tokens only, row after row       |
| `ragged_packed` | `routed_experts_packed` uint8: ids in `id_bits(experts)` bits, one after another                 |
|                 | `routed_experts_validity` uint8: one bit per token and layer, 0 = unset                          |
| both ragged     | `routed_experts_offsets` int32 `[rows + 1]`: where each row's real tokens begin, then their count |

`capacity` is the most real tokens a micro-batch may hold: `max_real_tokens`, or rows x tokens without that limit.
"""

from __future__ import annotations

from typing import Literal, get_args

from shmstage.errors import LayoutError

RoutingEncoding = Literal["dense", "ragged", "ragged_packed"]
ROUTING_ENCODINGS: tuple[RoutingEncoding, ...] = get_args(RoutingEncoding)

DENSE = "routed_experts"
RAGGED = "routed_experts_ragged"
PACKED = "routed_experts_packed"
VALIDITY = "routed_experts_validity"
OFFSETS = "routed_experts_offsets"

#: expert ids are int16, and -1 means unset
MAX_EXPERTS = 1 << 15
_MAX_INT32 = (1 << 31) - 1

Specs = dict[str, tuple[str, tuple[int, ...]]]


def id_bits(experts: int) -> int:
    """Bits of one packed expert id, ceil(log2 experts), at least 1. Raises `LayoutError` if that is not known."""
    if not 1 <= experts <= MAX_EXPERTS:
        raise LayoutError(f"experts = {experts}; packed routing needs the number of experts, 1 to {MAX_EXPERTS}")
    return max((experts - 1).bit_length(), 1)


def routing_capacity(rows: int, tokens: int, max_real_tokens: int = 0) -> int:
    """The most real tokens a micro-batch `[rows, tokens]` may hold; `max_real_tokens` 0: no further limit."""
    return min(max_real_tokens, rows * tokens) if max_real_tokens else rows * tokens


def routing_fields(
    encoding: str,
    *,
    rows: int,
    tokens: int,
    max_real_tokens: int = 0,
    layers: int,
    top_k: int,
    experts: int = 0,
) -> Specs:
    """The fields of routing in this encoding, name → (dtype, shape), in slot order.

    Raises `LayoutError` for an unknown encoding, for sizes below 1, for `experts` unknown or beyond int16 where ids
    are packed, and where int32 row offsets could not count the real tokens.
    """
    if encoding not in ROUTING_ENCODINGS:
        raise LayoutError(f"routing_encoding = {encoding!r}; it is one of {', '.join(ROUTING_ENCODINGS)}")
    if min(rows, tokens, layers, top_k) < 1:
        raise LayoutError(
            f"routing of {rows} rows x {tokens} tokens, {layers} layers x top-{top_k}; give at least 1 of each"
        )
    if encoding == "dense":
        return {DENSE: ("int16", (rows, tokens, layers, top_k))}
    capacity = routing_capacity(rows, tokens, max_real_tokens)
    if capacity > _MAX_INT32:
        raise LayoutError(
            f"{capacity} real tokens in a micro-batch; routing_encoding = {encoding} counts to {_MAX_INT32}; set "
            "max_real_tokens, or use fewer rows"
        )
    offsets: Specs = {OFFSETS: ("int32", (rows + 1,))}
    if encoding == "ragged":
        return {RAGGED: ("int16", (capacity, layers, top_k)), **offsets}
    return {
        PACKED: ("uint8", (_whole_bytes(capacity * layers * top_k * id_bits(experts)),)),
        VALIDITY: ("uint8", (_whole_bytes(capacity * layers),)),
        **offsets,
    }


def token_nbits(encoding: str, *, layers: int, top_k: int, experts: int = 0) -> int:
    """Bits that the routing of one real token takes in this encoding, row offsets not counted."""
    if encoding == "ragged_packed":
        return layers * (top_k * id_bits(experts) + 1)
    return layers * top_k * 16


def _whole_bytes(bits: int) -> int:
    return -(-bits // 8)
