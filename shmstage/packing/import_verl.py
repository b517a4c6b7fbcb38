"""Records with the names of verl's DataProto batches.

| name                                      | shape      | becomes                                              |
|-------------------------------------------|------------|------------------------------------------------------|
| `prompts`, or the front of `input_ids`    | `[p]`      | the prompt; padded on the left                       |
| `responses`                               | `[r]`      | the answer; padded on the right                      |
| `attention_mask`                          | `[p + r]`  | which tokens are no padding                          |
| `response_mask`, `loss_mask`              | `[r]`      | which tokens of the answer train: those of all masks |
|                                           |            | that are there; `loss_mask` may be `[p + r]`         |
| `rollout_log_probs`, else `old_log_probs` | `[r]`      | `old_logprobs`: of the policy that sampled           |
| `advantages`                              | `[r]` or 1 | `advantages`                                         |
| `token_level_rewards`, `rm_scores`,       | `[r]` or 1 | the reward: their sum                                |
| `token_level_scores`, `rewards`,          |            |                                                      |
| `reward`, `score`                         |            |                                                      |
| `ref_log_prob`, `returns`, `values`       | `[r]`      | `ref_logprobs`, `returns`, `old_values`              |
| `uid`                                     |            | the group                                            |

The names are those of `verl/trainer/ppo/core_algos.py` and `verl/trainer/ppo/ray_trainer.py`.
"""

from __future__ import annotations

import numpy as np

from shmstage.packing.import_rollouts import Names, Rollout
from shmstage.packing.import_rows import Row
from shmstage.packing.import_values import Bools, Int32, Values

NAMES = Names("advantages", "token_level_rewards", "uid", epsilon=1e-6)
_LOGPROBS = ("rollout_log_probs", "old_log_probs")
_REWARDS = ("token_level_rewards", "token_level_scores", "rm_scores", "rewards", "reward", "score")
_MASKS = ("response_mask", "loss_mask")
_OPTIONAL = {"ref_log_prob": "ref_logprobs", "returns": "returns", "values": "old_values"}
_NAMED = ("trajectory_id", "request_id")
_BATCH = ("batch_index", "global_step", "global_steps", "step")
_VERSION = ("policy_version",)
USED = frozenset(
    {"prompts", "input_ids", "responses", "attention_mask", "advantages", "uid"}.union(
        _LOGPROBS, _REWARDS, _MASKS, _OPTIONAL, _NAMED, _BATCH, _VERSION
    )
)


def verl_rollout(row: Row) -> Rollout:
    """Raises `TrajectoryError` naming row, field, want and got."""
    values = Values(row)
    answer = values.tokens(values.need(("responses",), "token ids of the answer", "write them"))
    prompt = _prompt(values, len(answer))
    real_prompt, real, trains = _masks(values, len(prompt), len(answer))
    logprobs = values.need(
        _LOGPROBS, "log-probs of the policy that sampled, one per token of responses",
        "have verl keep them: actor_rollout_ref.rollout.calculate_log_probs=True",
    )  # fmt: skip
    reward, named = row.first_of(_REWARDS), row.first_of(_NAMED)
    return Rollout(
        row=row,
        prompt=prompt[real_prompt],
        answer=answer[real],
        trains=trains[real],
        logprobs=values.numbers(logprobs, len(answer))[real],
        extra={
            field: values.numbers(name, len(answer))[real]
            for name, field in _OPTIONAL.items()
            if row.values.get(name) is not None
        },
        advantages=values.spread(("advantages",), real),
        reward=values.total(reward[0]) if reward is not None else None,
        name=values.identity(named[0]) if named is not None else "",
        group=values.identity("uid") if row.values.get("uid") is not None else "",
        batch=values.count(_BATCH, 0) if row.first_of(_BATCH) is not None else None,
        policy_version=values.count(_VERSION, 0),
    )


def _prompt(values: Values, answer: int) -> Int32:
    found = values.need(("prompts", "input_ids"), "token ids of the prompt", "write them")
    tokens = values.tokens(found)
    if found == "prompts":
        return tokens
    if len(tokens) < answer:
        values.row.refuse(f"input_ids wants prompt and responses, at least {answer} tokens, got {len(tokens)}")
    return tokens[: len(tokens) - answer]


def _masks(values: Values, prompt: int, answer: int) -> tuple[Bools, Bools, Bools]:
    """Which tokens of the prompt are real, which of the answer, and which of those train."""
    row = values.row
    trains = _trained(values, prompt, answer)
    if row.values.get("attention_mask") is None:
        # verl pads whatever it keeps, and a padded prompt looks like a longer one
        row.refuse(
            "wants attention_mask, by which padding is told from tokens; save it with the rest of the batch, or write "
            f"{prompt + answer} ones where nothing is padded"
        )
    real = values.mask("attention_mask", prompt + answer)
    real_prompt, real_answer = real[:prompt], real[prompt:]
    return real_prompt, real_answer, real_answer if trains is None else trains & real_answer


def _trained(values: Values, prompt: int, answer: int) -> Bools | None:
    # of dialogues with tools verl 0.4 keeps both: its response_mask has the tool's tokens, its loss_mask has not, and
    # has the prompt in front
    masks = []
    for name in _MASKS:
        given = values.row.values.get(name)
        if given is not None:
            is_whole = prompt and isinstance(given, (list, np.ndarray)) and len(given) == prompt + answer
            masks.append(values.mask(name, prompt + answer)[prompt:] if is_whole else values.mask(name, answer))
    return np.logical_and.reduce(masks) if masks else None
