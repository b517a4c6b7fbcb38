"""Tunix's payload of our packed fields: what its loss functions take.

    from shmstage.adapters.tunix import TunixPayload
    from tunix.rl.algo_core import grpo_loss_fn

    example_of = TunixPayload()                                      # makes tunix.rl.common.TrainExample
    loss, metrics = grpo_loss_fn(model, example_of(batch), config, pad_id=0, eos_id=1)

Read from ``google-tunix`` 0.1.7, ``rl/common.py`` (``TrainExample``, ``process_ids``) and ``rl/utils.py``
(``pack_sequences``): packed, a payload has prompts and completions in ``completion_ids``, its prompt arrays are
``[rows, 0]``, everything per token is ``[rows, tokens]`` and stands at its token. Those are our names and our form: the
arrays are handed over as they are. Nothing of the package is imported before a payload class is looked for.
"""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Collection, Mapping
from importlib import metadata
from typing import Any, final

import jax
import numpy as np

from shmstage.errors import InputError, LayoutError, MissingExtraError
from shmstage.packing.fields import OLD_LOGPS, REF_LOGPS, SEGMENT_IDS
from shmstage.packing.routing import DENSE, NAMES, encoding_of, is_encoded
from shmstage.trainer.decode import dense_routing, in_place_of_encoded

IDS, PROMPTS = "completion_ids", ("prompt_ids", "prompt_mask")
TRAIN_EXAMPLE = "tunix.rl.common:TrainExample"
#: where to look for one with other fields: in 0.1.7 the first two, later the last
ELSEWHERE = ("tunix.rl.ppo.ppo_learner:TrainExample", "tunix.experimental.common.datatypes:RLTrainerPayload")
#: may be absent, which tunix writes as None
NULLABLE = (REF_LOGPS, OLD_LOGPS)

Batch = Mapping[str, Any]


@final
class TunixPayload:
    """Call it with packed fields, outside a jitted function or in one; arrays are neither copied nor changed.

    ``payload_class`` is a class or ``"module:Class"``: PPO's fields need
    ``"tunix.rl.ppo.ppo_learner:TrainExample"``. A field that it lacks is refused with its name, never dropped; ``omit``
    names fields that are to be left out all the same. ``constants`` are values of the payload's other fields.
    Encoded routing is decoded if the class has ``routed_experts``.
    """

    def __init__(
        self, payload_class: type | str = TRAIN_EXAMPLE, *, omit: Collection[str] = (), **constants: Any
    ) -> None:
        """Raises ``MissingExtraError`` without tunix, ``InputError`` for a class that is not there or no payload."""
        self._class = _find(payload_class) if isinstance(payload_class, str) else payload_class
        if not dataclasses.is_dataclass(self._class):
            raise InputError(f"{_name(self._class)} is no dataclass; give a payload class, for example {TRAIN_EXAMPLE}")
        self._fields = {field.name: field for field in dataclasses.fields(self._class) if field.init}
        self._omit = frozenset(omit)
        self._constants = constants
        self._refuse_unknown(constants, "do not give it to TunixPayload")
        self._prompts: dict[tuple[str, int, jax.sharding.Sharding], jax.Array] = {}
        self._decode = jax.jit(dense_routing)

    @property
    def payload_class(self) -> type:
        return self._class

    def __call__(self, batch: Batch) -> Any:
        """Raises ``LayoutError`` naming the fields that the class lacks, or that it needs and the batch has not."""
        fields = self._chosen(batch)
        names = _as_dense(fields)
        self._refuse_unknown(names, "leave out what does not matter with omit={unknown}")
        if is_encoded(fields):
            routed = (SEGMENT_IDS, *NAMES[encoding_of(fields) or "dense"])
            fields = in_place_of_encoded(fields, self._decode({name: fields[name] for name in routed}))
        if twice := [name for name in self._constants if name in fields]:
            raise LayoutError(
                f"{', '.join(map(repr, twice))} was given to TunixPayload and is a packed field, too; leave the packed "
                f"one out with omit={tuple(twice)}, or do not give the other"
            )
        prompts = {name: self._empty(name, fields[IDS]) for name in PROMPTS if name in self._fields and IDS in fields}
        values = {**prompts, **self._constants, **fields}
        for name, field in self._fields.items():
            if name not in values and _has_no_default(field):
                if name not in NULLABLE:
                    raise LayoutError(
                        f"{self._described()} needs {name!r}, which the packed fields {list(batch)} do not give; give "
                        f"its value to TunixPayload({name}=...), or take another payload class"
                    )
                values[name] = None
        return self._class(**values)

    def _chosen(self, batch: Batch) -> dict[str, Any]:
        omitted = set(self._omit)
        if DENSE in omitted:
            omitted.update(NAMES[encoding_of(batch) or "dense"])
        return {name: array for name, array in batch.items() if name not in omitted}

    def _refuse_unknown(self, names: Collection[str], otherwise: str) -> None:
        unknown = [name for name in names if name not in self._fields]
        if not unknown:
            return
        others = [other for other in ELSEWHERE if set(names) <= _fields_of(other)]
        remedy = f"take payload_class={others[0]!r}" if others else "take a version of it that has them"
        raise LayoutError(
            f"{self._described()} has no field {', '.join(map(repr, unknown))}; it has {', '.join(self._fields)}; "
            f"{remedy}, or {otherwise.format(unknown=tuple(unknown))}"
        )

    def _empty(self, name: str, ids: Any) -> Any:
        """int32 ``[rows, 0]``, lying where the ids lie. Each name has its own: a step may donate its payload."""
        if isinstance(ids, jax.core.Tracer) or not isinstance(ids, jax.Array):
            return ids[:, :0]
        key = (name, ids.shape[0], ids.sharding)
        if key not in self._prompts or self._prompts[key].is_deleted():
            self._prompts[key] = jax.device_put(np.zeros((ids.shape[0], 0), np.int32), ids.sharding)
        return self._prompts[key]

    def _described(self) -> str:
        return f"{_name(self._class)}{_version(self._class)}"


def _as_dense(names: Collection[str]) -> list[str]:
    """The names once encoded routing is decoded."""
    first, *others = NAMES[encoding_of(names) or "dense"]
    return [DENSE if name == first else name for name in names if name not in others]


def _has_no_default(field: dataclasses.Field[Any]) -> bool:
    return field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING


def _find(where: str) -> type:
    module, _, name = where.partition(":")
    try:
        found = getattr(importlib.import_module(module), name)
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] == "tunix" and _version_of("tunix") is None:
            raise MissingExtraError(f"{where} needs tunix; pip install google-tunix") from error
        raise InputError(f"{where} cannot be imported: no module named {error.name!r}; install it") from error
    except ImportError as error:  # one that tunix needs is there, but not as tunix wants it
        raise InputError(f"{where} cannot be imported: {error}; mend that, or give another class") from error
    except AttributeError as error:
        raise InputError(f"{module}{_version_of(module) or ''} has no {name!r}; give \"module:Class\"") from error
    if not isinstance(found, type):
        raise InputError(f"{where} is a {type(found).__name__}, not a class")
    return found


def _fields_of(where: str) -> set[str]:
    try:
        found = _find(where)
    except InputError:
        return set()
    return {field.name for field in dataclasses.fields(found)} if dataclasses.is_dataclass(found) else set()


def _name(of: type) -> str:
    return f"{of.__module__}.{of.__qualname__}"


def _version(of: type) -> str:
    return _version_of(of.__module__) or ""


def _version_of(module: str) -> str | None:
    """What follows a name of tunix in an error: which version is installed."""
    if module.partition(".")[0] != "tunix":
        return None
    try:
        return f" of google-tunix {metadata.version('google-tunix')}"
    except metadata.PackageNotFoundError:
        return None
