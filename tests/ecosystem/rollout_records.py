"""Made-up rollouts as verl and TRL keep them, in the containers that people have: `python rollout_records.py FILE`.

The same rollouts whatever the names and the container, so that what becomes of them can be compared.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

#: ids of the demo's vocabulary: whatever trains by default can train them
VOCABULARY = 14
PROMPTS, ANSWERS = 6, 4
LONGEST_PROMPT, LONGEST_ANSWER = 8, 7


def rollouts(seed: int = 0) -> Iterator[dict[str, Any]]:
    """`prompt`, `answer`, `logps`, `reward`, `group` of each answer; no padding."""
    rng = np.random.default_rng(seed)
    for number in range(PROMPTS):
        prompt = rng.integers(1, VOCABULARY, rng.integers(2, LONGEST_PROMPT + 1)).tolist()
        for _ in range(ANSWERS):
            count = int(rng.integers(1, LONGEST_ANSWER + 1))
            yield {
                "prompt": prompt,
                "answer": rng.integers(1, VOCABULARY, count).tolist(),
                # exact in float32: containers of 8 bytes and of 4 hold the same
                "logps": (-rng.integers(1, 64, count) / 16).tolist(),
                "reward": float(rng.integers(0, 2)),
                "group": f"prompt-{number}",
            }


def trl_records(*, padded: bool = False) -> list[dict[str, Any]]:
    """`padded`: as in the batch of a trainer, prompts to the left, completions to the right."""
    return [
        {
            "prompt_ids": _left(each["prompt"]) if padded else each["prompt"],
            "prompt_mask": _left([1] * len(each["prompt"])) if padded else [1] * len(each["prompt"]),
            "completion_ids": _right(each["answer"]) if padded else each["answer"],
            "completion_mask": _right([1] * len(each["answer"])) if padded else [1] * len(each["answer"]),
            "logprobs": _right(each["logps"]) if padded else each["logps"],
            "rewards": each["reward"],
            "group_id": each["group"],
        }
        for each in rollouts()
    ]


def verl_records() -> list[dict[str, Any]]:
    """Rows of a DataProto batch: always padded."""
    return [
        {
            "prompts": _left(each["prompt"]),
            "responses": _right(each["answer"]),
            "attention_mask": _left([1] * len(each["prompt"])) + _right([1] * len(each["answer"])),
            "response_mask": _right([1] * len(each["answer"])),
            "rollout_log_probs": _right(each["logps"]),
            "token_level_rewards": _right([0.0] * (len(each["answer"]) - 1) + [each["reward"]]),
            "uid": each["group"],
        }
        for each in rollouts()
    ]


def write(file: Path, records: list[dict[str, Any]]) -> Path:
    """In the container that the file's name says: `.jsonl`, `.parquet` or `.npz`."""
    if file.suffix == ".jsonl":
        file.write_text("\n".join(map(json.dumps, records)))
    elif file.suffix == ".npz":
        np.savez(file, **{name: np.array([record[name] for record in records]) for name in records[0]})
    else:
        import pyarrow
        from pyarrow import parquet

        parquet.write_table(pyarrow.Table.from_pylist(records), file, row_group_size=7)
    return file


def _left(values: list[Any]) -> list[Any]:
    return [0] * (LONGEST_PROMPT - len(values)) + values


def _right(values: list[Any]) -> list[Any]:
    return values + [0] * (LONGEST_ANSWER - len(values))


if __name__ == "__main__":
    write(Path(sys.argv[1]), trl_records())
