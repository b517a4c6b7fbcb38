"""Registering host memory with the device runtime: uploads then read it themselves, without a copy in between.

All or nothing: a pool of which only a part is registered would upload at two speeds, and a copy that starts in
registered memory and ends outside of it is refused by CUDA ("regions spanning over allocations that are both
registered and not registered": CUDA_ERROR_INVALID_VALUE). A copy across two registrations is refused in the same way,
so the pieces are slots, whatever their size: no upload reads across the end of one.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, final

from shmstage.errors import HostRegistrationError

log = logging.getLogger(__name__)

#: what runtimes say when they know of no read-only registration
NO_READ_ONLY = ("CUDA_ERROR_NOT_SUPPORTED", "CUDA_ERROR_INVALID_VALUE")


class HostRegistry(Protocol):
    """A device runtime that host memory can be registered with. Raises ``HostRegistrationError``."""

    def register(self, address: int, nbytes: int, *, read_only: bool) -> None:
        """Pin whole pages; ``read_only``: they are mapped so, and the devices will only read them."""

    def unregister(self, address: int) -> None:
        """Undo the ``register`` that began at ``address``; before the memory is unmapped."""

    def close(self) -> None:
        """Let go of the runtime."""


@dataclass(frozen=True, slots=True)
class Registration:
    """How it went. ``why_not`` is "" if ``nbytes`` are registered, else nothing is."""

    nbytes: int = 0
    seconds: float = 0.0
    why_not: str = ""

    def as_facts(self) -> dict[str, object]:
        """Plain values, for ``info``."""
        return {"registered_nbytes": self.nbytes, "seconds": round(self.seconds, 6), "why_not": self.why_not}

    def describe(self) -> str:
        if self.why_not:
            return f"host memory is not registered: {self.why_not}"
        return f"registered {self.nbytes} bytes of host memory in {self.seconds:.3f} s"


@final
class RegisteredMemory:
    """Ranges of memory, mapped read-only, that are registered until ``close``, or none of them."""

    def __init__(
        self,
        ranges: Sequence[tuple[int, int]],
        open_registry: Callable[[], HostRegistry],
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """``ranges`` are (address, nbytes). Never raises ``HostRegistrationError``: ``registration`` says why not."""
        self._registry: HostRegistry | None = None
        self._addresses: list[int] = []
        begin = clock()
        try:
            self._registry = open_registry()
            self._register(self._registry, ranges)
        except HostRegistrationError as error:
            self.close()
            self.registration = Registration(seconds=clock() - begin, why_not=str(error))
        except BaseException:
            self.close()
            raise
        else:
            self.registration = Registration(sum(nbytes for _, nbytes in ranges), clock() - begin)
        log.info("%s", self.registration.describe())

    def close(self) -> None:
        """Unregister, the last first; idempotent. To be called before the memory is unmapped, when no upload reads it.

        What cannot be unregistered is logged: its pages stay pinned until the process ends.
        """
        registry, self._registry = self._registry, None
        if registry is None:
            return
        while self._addresses:
            address = self._addresses.pop()
            try:
                registry.unregister(address)
            except HostRegistrationError as error:
                log.warning("host memory at %#x stays registered: %s", address, error)
        registry.close()

    def _register(self, registry: HostRegistry, ranges: Sequence[tuple[int, int]]) -> None:
        read_only = True
        for address, nbytes in ranges:
            try:
                registry.register(address, nbytes, read_only=read_only)
            except HostRegistrationError as error:
                if self._addresses or not read_only or error.name not in NO_READ_ONLY:
                    raise
                # it knows only memory that may be written; where devices walk the host's page tables that is enough
                read_only = False
                self._register_plainly(registry, address, nbytes, error)
            self._addresses.append(address)

    def _register_plainly(
        self, registry: HostRegistry, address: int, nbytes: int, refusal: HostRegistrationError
    ) -> None:
        try:
            registry.register(address, nbytes, read_only=False)
        except HostRegistrationError as error:
            raise HostRegistrationError(f"read-only: {refusal}; as writable memory: {error}", error.name) from None
