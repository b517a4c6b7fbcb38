"""What a walk raises when something happens that must not."""

from __future__ import annotations


class ViolationError(Exception):
    """``invariant`` is the short name of what was broken; ``trace`` the steps that lead there, set by the walker."""

    def __init__(self, invariant: str, text: str) -> None:
        super().__init__(f"{invariant}: {text}")
        self.invariant = invariant
        self.trace: list[str] = []


def require(holds: object, invariant: str, text: str) -> None:
    if not holds:
        raise ViolationError(invariant, text)
