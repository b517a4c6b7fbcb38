"""The wire form of the routing encodings, made the obvious way with numpy: what native code is compared with."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]


def pack_groups(dense: Array, bits: int) -> tuple[Array, Array]:
    """int16 `[8 * groups, layers, top_k]` → ids uint8 `[groups, layers, top_k, bits]`, validity `[groups, layers]`."""
    groups, (layers, top_k) = len(dense) // 8, dense.shape[1:]
    grouped = dense.reshape(groups, 8, layers, top_k).astype(np.int64)
    ids = np.where(grouped < 0, 0, grouped)
    each_bit = ids[..., None] >> np.arange(bits) & 1  # [groups, 8, layers, top_k, bits]
    stream = each_bit.transpose(0, 2, 3, 1, 4).reshape(groups, layers, top_k, 8 * bits).astype(np.uint8)
    validity = np.packbits(grouped[..., 0] >= 0, axis=1, bitorder="little")[:, 0]
    return np.packbits(stream, axis=-1, bitorder="little"), validity


def whole_groups(dense: Array, tokens: int) -> Array:
    """`dense` with unset tokens at the end, `tokens` in all."""
    out = np.full((tokens, *dense.shape[1:]), -1, np.int16)
    out[: len(dense)] = dense
    return out


def held(dense: Array, bits: int) -> bytes:
    """What `pack_routing` makes."""
    ids, validity = pack_groups(whole_groups(dense, -(-len(dense) // 8) * 8), bits)
    return ids.tobytes() + validity.tobytes()


def random_routing(dice: np.random.Generator, tokens: int, layers: int, top_k: int, experts: int) -> Array:
    """Distinct ids in each choice, one choice of four unset, the highest id among them."""
    order = dice.random((tokens, layers, experts)).argsort(axis=-1)[..., :top_k].astype(np.int16)
    order[dice.random((tokens, layers)) < 0.25] = -1
    return order
