"""What the worker asks of a training engine. Implement this to plug in your own; ``OptaxEngine`` is ready-made.

An engine is called by one thread and must not wait for the device inside ``fwd_bwd`` or ``update``: it dispatches
and returns. Completion is what its *tokens* say.
"""

from __future__ import annotations

import inspect
from collections.abc import Collection, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

import jax
import numpy as np

from shmstage.memory.layout import Layout

Batch = Mapping[str, jax.Array]
"""Field name → device array ``[rows, tokens, ...]``. An engine drops its references when it has dispatched.

It must not donate them to a program: that an upload is over, and its slot free, is told by these arrays. On a device
that is not the host a donated one fails the step (``TrainerError``).
"""


TRAIN, EVALUATE, SCORE = "train", "evaluate", "score"
"""What micro-batches of a layout are used for: what ``compile`` can be asked for."""


class Snapshot(Protocol):
    """A checkpoint being taken: references first, bytes of its own next, durable last."""

    def copy_to_host(self) -> None:
        """Copy the referenced arrays to bytes the host owns, waiting until they are computed, and drop them.

        Runs on the snapshot thread and must not dispatch a device program. Raises if the arrays' computation failed.
        """

    def write(self) -> Mapping[str, object]:
        """Make the copy durable and return plain facts about it. Runs on the snapshot thread."""


class TrainEngine(Protocol):
    """Seven methods every engine has. ``OptionalMethods`` lists what it may have besides."""

    def shardings(self, layout: Layout) -> Mapping[str, jax.sharding.Sharding]:
        """The sharding of every field of ``layout``."""

    def fwd_bwd(self, batch: Batch) -> jax.Array | None:
        """Dispatch forward and backward of one micro-batch and add its gradients, undivided, to the step's.

        Returns a token: a fresh output array of that work, never an accumulator, never donated; ``None`` from an
        engine that has no tokens and returns only when the work is done.
        """

    def update(self) -> jax.Array | None:
        """Dispatch one optimizer update: divide once by the summed denominator, step, zero the accumulators."""

    def metrics(self) -> Mapping[str, jax.Array]:
        """Scalars of the last update, fresh outputs: ``loss``, ``grad_norm``, ``denominator``, others."""

    def save(self, step: int, metadata: Mapping[str, object]) -> Snapshot:
        """References to the state as the last update left it; no copy, no wait.

        Called inside a step too, unless ``snapshots`` is False: the gradients accumulated there are no part of it.
        ``metadata`` is complete when ``copy_to_host`` is called, not before: it then says when the update landed
        (``landed_ns`` on the monotonic clock, ``landed_wall_s``). Keep the reference and read it in ``write``.
        In ``checkpoint_dir`` whatever does not begin with a dot is a checkpoint to ``--resume``; name it by its step
        (``12``, ``12.npz``), as ``status`` and metrics show it, and what is not complete yet with a dot before it.
        """

    def restore(self) -> Mapping[str, object] | None:
        """Load the highest complete checkpoint and return its metadata with ``"step"`` added.

        An engine may take ``at_most: int | None = None``, the highest step to look at. A restart passes it, so that a
        step whose line was not written is trained again; an engine without it leaves a hole in ``steps.jsonl``.
        Checkpoints of later steps are then removed, so that no later restart takes them.
        ``None`` if there is none; the parameters then stay as they are. Accumulated gradients, denominators and
        metrics are zero afterwards in both cases.
        """

    def weights(self) -> Mapping[str, jax.Array]:
        """References to the parameters as the last update left them, by path, in tree order."""


#: methods of ``OptionalMethods`` that settings depend on; ``info`` says which the engine has
OPTIONAL = ("decodes_routing", "eval_step", "per_token_logps", "settle")


def optional_of(engine: TrainEngine) -> list[str]:
    """Those of ``OPTIONAL`` that an engine has."""
    return [name for name in OPTIONAL if getattr(engine, name, None)]


def restored(engine: TrainEngine, at_most: int | None) -> Mapping[str, object] | None:
    """``engine.restore``, bounded if the engine can: one that cannot takes its newest checkpoint."""
    bounded = at_most is not None and "at_most" in inspect.signature(engine.restore).parameters
    return engine.restore(at_most=at_most) if bounded else engine.restore()  # type: ignore[call-arg]


def compile_for(engine: TrainEngine, example: Mapping[str, jax.ShapeDtypeStruct], uses: Sequence[str]) -> None:
    """``engine.compile`` for what micro-batches of one layout are used for; does nothing if the engine has none.

    One that takes no ``uses`` compiles what it trains with.
    """
    compile_programs = getattr(engine, "compile", None)
    if compile_programs is None:
        return
    if "uses" in inspect.signature(compile_programs).parameters:
        compile_programs(example, uses=frozenset(uses))
    elif TRAIN in uses:
        compile_programs(example)


class OptionalMethods(Protocol):
    """What an engine may have; the worker looks for each by name."""

    #: False: the forward pass changes state, so every snapshot is waited for before the command returns
    snapshots: bool
    #: True: it decodes routing (``trainer/decode.py``); without it ``routing_encoding`` other than dense is refused
    decodes_routing: bool

    def compile(self, example: Mapping[str, jax.ShapeDtypeStruct], uses: Collection[str] = (TRAIN,)) -> None:
        """Compile the programs for micro-batches of these shapes, dtypes and shardings. May wait.

        ``uses`` may be left out of the signature: which of ``"train"``, ``"evaluate"`` and ``"score"`` will be asked
        for. What is not compiled here is compiled at its first use, which can lie inside a boundary.
        """

    def put(self, views: Mapping[str, np.ndarray[Any, Any]], shardings: Mapping[str, jax.sharding.Sharding]) -> Batch:
        """Issue the upload of one micro-batch's host arrays; ``jax.device_put`` where there is none.

        Returns at once. ``views`` lie in the slot and are read until the arrays are ready, and never afterwards. Asked
        only if none of ``shardings`` is on the host's own devices, for micro-batches to be trained, and by a trainer of
        one host.
        """

    def settle(self, upto: int) -> Mapping[int, jax.Array] | None:
        """Read the overflow flags through the ``upto``-th ``fwd_bwd`` of this step (from 1), dispatch replays.

        Returns the replays' tokens by the number of the ``fwd_bwd``; a micro-batch is over when its replay's token is.
        After it returns, those micro-batches' arrays are not read by any program not yet dispatched. Only engines that
        may overflow have it.
        """

    def per_token_logps(self, batch: Batch, role: str) -> jax.Array:
        """Dispatch scoring: float32 ``[rows, tokens]``. ``role`` is ``"actor"`` or ``"reference"``."""

    def eval_step(self, batch: Batch) -> Mapping[str, jax.Array]:
        """Dispatch an evaluation of one micro-batch: named scalars."""

    def annotate(self, what: str, step: int, request_id: str) -> AbstractContextManager[object]:
        """A range for profilers around what the command thread does for one micro-batch, entered at once.

        ``what`` is ``"stage"`` (upload issued, on CPU: copied), ``"fwd_bwd"`` or ``"update"`` (dispatched).
        """

    def close(self) -> None:
        """Give up threads and files."""
