"""``OptaxEngine`` trains, saves and restores any registered pytree of floating-point arrays, and names what is none."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from shmstage.errors import EngineError
from shmstage.trainer.digests import param_digest
from shmstage.trainer.model_tree import state_shardings
from shmstage.trainer.optax_engine import OptaxEngine

BATCH = {"x": np.ones((4, 8), np.float32), "y": np.arange(4, dtype=np.float32)}
Apply = Callable[[Any, jax.Array], jax.Array]


class Pair(NamedTuple):
    w: Any
    b: Any


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Layer:
    w: Any
    b: Any
    activation: str = dataclasses.field(default="tanh", metadata={"static": True})


class Perceptron(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.layers = nnx.List([nnx.Linear(8, 4, rngs=rngs), nnx.Linear(4, 1, rngs=rngs)])
        self.dropout = nnx.Dropout(0.0, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.layers[1](self.dropout(nnx.relu(self.layers[0](x))))


def weights() -> np.ndarray[Any, Any]:
    return np.linspace(-1, 1, 8, dtype=np.float32)[:, None]


def linear(params: Any, x: jax.Array) -> jax.Array:
    return x @ params.w + params.b


def containers() -> tuple[Any, Apply]:
    out = Layer(np.ones((1, 1), np.float32), np.float32(0))
    tree = [Pair(weights(), np.zeros(1, np.float32)), (None, {"out": out})]
    return tree, lambda tree, x: linear(tree[1][1]["out"], jnp.tanh(linear(tree[0], x)))


def state_of_nnx() -> tuple[Any, Apply]:
    structure, params, rest = nnx.split(Perceptron(nnx.Rngs(0)), nnx.Param, ...)
    return params, lambda params, x: nnx.merge(structure, params, rest)(x)


def module_of_equinox() -> tuple[Any, Apply]:
    params, static = eqx.partition(eqx.nn.MLP(8, 1, 4, 1, key=jax.random.key(0)), eqx.is_inexact_array)
    return params, lambda params, x: jax.vmap(eqx.combine(params, static))(x)


TREES: dict[str, tuple[Callable[[], tuple[Any, Apply]], list[str]]] = {
    "containers": (containers, ["0/w", "0/b", "1/1/out/w", "1/1/out/b"]),
    "nnx state": (state_of_nnx, [f"layers/{n}/{kind}/value" for n in (0, 1) for kind in ("bias", "kernel")]),
    "equinox module": (module_of_equinox, [f"layers/{n}/{kind}" for n in (0, 1) for kind in ("weight", "bias")]),
}


def engine_of(params: Any, apply: Apply, optimizer: Any, **others: Any) -> OptaxEngine:
    def loss_fn(params: Any, batch: Any) -> tuple[jax.Array, jax.Array, dict[str, jax.Array]]:
        return jnp.square(apply(params, batch["x"])[:, 0] - batch["y"]).sum(), jnp.float32(4), {}

    return OptaxEngine(loss_fn, params, optimizer, **others)


def train(engine: OptaxEngine) -> float:
    for _ in range(2):
        engine.fwd_bwd({name: jnp.array(value) for name, value in BATCH.items()})
    engine.update()
    return float(engine.metrics()["loss"])


def save(engine: OptaxEngine) -> None:
    snapshot = engine.save(1, {})
    snapshot.copy_to_host()
    snapshot.write()


@pytest.mark.slow
@pytest.mark.parametrize("kind", TREES)
def test_a_tree_is_trained_saved_and_restored_as_what_it_is(kind: str, tmp_path: Path) -> None:
    make, names = TREES[kind]
    params, apply = make()
    # masks and schedules see the tree as it is
    optimizer = optax.chain(
        optax.clip_by_global_norm(1.0), optax.adamw(1e-2, mask=lambda tree: jax.tree.map(lambda p: p.ndim > 1, tree))
    )
    first = engine_of(params, apply, optimizer, checkpoint_dir=tmp_path)
    losses = [train(first) for _ in range(3)]
    assert losses[2] < losses[1] < losses[0]
    save(first)
    second = engine_of(params, apply, optimizer, checkpoint_dir=tmp_path)
    assert param_digest(second) != param_digest(first)
    assert second.restore() == {"step": 1}
    assert list(second.weights()) == names
    structures = [jax.tree.structure((engine._params, engine._opt_state)) for engine in (first, second)]
    assert structures[0] == structures[1]
    assert train(second) == train(first)
    assert param_digest(second) == param_digest(first)
    assert second._programs.update._cache_size() == 1


@pytest.mark.slow
def test_random_keys_in_the_optimizers_state_go_on_where_they_were(tmp_path: Path) -> None:
    noisy = optax.chain(optax.add_noise(0.1, 0.5, 7), optax.sgd(0.01))
    params = Pair(weights(), np.zeros(1, np.float32))
    first, second = (engine_of(params, linear, noisy, checkpoint_dir=tmp_path) for _ in range(2))
    train(first)
    save(first)
    second.restore()
    assert jax.random.key_impl(second._opt_state[0].rng_key) == jax.random.key_impl(first._opt_state[0].rng_key)
    assert train(second) == train(first)
    assert param_digest(second) == param_digest(first)


@pytest.mark.slow
def test_a_python_number_is_a_parameter_and_nothing_is_compiled_twice_for_it() -> None:
    engine = engine_of(Pair(weights(), 0.5), linear, optax.sgd(0.1))
    for _ in range(2):
        train(engine)
    assert engine._programs.forward._cache_size() == engine._programs.update._cache_size() == 1
    assert engine.weights()["b"].dtype == jnp.float32


REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "whole equinox module": (
        lambda: eqx.nn.MLP(8, 1, 4, 1, key=jax.random.key(0)),
        r"parameter activation is a custom_jvp, no array; .*eqx\.partition\(model, eqx\.is_inexact_array\)",
    ),
    "nnx state with its random keys": (
        lambda: nnx.state(Perceptron(nnx.Rngs(0))),
        r"parameter dropout/rngs/count/value is uint32, want floating point; .*nnx\.split\(model, nnx\.Param",
    ),
    "key": (lambda: {"k": jax.random.key(0)}, r"parameter k is key<fry>, want floating point"),
    "integer": (lambda: {"n": 3}, r"parameter n is a int, no array"),
    "integers": (lambda: {"n": np.arange(3)}, r"parameter n is int64, want floating point"),
    "shape": (lambda: {"w": jax.ShapeDtypeStruct((2,), jnp.float32)}, r"parameter w is a ShapeDtypeStruct, no array"),
    "one name twice": (lambda: {"a/b": np.ones(2), "a": {"b": np.ones(2)}}, r"two parameters are called a/b; .*'/'"),
    "nothing": (lambda: {"layers": [None]}, r"params dict has no arrays: there is nothing to train"),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_what_cannot_be_trained_is_named_before_anything_is_compiled(kind: str) -> None:
    make, said = REFUSED[kind]
    with pytest.raises(EngineError, match=said):
        engine_of(make(), linear, optax.sgd(0.1))


def test_state_lies_with_the_parameter_that_its_path_ends_in_if_the_shape_is_its() -> None:
    """The longest path wins; shapes alone decide nothing."""

    @dataclasses.dataclass(frozen=True)
    class At:
        shape: tuple[int, ...]
        sharding: Any = None

    params = {"w": At((2, 3), "w"), "layer": {"w": At((2, 3), "layer/w")}}
    moments = {"w": At((2, 3)), "layer": {"w": At((2, 3))}}
    factored = {"w": At((2,)), "layer": {"w": At((3,))}}
    state = (Pair(moments, factored), {"count": At(()), "v": At((2, 3))}, ())
    found: Any = state_shardings(state, params, "otherwise")
    assert found[0].w == {"w": "w", "layer": {"w": "layer/w"}}
    assert found[0].b == {"w": "otherwise", "layer": {"w": "otherwise"}}
    assert found[1:] == ({"count": "otherwise", "v": "otherwise"}, ())
