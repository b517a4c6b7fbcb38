"""``engine = "shmstage.testing.engines_simulated:make_engine"``: an engine on a ``SimulatedDevice``.

For benchmarks of everything around a device: the real worker drives it in the real trainer process, while the host's
cores stay free. What it trains is a chain of hashes over what it really read, so that one micro-batch too many, too
few, out of order or overwritten changes every later parameter.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from functools import partial
from pathlib import Path
from typing import Any, Literal, cast, final, get_args

import jax
import numpy as np
import xxhash

from shmstage.errors import EngineError, SettingsError
from shmstage.memory.layout import Layout
from shmstage.records import write_json
from shmstage.testing.simulated_device import Operation, SimulatedDevice

Array = np.ndarray[Any, Any]
Blocks = Literal["never", "two deep", "until last done"]
MASK = "completion_mask"
KEEPS = ("copies", "hashes")
PLATFORM = "simulated"
#: of each field's 8-byte words, one in so many goes into the hash; 1 with ``digest = "full"``
SAMPLED = 64


@final
@dataclass(frozen=True)
class SimulatedSettings:
    """The ``[engine]`` table. Times in seconds, of one call; ``upload_gbps`` in 1e9 bytes per second, 0: unpaced.

    ``blocks``: where the host waits. ``settles``: overflow flags are read on the host, as an engine does that may drop
    tokens. ``keeps``: what is left of an upload, the copies (looked at only when they are computed on, so that one
    overwritten too early is seen) or, in no memory of this machine, what they are hashed to (taken when they are read).
    ``record``: a file that gets all of the device's stamps at the end.
    """

    microbatch_s: float = 0.0
    update_s: float = 0.0
    upload_gbps: float = 0.0
    checkpoint_s: float = 0.0
    param_nbytes: int = 1 << 20
    blocks: Blocks = "never"
    settles: bool = False
    digest: Literal["sampled", "full"] = "sampled"
    keeps: Literal["copies", "hashes"] = "copies"
    record: str = ""
    checkpoint_dir: str | None = None

    def __post_init__(self) -> None:
        for name in ("microbatch_s", "update_s", "upload_gbps", "checkpoint_s"):
            value = getattr(self, name)
            if not isinstance(value, int | float) or value < 0:
                raise SettingsError(f"[engine] {name} = {value!r}; give a number that is not negative")
        for name, allowed in (("blocks", get_args(Blocks)), ("digest", ("sampled", "full")), ("keeps", KEEPS)):
            if getattr(self, name) not in allowed:
                raise SettingsError(f"[engine] {name} = {getattr(self, name)!r}; want one of {', '.join(allowed)}")


def make_engine(settings: Mapping[str, Any]) -> SimulatedEngine:
    """The factory. Raises ``SettingsError`` for a setting that ``SimulatedSettings`` does not have."""
    known = {f.name for f in fields(SimulatedSettings)}
    if unknown := sorted(set(settings) - known):
        raise SettingsError(f"[engine] does not know {', '.join(unknown)}; the simulated engine has {sorted(known)}")
    config: Any = jax.config
    if config.jax_platforms == PLATFORM:
        # JAX_PLATFORMS tells the budget that device buffers are no memory of this machine; to jax it would be unknown
        config.update("jax_platforms", "cpu")
    return SimulatedEngine(SimulatedSettings(**settings))


@dataclass(frozen=True)
class _Place:
    platform: str = PLATFORM


@final
class SimulatedSharding(jax.sharding.Sharding):
    """Names a device that is not the host's, so that uploads read the slot itself."""

    @property
    def device_set(self) -> set[Any]:
        return {_Place()}

    def check_compatible_aval(self, aval_shape: tuple[int, ...]) -> None:
        """Any shape is."""


@final
class SimulatedArray:
    """Stands for an array that ``until`` computes or uploads; its value is looked at only then."""

    def __init__(
        self,
        until: Operation | None,
        value: Callable[[], Array],
        dtype: Any,
        shape: tuple[int, ...] = (),
        kept: FieldHashes | None = None,
    ) -> None:
        self.until = until
        self.kept = kept
        self._value = value
        self.dtype = np.dtype(dtype)
        self.shape = shape
        self.ndim = len(shape)
        self.replica_id, self.index = 0, (slice(None),) * self.ndim

    def is_ready(self) -> bool:
        return self.until is None or self.until.is_ready()

    def block_until_ready(self) -> SimulatedArray:
        if self.until is not None:
            self.until.block_until_ready()
        return self

    @property
    def addressable_shards(self) -> list[SimulatedArray]:
        return [self]

    @property
    def data(self) -> SimulatedArray:
        return self

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Array:
        self.block_until_ready()
        return np.asarray(self._value(), dtype)


@dataclass(slots=True)
class _Step:
    """What the device has added up since the last update; the device's thread alone touches it."""

    hashes: list[int]
    denominator: float = 0.0


@dataclass(slots=True)
class _Landing:
    """What one update leaves: filled when it lands, and never changed by a later one."""

    params: Array
    until: Operation | None = None
    values: dict[str, float] = field(default_factory=dict)


@final
class SimulatedEngine:
    """A ``TrainEngine``; see the module."""

    snapshots = True

    def __init__(self, settings: SimulatedSettings, device: SimulatedDevice | None = None) -> None:
        self._settings = settings
        self.device = device or SimulatedDevice(upload_gbps=settings.upload_gbps)
        self._last = _Landing(np.zeros(max(8, settings.param_nbytes // 4), np.uint32))
        self._step = 1
        self._open: list[Operation] = []
        self._sums = _Step([])
        if settings.settles:
            self.settle = self._settle

    # --- what the worker asks -------------------------------------------------------------------------------

    def shardings(self, layout: Layout) -> dict[str, jax.sharding.Sharding]:
        return {each.name: SimulatedSharding() for each in layout.fields}

    def put(self, views: Mapping[str, Array], shardings: Mapping[str, Any]) -> dict[str, SimulatedArray]:
        """Stands for ``jax.device_put``: the views are read until the arrays are ready."""
        kept = FieldHashes(views, self._every)
        if self._settings.keeps == "copies":
            operation, copies = self.device.upload(views)
        else:
            operation, copies = self.device.upload(views, kept.take)
        return {
            name: SimulatedArray(operation, partial(_copy_of, copies, name), view.dtype, view.shape, kept)
            for name, view in views.items()
        }

    def fwd_bwd(self, batch: Mapping[str, SimulatedArray]) -> jax.Array:
        kept = next(iter(batch.values())).kept
        copies = {name: array._value() for name, array in batch.items()} if self._settings.keeps == "copies" else {}
        needs = next(iter(batch.values())).until
        sums = self._sums

        def act() -> None:
            hashes = kept
            if copies:
                hashes = hashes_of(copies, self._every)
                self.device.recycle(copies)
            assert hashes is not None
            sums.hashes.append(hashes.digest())
            sums.denominator += hashes.denominator

        operation = self.device.compute(
            "fwd_bwd", self._step, len(self._open), self._settings.microbatch_s, needs=needs, act=act
        )
        self._open.append(operation)
        self._throttle()
        return cast(jax.Array, operation)

    def update(self) -> jax.Array:
        if self._settings.blocks == "until last done" and self._open:
            self._open[-1].block_until_ready()
        sums, self._sums = self._sums, _Step([])
        before, after = self._last, _Landing(self._last.params)

        def act() -> None:
            words, loss = updated(before.params[:2], sums.hashes)
            after.params = _with_words(before.params, words)
            after.values = {"loss": loss, "grad_norm": 1.0, "denominator": sums.denominator}

        operation = self.device.compute("update", self._step, -1, self._settings.update_s, act=act)
        after.until, self._last = operation, after
        self._step += 1
        self._open = []
        self._throttle()
        return cast(jax.Array, operation)

    def metrics(self) -> dict[str, jax.Array]:
        return {name: _scalar(self._last, name) for name in ("loss", "grad_norm", "denominator")}

    def weights(self) -> dict[str, jax.Array]:
        last = self._last
        array = SimulatedArray(last.until, lambda: last.params, np.uint32, last.params.shape)
        return {"w": cast(jax.Array, array)}

    def save(self, step: int, metadata: Mapping[str, object]) -> _Snapshot:
        return _Snapshot(self.weights()["w"], step, metadata, self._settings)

    def restore(self, *, at_most: int | None = None) -> dict[str, object] | None:
        self._open, self._sums = [], _Step([])
        found = sorted(_saved(self._settings), reverse=True)
        for step in found:
            if at_most is not None and step > at_most:
                _file(self._settings, step).unlink()
                continue
            metadata = json.loads(_file(self._settings, step).read_text())
            self._last = _Landing(_with_words(self._last.params, metadata.pop("params")))
            self._step = step + 1
            return {**metadata, "step": step}
        self._step = 1
        return None

    def close(self) -> None:
        self.device.close()
        if self._settings.record:
            write_json(Path(self._settings.record), self.device.record())

    # --- parts ----------------------------------------------------------------------------------------------

    def _settle(self, upto: int) -> None:
        """Reads the overflow flags on the host, and finds none."""
        self._open[upto - 1].block_until_ready()

    def _throttle(self) -> None:
        if self._settings.blocks == "two deep" and len(unfinished := self.device.unfinished) > 2:
            unfinished[-3].block_until_ready()

    @property
    def _every(self) -> int:
        return 1 if self._settings.digest == "full" else SAMPLED


@final
class FieldHashes:
    """A micro-batch's fields, hashed piece by piece as they are read, and the sum of its mask."""

    def __init__(self, arrays: Mapping[str, Array], every: int) -> None:
        """``arrays`` are looked at for names, dtypes and shapes. Of 8-byte words one in ``every`` is hashed."""
        self.denominator = 0.0 if MASK in arrays else 1.0
        self._every = every
        self._states = {name: xxhash.xxh3_64(f"{name} {a.dtype} {a.shape};".encode()) for name, a in arrays.items()}

    def take(self, name: str, piece: Array) -> None:
        """The next bytes of this field, uint8; all pieces but the last are multiples of 512 bytes."""
        words = piece[: piece.nbytes & ~7].view(np.uint64)
        self._states[name].update(np.ascontiguousarray(words[:: self._every]).data)
        self._states[name].update(piece[piece.nbytes & ~7 :].tobytes())
        if name == MASK:
            self.denominator += float(piece.view(np.float32).sum(dtype=np.float64))

    def digest(self) -> int:
        return xxhash.xxh3_64(b"".join(state.digest() for state in self._states.values())).intdigest()


def hashes_of(arrays: Mapping[str, Array], every: int = SAMPLED) -> FieldHashes:
    """Of arrays that are there as a whole."""
    found = FieldHashes(arrays, every)
    for name, array in arrays.items():
        found.take(name, array.reshape(-1).view(np.uint8))
    return found


def updated(words: Array, hashes: list[int]) -> tuple[Array, float]:
    """The two words that stand for the parameters (uint32), and the loss, after an update with these micro-batches."""
    chain = xxhash.xxh3_64(words.tobytes())
    chain.update(np.asarray(hashes, np.uint64).tobytes())
    return np.frombuffer(chain.digest(), np.uint32), (chain.intdigest() % 10**6) / 1e6


def _with_words(params: Array, words: Any) -> Array:
    changed = params.copy()
    changed[:2] = words
    return changed


def _scalar(landing: _Landing, name: str) -> jax.Array:
    return cast(jax.Array, SimulatedArray(landing.until, lambda: np.float32(landing.values[name]), np.float32))  # type: ignore[arg-type,return-value]


def _copy_of(copies: Mapping[str, Array], name: str) -> Array:
    if name not in copies:
        raise EngineError(f"the bytes of {name} are not kept on this device; use [engine] keeps = \"copies\"")
    return copies[name]


@final
class _Snapshot:
    """A checkpoint of two words that takes as long as a real one."""

    def __init__(
        self, params: jax.Array, step: int, metadata: Mapping[str, object], settings: SimulatedSettings
    ) -> None:
        self._params: Any = params
        self._words: list[int] = []
        self._step = step
        self._metadata = metadata
        self._settings = settings

    def copy_to_host(self) -> None:
        self._words = [int(word) for word in np.array(self._params)[:2]]
        self._params = None

    def write(self) -> dict[str, object]:
        time.sleep(self._settings.checkpoint_s)
        if self._settings.checkpoint_dir is None:
            return {"kept": False}
        path = _file(self._settings, self._step)
        path.parent.mkdir(parents=True, exist_ok=True)
        write_json(path, {**self._metadata, "params": self._words})
        return {"path": str(path)}


def _file(settings: SimulatedSettings, step: int) -> Path:
    return Path(settings.checkpoint_dir or ".") / f"simulated-{step}.json"


def _saved(settings: SimulatedSettings) -> list[int]:
    if settings.checkpoint_dir is None:
        return []
    return [int(path.stem.partition("-")[2]) for path in Path(settings.checkpoint_dir).glob("simulated-*.json")]
