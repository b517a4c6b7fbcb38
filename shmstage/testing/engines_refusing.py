"""Engines that raise where one wants it: in one of their methods, in a snapshot, in the middle of an upload."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any, final

import jax

from shmstage.memory.layout import Layout
from shmstage.trainer.engine import restored


@final
class RefusingEngine:
    """Raises in one method, on its ``nth`` call: before the wrapped engine is asked, or ``after`` it has answered.

    ``method`` is any that a worker calls: ``fwd_bwd``, ``update``, ``metrics``, ``save``, ``weights``, ``restore``,
    ``shardings``, ``compile``; ``copy_to_host`` and ``write`` mean those of the ``nth`` snapshot.
    """

    def __init__(self, inner: Any, method: str, *, nth: int = 1, after: bool = False) -> None:
        self._inner = inner
        self._method = method
        self._nth = nth
        self._after = after
        self._calls = 0

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._inner, name)
        if name == self._method:
            return functools.partial(self._refusing, found)
        if name == "save" and self._method in ("copy_to_host", "write"):
            return lambda step, metadata: RefusingSnapshot(self, found(step, metadata))
        return found

    def restore(self, at_most: int | None = None) -> Mapping[str, object] | None:
        bounded = functools.partial(restored, self._inner, at_most)
        metadata: Mapping[str, object] | None = self._refusing(bounded) if self._method == "restore" else bounded()
        return metadata

    def _refusing(self, method: Callable[..., Any], *args: Any) -> Any:
        self._calls += 1
        due = self._calls == self._nth
        if due and not self._after:
            raise RuntimeError(f"seeded refusal of {self._method}")
        result = method(*args)
        if due:
            raise RuntimeError(f"seeded failure at the end of {self._method}")
        return result


@final
class RefusingSnapshot:
    """A checkpoint that cannot be copied or written; made by ``RefusingEngine``."""

    def __init__(self, engine: RefusingEngine, inner: Any) -> None:
        self._engine = engine
        self._inner = inner

    def copy_to_host(self) -> None:
        self._run("copy_to_host")

    def write(self) -> Any:
        return self._run("write")

    def _run(self, name: str) -> Any:
        method = getattr(self._inner, name)
        return self._engine._refusing(method) if self._engine._method == name else method()


@final
class RefusingUploads:
    """The ``nth`` placement of a micro-batch on the device raises, in the middle of it; ``compile`` counts as one."""

    def __init__(self, inner: Any, *, nth: int) -> None:
        self._inner = inner
        self._nth = nth
        self._count = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def shardings(self, layout: Layout) -> Mapping[str, jax.sharding.Sharding]:
        return _CountedShardings(self._inner.shardings(layout), self._placing)

    def _placing(self) -> None:
        self._count += 1
        if self._count == self._nth:
            raise RuntimeError("RESOURCE_EXHAUSTED: seeded, out of device memory")


class _CountedShardings(dict[str, jax.sharding.Sharding]):
    """Looked up once per field and placement; the last field is where it may fail."""

    def __init__(self, shardings: Mapping[str, jax.sharding.Sharding], placing: Callable[[], None]) -> None:
        super().__init__(shardings)
        self._placing = placing
        self._last = list(shardings)[-1]

    def __getitem__(self, name: str) -> jax.sharding.Sharding:
        if name == self._last:
            self._placing()
        return super().__getitem__(name)
