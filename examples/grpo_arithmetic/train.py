"""A whole loop of reinforcement learning on one machine: python examples/grpo_arithmetic/train.py

Rollout workers sample chains of sums from the policy, a verifier scores them, advantages are taken within each group
(GRPO), and `shmstage run` trains. Ends when the mean reward of five steps has reached the target: exit 0. Without it
after `--steps`: exit 1. What failed has the exit code of `shmstage run`.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parents[1]
# for this process, and for the ones that it starts: the plug-ins are named as grpo_arithmetic.MODULE
sys.path.insert(0, str(HERE))
os.environ["PYTHONPATH"] = os.pathsep.join([str(HERE), *filter(None, [os.environ.get("PYTHONPATH")])])

from grpo_arithmetic.table import Table, curve_of, plot  # noqa: E402
from grpo_arithmetic.task import Rollouts, shape_of  # noqa: E402

from shmstage.errors import RunFailedError, SettingsError, ShmstageError, StoppedError  # noqa: E402
from shmstage.launch.run_directory import completed  # noqa: E402
from shmstage.launch.single_host import run  # noqa: E402
from shmstage.settings import BOUNDARIES, Settings  # noqa: E402


def arguments(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="train.py", description=(__doc__ or "").split("\n\n")[1])
    parser.add_argument("--steps", type=int, default=150, help="at most so many (default %(default)s)")
    parser.add_argument("--target", type=float, default=0.9, help="mean reward to reach; 0: train all steps")
    parser.add_argument("--out", type=Path, help="new directory (default: runs/grpo-TIME)")
    parser.add_argument("--boundary", choices=BOUNDARIES, default="staged_before_update")
    parser.add_argument("--max-staleness", type=int, default=1, help="updates that rollouts may lie behind")
    parser.add_argument("--workers", type=int, default=2, help="rollout processes (default %(default)s)")
    parser.add_argument("--microbatches", type=int, default=2, help="micro-batches of a step (default %(default)s)")
    parser.add_argument("--prompts", type=int, default=32, help="prompts of a step (default %(default)s)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--policy", type=Path, help="file with the warmed-up policy; made if it is not there")
    parser.add_argument("--kill-at", type=int, default=-1, metavar="PROMPT", help="kill a worker at that prompt, once")
    parser.add_argument("--checkpoint-every", type=int, default=0, metavar="N")
    parser.add_argument("--json", action="store_true", help="the summary as one JSON object on stdout")
    given = parser.parse_args(argv)
    given.out = (given.out or Path("runs", f"grpo-{time.strftime('%Y%m%d-%H%M%S')}")).absolute()
    return given


def settings_of(given: argparse.Namespace, policy: Path) -> Settings:
    rollouts = Rollouts(
        workers=given.workers, max_staleness=given.max_staleness, seed=given.seed, stop_at=given.target,
        kill_at=given.kill_at, prompts_per_batch=given.prompts, prompts_per_call=max(1, given.prompts // 2),
    )  # fmt: skip
    settings: dict[str, Any] = {
        "run": f"grpo-{os.getpid()}",
        "out": given.out,
        "boundary": given.boundary,
        "steps": given.steps,
        "source": "grpo_arithmetic.rollouts:make_source",
        "source_settings": asdict(rollouts),
        "engine": "grpo_arithmetic.engine:make_engine",
        "engine_settings": {"policy": str(policy.absolute())},
        "weight_sync": "sync",  # a version that was skipped could be one that a batch waits for
        "order": "prompt_batch",  # a batch is planned when it is there, not when the next one begins
        "checkpoint_every": given.checkpoint_every,
        **shape_of(rollouts, given.microbatches),
    }
    return completed(Settings(**settings))


def train(given: argparse.Namespace, out: Path) -> dict[str, Any]:
    """Everything; returns the summary, which is also in OUT, with the curve."""
    if (out / "checkpoints").exists():
        raise SettingsError(f"{out} holds a run; remove it or give another --out")
    with tempfile.TemporaryDirectory(prefix="grpo-") as scratch:
        policy = given.policy or Path(scratch, "policy.safetensors")
        settings = settings_of(given, policy)  # what is wrong is said before the warm-up, not after it
        if not policy.exists():
            from grpo_arithmetic.engine import first_policy

            print("warming the policy up", file=sys.stderr, flush=True)
            first_policy(policy, given.seed)
        with Table(settings.out_dir, given.target, given.steps) as table:
            summary = run(settings, table, table.say)
    summary["reward"] = curve = curve_of(summary["metrics"])
    recent = curve[-Rollouts().stop_after :]
    summary["reward_reached"] = sum(recent) / len(recent) >= given.target - 1e-6
    summary["plot"] = str(plot(out, curve, given.target))
    (out / "summary.json").write_text(json.dumps(summary) + "\n")
    return summary


def main(argv: Sequence[str]) -> int:
    given = arguments(argv)
    try:
        summary = train(given, given.out)
    except (ShmstageError, KeyboardInterrupt) as raised:
        # `run` has signal handlers of its own, the warm-up has none
        error = raised if isinstance(raised, ShmstageError) else StoppedError("stopped by SIGINT")
        if given.json:
            print(json.dumps({"error": {"kind": type(error).__name__, "text": str(error)}}))
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return getattr(error, "exit_code", RunFailedError.exit_code)
    if given.json:
        print(json.dumps(summary))
    curve = summary["reward"]
    verdict = "reached" if summary["reward_reached"] else "NOT reached"
    print(
        f"mean reward {curve[0]:.2f} → {curve[-1]:.2f} in {summary['steps']} steps, {summary['wall_s']:.0f} s; target "
        f"{given.target:g} {verdict}; {summary['plot']}, {summary['out']}/summary.json", file=sys.stderr,
    )  # fmt: skip
    return 0 if summary["reward_reached"] else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
