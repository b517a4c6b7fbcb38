"""From a micro-batch's fields to the pytree that is trained on, and where each leaf of it lies."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, final

import jax
import numpy as np
from jax.sharding import Sharding, SingleDeviceSharding

from shmstage.errors import LayoutError, shown
from shmstage.memory.handle import Handle
from shmstage.trainer.device_buffers import Readable
from shmstage.trainer.jax_seam import check_fits, struct_like
from shmstage.trainer.reporting import describe


@final
@dataclass(frozen=True, slots=True)
class Arrangement:
    """What one layout's micro-batches become: ``names`` are their fields in the order of the tree's leaves."""

    names: tuple[str, ...]
    tree: jax.tree_util.PyTreeDef
    shardings: Mapping[str, Sharding]

    @classmethod
    def of(cls, views: Mapping[str, np.ndarray[Any, Any]], into: Callable[..., Any], placed: Any) -> Arrangement:
        """``into(**fields)`` is called with shapes (``jax.ShapeDtypeStruct``), ``placed`` is what
        ``DoubleBuffer`` takes as ``sharding``. Raises ``LayoutError``.
        """
        structs = {name: struct_like(view) for name, view in views.items()}
        try:
            tree = into(**structs)
        except (TypeError, LookupError, AttributeError) as error:
            raise LayoutError(
                f"into={_called(into)} does not take the fields {list(views)}: {describe(error)}; give a callable that "
                "takes them by name and returns a pytree, with **rest where some of them are not wanted"
            ) from error
        leaves, treedef = jax.tree.flatten(tree)
        names = _names(leaves, structs, into)
        shardings = _shardings(placed(tree) if callable(placed) else placed, tree, names)
        for name, sharding in shardings.items():
            _refuse_misfit(name, structs[name].shape, sharding)
        return cls(names, treedef, shardings)

    def chosen(self, lease: Readable) -> Readable:
        """The lease with the fields of the tree and no others."""
        return _Chosen(lease, tuple(self.shardings))

    def build(self, arrays: Mapping[str, jax.Array]) -> Any:
        """The tree."""
        return jax.tree.unflatten(self.tree, [arrays[name] for name in self.names])


@final
@dataclass(frozen=True, slots=True)
class _Chosen:
    lease: Readable
    names: tuple[str, ...]

    @property
    def handle(self) -> Handle:
        return self.lease.handle

    @property
    def views(self) -> Mapping[str, np.ndarray[Any, Any]]:
        # not kept: a view that outlives the lease keeps the pool mapped
        found = {**self.lease.views, **self.lease.late_views}
        return {name: found[name] for name in self.names}

    @property
    def late_views(self) -> Mapping[str, np.ndarray[Any, Any]]:
        return {}

    def check(self) -> None:
        self.lease.check()

    def end(self) -> None:
        self.lease.end()


def _names(leaves: list[Any], structs: Mapping[str, Any], into: Callable[..., Any]) -> tuple[str, ...]:
    by_identity = {id(struct): name for name, struct in structs.items()}
    for leaf in leaves:
        if id(leaf) not in by_identity:
            raise LayoutError(
                f"into={_called(into)} put a {type(leaf).__name__} into the tree, which is none of the fields "
                f"{list(structs)}: it arranges them and computes nothing; a class of your own has to be registered "
                "as a pytree (jax.tree_util.register_dataclass, flax.struct, equinox.Module, NamedTuple)"
            )
    if not leaves:
        raise LayoutError(f"into={_called(into)} keeps none of the fields {list(structs)}; keep one at least")
    return tuple(by_identity[id(leaf)] for leaf in leaves)


def _shardings(prefix: Any, tree: Any, names: tuple[str, ...]) -> dict[str, Sharding]:
    """By field. A leaf of ``prefix`` is for the whole subtree below it."""
    prefix = jax.tree.map(_sharding, prefix, is_leaf=lambda leaf: leaf is None)
    try:
        full = jax.tree.map(lambda place, below: jax.tree.map(lambda _: place, below), prefix, tree)
    except ValueError as error:
        raise LayoutError(
            f"sharding is no tree prefix of the micro-batch {jax.tree.structure(tree)}: {describe(error)}; give one "
            "jax.sharding.Sharding for all, or the same nesting down to where one serves for everything below"
        ) from error
    found: dict[str, Sharding] = {}
    for name, placed in zip(names, jax.tree.leaves(full), strict=True):
        if found.setdefault(name, placed) != placed:
            raise LayoutError(f"field {name!r} is in the tree twice, as {found[name]} and as {placed}; place it alike")
    return found


def _refuse_misfit(name: str, shape: tuple[int, ...], sharding: Sharding) -> None:
    """Now: what ``device_put`` says of it names no field, and the slot's copy is under way by then."""
    try:
        check_fits(shape, sharding)
    except ValueError as error:
        raise LayoutError(
            f"field {name!r} {list(shape)} cannot lie as {sharding}: {describe(error)}; give it a sharding of at most "
            f"{len(shape)} axes whose sizes divide the field's, PartitionSpec() to have it whole on every device"
        ) from error


def _sharding(leaf: Any) -> Sharding:
    if isinstance(leaf, Sharding):
        return leaf
    if leaf is None or isinstance(leaf, jax.Device):
        return SingleDeviceSharding(leaf or jax.local_devices()[0])
    raise LayoutError(
        f"a {type(leaf).__name__} cannot place a field: {shown(leaf)}; give a jax.sharding.Sharding, for example "
        "jax.sharding.NamedSharding(mesh, PartitionSpec('data'))"
    )


def _called(into: Callable[..., Any]) -> str:
    return getattr(into, "__qualname__", None) or repr(into)
