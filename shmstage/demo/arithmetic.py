"""The demo's task: chains of additions and subtractions, worked out one step at a time, and its verifier.

Prompt ``17a+8b-6=``, solution ``a+8=25,b-6=19;``: each step names its term and gives the running total. Text is bytes;
``;`` ends a completion, and a completion that ran into its length limit has none.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

END = ";"
STEP_SEPARATOR = ","
# A term's letter is what a small model finds it again by.
LETTERS = "abcdefghijklmnopqrstuvwxyz"


@dataclass(frozen=True)
class TaskConfig:
    """Chains have ``min_terms`` to ``max_terms`` terms of 1 to ``max_term``; totals stay in 0 to ``max_total``."""

    min_terms: int = 2
    max_terms: int = 16
    max_term: int = 9
    max_total: int = 25


@dataclass(frozen=True)
class Problem:
    """``prompt`` ends in ``=``; ``steps`` are those of the solution, ``a+8=25``, without separators."""

    prompt: str
    steps: tuple[str, ...]

    @property
    def solution(self) -> str:
        return STEP_SEPARATOR.join(self.steps) + END


def make_problem(rng: np.random.Generator, config: TaskConfig) -> Problem:
    """One chain; short ones are more frequent than long ones, so that lengths are uneven."""
    spread = config.max_terms - config.min_terms + 1
    terms = config.min_terms + int(spread * rng.random() ** 2)
    total = int(rng.integers(1, config.max_total + 1))
    prompt, steps = str(total), []
    for letter in LETTERS[: terms - 1]:
        term = int(rng.integers(1, config.max_term + 1))
        sign = "-" if rng.random() < 0.5 else "+"
        if total - term < 0:
            sign = "+"
        elif total + term > config.max_total:
            sign = "-"
        total = total + term if sign == "+" else total - term
        prompt += f"{letter}{sign}{term}"
        steps.append(f"{letter}{sign}{term}={total}")
    return Problem(prompt + "=", tuple(steps))


def verify(problem: Problem, completion: str) -> float:
    """Reward in [0, 1]: half for the right answer, half for the share of steps right before the first wrong one.

    Nothing after ``;`` counts, and without it there is no answer.
    """
    body, end, _ = completion.partition(END)
    given = body.split(STEP_SEPARATOR)
    right = 0
    for want, got in zip(problem.steps, given, strict=False):
        if want != got:
            break
        right += 1
    answer = problem.steps[-1].rpartition("=")[2]
    answered = end == END and given[-1].rpartition("=")[2] == answer
    return 0.5 * answered + 0.5 * right / len(problem.steps)


def encode(text: str) -> npt.NDArray[np.int32]:
    """ASCII text to int32 tokens, one per byte."""
    return np.frombuffer(text.encode("ascii"), np.uint8).astype(np.int32)


def decode(tokens: npt.NDArray[np.int32]) -> str:
    """Tokens back to text; a byte outside ASCII becomes ``?``, since a policy may sample any byte."""
    return "".join(chr(token) if 0 <= token < 128 else "?" for token in tokens.tolist())
