"""The three encodings of `routed_experts` in a slot: which fields they are, of which dtype and shape.

| encoding        | fields                                                                                           |
|-----------------|--------------------------------------------------------------------------------------------------|
| `dense`         | `routed_experts` int16 `[rows, tokens, layers, top_k]`, -1 = unset                               |
| `ragged`        | `routed_experts_ragged` int16 `[capacity, layers, top_k]`, -1 = unset                            |
| `ragged_packed` | `routed_experts_packed` uint8 `[capacity / 8, layers, top_k, bits]`, 0 where unset               |
|                 | `routed_experts_validity` uint8 `[capacity / 8, layers]`: bit j = token j of the group is set    |
| both ragged     | `routed_experts_offsets` int32 `[rows + 1]`: row r has tokens `offsets[r]` to `offsets[r + 1]`   |

The ragged ones hold a micro-batch's real tokens only, row by row, each row by position; past the last of them -1, or 0
where ids are packed. A *group* is 8 consecutive tokens: the 8 ids of one (layer, k) lie in `bits` = `id_bits(experts)`
bytes as one little-endian integer, token j's in bits `j * bits` to `(j + 1) * bits - 1`. `capacity` is the most real
tokens a micro-batch may hold: `max_real_tokens`, or rows x tokens without that limit, in whole groups. All that is
static lies in the shapes.

Where a micro-batch is divided among hosts and devices, its ragged forms are too: `tiles` = (R, T) cuts rows into R
parts and tokens into T, every tile is encoded as a micro-batch of its own, and the fields have two leading axes,
`[R, T, ...]`.
"""

from __future__ import annotations

from collections.abc import Iterable

from shmstage.errors import LayoutError, SettingsError
from shmstage.settings import MAX_EXPERTS, ROUTING_ENCODINGS

DENSE = "routed_experts"
RAGGED = "routed_experts_ragged"
PACKED = "routed_experts_packed"
VALIDITY = "routed_experts_validity"
OFFSETS = "routed_experts_offsets"
#: encoding → its fields, in slot order
NAMES: dict[str, tuple[str, ...]] = {
    "dense": (DENSE,),
    "ragged": (RAGGED, OFFSETS),
    "ragged_packed": (PACKED, VALIDITY, OFFSETS),
}
#: tokens whose ids are packed together: 8 ids of b bits are b whole bytes
GROUP = 8

_MAX_INT32 = (1 << 31) - 1

Specs = dict[str, tuple[str, tuple[int, ...]]]


def id_bits(experts: int) -> int:
    """Bits of one packed expert id, ceil(log2 experts), at least 1. Raises `LayoutError` if that is not known."""
    if not 1 <= experts <= MAX_EXPERTS:
        raise LayoutError(f"experts = {experts}; packed routing needs the number of experts, 1 to {MAX_EXPERTS}")
    return max((experts - 1).bit_length(), 1)


def routing_capacity(rows: int, tokens: int, max_real_tokens: int = 0) -> int:
    """Room for the most real tokens a micro-batch `[rows, tokens]` may hold, in whole groups.

    `max_real_tokens` 0: no further limit.
    """
    most = min(max_real_tokens, rows * tokens) if max_real_tokens else rows * tokens
    return -(-most // GROUP) * GROUP


def encoding_of(names: Iterable[str]) -> str | None:
    """The encoding that fields of these names are of; `None` where there is no routing among them."""
    present = frozenset(names)
    return next((encoding for encoding, fields in NAMES.items() if fields[0] in present), None)


def is_encoded(names: Iterable[str]) -> bool:
    """Whether fields of these names hold routing in another form than dense."""
    return encoding_of(names) not in (None, "dense")


def experts_for(encoding: str, *, asked: int, said: int, who: str) -> int:
    """The number of experts to encode for: `asked` for by the settings, else as `who` (the input) said; 0: unknown.

    Raises `SettingsError` where it is needed and nobody knows it, and where the input has more than the settings.
    """
    if asked and said > asked:
        raise SettingsError(f"experts = {asked}: {who} chooses from {said}; set experts = {said} or leave it out")
    if encoding == "ragged_packed" and not (asked or said):
        raise SettingsError(
            f"routing_encoding = {encoding} needs the number of experts, which {who} does not say; set experts (at "
            f'most {MAX_EXPERTS}), or use routing_encoding = "ragged"'
        )
    return asked or said


def routing_fields(
    encoding: str,
    *,
    rows: int,
    tokens: int,
    max_real_tokens: int = 0,
    layers: int,
    top_k: int,
    experts: int = 0,
    tiles: tuple[int, int] | None = None,
) -> Specs:
    """The fields of routing in this encoding, name → (dtype, shape), in slot order.

    Raises `LayoutError` for an unknown encoding, for sizes below 1, for `experts` unknown or beyond int16 where ids
    are packed, where int32 row offsets could not count the real tokens, and for tiles that do not divide the rows or
    the tokens (in any encoding: dense routing is cut there too).
    """
    if encoding not in ROUTING_ENCODINGS:
        raise LayoutError(f"routing_encoding = {encoding!r}; it is one of {', '.join(ROUTING_ENCODINGS)}")
    if min(rows, tokens, layers, top_k) < 1:
        raise LayoutError(
            f"routing of {rows} rows x {tokens} tokens, {layers} layers x top-{top_k}; give at least 1 of each"
        )
    tile_rows, tile_tokens = _tile(rows, tokens, tiles or (1, 1))
    if encoding == "dense":
        return {DENSE: ("int16", (rows, tokens, layers, top_k))}
    capacity = routing_capacity(tile_rows, tile_tokens, max_real_tokens)
    if capacity > _MAX_INT32:
        raise LayoutError(
            f"{capacity} real tokens in a micro-batch; routing_encoding = {encoding} counts to {_MAX_INT32}; set "
            "max_real_tokens, or use fewer rows"
        )
    each = tiles or ()
    offsets: Specs = {OFFSETS: ("int32", (*each, tile_rows + 1))}
    if encoding == "ragged":
        return {RAGGED: ("int16", (*each, capacity, layers, top_k)), **offsets}
    return {
        PACKED: ("uint8", (*each, capacity // GROUP, layers, top_k, id_bits(experts))),
        VALIDITY: ("uint8", (*each, capacity // GROUP, layers)),
        **offsets,
    }


def _tile(rows: int, tokens: int, tiles: tuple[int, int]) -> tuple[int, int]:
    """Rows and tokens of one tile."""
    for name, size, count in (("rows", rows, tiles[0]), ("tokens", tokens, tiles[1])):
        if count < 1 or size % count:
            raise LayoutError(f"{name} = {size} in {count} parts; give a multiple of {max(count, 1)}")
    return rows // tiles[0], tokens // tiles[1]


def token_nbits(encoding: str, *, layers: int, top_k: int, experts: int = 0) -> int:
    """Bits that the routing of one real token takes in this encoding, row offsets not counted."""
    if encoding == "ragged_packed":
        return layers * (top_k * id_bits(experts) + 1)
    return layers * top_k * 16
