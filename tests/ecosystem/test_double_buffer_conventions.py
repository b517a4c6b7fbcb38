"""``DoubleBuffer`` beside what people know: shardings as ``jax.device_put`` takes them, any pytree, Grain's sizes."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import equinox
import flax.struct
import jax
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding
from trainer.test_double_buffer import Published
from trainer.test_one_device_put import calls  # noqa: F401
from trainer.test_poison import content, heavy

from shmstage import Consumer, DoubleBuffer, Producer
from shmstage.errors import InputError, LayoutError, PeerLostError, StaleHandleError, WaitTimeoutError
from shmstage.trainer import aliasing

pytestmark = pytest.mark.slow

TESTS = Path(__file__).parents[1]
EXAMPLES = TESTS.parent / "examples"

# --- where the leaves lie -----------------------------------------------------------------------------------------

ALL = list(range(8))
WHOLE, SCALAR = [[16, 8], ALL], [[], ALL]
WANTED = {
    "one": (WHOLE, WHOLE, SCALAR),
    "prefix": ([[4, 4], ALL], [[4, 4], ALL], SCALAR),
    "leaves": ([[4, 8], ALL], [[16, 4], ALL], SCALAR),
    "device": ([[16, 8], [3]], [[16, 8], [3]], [[], [3]]),
    "none": ([[4, 8], ALL], [[4, 8], ALL], [[], [0]]),
    "callable": ([[4, 8], ALL], [[4, 8], ALL], SCALAR),
    "callable for all": (WHOLE, WHOLE, SCALAR),
}


@pytest.fixture(scope="module")
def on_mesh() -> dict[str, Any]:
    result = subprocess.run(
        [sys.executable, "-m", "ecosystem.double_buffer_on_mesh"],
        cwd=TESTS,
        env={**os.environ, "XLA_FLAGS": "--xla_force_host_platform_device_count=8", "JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert result.returncode == 0, result.stderr
    found: dict[str, Any] = json.loads(result.stdout)
    return found


@pytest.mark.parametrize("way", list(WANTED))
def test_leaves_lie_where_the_sharding_says(on_mesh: dict[str, Any], way: str) -> None:
    assert on_mesh[way] == dict(zip(("tokens", "logps", "scale"), WANTED[way], strict=True))


HERE = SingleDeviceSharding(jax.local_devices()[0])


@pytest.mark.parametrize(
    ("sharding", "told"),
    [
        ({"x": HERE}, r"no tree prefix of the micro-batch PyTreeDef\({'bias': \*, 'x': \*}\)"),
        ([HERE, HERE], "no tree prefix"),
        (lambda batch: {"x": HERE, "y": HERE}, "no tree prefix"),
        ({"x": HERE, "bias": jax.sharding.PartitionSpec("data")}, r"cannot place a field: P.*'data'.*NamedSharding"),
        ("cpu", "a str cannot place a field: 'cpu'; give a jax.sharding.Sharding"),
        (
            NamedSharding(Mesh(jax.devices()[:1], "data"), PartitionSpec(None, "data")),
            r"field 'bias' \[3\] cannot lie as NamedSharding.* at most 1 axes whose sizes divide the field's",
        ),
    ],
    ids=["missing", "other nesting", "other names", "no sharding", "text", "other rank"],
)
def test_a_sharding_that_does_not_fit_the_tree_is_refused_with_both_told(sharding: Any, told: str) -> None:
    with DoubleBuffer(Published(1), sharding) as batches, pytest.raises(LayoutError, match=told):
        next(batches)


def test_a_callable_is_asked_once_for_all_micro_batches_of_one_layout() -> None:
    asked = []

    def place(batch: dict[str, jax.ShapeDtypeStruct]) -> SingleDeviceSharding:
        asked.append({name: (leaf.shape, leaf.dtype) for name, leaf in batch.items()})
        return HERE

    with DoubleBuffer(Published(3), place) as batches:
        for _ in range(3):
            next(batches)
    assert asked == [{"x": ((96, 96), np.float32), "bias": ((3,), np.float32)}]


# --- any registered pytree ----------------------------------------------------------------------------------------


class Pair(NamedTuple):
    x: Any
    bias: Any


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Registered:
    x: Any
    bias: Any
    name: str = dataclasses.field(default="static", metadata={"static": True})


@flax.struct.dataclass
class Struct:
    x: jax.Array
    bias: jax.Array
    absent: jax.Array | None = None


class Module(equinox.Module):
    x: jax.Array
    bias: jax.Array
    activation: Callable[..., Any] = equinox.field(static=True, default=jax.numpy.tanh)


class Nested(NamedTuple):
    inputs: dict[str, Any]
    labels: list[Any]


@pytest.mark.parametrize(
    ("into", "read"),
    [
        (dict, lambda batch: (batch["x"], batch["bias"])),
        (Pair, lambda batch: (batch.x, batch.bias)),
        (Registered, lambda batch: (batch.x, batch.bias)),
        (Struct, lambda batch: (batch.x, batch.bias)),
        (Module, lambda batch: (batch.x, batch.bias)),
        (lambda x, bias: Nested({"x": x}, [bias, x]), lambda batch: (batch.inputs["x"], batch.labels[0])),
        (lambda **fields: {"in": fields}, lambda batch: (batch["in"]["x"], batch["in"]["bias"])),
    ],
    ids=["dict", "named tuple", "dataclass", "flax struct", "equinox module", "nested", "dict of dicts"],
)
def test_a_batch_comes_as_the_tree_that_into_makes(into: Callable[..., Any], read: Callable[[Any], Any]) -> None:
    with DoubleBuffer(Published(3), into=into) as batches:
        for number in range(3):
            batch = next(batches)
            assert jax.tree.structure(batch) == jax.tree.structure(into(x=0, bias=0))
            for got, name in zip(read(batch), ("x", "bias"), strict=True):
                assert isinstance(got, jax.Array)
                np.testing.assert_array_equal(got, content(number)[name])
            del batch, got


def test_a_field_that_into_leaves_out_is_not_uploaded(calls: list[int]) -> None:  # noqa: F811
    with DoubleBuffer(Published(1), into=lambda bias, **rest: [bias]) as batches:
        (bias,) = next(batches)
    assert calls == [1]
    np.testing.assert_array_equal(bias, content(0)["bias"])


class Plain:
    def __init__(self, x: Any, bias: Any) -> None:
        self.x, self.bias = x, bias


class Short(NamedTuple):
    x: Any


@pytest.mark.parametrize(
    ("into", "told"),
    [
        (Plain, "into=Plain put a Plain into the tree.*register_dataclass"),
        (Short, r"into=Short does not take the fields \['x', 'bias'\].*'bias'.*\*\*rest"),
        (lambda x, bias: {"y": np.zeros(3), "x": x}, "put a ndarray into the tree.*computes nothing"),
        (lambda **fields: fields["z"], "does not take the fields.*KeyError: 'z'"),
        (lambda **fields: {}, "keeps none of the fields"),
    ],
    ids=["unregistered", "missing field", "computed", "unknown field", "empty"],
)
def test_an_into_that_makes_no_tree_of_the_fields_is_refused_and_the_slot_given_back(into: Any, told: str) -> None:
    source = Published(1)
    with DoubleBuffer(Ending(source), into=into) as batches, pytest.raises(LayoutError, match=told):
        next(batches)
    assert source.given_back == [0]  # type: ignore[attr-defined]


def test_one_field_at_two_leaves_lies_in_one_place() -> None:
    elsewhere = NamedSharding(Mesh(jax.devices()[:1], "data"), PartitionSpec("data"))
    twice = DoubleBuffer(Published(1), [HERE, elsewhere], into=lambda x, **rest: [x, x])
    with twice as batches, pytest.raises(LayoutError, match="'x' is in the tree twice"):
        next(batches)


class Ending:
    """Notes which leases were ended, and in what order."""

    def __init__(self, source: Published) -> None:
        self._source = source
        source.given_back = []  # type: ignore[attr-defined]

    def receive(self, timeout_s: float) -> Any:
        lease = self._source.receive(timeout_s)
        if lease is not None:
            end = lease.end

            def ended() -> None:
                self._source.given_back.append(lease.handle.index)  # type: ignore[attr-defined]
                end()

            lease.end = ended
        return lease


# --- how many ahead -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [2, 3, 4])
def test_device_buffer_size_counts_the_one_in_use_and_those_ahead(size: int) -> None:
    source = Published(6)
    with DoubleBuffer(source, device_buffer_size=size) as batches:
        next(batches)
        assert len(source.left) == 6 - size


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("waiting", [0, 1, 3])
def test_every_size_gives_the_same_losses_in_the_same_order(size: int, waiting: int) -> None:
    source = Published(6)
    source.ended = True
    batches = DoubleBuffer(source, device_buffer_size=size, host_buffer_size=waiting)
    losses = [heavy(np.float32(0), batch) for batch in batches]
    assert [float(loss) for loss in losses] == [float(heavy(np.float32(0), content(n))) for n in range(6)]


def test_what_waits_on_the_host_has_given_its_slot_back() -> None:
    source = Published(9)
    with DoubleBuffer(Ending(source), host_buffer_size=3) as batches:
        batch = next(batches)
        assert source.given_back == [0, 1, 2, 3, 4]  # type: ignore[attr-defined]
        for number in range(1, 5):
            del batch
            batch = next(batches)
            # the slots are poisoned by now
            np.testing.assert_array_equal(batch["x"], content(number)["x"])
        assert list(source.left) == []


class Prompt:
    """A consumer that waits for what has been published, however little time it is given: messages take a while."""

    def __init__(self, consumer: Consumer) -> None:
        self._consumer = consumer
        self.published = self.received = 0

    def receive(self, timeout_s: float) -> Any:
        lease = self._consumer.receive(20.0 if self.received < self.published else timeout_s)
        self.received += 1
        return lease


@pytest.mark.parametrize("waiting", [0, 2])
def test_a_producer_goes_on_by_as_many_slots_as_wait_on_the_host(waiting: int) -> None:
    with Producer("few", {"x": ("float32", (2, 8))}, slots=2) as producer, Consumer("few") as consumer:
        source = Prompt(consumer)

        def publish_all() -> None:
            while True:
                try:
                    slot = producer.acquire(0.0)
                except WaitTimeoutError:
                    return
                slot.views["x"][...] = source.published
                slot.publish()
                source.published += 1

        publish_all()
        with DoubleBuffer(source, host_buffer_size=waiting, timeout_s=20.0) as batches:
            kept = [next(batches)]
            publish_all()
            kept.append(next(batches))  # nothing more finds a place on the device
            for _ in range(3):
                publish_all()
                batches._hold_ahead()
            assert source.published == 2 + waiting + 2
            for number in range(2, source.published):
                kept.clear()
                kept = [next(batches)]
                assert float(kept[0]["x"][0, 0]) == number
        producer._ended = True  # one thread: the consumer leaves in good order


def test_a_place_on_the_host_is_free_again_once_its_upload_is_over(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on an accelerator, which reads the memory itself: the watcher's thread gives the place back."""
    monkeypatch.setattr(aliasing, "aliases_host_memory", lambda shardings: False)
    # four bytes off a boundary the CPU backend copies, as a device does
    monkeypatch.setattr("shmstage.trainer.host_buffers.aligned_buffer", unaligned)
    source = Published(12, offset=4)
    source.ended = True
    batches = DoubleBuffer(source, host_buffer_size=2)
    losses = [float(heavy(np.float32(0), batch)) for batch in batches]
    assert losses == [float(heavy(np.float32(0), content(n))) for n in range(12)]
    assert batches._host.room()


def unaligned(nbytes: int, alignment: int) -> Any:
    from shmstage.memory.aligned import aligned_buffer

    return aligned_buffer(nbytes, alignment, 4)


def test_an_error_met_for_the_host_is_told_after_everything_before_it() -> None:
    class Dying(Published):
        def receive(self, timeout_s: float) -> Any:
            if not self.left:
                raise PeerLostError("producer 'p' died")
            return super().receive(timeout_s)

    with DoubleBuffer(Dying(5), host_buffer_size=8) as batches:
        for number in range(5):
            np.testing.assert_array_equal(next(batches)["bias"], content(number)["bias"])
        with pytest.raises(PeerLostError):
            next(batches)


def test_closing_gives_up_what_waits_on_the_host() -> None:
    source = Published(9)
    with DoubleBuffer(source, host_buffer_size=3) as batches:
        next(batches)
    with pytest.raises(StopIteration):
        next(batches)
    assert len(source.left) == 4


def test_closing_ends_a_lease_that_found_no_place_on_the_device() -> None:
    source = Published(3)
    with DoubleBuffer(Ending(source), timeout_s=0.02) as batches:
        kept = [next(batches), next(batches)]
        with pytest.raises(WaitTimeoutError, match="drop references"):
            next(batches)
        assert source.given_back == [0, 1]  # type: ignore[attr-defined]
    assert source.given_back == [0, 1, 2] and len(kept) == 2  # type: ignore[attr-defined]


def test_a_slot_that_moves_on_while_it_is_copied_to_the_host_is_no_batch_and_its_place_is_free() -> None:
    class Moving(Published):
        """The slot of the third is taken away between its copy's beginning and end."""

        def receive(self, timeout_s: float) -> Any:
            lease = super().receive(timeout_s)
            checks = [None, StaleHandleError("slot 0 moved on")] if lease.handle.index == 2 else [None] * 9

            def check() -> None:
                if error := checks.pop(0):
                    raise error

            lease.check = check
            return lease

    source = Moving(4)
    with DoubleBuffer(Ending(source), host_buffer_size=1) as batches:
        for number in (0, 1):
            np.testing.assert_array_equal(next(batches)["bias"], content(number)["bias"])
        assert 2 in source.given_back  # type: ignore[attr-defined]
        with pytest.raises(StaleHandleError, match="slot 0 moved on"):
            next(batches)
        np.testing.assert_array_equal(next(batches)["bias"], content(3)["bias"])
        assert batches._host.room()


@pytest.mark.parametrize(("name", "size", "least"), [("host_buffer_size", -1, 0), ("device_buffer_size", 1, 2)])
def test_a_size_that_cannot_work_is_refused(name: str, size: int, least: int) -> None:
    with pytest.raises(InputError, match=f"{name} = {size}; give at least {least}"):
        DoubleBuffer(Published(1), **{name: size})  # type: ignore[call-overload]


# --- under a transfer guard ---------------------------------------------------------------------------------------


@pytest.fixture(params=["of this thread", "of the process"])
def disallowed(request: pytest.FixtureRequest) -> Iterator[None]:
    if request.param == "of this thread":
        with jax.transfer_guard("disallow"):
            yield
    else:
        jax.config.update("jax_transfer_guard", "disallow")  # the watcher's thread, too
        yield
        jax.config.update("jax_transfer_guard", "allow")


@pytest.mark.parametrize("offset", [0, 4])
def test_a_loop_runs_where_implicit_transfers_are_disallowed(disallowed: None, offset: int) -> None:
    step = jax.jit(lambda batch: batch["x"].sum() + batch["bias"].sum())
    with pytest.raises(Exception, match="Disallowed host-to-device transfer"):
        step(content(0))  # the guard is on
    source = Published(4, offset)
    source.ended = True
    for number, batch in enumerate(DoubleBuffer(source, host_buffer_size=1)):
        got = jax.device_get(step(batch))
        assert got == jax.device_get(step(jax.device_put(content(number))))
        del batch


# --- the examples -------------------------------------------------------------------------------------------------


def output_of(example: str) -> list[str]:
    result = subprocess.run(
        [sys.executable, str(EXAMPLES / example)],
        env={**os.environ, "PYTHONPATH": str(TESTS.parent), "JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        timeout=250,
    )
    assert result.returncode == 0, result.stderr
    return result.stdout.splitlines()


def test_the_example_in_the_place_of_prefetch_to_device_sees_every_batch_in_twenty_lines() -> None:
    lines = [line for line in (EXAMPLES / "prefetch_to_device.py").read_text().splitlines() if line.strip()]
    assert len(lines) <= 20
    assert output_of("prefetch_to_device.py") == [f"label {n % 10}, pixels {n}" for n in range(20)]


def test_the_example_that_feeds_from_grain_trains_on_what_grain_gives(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(EXAMPLES))
    from from_grain import pipeline  # type: ignore[import-not-found]

    wanted = [float((batch["tokens"].sum(axis=1) * batch["weight"]).sum()) for batch in pipeline()]
    assert len(set(wanted)) > 8  # in an order that could be wrong
    assert [float(line) for line in output_of("from_grain.py")] == wanted
