"""Host memory is registered as a whole or not at all, and never outlives its mapping registered."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
from trainer.rig import rigged

from shmstage.errors import HostRegistrationError
from shmstage.memory.layout import PAGE_NBYTES
from shmstage.memory.reader import PoolReader
from shmstage.trainer import host_registry
from shmstage.trainer.attachment import Attachment
from shmstage.trainer.host_registry import registry_for
from shmstage.trainer.registration import HostRegistry, RegisteredMemory

RANGES = [(0x10000, 4096), (0x20000, 8192), (0x40000, 4096)]
TOTAL = 16384


class FakeRuntime:
    """Records calls. Refuses the ``fail_at``-th ``register`` and what ``refuses`` says."""

    def __init__(self, *, fail_at: int = 0, refuses_read_only: str = "", stuck: int = 0) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.registered: dict[int, int] = {}
        self.open = True
        self._fail_at = fail_at
        self._refuses_read_only = refuses_read_only
        self._stuck = stuck

    def register(self, address: int, nbytes: int, *, read_only: bool) -> None:
        assert self.open
        self.calls.append(("register", address, nbytes, read_only))
        if self._refuses_read_only and read_only:
            raise HostRegistrationError(f"register: {self._refuses_read_only}", self._refuses_read_only)
        if len([call for call in self.calls if call[0] == "register"]) == self._fail_at:
            raise HostRegistrationError("register: OUT_OF_MEMORY", "OUT_OF_MEMORY")
        self.registered[address] = nbytes

    def unregister(self, address: int) -> None:
        assert self.open
        self.calls.append(("unregister", address))
        if address == self._stuck:
            raise HostRegistrationError("unregister: BUSY", "BUSY")
        del self.registered[address]

    def close(self) -> None:
        self.open = False


def registered(runtime: FakeRuntime) -> RegisteredMemory:
    ticks = iter((1.0, 3.5))
    return RegisteredMemory(RANGES, lambda: runtime, clock=lambda: next(ticks))


def test_every_piece_is_registered_read_only_and_the_report_says_how_much_and_how_long() -> None:
    runtime = FakeRuntime()
    memory = registered(runtime)
    assert runtime.calls == [("register", *piece, True) for piece in RANGES]
    assert memory.registration.as_facts() == {"registered_nbytes": TOTAL, "seconds": 2.5, "why_not": ""}
    assert memory.registration.describe() == f"registered {TOTAL} bytes of host memory in 2.500 s"
    memory.close()


@pytest.mark.parametrize("fail_at", [1, 2, 3])
def test_a_failure_at_any_piece_leaves_none_registered(fail_at: int) -> None:
    runtime = FakeRuntime(fail_at=fail_at)
    memory = registered(runtime)
    assert not runtime.registered and not runtime.open
    facts = memory.registration.as_facts()
    assert facts == {"registered_nbytes": 0, "seconds": 2.5, "why_not": "register: OUT_OF_MEMORY"}
    undone = [call[1] for call in runtime.calls if call[0] == "unregister"]
    assert undone == [address for address, _ in RANGES[: fail_at - 1]][::-1]
    memory.close()


@pytest.mark.parametrize("refusal", ["CUDA_ERROR_NOT_SUPPORTED", "CUDA_ERROR_INVALID_VALUE"])
def test_a_runtime_that_knows_no_read_only_memory_is_given_it_as_writable(refusal: str) -> None:
    runtime = FakeRuntime(refuses_read_only=refusal)
    memory = registered(runtime)
    assert runtime.calls[0] == ("register", *RANGES[0], True)
    assert runtime.calls[1:] == [("register", *piece, False) for piece in RANGES]  # it is asked once
    assert memory.registration.nbytes == TOTAL
    memory.close()


def test_a_read_only_mapping_refused_in_both_ways_is_reported_with_both_reasons() -> None:
    memory = registered(FakeRuntime(refuses_read_only="CUDA_ERROR_NOT_SUPPORTED", fail_at=2))
    why_not = memory.registration.why_not
    assert why_not == "read-only: register: CUDA_ERROR_NOT_SUPPORTED; as writable memory: register: OUT_OF_MEMORY"


def test_a_piece_refused_after_others_is_not_tried_in_another_way() -> None:
    runtime = FakeRuntime(fail_at=2)
    registered(runtime)
    assert ("register", *RANGES[1], False) not in runtime.calls


def test_closing_unregisters_each_piece_once_and_then_lets_go_of_the_runtime() -> None:
    runtime = FakeRuntime()
    memory = registered(runtime)
    memory.close()
    memory.close()
    assert [call[1] for call in runtime.calls if call[0] == "unregister"] == [a for a, _ in RANGES][::-1]
    assert not runtime.registered and not runtime.open


def test_a_piece_that_cannot_be_unregistered_keeps_no_other_one_registered(caplog: pytest.LogCaptureFixture) -> None:
    runtime = FakeRuntime(stuck=RANGES[2][0])
    registered(runtime).close()
    assert runtime.registered == dict(RANGES[2:])
    assert "0x40000 stays registered: unregister: BUSY" in caplog.text


def test_an_unforeseen_error_leaves_nothing_registered_either() -> None:
    runtime = FakeRuntime()
    inner = runtime.register

    def raising(address: int, nbytes: int, *, read_only: bool) -> None:
        if address == RANGES[2][0]:
            raise KeyError("a fault of ours")
        inner(address, nbytes, read_only=read_only)

    runtime.register = raising  # type: ignore[method-assign]
    with pytest.raises(KeyError):
        RegisteredMemory(RANGES, lambda: runtime)
    assert not runtime.registered and not runtime.open


# --- which runtime ------------------------------------------------------------------------------------------


def device(platform: str, number: int = 0, *, version: str = "PJRT C API\ncuda 13000", process: int = 0) -> Any:
    client = SimpleNamespace(platform_version=version)
    return SimpleNamespace(platform=platform, process_index=process, client=client, local_hardware_id=number)


@pytest.mark.parametrize(
    ("devices", "why_not"),
    [
        ([device("cpu")], "on the CPU backend"),
        ([device("gpu"), device("cpu")], "on the CPU backend"),
        ([device("tpu")], "no runtime to register with on tpu"),
        ([SimpleNamespace(platform="simulated")], "no runtime to register with on simulated"),
        ([], "no runtime to register with on no device"),
        ([device("gpu", process=1)], "none of the devices belongs to this process"),
        ([device("gpu", version="PJRT C API\nrocm 60200")], "no CUDA runtime: the devices are driven by .*rocm 60200"),
    ],
)
def test_what_has_no_runtime_says_so_and_opens_none(
    devices: list[Any], why_not: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host_registry, "CudaHostRegistry", lambda ordinal: pytest.fail("opened"))
    with pytest.raises(HostRegistrationError, match=why_not):
        registry_for(devices)


def test_the_runtime_is_that_of_the_first_device_of_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_registry, "CudaHostRegistry", lambda ordinal: ("cuda", ordinal))
    assert registry_for([device("gpu", 5), device("gpu", 2), device("gpu", 0, process=1)]) == ("cuda", 2)


# --- the trainer's pool -------------------------------------------------------------------------------------


def attaching(runtime: FakeRuntime, **options: Any) -> Callable[..., Attachment]:
    def fake_registry(devices: Any) -> HostRegistry:
        return runtime

    return partial(Attachment, registry_for=fake_registry, **options)


@pytest.mark.slow
def test_the_trainer_registers_each_slot_of_its_pool_and_says_so_in_info() -> None:
    runtime = FakeRuntime()
    with rigged(slots=3, aux_slots=1, attach=attaching(runtime)) as rig:
        stride = rig.layout.nbytes
        addresses = sorted(runtime.registered)
        assert list(runtime.registered.values()) == [stride] * 4
        assert [address % PAGE_NBYTES for address in addresses] == [0] * 4
        assert [b - a for a, b in itertools.pairwise(addresses)] == [stride] * 3
        told = rig.call("info")["host_memory"]
        assert (told["registered_nbytes"], told["why_not"]) == (4 * stride, "")
        lease = rig.worker._stepper.attachment.lease(rig.publish(1, 0))
        begin = lease.views["x"].ctypes.data
        assert any(a <= begin and begin + lease.views["x"].nbytes <= a + n for a, n in runtime.registered.items())
        lease.end()
        rig.train_step(1)
    assert not runtime.registered


@pytest.mark.slow
def test_the_old_pool_is_unregistered_before_it_is_unmapped(monkeypatch: pytest.MonkeyPatch) -> None:
    runtime = FakeRuntime()
    unmapped: list[set[int]] = []
    close = PoolReader.close

    def closing(reader: PoolReader) -> None:
        unmapped.append({address for address, _ in reader.slot_ranges()} & runtime.registered.keys())
        close(reader)

    with rigged(attach=attaching(runtime)) as rig:
        monkeypatch.setattr(PoolReader, "close", closing)
        runtime_of_old = dict(runtime.registered)
        rig.worker.attach(replace(rig.hello(), epoch=2, pool="", layouts=[]))
        assert unmapped == [set()] and runtime_of_old and not runtime.registered
        assert rig.call("info")["host_memory"] is None
        monkeypatch.undo()


@pytest.mark.slow
def test_a_trainer_told_off_or_on_the_cpu_registers_nothing_and_trains() -> None:
    runtime = FakeRuntime()
    with rigged(attach=attaching(runtime, host_register="off")) as rig:
        assert rig.call("info")["host_memory"]["why_not"] == 'host_register = "off"'
        rig.train_step(1)
    assert not runtime.calls
    with rigged() as rig:
        assert "CPU backend" in rig.call("info")["host_memory"]["why_not"]


@pytest.mark.slow
def test_a_pool_that_cannot_be_registered_is_used_all_the_same() -> None:
    with rigged(attach=attaching(FakeRuntime(fail_at=2))) as rig:
        assert rig.call("info")["host_memory"]["why_not"] == "register: OUT_OF_MEMORY"
        rig.train_step(1)
