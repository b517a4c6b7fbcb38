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
from shmstage.memory.layout import ALIGNMENT, MAX_FIELDS, MAX_NBYTES, PAGE_NBYTES, Layout
from shmstage.memory.limits import format_nbytes
from shmstage.memory.mapping import Geometry
from shmstage.packing.fields import RECOMPUTED
from shmstage.packing.journal import SEGMENT_NBYTES
from shmstage.packing.routing import DENSE, routing_fields

Scope = Literal["shm", "host", "device", "disk"]
SCOPES: tuple[Scope, ...] = get_args(Scope)
Moment = Literal["steady", "checkpoint", "restart"]
MOMENTS: tuple[Moment, ...] = get_args(Moment)
Platform = Literal["cpu", "accelerator"]

# These four mirror code of the trainer and the orchestrator, which this layer must not import; tests hold them to it.
#: places of the weights pool (trainer/weights.py)
WEIGHTS_PLACES = 3
#: host copies of a snapshot at once: one is written, one waits, one is copied already (trainer/snapshots.py)
SNAPSHOT_COPIES = 3
#: what orbax and tensorstore hold beside the snapshot they write: their copy of it and the encoded chunks. Measured
#: with random numbers, which no encoding makes smaller: 1.7 to 1.9 snapshots; up to one stays with the allocator
WRITER_COPIES = 2
#: steps beyond the last one that was closed: the one that is sent and the one that is packed ahead (schedule_events.py)
HELD_STEPS = 2
#: arrays that a weights pool can publish: a layout has no more fields
MAX_LEAVES = MAX_FIELDS


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Inputs:
    """One host's share of a run; bytes are of one host, all its devices together.

    ``fill``: real tokens / (rows x tokens). ``held_input_nbytes``, ``evaluation_nbytes``: an input, and evaluation
    data, that lie in memory as a whole (bundles). ``journaled``: the source cannot be replayed. ``replay``: the engine
    runs micro-batches that overflowed again. ``reference``, ``recompute``: log-probs that are scored; ``evaluates``:
    ``evaluation`` is not only packed but run. ``pipelined``: a step may begin before the last has landed. ``stages``:
    micro-batches may be uploaded before their late fields are there. ``sums_nbytes``: gradient sums where they are not
    of the parameters' size. ``param_leaves``: arrays that the parameters are, 0: not known. ``process_nbytes``: what
    the processes take before they hold anything. ``longest``: tokens of the longest trajectory, 0: not known.
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
    evaluation_nbytes: int = 0
    journaled: bool = False
    weight_sync: bool = False
    reference: bool = False
    recompute: bool = False
    evaluates: bool = False
    pipelined: bool = False
    stages: bool = False
    replay: bool = False
    param_nbytes: int = 0
    param_leaves: int = 0
    sums_nbytes: int | None = None
    optimizer_nbytes: int = 0
    process_nbytes: int = 0
    longest: int = 0
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
    def scores(self) -> bool:
        return self.reference or self.recompute

    @property
    def saves_every(self) -> int:
        """Steps between checkpoints, 0: only the first. What a journaled source holds may force one at any step."""
        return 1 if self.journaled and self.max_held_nbytes else self.checkpoint_every

    @property
    def step_nbytes(self) -> int:
        """Bytes of one step's trajectories as they arrive, on all hosts."""
        return _bytes_of(self.microbatches_per_step * self.real_tokens * self.hosts, self.fields.trajectory_nbits)

    @property
    def held_microbatches(self) -> int:
        """Micro-batches whose step has not landed, two steps at least: a source reads ahead.

        A step is held until its last micro-batch is computed, which lies in a device buffer; the others hold later
        ones, and so do the slots, up to the first micro-batch of the second step that is not closed.
        """
        per_step, later = self.microbatches_per_step, self.device_buffers - 1
        least = HELD_STEPS * per_step
        if not self.pipelined or later < 0:
            return least
        closed = 1 + later // per_step
        return max(least, min(per_step + later + self.slots, (closed + 1) * per_step + 1))

    @property
    def held_tokens(self) -> int:
        """Real tokens of what is held, on all hosts."""
        return self.held_microbatches * self.real_tokens * self.hosts

    @property
    def held_nbytes(self) -> int:
        """Bytes of the trajectories that are held where no limit is set, as they arrive."""
        return _bytes_of(self.held_tokens, self.fields.trajectory_nbits)

    @property
    def waits_encoded(self) -> bool:
        """Whether held trajectories are encoded; in Ray's object store they lie as they arrived."""
        return self.hosts == 1 and self.fields.has_routing and self.fields.encoding == "ragged_packed"

    def waiting_nbytes(self, arrived_nbytes: int) -> int:
        """Bytes that count against `max_held_bytes`, of so many as they arrive."""
        return self.fields.waiting_nbytes(arrived_nbytes) if self.waits_encoded else arrived_nbytes

    @property
    def row_nbytes(self) -> int:
        """Bytes of a full row's trajectories as they wait."""
        return self.waiting_nbytes(_bytes_of(self.tokens, self.fields.trajectory_nbits))

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
    evaluated = None
    if inputs.evaluation is not None:
        evaluated = inputs.evaluation.layout(inputs.host_rows, inputs.tokens, inputs.capacity)
    slot_nbytes = max(each.nbytes for each in (layout, evaluated) if each is not None)
    pool = Geometry(inputs.slots + inputs.aux_slots, slot_nbytes)
    if pool.pool_nbytes > MAX_NBYTES:
        raise LayoutError(f"a pool of {pool.pool_nbytes} bytes; the limit is {MAX_NBYTES}; use fewer slots or rows")
    amounts = (
        *_pool_amounts(inputs, pool),
        *_trajectory_amounts(inputs),
        *_batch_amounts(inputs, layout, evaluated),
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
        amounts.append(_weights_pool(inputs))
    return amounts


def _weights_pool(inputs: Inputs) -> Amount:
    place = inputs.param_nbytes + inputs.param_leaves * (ALIGNMENT - 1)
    weights = Geometry(WEIGHTS_PLACES, -(-place // PAGE_NBYTES) * PAGE_NBYTES).pool_nbytes
    padded = (
        f"at most, {inputs.param_leaves} arrays padded to {ALIGNMENT} bytes each"
        if inputs.param_leaves
        else f"at least: each array is padded to {ALIGNMENT} bytes"
    )
    text = f"{WEIGHTS_PLACES} places x parameters ({padded}); at a restart twice: readers keep the old ones for a while"
    return Amount("weights_pool", "shm", text, weights, weights, 2 * weights)


def _trajectory_amounts(inputs: Inputs) -> list[Amount]:
    """Trajectories as they arrive, and with routing encoded as in a slot; the form in which they wait is counted."""
    count = f"{inputs.held_microbatches} micro-batches of {inputs.real_tokens * inputs.hosts} real tokens"
    text = f"{count} whose step has not landed"
    raw, encoded = inputs.held_nbytes, _bytes_of(inputs.held_tokens, inputs.fields.encoded_nbits)
    if inputs.held_input_nbytes:
        text = "the whole bundle is held in memory"
        raw, encoded = inputs.held_input_nbytes, inputs.fields.waiting_nbytes(inputs.held_input_nbytes)
    elif inputs.max_held_nbytes:
        held = encoded if inputs.waits_encoded else raw
        if held > inputs.max_held_nbytes:
            text = "max_held_bytes"
            raw, encoded = (min(each, inputs.max_held_nbytes) for each in (raw, encoded))
    form = f"routing as in a slot ({inputs.fields.encoding})"
    waits = inputs.waits_encoded
    raw_text = f"{text}, as they arrived{'; for comparison' if waits else ''}"
    encoded_text = f"{text}, {form}{'' if waits else '; for comparison'}"
    amounts = [
        _always("held_trajectories", "host", raw_text, raw, counted=not waits)
        if inputs.hosts == 1
        else _always("object_store", "shm", f"in Ray's object store, on any node: {raw_text}", raw)
    ]
    amounts.append(_always("held_trajectories_encoded", "host", encoded_text, encoded, counted=waits))
    evaluated = inputs.evaluation_nbytes
    if inputs.evaluation is not None:
        evaluated = inputs.evaluation.waiting_nbytes(evaluated)
    whole = "the whole evaluation bundle is held in memory"
    amounts.append(_always("evaluation_trajectories", "host", whole, evaluated))
    if inputs.journaled:
        amounts.append(_journal(inputs))
    return amounts


def _journal(inputs: Inputs) -> Amount:
    """Checkpoints in the making cover their steps only when they are durable, and one more may wait to be copied."""
    step = inputs.step_nbytes
    unsaved = (SNAPSHOT_COPIES + 1) * inputs.saves_every
    if inputs.max_held_nbytes:
        # on disk they lie as they arrived
        most = inputs.max_held_nbytes * inputs.held_nbytes // max(inputs.waiting_nbytes(inputs.held_nbytes), 1)
        nbytes = most + min(step, most) * (SNAPSHOT_COPIES + 1)
        text = f"max_held_bytes and {SNAPSHOT_COPIES + 1} steps, admitted beyond it while checkpoints are in the making"
    elif inputs.saves_every:
        nbytes = unsaved * step + inputs.held_nbytes
        text = f"what is held and {unsaved} steps that landed and no durable checkpoint covers"
    else:
        nbytes = (inputs.steps or 0) * step + inputs.held_nbytes
        text = f"what is held and all {inputs.steps or 0} steps: checkpoint_every = 0 releases nothing"
    segment = f"{text} + a segment of {format_nbytes(SEGMENT_NBYTES)}, released as a whole"
    return _always("journal", "disk", segment, nbytes + SEGMENT_NBYTES)


def _batch_amounts(inputs: Inputs, layout: Layout, evaluated: Layout | None) -> list[Amount]:
    """Micro-batches on the device side; where there is no accelerator that is the trainer's private memory."""
    scope = _device_scope(inputs)
    one = _uploaded_nbytes(inputs, layout)
    text = f"device_buffers = {inputs.device_buffers} x {format_nbytes(one)}"
    amounts = [_always("device_buffers", scope, text, inputs.device_buffers * one)]
    scored = [layout] if inputs.scores else []
    scored += [evaluated] if inputs.evaluates and evaluated is not None else []
    own = max((_uploaded_nbytes(inputs, each) for each in scored), default=0)
    amounts.append(_always("scoring_buffer", scope, "one more micro-batch, which is scored or evaluated", own))
    if inputs.recompute and inputs.stages:
        late = sum(each.nbytes for each in layout.fields if each.name in RECOMPUTED)
        text = "recomputed fields of the staged micro-batch, uploaded once more"
        amounts.append(_always("patched_fields", scope, text, late))
    decoded = _dense_routing_nbytes(inputs)
    if decoded and inputs.fields.encoding != "dense":
        text = f"{DENSE} int16 [rows, tokens, layers, top_k], restored inside the program"
        amounts.append(Amount("dense_decode", scope, text, decoded, decoded, 0))
        if inputs.replay:
            text = f"{DENSE} of the micro-batch that is run again while the next one computes"
            amounts.append(Amount("replay_workspace", scope, text, decoded, decoded, 0))
    return amounts


def _uploaded_nbytes(inputs: Inputs, layout: Layout) -> int:
    """On CPU a private buffer as large as a slot, else the arrays alone."""
    return layout.nbytes if inputs.platform == "cpu" else layout.payload_nbytes


def _dense_routing_nbytes(inputs: Inputs) -> int:
    fields = inputs.fields
    if not fields.has_routing:
        return 0
    specs = routing_fields(
        "dense", rows=inputs.host_rows, tokens=inputs.tokens, layers=fields.layers, top_k=fields.top_k
    )
    return Layout.of(specs).payload_nbytes


def _state_amounts(inputs: Inputs) -> list[Amount]:
    """Parameters and what belongs to them; gradients are of the parameters' dtype, their sums at least float32."""
    params, optimizer, state = inputs.param_nbytes, inputs.optimizer_nbytes, inputs.state_nbytes
    scope = _device_scope(inputs)
    twice = "; at a restart the restored ones lie beside the first"
    every = inputs.saves_every
    copies = SNAPSHOT_COPIES if every else 1
    sums = params if inputs.sums_nbytes is None else inputs.sums_nbytes
    snapshot = (
        f"{copies} host copies of parameters and optimizer state (one written, one waiting, one copied)"
        if copies > 1
        else "a host copy of parameters and optimizer state"
    )
    amounts = [
        Amount("parameters", scope, f"param_bytes{twice}", params, params, 2 * params),
        Amount("optimizer_state", scope, f"optimizer_bytes{twice}", optimizer, optimizer, 2 * optimizer),
        Amount("accumulators", scope, "summed gradients of the open step", sums, sums, 0),
        Amount("gradients", scope, "gradients of one micro-batch", params, params, 0),
        Amount("optimizer_snapshot", "host", f"{snapshot}; at a restart what is read back", 0, copies * state, state),
        Amount("checkpoint_writer", "host", _WRITER, 0, WRITER_COPIES * state, state),
        _always("processes", "host", "interpreters and libraries of the run's processes", inputs.process_nbytes),
    ]
    if inputs.scores:
        text = "the parameters that training began with; an engine that scores keeps them, whatever it scores"
        amounts.append(_always("reference_parameters", scope, text, params))
    kept = 1 + (inputs.steps or 0) // every if every else 1
    later = f" and every {every}" if kept > 1 else ""
    text = f"{kept} kept (before step 1{later}) and one in the making"
    amounts.append(Amount("checkpoints", "disk", text, kept * state, (kept + 1) * state, kept * state))
    return amounts


_WRITER = (
    f"{WRITER_COPIES} x parameters and optimizer state: the writer's own copy and what it encoded of it; at a restart "
    "once: what the reader has in flight, and what the allocator kept"
)


def _device_scope(inputs: Inputs) -> Scope:
    return "host" if inputs.platform == "cpu" else "device"


def _bytes_of(tokens: int, nbits: int) -> int:
    return -(-tokens * nbits // 8)
