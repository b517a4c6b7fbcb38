"""The task is solvable, its verifier gives partial credit, and its lengths are uneven."""

from __future__ import annotations

import re

import numpy as np
import pytest

from shmstage.demo.arithmetic import Problem, TaskConfig, decode, encode, make_problem, verify

PROBLEM = Problem("17a+8b-6c+1=", ("a+8=25", "b-6=19", "c+1=20"))


def problems(count: int) -> list[Problem]:
    rng = np.random.default_rng(3)
    return [make_problem(rng, TaskConfig()) for _ in range(count)]


def test_a_solution_is_what_python_computes() -> None:
    config = TaskConfig()
    for problem in problems(200):
        total = int(re.match(r"\d+", problem.prompt)[0])  # type: ignore[index]
        terms = re.findall(r"([a-z])([+-])(\d+)", problem.prompt)
        assert config.min_terms <= len(terms) + 1 <= config.max_terms
        for (letter, sign, term), step in zip(terms, problem.steps, strict=True):
            total += int(sign + term)
            assert step == f"{letter}{sign}{term}={total}"
            assert 0 <= total <= config.max_total
        assert verify(problem, problem.solution) == 1.0


def test_the_same_seed_makes_the_same_problems() -> None:
    assert problems(20) == problems(20)


def test_lengths_are_uneven_and_fit() -> None:
    lengths = [len(problem.prompt + problem.solution) for problem in problems(500)]
    assert min(lengths) < 20 and max(lengths) > 130 and max(lengths) <= 160


@pytest.mark.parametrize(
    ("completion", "reward"),
    [
        ("a+8=25,b-6=19,c+1=20;", 1.0),
        ("a+8=25,b-6=19,c+1=20;and more", 1.0),
        ("a+8=25,b-6=18,c+1=20;", 0.5 + 0.5 / 3),  # right answer by a wrong step
        ("a+8=25,b-6=19,c+1=21;", 0.5 * 2 / 3),
        ("20;", 0.5),
        ("a+8=25,b-6=19,c+1=20", 0.5),  # cut off: steps but no answer
        ("a+8=25,", 0.5 / 3),
        (";", 0.0),
        ("", 0.0),
    ],
)
def test_the_verifier_gives_half_for_the_answer_and_half_for_the_steps(
    completion: str, reward: float
) -> None:
    assert verify(PROBLEM, completion) == pytest.approx(reward)


def test_text_and_tokens_are_the_same_bytes() -> None:
    tokens = encode("7a+5=;")
    assert tokens.dtype == np.int32 and tokens.tolist() == [55, 97, 43, 53, 61, 59]
    assert decode(tokens) == "7a+5=;"
    assert decode(np.array([55, 200, 255], np.int32)) == "7??"
