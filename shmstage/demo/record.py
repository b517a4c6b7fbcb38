"""``shmstage bundle record OUT``: a bundle of real rollouts of the demo model on its own task.

Warm-up, sampling, verification, advantages within each group; the policy that sampled is kept beside the
trajectories, so that training starts where they come from. One seed gives one bundle on one machine.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import jax
import numpy as np
import numpy.typing as npt

from shmstage.demo.arithmetic import END, Problem, TaskConfig, decode, encode, make_problem, verify
from shmstage.demo.model import ModelConfig, Params, init, parameter_count
from shmstage.demo.policy import POLICY_FILE, encode_policy, rounded
from shmstage.demo.sampling import Rollout, sample
from shmstage.errors import BundleError, MissingExtraError, SettingsError
from shmstage.packing.bundle import Bundle, write_bundle
from shmstage.packing.trajectory import Trajectory

MAX_TOKENS = 160
GROUPS_PER_SAMPLING = 8
ADVANTAGE_EPSILON = 1e-4

Report = Callable[[str], None]


@dataclass(frozen=True)
class RecordSettings:
    """What a recording depends on besides the machine; ``SettingsError`` for a number that makes no sense."""

    seed: int = 0
    groups: int = 48
    group_size: int = 8
    groups_per_batch: int = 16
    warmup_steps: int = 1000

    def __post_init__(self) -> None:
        least = {"seed": 0, "groups": 1, "group_size": 2, "groups_per_batch": 1, "warmup_steps": 0}
        for name, low in least.items():
            if getattr(self, name) < low:
                raise SettingsError(f"{name} = {getattr(self, name)}: must be at least {low}")


def record(out: Path, settings: RecordSettings, report: Report, model: ModelConfig | None = None) -> Bundle:
    """Make the bundle and its policy at ``out``, which must not exist. Raises ``BundleError``."""
    if os.path.lexists(out):
        # Said before the minutes of work, not after.
        raise BundleError(f"{out} exists; a bundle is never overwritten, choose another name or remove it")
    model, task = model or ModelConfig(), TaskConfig()
    init_key, sample_key = jax.random.split(jax.random.key(settings.seed))
    rng = np.random.default_rng(settings.seed)
    params = rounded(_warmed_up(init(init_key, model), rng, task, settings, report))
    problems = [make_problem(rng, task) for _ in range(settings.groups)]
    rollouts = _rollouts(params, problems, sample_key, settings, report)
    rewards = np.array(
        [
            [verify(problem, _completion(r)) for r in group]
            for problem, group in zip(problems, rollouts, strict=True)
        ]
    )
    trajectories = _trajectories(rollouts, rewards, settings)
    policy = encode_policy(params)
    provenance = {
        "made_by": "shmstage bundle record",
        "settings": asdict(settings),
        "task": asdict(task),
        "model": asdict(model),
        "sampling": {"temperature": 1.0, "max_tokens": MAX_TOKENS},
        "policy": {
            "file": POLICY_FILE,
            "sha256": hashlib.sha256(policy).hexdigest(),
            "dtype": "bfloat16",
            "parameters": parameter_count(params),
        },
        "rewards": {
            "mean": round(float(rewards.mean()), 4),
            "min": round(float(rewards.min()), 4),
            "max": round(float(rewards.max()), 4),
            "distinct": len(np.unique(rewards)),
            "groups_all_equal": int((rewards.std(axis=1) == 0).sum()),
        },
        "jax": jax.__version__,
    }
    bundle = write_bundle(out, trajectories, provenance=provenance)
    _write(out / POLICY_FILE, policy)
    return bundle


def advantages_of(rewards: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """Rewards ``[groups, group_size]`` less their group's mean, over its standard deviation; 0 where all are equal.

    Shao et al., DeepSeekMath, 2024, section 4.1 (GRPO).
    """
    centred = rewards - rewards.mean(axis=1, keepdims=True)
    scaled: npt.NDArray[np.float64] = centred / (rewards.std(axis=1, keepdims=True) + ADVANTAGE_EPSILON)
    return scaled


def _warmed_up(
    params: Params, rng: np.random.Generator, task: TaskConfig, settings: RecordSettings, report: Report
) -> Params:
    try:
        from shmstage.demo.warmup import warm_up
    except ModuleNotFoundError as error:
        if error.name != "optax":
            raise
        raise MissingExtraError("recording needs optax; pip install 'shmstage[train]'") from None
    return warm_up(
        params,
        rng,
        task,
        steps=settings.warmup_steps,
        tokens=MAX_TOKENS,
        report=lambda step, loss: report(
            f"warm-up step {step}/{settings.warmup_steps}: loss {loss:.3f} per token"
        ),
    )


def _rollouts(
    params: Params, problems: Sequence[Problem], key: jax.Array, settings: RecordSettings, report: Report
) -> list[list[Rollout]]:
    """Per problem its group, in the problems' order."""
    # Problems of one length together: all sequences of a call are computed as wide as its longest.
    order = sorted(range(len(problems)), key=lambda number: (len(problems[number].prompt), number))
    groups: list[list[Rollout]] = [[] for _ in problems]
    size = settings.group_size
    for first in range(0, len(order), GROUPS_PER_SAMPLING):
        chosen = order[first : first + GROUPS_PER_SAMPLING]
        # The last call is filled up with repeats, to find its programs compiled.
        padded = chosen + chosen[-1:] * (GROUPS_PER_SAMPLING - len(chosen))
        prompts = [encode(problems[number].prompt) for number in padded for _ in range(size)]
        drawn = sample(params, prompts, jax.random.fold_in(key, first), end=ord(END), max_tokens=MAX_TOKENS)
        for place, number in enumerate(chosen):
            groups[number] = drawn[place * size : (place + 1) * size]
        report(f"sampled {min(first + len(chosen), len(order))}/{len(order)} groups of {size}")
    return groups


def _completion(rollout: Rollout) -> str:
    return decode(rollout.tokens[rollout.prompt_length :])


def _trajectories(
    rollouts: Sequence[Sequence[Rollout]],
    rewards: npt.NDArray[np.float64],
    settings: RecordSettings,
) -> list[Trajectory]:
    advantages = advantages_of(rewards)
    made = []
    for number, group in enumerate(rollouts):
        for member, rollout in enumerate(group):
            mask = np.zeros(len(rollout.tokens), np.float32)
            mask[rollout.prompt_length :] = 1
            made.append(
                Trajectory(
                    trajectory_id=f"g{number:03d}-{member}",
                    group_id=f"g{number:03d}",
                    batch_index=number // settings.groups_per_batch,
                    tokens=rollout.tokens,
                    loss_mask=mask,
                    advantages=mask * np.float32(advantages[number, member]),
                    old_logprobs=rollout.logps,
                )
            )
    return made


def _write(file: Path, data: bytes) -> None:
    partial = file.with_name(f".{file.name}.partial")
    try:
        partial.write_bytes(data)
        partial.replace(file)
    except OSError as error:
        raise BundleError(f"{file} cannot be written: {error.strerror}; choose another place") from None


def main(argv: Sequence[str]) -> int:
    """Command-line door; returns the exit code, raises ``ShmstageError``."""
    defaults = RecordSettings()
    parser = argparse.ArgumentParser(
        prog="shmstage bundle record",
        description="Warms the demo model up on arithmetic, samples completions, verifies them, writes a bundle.",
    )
    parser.add_argument("out", metavar="OUT", type=Path, help="directory to make")
    parser.add_argument("--seed", type=int, default=defaults.seed)
    parser.add_argument("--groups", type=int, default=defaults.groups, help="problems (default %(default)s)")
    parser.add_argument(
        "--group-size",
        type=int,
        default=defaults.group_size,
        help="completions of each (default %(default)s)",
    )
    parser.add_argument(
        "--groups-per-batch",
        type=int,
        default=defaults.groups_per_batch,
        help="problems consumed between two weight syncs (default %(default)s)",
    )
    parser.add_argument(
        "--warmup-steps",
        type=int,
        default=defaults.warmup_steps,
        help="supervised steps before sampling (default %(default)s)",
    )
    parser.add_argument("--json", action="store_true", help="exactly one JSON object on stdout")
    given = vars(parser.parse_args(list(argv)))
    out, as_json = given.pop("out"), given.pop("json")
    begin = time.monotonic()
    bundle = record(out, RecordSettings(**given), lambda line: print(line, file=sys.stderr, flush=True))
    lengths = [trajectory.length for trajectory in bundle.trajectories]
    summary = {
        "path": str(bundle.path),
        **bundle.manifest["counts"],
        "length": {"min": min(lengths), "mean": round(float(np.mean(lengths)), 1), "max": max(lengths)},
        "rewards": bundle.manifest["provenance"]["rewards"],
        "nbytes": sum(file.stat().st_size for file in bundle.path.iterdir()),
        "record_s": round(time.monotonic() - begin, 1),
    }
    if as_json:
        print(json.dumps(summary))
    else:
        print(
            f"{summary['path']}: {summary['trajectories']} trajectories in {summary['batches']} batches, "
            f"{min(lengths)} to {max(lengths)} tokens, reward {summary['rewards']['mean']} on average, "
            f"{summary['nbytes']:,} bytes, {summary['record_s']} s"
        )
    return 0
