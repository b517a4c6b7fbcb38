"""The most that fits, and what would make it fit. Every answer was found by running the formula again. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, final

from shmstage.budget.formula import Inputs, forecast
from shmstage.budget.verdict import Bound, Verdict, judge
from shmstage.errors import LayoutError
from shmstage.settings import MAX_EXPERTS

#: a run has at least so many (settings.py)
LEAST = {"slots": 2, "rows": 1, "tokens": 2}
MOST = {"slots": 4096, "rows": 1 << 20, "tokens": 1 << 24}


@final
@dataclass(frozen=True)
class Suggestion:
    """Settings to change, and what the verdict and the least headroom are then, if ``condition`` holds."""

    change: Mapping[str, Any]
    verdict: Verdict
    headroom_nbytes: int
    condition: str = ""

    @property
    def text(self) -> str:
        return " and ".join(f"{key} = {value}" for key, value in self.change.items()) + self.condition


def most_that_fits(inputs: Inputs, bounds: Sequence[Bound], name: str) -> int:
    """The largest ``slots``, ``rows`` or ``tokens`` that fits with all else as it is; 0 if not even the least does."""
    return _largest(lambda value: fits(apply(inputs, {name: value}), bounds), LEAST[name], MOST[name])


def fits(inputs: Inputs, bounds: Sequence[Bound], *, well: bool = False) -> bool:
    """Whether it fits; ``well``: with headroom."""
    verdict = _outcome(inputs, bounds)[0]
    return verdict == "fits" or (verdict == "low headroom" and not well)


def suggestions(inputs: Inputs, bounds: Sequence[Bound]) -> list[Suggestion]:
    """Changes that make it fit with headroom, or just fit where nothing does better; none if it fits well now.

    One setting at a time where that is enough.
    """
    verdict = _outcome(inputs, bounds)[0]
    if verdict == "fits":
        return []
    for well in (True, False) if verdict == "does not fit" else (True,):
        single = [change for change in _single_changes(inputs, bounds, well) if _helps(inputs, change, bounds, well)]
        found = single or list(_combined(inputs, bounds, well))
        if found:
            return [_suggestion(inputs, change, bounds) for change in found]
    return []


def apply(inputs: Inputs, change: Mapping[str, Any]) -> Inputs:
    """The inputs with a suggestion's settings."""
    plain = dict(change)
    fields, evaluation = inputs.fields, inputs.evaluation
    if "routing_encoding" in plain:
        encoding = plain.pop("routing_encoding")
        fields = replace(fields, encoding=encoding)
        evaluation = replace(evaluation, encoding=encoding) if evaluation is not None else None
    if "max_held_bytes" in plain:
        plain["max_held_nbytes"] = plain.pop("max_held_bytes")
    if "weight_sync" in plain:
        plain["weight_sync"] = plain["weight_sync"] != "off"
    return replace(inputs, fields=fields, evaluation=evaluation, **plain)


def _single_changes(inputs: Inputs, bounds: Sequence[Bound], well: bool) -> Iterator[dict[str, Any]]:
    for encoding in _smaller_encodings(inputs):
        yield _encoding_change(inputs, encoding)
    for name in ("slots", "rows", "tokens"):
        largest = _largest(
            lambda value, name=name: _helps(inputs, {name: value}, bounds, well),  # type: ignore[misc]
            _least(inputs, name), getattr(inputs, name) - 1,
        )  # fmt: skip
        if largest:
            yield {name: largest}
    yield from ([_RARER] if _saves_often(inputs) else [])
    yield from ({key: value} for key, value in _savings(inputs).items())
    # with less than a step of them nothing could be trained; what a bundle holds no limit lowers, so it never helps
    waiting = inputs.waiting_nbytes(inputs.held_nbytes)
    held = _largest(
        lambda value: _helps(inputs, {"max_held_bytes": value}, bounds, well),
        max(inputs.waiting_nbytes(inputs.step_nbytes), 1), min(waiting, inputs.max_held_nbytes or waiting) - 1,
    )  # fmt: skip
    if held:
        yield {"max_held_bytes": held}


def _savings(inputs: Inputs) -> dict[str, Any]:
    """What can be done without, each at its least."""
    found: dict[str, Any] = {}
    if inputs.aux_slots and inputs.evaluation is None:
        found["aux_slots"] = 0
    if inputs.device_buffers > 2:
        found["device_buffers"] = 2
    if inputs.weight_sync and inputs.param_nbytes:
        found["weight_sync"] = "off"
    return found


def _combined(inputs: Inputs, bounds: Sequence[Bound], well: bool) -> Iterator[dict[str, Any]]:
    """Everything that costs no training, then as many rows as fit beside it; then the same with one checkpoint."""
    change = {**_savings(inputs), **({"slots": LEAST["slots"]} if inputs.slots > LEAST["slots"] else {})}
    yield from _with_fewer(inputs, change, bounds, well)
    if _saves_often(inputs):
        yield from _with_fewer(inputs, {**change, **_RARER}, bounds, well)


def _with_fewer(
    inputs: Inputs, change: dict[str, Any], bounds: Sequence[Bound], well: bool
) -> Iterator[dict[str, Any]]:
    for encoding in [*_smaller_encodings(inputs), None]:
        with_encoding = {**(_encoding_change(inputs, encoding) if encoding else {}), **change}
        if with_encoding and _helps(inputs, with_encoding, bounds, well):
            yield with_encoding
            return
        for name in ("rows", "tokens"):
            largest = _largest(
                lambda value, name=name, first=with_encoding: _helps(  # type: ignore[misc]
                    inputs, {**first, name: value}, bounds, well
                ),
                _least(inputs, name), getattr(inputs, name) - 1,
            )  # fmt: skip
            if largest:
                yield {**with_encoding, name: largest}
                return


def _encoding_change(inputs: Inputs, encoding: str) -> dict[str, Any]:
    """With slots of the capacity that the fill asks for, unless that is all of it or set already."""
    whole = inputs.rows * inputs.tokens
    filled = -(-whole * inputs.fill.numerator // inputs.fill.denominator)
    limit = {"max_real_tokens": filled} if 0 < filled < whole and not inputs.max_real_tokens else {}
    return {"routing_encoding": encoding, **limit}


def _smaller_encodings(inputs: Inputs) -> list[str]:
    fields = inputs.fields
    if not fields.has_routing:
        return []
    known = ["ragged_packed"] if 1 <= fields.experts <= MAX_EXPERTS else []
    return [name for name in (*known, "ragged") if name != fields.encoding and fields.encoding != "ragged_packed"]


def _helps(inputs: Inputs, change: Mapping[str, Any], bounds: Sequence[Bound], well: bool) -> bool:
    return fits(apply(inputs, change), bounds, well=well)


def _suggestion(inputs: Inputs, change: Mapping[str, Any], bounds: Sequence[Bound]) -> Suggestion:
    verdict, headroom = _outcome(apply(inputs, change), bounds)
    unknown = "tokens" in change and not inputs.longest
    return Suggestion(change, verdict, headroom, ", if no trajectory is longer" if unknown else "")


def _least(inputs: Inputs, name: str) -> int:
    """A trajectory is not split: a row has to hold the longest."""
    return max(LEAST[name], inputs.longest) if name == "tokens" else LEAST[name]


def _saves_often(inputs: Inputs) -> bool:
    return inputs.checkpoint_every > 0 and inputs.state_nbytes > 0


#: only the checkpoint before step 1, of which no second one waits
_RARER = {"checkpoint_every": 0}


def _outcome(inputs: Inputs, bounds: Sequence[Bound]) -> tuple[Verdict, int]:
    try:
        judgement = judge(forecast(inputs), bounds)
    except LayoutError:  # beyond what any pool may hold
        return "does not fit", -1
    return judgement.verdict, judgement.binding.headroom_nbytes


def _largest(holds: Callable[[int], bool], least: int, most: int) -> int:
    """The largest value in ``least .. most`` for which ``holds``, which is true up to some value and false beyond."""
    if most < least or not holds(least):
        return 0
    low, high = least, most + 1
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if holds(middle) else (low, middle)
    return low
