"""Past one machine: does the orchestrator's host stay out of the payload's way, and do trajectories land as fast as Ray
carries plain objects?

Hosts are network, mount, uts, ipc and pid namespaces joined by veth pairs (``tests/multihost/hosts.py``), a Ray node in
each, and one more for the head: orchestrator, launcher and Ray's own head, without a trainer. Where namespaces are not
allowed it is raylets on this machine, and ``figures`` say so.

* *rate*: the launcher's own stores and agents without trainers. Every agent wants its rows of some micro-batches from
  all stores, ahead as in a run, and packs them into slots of its pool; for comparison it gets plain Ray objects of the
  very sizes from the very stores, as many at a time. Both arms alternate within a run, all hosts at once. With one host
  its store lies on the head: a fetch is between hosts.
* *share*: a real ``shmstage launch``; all bytes at the head's interface (Ray's own, actors, logs and TCP's headers
  included), over the bytes that landed at the hosts. ``told``: what the orchestrator counted at its doors.

    python bench/multihost.py [--hosts 1,2,4] [--payload 64MB] [--rounds 5] [--steps 4] [--json]

Exit 1 if anything was left in a host's shared memory; a digest that is not the planned one ends it at once.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

from multihost_places import Places, places
from results import BENCH, keep, machine, machine_line, print_targets, spread, verdict

from shmstage.budget.sizes import parse_size

ROWS, LAYERS, TOP_K, EXPERTS, BITS = 32, 48, 8, 128, 7
#: a token of a trajectory, encoded: six fields of 4 bytes, ids in bits, a bit that says that they are there
TOKEN_NBYTES = 6 * 4 + LAYERS * (TOP_K * BITS / 8 + 1 / 8)
MICROBATCHES = 6
#: trajectories with routing of their own; all else tells the others apart
ROUTINGS = 4
SLOTS = 2
ALLOWED_SHARE, WANTED_RATE = 0.01, 0.8
DEADLINE_S = 600.0
MB = 1_000_000


def source_settings(payload_nbytes: int) -> dict[str, Any]:
    tokens = -(-payload_nbytes // int(ROWS * TOKEN_NBYTES)) // 8 * 8 + 8
    return {
        "rows": ROWS, "tokens": tokens, "microbatches": MICROBATCHES, "layers": LAYERS, "top_k": TOP_K,
        "experts": EXPERTS, "routings": ROUTINGS,
    }  # fmt: skip


def settings_of(run: str, out: Path, payload_nbytes: int) -> dict[str, Any]:
    given = source_settings(payload_nbytes)
    return {
        "run": run, "out": str(out), "rows": ROWS, "tokens": given["tokens"], "slots": SLOTS,
        "microbatches_per_step": 2, "routing_encoding": "ragged_packed", "experts": EXPERTS,
        "source": "shmstage.testing.simulated_input:make_source", "source_settings": given,
    }  # fmt: skip


def share(where: Places, args: argparse.Namespace, out: Path) -> dict[str, Any]:
    """A launch from the head: its bytes there over the bytes that landed at the hosts."""
    given = settings_of(f"bench-{os.getpid()}-launch", out, args.payload)
    tables = {
        "source": given.pop("source_settings"),
        "engine": {"tokens": given["tokens"], "checkpoint_dir": str(out / "checkpoints")},
    }
    plugins = {"source": given.pop("source"), "engine": "multihost_engine:make_engine"}
    lines = [f"{key} = {json.dumps(value)}" for key, value in given.items()]
    lines += ['boundary = "staged_before_update"', "latch = false", "start_timeout_s = 300.0"]
    for name, table in tables.items():
        lines += [f"[{name}]", *(f"{key} = {json.dumps(value)}" for key, value in table.items())]
    config = out.with_suffix(".toml")
    config.write_text("\n".join(lines) + "\n")
    command = [sys.executable, "-m", "shmstage.cli", "launch", "--json", "--config", str(config)]
    command += [f"--{name}={factory}" for name, factory in plugins.items()]
    command += ["--steps", str(args.steps)]
    before = where.traffic()
    done = where.run([*command, "--address", where.address, "--hosts", str(len(where.hosts))], DEADLINE_S)
    after = where.traffic()
    if done.returncode:
        raise SystemExit(f"shmstage launch ended with {done.returncode}\n{done.stdout}\n{done.stderr}")
    at_head = after - before if before is not None and after is not None else None
    return figures_of_share(json.loads(done.stdout), at_head)


def figures_of_share(summary: dict[str, Any], at_head_nbytes: int | None) -> dict[str, Any]:
    landed = sum(summary["fetched_nbytes_per_host"])
    told = summary["orchestrator_bytes_per_trajectory"] * summary["trajectories"]["trained"]
    return {
        "landed_nbytes": landed,
        "landed_nbytes_per_host": summary["fetched_nbytes_per_host"],
        "head_nbytes": at_head_nbytes,
        "told_nbytes": told,
        "told_nbytes_per_trajectory": summary["orchestrator_bytes_per_trajectory"],
        "share": (told if at_head_nbytes is None else at_head_nbytes) / landed,
        "counted": "by the orchestrator" if at_head_nbytes is None else "at the head's interface",
        "leaked_pools": summary["leaked_pools"],
    }


def rate(where: Places, args: argparse.Namespace, out: Path) -> dict[str, Any]:
    stores = where.hosts if len(where.hosts) > 1 else [where.head]
    what = {
        "address": where.address, "agents": where.hosts, "stores": stores, "rounds": args.rounds,
        "settings": settings_of(f"bench-{os.getpid()}", out, args.payload),
    }  # fmt: skip
    done = where.run([sys.executable, str(BENCH / "multihost_rate.py"), json.dumps(what)], DEADLINE_S)
    if done.returncode:
        raise SystemExit(f"multihost_rate.py ended with {done.returncode}\n{done.stdout}\n{done.stderr}")
    return figures_of_rate(json.loads(done.stdout.splitlines()[-1]), len(where.hosts))


def figures_of_rate(told: dict[str, Any], hosts: int) -> dict[str, Any]:
    """Bytes per second and host: of each round the mean over the hosts; the ratio is taken within a round."""
    per_round = {
        arm: [sum(nbytes / seconds for seconds, nbytes in measured[arm]) / hosts for measured in told["rounds"]]
        for arm in ("ours", "plain")
    }
    return {
        "payload_nbytes": told["payload_nbytes"],
        "fetched_nbytes_per_microbatch": sum(n for _, n in told["rounds"][0]["ours"]) / told["microbatches"],
        "nbytes_per_s_per_host": {arm: spread(values) for arm, values in per_round.items()},
        "ratio": spread([ours / plain for ours, plain in zip(per_round["ours"], per_round["plain"], strict=True)]),
        "left": told["left"],
    }


def measure(hosts: int, args: argparse.Namespace, work: Path) -> dict[str, Any]:
    each = args.payload // hosts
    # four micro-batches fetched ahead, and as much again that its store gave to others
    with places(hosts, store_nbytes=10 * each + 50 * MB, pool_nbytes=(SLOTS + 2) * each * 5 // 4) as where:
        figure: dict[str, Any] = {"kind": where.kind}
        if "rate" in args.only:
            figure["rate"] = rate(where, args, work / f"rate-{hosts}")
        if "share" in args.only:
            figure["share"] = share(where, args, work / f"share-{hosts}")
        return figure


def targets_of(figures: dict[str, Any]) -> list[dict[str, Any]]:
    found = []
    for hosts, figure in figures.items():
        if "share" in figure:
            share_of_bytes = figure["share"]["share"]
            found.append(verdict(f"{hosts} hosts, orchestrator's share of the bytes", share_of_bytes, ALLOWED_SHARE))
        if "rate" in figure:
            ratio = figure["rate"]["ratio"]["median"]
            found.append(verdict(f"{hosts} hosts, landed / plain Ray fetch", ratio, WANTED_RATE, at_least=True))
    return found


def leftovers(figures: dict[str, Any]) -> list[str]:
    found = []
    for hosts, figure in figures.items():
        found += [f"{hosts} hosts: {name}" for name in figure.get("rate", {}).get("left", ())]
        found += [f"{hosts} hosts: {n} pools of the launch" for n in [figure.get("share", {}).get("leaked_pools")] if n]
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hosts", type=lambda text: [int(n) for n in text.split(",")], default=[1, 2, 4])
    parser.add_argument("--payload", type=parse_size, default=64 * MB, help="bytes of a micro-batch, encoded")
    parser.add_argument("--rounds", type=int, default=5, help="of both arms (default 5)")
    parser.add_argument("--steps", type=int, default=4, help="of the launch (default 4)")
    parser.add_argument("--only", type=lambda text: text.split(","), default=["rate", "share"], help="rate,share")
    parser.add_argument("--json", action="store_true", help="one JSON object on stdout")
    args = parser.parse_args()
    figures: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(prefix="multihost") as work:
        for hosts in args.hosts:
            figures[str(hosts)] = measure(hosts, args, Path(work))
    result = {"machine": machine(), "figures": figures, "targets": targets_of(figures)}
    path = keep("multihost", result)
    if args.json:
        print(json.dumps(result))
    else:
        print(machine_line(result["machine"]))
        print_targets(result["targets"])
        print(f"written to {path}")
    for text in leftovers(figures):
        print(f"left in shared memory: {text}", file=sys.stderr)
    return 1 if leftovers(figures) else 0


if __name__ == "__main__":
    sys.exit(main())
