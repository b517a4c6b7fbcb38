"""Whether what a file says it holds fits into memory, asked before any of it is read."""

from __future__ import annotations

from shmstage.memory.limits import check_fits, read_limits


def check_room(nbytes: int, what: str, remedy: str) -> None:
    """Raises ``BudgetError`` naming the limit that binds. Private memory: the size of /dev/shm does not matter."""
    check_fits(nbytes, what, remedy, [limit for limit in read_limits() if limit.kind != "mount"])
