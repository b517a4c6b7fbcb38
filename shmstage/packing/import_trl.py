"""Records with the names of TRL's GRPO trainer: what its rollout functions return and what it keeps for the loss.

| name                                           | shape      | becomes                                              |
|------------------------------------------------|------------|------------------------------------------------------|
| `prompt_ids`                                   | `[p]`      | the prompt; padded on the left                       |
| `prompt_mask`                                  | `[p]`      | which of its tokens are no padding                   |
| `completion_ids`                               | `[c]`      | the answer; padded on the right                      |
| `completion_mask`                              | `[c]`      | which of its tokens are no padding                   |
| `tool_mask`, `env_mask`                        | `[c]`      | which of those train; else all                       |
| `logprobs`, `sampling_per_token_logps`, else   | `[c]`      | `old_logprobs`: of the policy that sampled           |
| `old_per_token_logps`                          |            |                                                      |
| `advantages`, `advantage`                      | 1 or `[c]` | `advantages`                                         |
| `reward`, else `rewards`                       | 1 or list  | the reward: one of each function, summed             |
| `ref_per_token_logps`                          | `[c]`      | `ref_logprobs`                                       |
| `group_id`, `prompt_id`, `uid`                 |            | the group, within its `step`; else the rows of a     |
|                                                |            | `step` with one prompt                               |
"""

from __future__ import annotations

import hashlib

import numpy as np

from shmstage.packing.import_rollouts import Names, Rollout
from shmstage.packing.import_rows import Row
from shmstage.packing.import_values import Bools, Int32, Values

NAMES = Names("advantages", "rewards", "group_id", epsilon=1e-4)
_LOGPROBS = ("logprobs", "sampling_per_token_logps", "old_per_token_logps")
_ADVANTAGES = ("advantages", "advantage")
#: the one number first: with weights it is another one than the sum of the list
_REWARDS = ("reward", "rewards")
_TRAINED = ("tool_mask", "env_mask")
_GROUP = ("group_id", "prompt_id", "uid")
_NAMED = ("trajectory_id",)
_BATCH = ("batch_index", "step")
_VERSION = ("policy_version",)
USED = frozenset(
    {"prompt_ids", "prompt_mask", "completion_ids", "completion_mask", "ref_per_token_logps"}.union(
        _LOGPROBS, _ADVANTAGES, _REWARDS, _TRAINED, _GROUP, _NAMED, _BATCH, _VERSION
    )
)
_NO_IDS = (
    "TRL's log of completions has texts only: keep prompt_ids, completion_ids and logprobs of the rollout beside them"
)


def trl_rollout(row: Row) -> Rollout:
    """Raises `TrajectoryError` naming row, field, want and got."""
    values = Values(row)
    prompt = values.tokens(values.need(("prompt_ids",), "token ids of the prompt", _NO_IDS))
    answer = values.tokens(values.need(("completion_ids",), "token ids of the completion", _NO_IDS))
    prompt = prompt[_real(values, "prompt_mask", len(prompt))]
    real = _real(values, "completion_mask", len(answer))
    trains = real
    for name in _TRAINED:
        if row.values.get(name) is not None:
            trains = trains & values.mask(name, len(answer))
    logprobs = values.need(
        _LOGPROBS, "log-probs of the policy that sampled, one per token of completion_ids",
        "keep them with the completions: a rollout function of TRL returns them as logprobs",
    )  # fmt: skip
    extra = {}
    if row.values.get("ref_per_token_logps") is not None:
        extra["ref_logprobs"] = values.numbers("ref_per_token_logps", len(answer))[real]
    reward, named = row.first_of(_REWARDS), row.first_of(_NAMED)
    batch = values.count(_BATCH, 0) if row.first_of(_BATCH) is not None else None
    return Rollout(
        row=row,
        prompt=prompt,
        answer=answer[real],
        trains=trains[real],
        logprobs=values.numbers(logprobs, len(answer))[real],
        extra=extra,
        advantages=values.spread(_ADVANTAGES, real),
        # null or NaN: the function does not apply to the row
        reward=values.total(reward[0], gaps=True) if reward is not None else None,
        name=values.identity(named[0]) if named is not None else "",
        group=_group(values, prompt, batch),
        batch=batch,
        policy_version=values.count(_VERSION, 0),
    )


def _real(values: Values, name: str, length: int) -> Bools:
    if values.row.values.get(name) is not None:
        return values.mask(name, length)
    if values.row.is_padded:
        values.row.refuse(
            f"wants {name}, by which padding is told from tokens: rows of an array are all of one length; save it with "
            "the rest of the batch"
        )
    return np.ones(length, bool)


def _group(values: Values, prompt: Int32, batch: int | None) -> str:
    found = values.row.first_of(_GROUP)
    name = values.identity(found[0]) if found is not None else f"prompt-{_digest(prompt)}"
    # a prompt comes again in a later epoch, and its answers are then another group
    return name if batch is None else f"step-{batch}-{name}"


def _digest(prompt: Int32) -> str:
    return hashlib.sha256(prompt.tobytes()).hexdigest()[:16]
