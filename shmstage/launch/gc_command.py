"""``shmstage gc``: remove what provably dead processes left in shared memory."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict

from shmstage.memory.sweep import SweptObject, sweep
from shmstage.transport.endpoint_lock import clear_stale_endpoints
from shmstage.transport.endpoints import runtime_dir


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="shmstage gc", description="Remove pools, locks and sockets of this user whose owner is provably dead."
    )
    parser.add_argument("--dry-run", action="store_true", help="say what would be removed, remove nothing")
    parser.add_argument("--json", action="store_true", help="print one JSON object on stdout")
    args = parser.parse_args(argv)
    swept = sweep(dry_run=args.dry_run)
    locks = sorted(runtime_dir().glob("*.lock"))
    sockets = clear_stale_endpoints([lock.with_suffix("") for lock in locks], dry_run=args.dry_run)
    swept += [SweptObject(str(path), "no living process owns this socket", 0) for path in sockets]
    if args.json:
        print(json.dumps({"dry_run": args.dry_run, "removed": [asdict(item) for item in swept]}))
        return 0
    verb = "would remove" if args.dry_run else "removed"
    for item in swept:
        print(f"{verb} {item.name} ({item.nbytes:,} bytes): {item.reason}")
    if not swept:
        print("nothing to remove")
    return 0
