"""What several hosts answered to one question, as one answer or one error that names hosts. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from shmstage.errors import ProtocolError, ShmstageError, StoppedError, TrainerError, WaitTimeoutError, shown

Outcome = Mapping[str, Any] | ShmstageError

#: figures of replies that must not differ between hosts
EQUAL = ("updated", "step", "param_digest", "optional", "snapshots", "engine")


def listed(names: Sequence[str]) -> str:
    """Names in words."""
    return " and ".join((", ".join(names[:-1]), names[-1])) if len(names) > 1 else "".join(names)


# --- states -------------------------------------------------------------------------------------------------


def states_of(names: Sequence[str], outcomes: Sequence[Outcome]) -> list[Mapping[str, Any]]:
    """What each host said of itself when it prepared. Raises ``ProtocolError`` if that is no map."""
    states = []
    for name, outcome in zip(names, outcomes, strict=True):
        state = outcome.get("state") if isinstance(outcome, Mapping) else None
        if not isinstance(state, Mapping):
            raise ProtocolError(f"{name} prepared without telling its state: {shown(outcome)}")
        states.append(state)
    return states


def differing(states: Sequence[Mapping[str, Any]], names: Sequence[str]) -> str:
    """Who differs from the others in what, in words; "" if nobody does."""
    parts: list[str] = []
    for key in sorted(set().union(*states)):
        told = [shown(state.get(key), 120) for state in states]
        common = Counter(told).most_common(1)[0][0]  # the first of those that are equally common
        odd = [host for host, value in enumerate(told) if value != common]
        if odd:
            others = listed([name for host, name in enumerate(names) if host not in odd])
            parts.extend(f"{names[host]}: {key} is {told[host]}, on {others} it is {common}" for host in odd)
    return "; ".join(parts)


# --- errors -------------------------------------------------------------------------------------------------


def named(error: ShmstageError, text: str) -> ShmstageError:
    """The same error with another text."""
    copy = type(error)(text)
    copy.from_peer = error.from_peer
    copy.__cause__ = error
    return copy


def gravest(names: Sequence[str], outcomes: Sequence[Outcome]) -> ShmstageError | None:
    """The gravest error of any host, naming it; ``None``: all have answered."""
    failed = _failed(names, outcomes)
    return named(failed[0][1], f"{failed[0][0]}: {failed[0][1]}") if failed else None


def refusal(what: str, names: Sequence[str], outcomes: Sequence[Outcome]) -> ShmstageError | None:
    """Why ``what`` is not begun, under the class of the gravest answer; ``None``: all accept."""
    failed = _failed(names, outcomes)
    if not failed:
        return None
    name, error = failed[0]
    silent = isinstance(error, WaitTimeoutError) and not error.from_peer
    rest = [f"{other}: {type(found).__name__}: {found}" for other, found in failed[1:]]
    answered = [each for each in names if each not in dict(failed)]
    if answered:
        rest.append(f"{listed(answered)} {'answered' if silent else 'would have done it'}")
    return named(error, "; ".join([f"{name}: {error}", *rest, f"{what} was not begun on any host"]))


def commit_error(
    what: str, names: Sequence[str], outcomes: Sequence[Outcome], *, keeps_class: bool
) -> ShmstageError | None:
    """What went wrong after all had accepted, and who did what; ``None``: nothing did.

    An error that a host answered with becomes a ``TrainerError`` unless ``keeps_class`` or all hosts say the same.
    """
    failed = _failed(names, outcomes)
    if not failed:
        return None
    name, error = failed[0]
    rest = [f"{other}: {type(found).__name__}: {found}" for other, found in failed[1:]]
    done = [each for each in names if each not in dict(failed)]
    if done:
        rest.append(f"{listed(done)} did it")
    unanimous = not done and len({type(found) for _, found in failed}) == 1
    text = "; ".join([f"{name}: {error}", *rest])
    if not error.from_peer or keeps_class or unanimous:
        return named(error, f"{what}: {text}" if done else text)
    told = TrainerError(f"{what} failed after all hosts had accepted it: {text}")
    told.from_peer = True
    told.__cause__ = error
    return told


def _failed(names: Sequence[str], outcomes: Sequence[Outcome]) -> list[tuple[str, ShmstageError]]:
    """Who failed, the gravest first: stopped, lost, refused, silent."""
    failed = [(n, o) for n, o in zip(names, outcomes, strict=True) if isinstance(o, ShmstageError)]
    return sorted(failed, key=lambda each: _gravity(each[1]))


def _gravity(error: ShmstageError) -> int:
    if isinstance(error, StoppedError):
        return 0
    if error.from_peer:
        return 2
    return 3 if isinstance(error, WaitTimeoutError) else 1


# --- replies ------------------------------------------------------------------------------------------------


def combined(what: str, names: Sequence[str], results: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """One reply: what must be equal is, seconds are of the slowest host, everything else is host 0's.

    Raises ``TrainerError`` naming the hosts that differ. A host may leave ``param_digest`` to another one ("").
    """
    reply = dict(results[0])
    for key in EQUAL:
        said = [(name, result[key]) for name, result in zip(names, results, strict=True) if key in result]
        if key == "param_digest":
            said = [each for each in said if each[1]] or said
        if said:
            name, reply[key] = said[0]
            other = next((each for each in said if each[1] != said[0][1]), None)
            if other is not None:
                raise TrainerError(
                    f"{what}: {key} is {shown(said[0][1])} on {name} and {shown(other[1])} on {other[0]}; the hosts "
                    "do not train the same model; see their logs"
                )
    for key, value in reply.items():
        if key.endswith("_s") and isinstance(value, int | float):
            reply[key] = max(float(result.get(key, 0.0)) for result in results)
    return reply
