"""The ctypes door against a library with CUDA's names, prototypes and refusals."""

from __future__ import annotations

import ctypes
import mmap
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from shmstage.errors import HostRegistrationError
from shmstage.trainer.cuda_host import CudaHostRegistry

PAGE = 4096
#: read-only pages, pinned for all contexts
READ_ONLY_PORTABLE = 9


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if compiler is None:
        pytest.skip("no C compiler")
    library = tmp_path_factory.mktemp("cuda") / "libfakecuda.so"
    source = Path(__file__).with_name("fake_cuda.c")
    subprocess.run([compiler, "-Wall", "-Werror", "-shared", "-fPIC", "-o", library, source], check=True)
    return library


@pytest.fixture
def library(built: Path, tmp_path: Path) -> str:
    """A copy of its own: another path is another library, with no memory of earlier tests."""
    return str(shutil.copy(built, tmp_path / "libfakecuda.so"))


@pytest.fixture
def pages() -> Iterator[tuple[int, int]]:
    """(address, nbytes) of two pages mapped read-only."""
    with mmap.mmap(-1, 2 * PAGE, prot=mmap.PROT_READ) as mapped:
        array = np.frombuffer(mapped, np.uint8)
        yield array.ctypes.data, array.nbytes
        del array


def log_of(library: str) -> list[str]:
    function = ctypes.CDLL(library).fake_log
    function.restype = ctypes.c_char_p
    return str(function().decode()).splitlines()


@pytest.mark.slow
def test_memory_is_pinned_in_the_primary_context_of_the_device_and_let_go_of(
    library: str, pages: tuple[int, int]
) -> None:
    address, nbytes = pages
    registry = CudaHostRegistry(2, library)
    registry.register(address, nbytes, read_only=True)
    registry.unregister(address)
    registry.close()
    registry.close()
    assert log_of(library) == [
        "init 0", "retain 42", f"register {address:#x} {nbytes} {READ_ONLY_PORTABLE}", f"unregister {address:#x}",
        "release 42",
    ]  # fmt: skip


@pytest.mark.slow
def test_memory_that_may_be_written_is_pinned_without_the_read_only_flag(library: str, pages: tuple[int, int]) -> None:
    registry = CudaHostRegistry(0, library)
    registry.register(*pages, read_only=False)
    assert log_of(library)[-1].endswith(" 1")
    registry.unregister(pages[0])


@pytest.mark.slow
def test_an_address_beyond_32_bits_and_a_size_beyond_them_arrive_whole(library: str) -> None:
    registry = CudaHostRegistry(0, library)
    registry.register(0x7ABC_0000_1000, 5 << 32, read_only=True)
    assert f"register 0x7abc00001000 {5 << 32} 9" in log_of(library)
    registry.unregister(0x7ABC_0000_1000)


@pytest.mark.slow
def test_a_refusal_carries_the_name_the_driver_gives_it(
    library: str, pages: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    registry = CudaHostRegistry(0, library)
    registry.register(*pages, read_only=True)
    with pytest.raises(HostRegistrationError, match="cuMemHostRegister: CUDA_ERROR_HOST_MEMORY_ALREADY_REG") as raised:
        registry.register(*pages, read_only=True)
    assert raised.value.name == "CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED"
    registry.unregister(pages[0])
    with pytest.raises(HostRegistrationError, match="cuMemHostUnregister: CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED"):
        registry.unregister(pages[0])
    with pytest.raises(HostRegistrationError, match="cuDeviceGet: CUDA_ERROR_INVALID_DEVICE"):
        CudaHostRegistry(4, library)
    monkeypatch.setattr(registry, "_context", ctypes.c_void_p(1))
    with pytest.raises(HostRegistrationError, match="CUDA error 201"):  # one without a name
        registry.register(*pages, read_only=True)


def test_a_machine_without_the_driver_is_told_apart() -> None:
    with pytest.raises(HostRegistrationError, match=r"no CUDA runtime: libnosuchcuda\.so\.1"):
        CudaHostRegistry(0, "libnosuchcuda.so.1")
    with pytest.raises(HostRegistrationError, match=r"no CUDA runtime: libc\.so\.6 has no cuInit"):
        CudaHostRegistry(0, "libc.so.6")
