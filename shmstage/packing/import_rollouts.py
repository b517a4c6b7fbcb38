"""What verl and TRL records have in common, once their names are read: a prompt, an answer, a reward → a trajectory."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, final

import numpy as np

from shmstage.errors import TrajectoryError
from shmstage.packing.import_advantages import Rule, group_advantages
from shmstage.packing.import_rows import Row
from shmstage.packing.import_values import Bools, Float32, Int32
from shmstage.packing.trajectory import Trajectory

#: `auto`: as given where they are given, else normalised
Advantages = Literal["auto", "given", "normalised", "centred", "rewards"]
ADVANTAGES: tuple[Advantages, ...] = ("auto", "given", "normalised", "centred", "rewards")


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Rollout:
    """One answer to a prompt, padding stripped; what is per token is of the answer's n tokens.

    `answer` int32 `[n]`, `trains` bool `[n]`, `logprobs` float32 `[n]`; `extra`: optional fields of a trajectory,
    float32 `[n]`. `advantages` float32 `[n]` if the record has them, `reward` if it has one. `group`: the same for all
    answers to one prompt; empty: not known. `batch` None: not known.
    """

    row: Row
    prompt: Int32
    answer: Int32
    trains: Bools
    logprobs: Float32
    extra: Mapping[str, Float32] = field(default_factory=dict)
    advantages: Float32 | None = None
    reward: float | None = None
    name: str = ""
    group: str = ""
    batch: int | None = None
    policy_version: int = 0


@final
@dataclass(frozen=True, slots=True)
class Names:
    """How a kind of record calls what an advantage is made of, for errors; `epsilon` as its framework has it."""

    advantages: str
    reward: str
    group: str
    epsilon: float


def trajectories_of(rollouts: Sequence[Rollout], names: Names, choice: Advantages) -> list[Trajectory]:
    """In the order of `rollouts`. Raises `TrajectoryError` naming row, field, want and got."""
    given = [rollout.advantages is not None for rollout in rollouts]
    if choice == "given" or (choice == "auto" and any(given)):
        advantages = [_given(rollout, names, choice) for rollout in rollouts]
    else:
        rule: Rule = "normalised" if choice == "auto" else choice
        advantages = _from_rewards(rollouts, names, rule)
    batch_of: dict[str, int] = {}
    made = []
    for rollout, each in zip(rollouts, advantages, strict=True):
        group = rollout.group or rollout.name or f"row-{rollout.row.number}"
        batch = rollout.batch
        if batch is None:
            batch = batch_of.setdefault(group, rollout.row.default_batch)
        made.append(_trajectory(rollout, each, group, batch))
    return made


def lonely_groups(rollouts: Iterable[Rollout]) -> int:
    """How many groups have one answer only."""
    counts: dict[str, int] = {}
    for rollout in rollouts:
        counts[rollout.group] = counts.get(rollout.group, 0) + 1
    return sum(1 for count in counts.values() if count == 1)


def _given(rollout: Rollout, names: Names, choice: Advantages) -> Float32:
    if rollout.advantages is None:
        others = "" if choice == "given" else ", and other rows have them"
        rollout.row.refuse(
            f"wants {names.advantages}, got none{others}; write them in every row, or have them made of rewards with "
            "--advantages normalised"
        )
    return rollout.advantages


def _from_rewards(rollouts: Sequence[Rollout], names: Names, rule: Rule) -> list[Float32]:
    groups: dict[str, list[int]] = {}
    rewards: list[float] = []
    for number, rollout in enumerate(rollouts):
        if rollout.reward is None:
            rollout.row.refuse(f"wants {names.reward} (or {names.advantages}), got neither; write one number per row")
        if not rollout.group and rule != "rewards":
            rollout.row.refuse(
                f"wants {names.group}, the same for all answers to one prompt, got none; write it, or take rewards as "
                "they are: --advantages rewards"
            )
        rewards.append(rollout.reward)
        groups.setdefault(rollout.group or f" {number}", []).append(number)
    found = [0.0] * len(rollouts)
    for members in groups.values():
        each = group_advantages([rewards[number] for number in members], rule, epsilon=names.epsilon)
        for number, advantage in zip(members, each, strict=True):
            found[number] = advantage
    return [
        np.full(len(rollout.answer), advantage, np.float32)
        for rollout, advantage in zip(rollouts, found, strict=True)
    ]


def _trajectory(rollout: Rollout, advantages: Float32, group: str, batch: int) -> Trajectory:
    row = rollout.row
    before = np.zeros(len(rollout.prompt), np.float32)
    if not len(rollout.prompt) and rollout.trains[:1].any():
        row.refuse(
            "the prompt wants at least one token, from which the first one of the answer is predicted, got none; begin "
            "it with the token that begins every text"
        )
    per_token: dict[str, Any] = {"advantages": advantages, "old_logprobs": rollout.logprobs, **rollout.extra}
    for name, values in per_token.items():
        if not np.isfinite(values[rollout.trains]).all():
            wrong = values[rollout.trains & ~np.isfinite(values)][0]
            row.refuse(f"{name} wants finite numbers where tokens train, got {wrong}")
    fields: dict[str, Any] = {name: np.concatenate([before, _tamed(values)]) for name, values in per_token.items()}
    try:
        return Trajectory(
            trajectory_id=rollout.name or f"row-{row.number}",
            group_id=group,
            batch_index=batch,
            policy_version=rollout.policy_version,
            tokens=np.concatenate([rollout.prompt, rollout.answer]),
            loss_mask=np.concatenate([before, rollout.trains.astype(np.float32)]),
            **fields,
        )
    except TrajectoryError as error:
        row.refuse(str(error))


def _tamed(values: Float32) -> Float32:
    """0 for what is not finite: of tokens that do not train, which may hold anything where they come from."""
    return np.where(np.isfinite(values), values, np.float32(0))
