"""What is needed against what there is: which limit binds, and does it hold. Pure, but for ``bounds_of_machine``."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal, final

from shmstage.budget.formula import MOMENTS, Forecast, Moment, Scope
from shmstage.errors import LimitUnreadableError
from shmstage.memory.limits import Limit, read_limits

BoundKind = Literal["mount", "cgroup", "ram", "given", "device"]
Verdict = Literal["fits", "low headroom", "does not fit"]
#: less than a tenth left is low
LOW_HEADROOM_PARTS = 10
_WORST_FIRST: tuple[Verdict, ...] = ("does not fit", "low headroom", "fits")

_SCOPES: dict[str, tuple[Scope, ...]] = {"mount": ("shm",), "device": ("device",)}
_PRIVATE_TOO: tuple[Scope, ...] = ("shm", "host")


@final
@dataclass(frozen=True, slots=True)
class Bound:
    """A limit, and so many bytes it leaves. A mount bounds shared memory, a device's memory what lies on it, anything
    else shared and private memory together. ``total_nbytes`` 0: not known.
    """

    name: str
    kind: BoundKind
    available_nbytes: int
    total_nbytes: int = 0

    @property
    def scopes(self) -> tuple[Scope, ...]:
        return _SCOPES.get(self.kind, _PRIVATE_TOO)


@final
@dataclass(frozen=True, slots=True)
class Fit:
    """What a bound has to hold at the moment that needs most of it."""

    bound: Bound
    need_nbytes: int
    moment: Moment

    @property
    def headroom_nbytes(self) -> int:
        return self.bound.available_nbytes - self.need_nbytes

    @property
    def verdict(self) -> Verdict:
        if self.headroom_nbytes < 0:
            return "does not fit"
        is_low = self.headroom_nbytes * LOW_HEADROOM_PARTS < self.bound.available_nbytes
        return "low headroom" if is_low and self.need_nbytes else "fits"


@final
@dataclass(frozen=True)
class Judgement:
    """``fits`` has one entry per bound. ``binding`` is the one that the verdict comes from: the worst off, and among
    those the one with the least headroom in bytes.
    """

    fits: tuple[Fit, ...]
    binding: Fit

    @property
    def verdict(self) -> Verdict:
        return self.binding.verdict


def bounds_of(limits: Iterable[Limit]) -> list[Bound]:
    """The limits that were found, as bounds."""
    return [Bound(limit.name, limit.kind, limit.available_nbytes, limit.total_nbytes) for limit in limits]


def bounds_of_machine() -> list[Bound]:
    """What binds here and now. Raises ``LimitUnreadableError``."""
    return bounds_of(read_limits())


def judge(forecast: Forecast, bounds: Sequence[Bound]) -> Judgement:
    """Hold the forecast against every bound. Raises ``LimitUnreadableError`` if there is none."""
    if not bounds:
        raise LimitUnreadableError("no memory limit is known, so it cannot be said what fits; give one with --limit")
    fits = tuple(_fit(forecast, bound) for bound in bounds)
    return Judgement(fits, min(fits, key=lambda fit: (_WORST_FIRST.index(fit.verdict), fit.headroom_nbytes)))


def _fit(forecast: Forecast, bound: Bound) -> Fit:
    needs = {moment: forecast.total(moment, *bound.scopes) for moment in MOMENTS}
    moment = max(MOMENTS, key=lambda moment: needs[moment])
    return Fit(bound, needs[moment], moment)
