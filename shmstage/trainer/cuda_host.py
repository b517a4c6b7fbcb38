"""The only door to CUDA: pins host memory through the driver that JAX has loaded, ``libcuda.so.1``.

The driver and not the runtime library: it is there wherever JAX computes on an NVIDIA device, under one name, whatever
wheels the runtime came from. Prototypes and flags: CUDA Driver API, "Memory Management" and "Primary Context
Management"; a name with ``_v2`` is what the header's plain one stands for.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from typing import final

from shmstage.errors import HostRegistrationError

LIBRARY = "libcuda.so.1"
PORTABLE = 0x01  # pinned for every context, so that one registration serves all devices of the process
READ_ONLY = 0x08  # needed for pages that are mapped read-only

_POINTER = ctypes.c_void_p
_PROTOTYPES = {
    "cuInit": (ctypes.c_uint,),
    "cuDeviceGet": (ctypes.POINTER(ctypes.c_int), ctypes.c_int),
    "cuDevicePrimaryCtxRetain": (ctypes.POINTER(_POINTER), ctypes.c_int),
    "cuDevicePrimaryCtxRelease_v2": (ctypes.c_int,),
    "cuCtxPushCurrent_v2": (_POINTER,),
    "cuCtxPopCurrent_v2": (ctypes.POINTER(_POINTER),),
    "cuMemHostRegister_v2": (_POINTER, ctypes.c_size_t, ctypes.c_uint),
    "cuMemHostUnregister": (_POINTER,),
    "cuGetErrorName": (ctypes.c_int, ctypes.POINTER(ctypes.c_char_p)),
}


@final
class CudaHostRegistry:
    """A ``HostRegistry`` in the primary context of one device, which is the one that JAX uses."""

    def __init__(self, ordinal: int, library: str = LIBRARY) -> None:
        """``ordinal`` counts the devices that are visible to this process."""
        try:
            self._cuda = ctypes.CDLL(library)
        except OSError as error:
            raise HostRegistrationError(f"no CUDA runtime: {error}") from None
        for name, arguments in _PROTOTYPES.items():
            try:
                function = getattr(self._cuda, name)
            except AttributeError:
                raise HostRegistrationError(f"no CUDA runtime: {library} has no {name}; update the driver") from None
            function.argtypes, function.restype = arguments, ctypes.c_int
        self._call("cuInit", 0)
        device = ctypes.c_int()
        self._call("cuDeviceGet", ctypes.byref(device), ordinal)
        self._device = device.value
        self._context = _POINTER()
        self._call("cuDevicePrimaryCtxRetain", ctypes.byref(self._context), self._device)
        self._closed = False

    def register(self, address: int, nbytes: int, *, read_only: bool) -> None:
        with self._current():
            self._call("cuMemHostRegister_v2", address, nbytes, PORTABLE | (READ_ONLY if read_only else 0))

    def unregister(self, address: int) -> None:
        with self._current():
            self._call("cuMemHostUnregister", address)

    def close(self) -> None:
        """Harmless twice. A failure is of no use to anybody: JAX retains the context as well."""
        if not self._closed:
            self._closed = True
            self._cuda.cuDevicePrimaryCtxRelease_v2(self._device)

    @contextmanager
    def _current(self) -> Iterator[None]:
        """The context belongs to the calling thread for the time being; what was current comes back."""
        self._call("cuCtxPushCurrent_v2", self._context)
        try:
            yield
        finally:
            self._cuda.cuCtxPopCurrent_v2(ctypes.byref(_POINTER()))

    def _call(self, name: str, *arguments: object) -> None:
        code = getattr(self._cuda, name)(*arguments)
        if code:
            error = self._name_of(code)
            raise HostRegistrationError(f"{name.removesuffix('_v2')}: {error}", error)

    def _name_of(self, code: int) -> str:
        name = ctypes.c_char_p()
        known = self._cuda.cuGetErrorName(code, ctypes.byref(name)) == 0 and name.value is not None
        return name.value.decode() if known and name.value is not None else f"CUDA error {code}"
