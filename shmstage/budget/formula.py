"""What a run needs, as named amounts of bytes. Pure: everything it knows is in ``Inputs``.

The pool's bytes come from the very code that makes one (``Layout``, ``Geometry``). What is not in it: activations and
temporaries of the model's own programs, compiled code, and what a user's source, engine or hooks keep for themselves.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from fractions import Fraction
from typing import Literal, final, get_args

from shmstage.budget.fields import MicrobatchFields
from shmstage.errors import LayoutError
from shmstage.memory.layout import MAX_NBYTES, Layout
from shmstage.memory.limits import format_nbytes
from shmstage.memory.mapping import Geometry
from shmstage.packing.journal import SEGMENT_NBYTES
from shmstage.packing.routing import DENSE, routing_fields

Scope = Literal["shm", "host", "device", "disk"]
SCOPES: tuple[Scope, ...] = get_args(Scope)
Moment = Literal["steady", "checkpoint", "restart"]
MOMENTS: tuple[Moment, ...] = get_args(Moment)
Platform = Literal["cpu", "accelerator"]

#: places of the weights pool (trainer/weights.py)
WEIGHTS_PLACES = 3
#: host copies of a snapshot at once: one is written, one waits, one is copied already (trainer/snapshots.py)
SNAPSHOT_COPIES = 3
#: steps whose trajectories are held: the one that is trained and the one that is packed ahead
HELD_STEPS = 2
_PAGE_NBYTES = 4096


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Inputs:
    """One host's share of a run; bytes are of one host, all its devices together.

    ``fill``: real tokens / (rows x tokens). ``held_input_nbytes``: an input that lies in memory as a whole (a bundle).
    ``journaled``: the source cannot be replayed. ``replay``: the engine runs micro-batches that overflowed again.
    ``process_nbytes``: what the processes take before they hold anything.
    """

    rows: int
    tokens: int
    fields: MicrobatchFields = field(default_factory=MicrobatchFields)
    evaluation: MicrobatchFields | None = None
    max_real_tokens: int = 0
    fill: Fraction = Fraction(1)
    slots: int = 3
    aux_slots: int = 1
    device_buffers: int = 2
    microbatches_per_step: int = 3
    steps: int | None = None
    checkpoint_every: int = 0
    max_held_nbytes: int = 0
    held_input_nbytes: int = 0
    journaled: bool = False
    weight_sync: bool = False
    reference: bool = False
    replay: bool = False
    param_nbytes: int = 0
    optimizer_nbytes: int = 0
    process_nbytes: int = 0
    hosts: int = 1
    platform: Platform = "cpu"

    @property
    def host_rows(self) -> int:
        """Rows of a micro-batch on one host."""
        return -(-self.rows // self.hosts)

    @property
    def real_tokens(self) -> int:
        """Most real tokens of a micro-batch on one host."""
        filled = -(-self.host_rows * self.tokens * self.fill.numerator // self.fill.denominator)
        return min(filled, self.max_real_tokens or filled)

    @property
    def capacity(self) -> int:
        """Real tokens a slot has room for where routing is ragged."""
        return self.max_real_tokens or self.real_tokens

    @property
    def state_nbytes(self) -> int:
        return self.param_nbytes + self.optimizer_nbytes


@final
@dataclass(frozen=True, slots=True)
class Amount:
    """Bytes with a name, where they lie, at each moment; ``formula`` in words. Not counted: told for comparison."""

    name: str
    scope: Scope
    formula: str
    steady: int
    checkpoint: int
    restart: int
    counted: bool = True

    @property
    def most(self) -> int:
        return max(self.steady, self.checkpoint, self.restart)


@final
@dataclass(frozen=True)
class Forecast:
    """``layout`` is that of a micro-batch to train, ``slot_nbytes`` what a slot takes for any, in whole pages."""

    inputs: Inputs
    layout: Layout
    slot_nbytes: int
    pool_nbytes: int
    amounts: tuple[Amount, ...]

    def total(self, moment: Moment, *scopes: Scope) -> int:
        """Bytes in these scopes at this moment."""
        counted = (amount for amount in self.amounts if amount.counted and amount.scope in scopes)
        return sum(getattr(amount, moment) for amount in counted)


def forecast(inputs: Inputs) -> Forecast:
    """What the run needs. Raises ``LayoutError`` where no pool can exist (sizes of 0, more than 2**47 bytes)."""
    layout = inputs.fields.layout(inputs.host_rows, inputs.tokens, inputs.capacity)
    layouts = [layout]
    if inputs.evaluation is not None:
        layouts.append(inputs.evaluation.layout(inputs.host_rows, inputs.tokens, inputs.capacity))
    slot_nbytes = max(each.nbytes for each in layouts)
    pool = Geometry(inputs.slots + inputs.aux_slots, slot_nbytes)
    if pool.pool_nbytes > MAX_NBYTES:
        raise LayoutError(f"a pool of {pool.pool_nbytes} bytes; the limit is {MAX_NBYTES}; use fewer slots or rows")
    amounts = (
        *_pool_amounts(inputs, pool),
        *_trajectory_amounts(inputs),
        *_batch_amounts(inputs, layouts),
        *_state_amounts(inputs),
    )
    kept = tuple(amount for amount in amounts if amount.most)
    return Forecast(inputs, layout, slot_nbytes, pool.pool_nbytes, kept)


def _always(name: str, scope: Scope, formula: str, nbytes: int, *, counted: bool = True) -> Amount:
    return Amount(name, scope, formula, nbytes, nbytes, nbytes, counted)


def _pool_amounts(inputs: Inputs, pool: Geometry) -> list[Amount]:
    slot = f"{format_nbytes(pool.slot_nbytes)} per slot, whole pages"
    amounts = [
        _always("slots", "shm", f"slots = {inputs.slots} x {slot}", inputs.slots * pool.slot_nbytes),
        _always("aux_slots", "shm", f"aux_slots = {inputs.aux_slots} x {slot}", inputs.aux_slots * pool.slot_nbytes),
        _always("pool_headers", "shm", "a header page and a header per slot", pool.payload_offset),
    ]
    if inputs.weight_sync and inputs.param_nbytes:
        weights = Geometry(WEIGHTS_PLACES, -(-inputs.param_nbytes // _PAGE_NBYTES) * _PAGE_NBYTES).pool_nbytes
        text = f"{WEIGHTS_PLACES} places x parameters; at a restart twice: readers keep the old ones for a while"
        amounts.append(Amount("weights_pool", "shm", text, weights, weights, 2 * weights))
    return amounts


def _trajectory_amounts(inputs: Inputs) -> list[Amount]:
    """Trajectories as they arrived, and the same with routing encoded as in a slot."""
    tokens = inputs.microbatches_per_step * inputs.real_tokens * inputs.hosts
    step = _bytes_of(tokens, inputs.fields.trajectory_nbits)
    encoded = HELD_STEPS * _bytes_of(tokens, inputs.fields.encoded_nbits)
    held, text = HELD_STEPS * step, f"{HELD_STEPS} steps x {tokens} real tokens, as they arrived"
    if inputs.held_input_nbytes:
        held, text = inputs.held_input_nbytes, "the whole bundle is held in memory"
    elif inputs.max_held_nbytes and held > inputs.max_held_nbytes:
        held, text = inputs.max_held_nbytes, "max_held_bytes"
    amounts = [
        _always("held_trajectories", "host", text, held)
        if inputs.hosts == 1
        else _always("object_store", "shm", f"in Ray's object store, on any node: {text}", held)
    ]
    told = f"{HELD_STEPS} steps with routing as in a slot ({inputs.fields.encoding}); for comparison"
    amounts.append(_always("held_trajectories_encoded", "host", told, encoded, counted=False))
    if inputs.journaled:
        amounts.append(_journal(inputs, step))
    return amounts


def _journal(inputs: Inputs, step: int) -> Amount:
    if inputs.max_held_nbytes:
        nbytes, text = inputs.max_held_nbytes, "max_held_bytes"
    elif inputs.checkpoint_every:
        covered = inputs.checkpoint_every + HELD_STEPS
        nbytes, text = covered * step, f"{covered} steps that no durable checkpoint covers"
    else:
        covered = (inputs.steps or 0) + HELD_STEPS
        nbytes, text = covered * step, f"all {covered} steps: checkpoint_every = 0 releases nothing"
    segment = f"{text} + a segment of {format_nbytes(SEGMENT_NBYTES)}, released as a whole"
    return _always("journal", "disk", segment, nbytes + SEGMENT_NBYTES)


def _batch_amounts(inputs: Inputs, layouts: list[Layout]) -> list[Amount]:
    """Micro-batches on the device side; where there is no accelerator that is the trainer's private memory."""
    scope = _device_scope(inputs)
    one = max(each.nbytes if inputs.platform == "cpu" else each.payload_nbytes for each in layouts)
    text = f"device_buffers = {inputs.device_buffers} x {format_nbytes(one)}"
    amounts = [_always("device_buffers", scope, text, inputs.device_buffers * one)]
    decoded = _dense_routing_nbytes(inputs)
    if decoded and inputs.fields.encoding != "dense":
        text = f"{DENSE} int16 [rows, tokens, layers, top_k], restored inside the program"
        amounts.append(Amount("dense_decode", scope, text, decoded, decoded, 0))
        if inputs.replay:
            text = f"{DENSE} of the micro-batch that is run again while the next one computes"
            amounts.append(Amount("replay_workspace", scope, text, decoded, decoded, 0))
    return amounts


def _dense_routing_nbytes(inputs: Inputs) -> int:
    fields = inputs.fields
    if not fields.has_routing:
        return 0
    specs = routing_fields(
        "dense", rows=inputs.host_rows, tokens=inputs.tokens, layers=fields.layers, top_k=fields.top_k
    )
    return Layout.of(specs).payload_nbytes


def _state_amounts(inputs: Inputs) -> list[Amount]:
    """Parameters and what belongs to them; sums and gradients are float32, as many bytes as float32 parameters."""
    params, optimizer, state = inputs.param_nbytes, inputs.optimizer_nbytes, inputs.state_nbytes
    scope = _device_scope(inputs)
    twice = "; at a restart the restored ones lie beside the first"
    copies = SNAPSHOT_COPIES if inputs.checkpoint_every else 1
    snapshot = (
        f"{copies} host copies of parameters and optimizer state (one written, one waiting, one copied)"
        if copies > 1
        else "a host copy of parameters and optimizer state"
    )
    amounts = [
        Amount("parameters", scope, f"param_bytes{twice}", params, params, 2 * params),
        Amount("optimizer_state", scope, f"optimizer_bytes{twice}", optimizer, optimizer, 2 * optimizer),
        Amount("accumulators", scope, "summed gradients of the open step", params, params, 0),
        Amount("gradients", scope, "gradients of one micro-batch", params, params, 0),
        Amount("optimizer_snapshot", "host", f"{snapshot}; at a restart what is read back", 0, copies * state, state),
        _always("processes", "host", "interpreters and libraries of the run's processes", inputs.process_nbytes),
    ]
    if inputs.reference:
        amounts.append(_always("reference_parameters", scope, "the parameters that training began with", params))
    kept = 1 + (inputs.steps or 0) // inputs.checkpoint_every if inputs.checkpoint_every else 1
    later = f" and every {inputs.checkpoint_every}" if kept > 1 else ""
    text = f"{kept} kept (before step 1{later}) and one in the making"
    amounts.append(Amount("checkpoints", "disk", text, kept * state, (kept + 1) * state, kept * state))
    return amounts


def _device_scope(inputs: Inputs) -> Scope:
    return "host" if inputs.platform == "cpu" else "device"


def _bytes_of(tokens: int, nbits: int) -> int:
    return -(-tokens * nbits // 8)
