"""Parameters and optimizer state as pytrees: what may be trained, what a leaf is called, where state lies on a mesh.

Any registered pytree will do: dicts, dataclasses, NamedTuples, equinox modules, ``nnx.State``.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from shmstage.errors import EngineError

PyTree = Any
Shardings = Any

REMEDY = (
    "give OptaxEngine what is trained and have loss_fn close over the rest: "
    "eqx.partition(model, eqx.is_inexact_array), nnx.split(model, nnx.Param, ...)"
)


def named_leaves(tree: PyTree) -> list[tuple[str, Any]]:
    """Every leaf with its path, as ``layers/0/weight``, in tree order."""
    leaves, _ = jax.tree_util.tree_flatten_with_path(tree)
    return [(jax.tree_util.keystr(path, simple=True, separator="/"), leaf) for path, leaf in leaves]


def check_trainable(params: PyTree) -> None:
    """Raise ``EngineError`` for a leaf that no gradient can be taken of, for two of one name, and for none at all."""
    seen = set[str]()
    for name, leaf in named_leaves(params):
        if not isinstance(leaf, (jax.Array, np.ndarray, np.generic, float)):
            raise EngineError(f"parameter {name} is a {type(leaf).__name__}, no array; {REMEDY}")
        dtype = leaf.dtype if isinstance(leaf, jax.Array) else np.asarray(leaf).dtype
        if not jnp.issubdtype(dtype, jnp.floating):
            raise EngineError(f"parameter {name} is {dtype}, want floating point; {REMEDY}")
        if name in seen:
            raise EngineError(f"two parameters are called {name}; use no '/' in the keys of params")
        seen.add(name)
    if not seen:
        raise EngineError(f"params {type(params).__name__} has no arrays: there is nothing to train")


def state_shardings(state: PyTree, params: PyTree, otherwise: jax.sharding.Sharding) -> Shardings:
    """Where each leaf of an optimizer's state belongs: with its parameter, or ``otherwise``.

    A leaf is a parameter's if its path ends in the parameter's and the shapes are equal: the first moment of ``w`` lies
    at ``.../mu/w``. The longest such path wins. Factored moments and counts are nobody's.
    """
    places = dict(jax.tree_util.tree_flatten_with_path(params)[0])

    def place(path: tuple[Any, ...], leaf: Any) -> jax.sharding.Sharding:
        for begin in range(len(path) + 1):
            param = places.get(path[begin:])
            if param is not None:
                sharding: jax.sharding.Sharding = param.sharding
                return sharding if param.shape == leaf.shape else otherwise
        return otherwise

    return jax.tree_util.tree_map_with_path(place, state)


def without_keys(state: PyTree) -> PyTree:
    """The same tree with the bits of random keys in their place: what can be copied and written."""
    return jax.tree.map(lambda leaf: jax.random.key_data(leaf) if _is_key(leaf) else leaf, state)


def with_keys(state: PyTree, like: PyTree) -> PyTree:
    """The inverse of ``without_keys``; ``like`` is a tree that has the keys."""

    def restored(leaf: jax.Array, like: jax.Array) -> jax.Array:
        return jax.random.wrap_key_data(leaf, impl=jax.random.key_impl(like)) if _is_key(like) else leaf

    return jax.tree.map(restored, state, like)


def _is_key(leaf: jax.Array) -> bool:
    return jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)
