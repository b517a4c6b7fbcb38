"""Which limits count: those of this machine, or what was given in their place."""

from __future__ import annotations

from collections.abc import Sequence

from shmstage.budget.sizes import parse_size
from shmstage.budget.verdict import Bound, BoundKind, bounds_of_machine
from shmstage.errors import SettingsError

KINDS: dict[str, BoundKind] = {"mount": "mount", "cgroup": "cgroup", "ram": "ram"}


def bounds_from(limits: Sequence[str], device_memory: str | None = None) -> list[Bound]:
    """``limits`` as ``--limit`` takes them: ``SIZE`` stands for all that were found, ``mount=SIZE`` for one kind.

    Raises ``SettingsError``, and ``LimitUnreadableError`` where a limit that still counts cannot be read.
    """
    given: dict[str, Bound] = {}
    for text in limits:
        kind, _, size = text.rpartition("=")
        if kind and kind not in KINDS:
            raise SettingsError(f"--limit {text[:80]}: no limit is of kind {kind[:40]!r}; use {', '.join(KINDS)}")
        if kind in given:
            raise SettingsError(f"--limit {text[:80]}: given twice; keep one")
        name = f"the {kind} limit" if kind else "the limit"
        given[kind] = Bound(f"{name} given", KINDS.get(kind, "given"), parse_size(size, "--limit"))
    found: list[Bound] = []
    if "" not in given and not KINDS.keys() <= given.keys():
        found = [bound for bound in bounds_of_machine() if bound.kind not in given]
    if device_memory is not None:
        found.append(Bound("the device memory", "device", parse_size(device_memory, "--device-memory")))
    return [*given.values(), *found]
