"""``shmstage gc``: remove what provably dead processes left in shared memory."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict

from shmstage.errors import SettingsError
from shmstage.launch.command import CommandParser, json_on_failure
from shmstage.memory.inspect import printable
from shmstage.memory.limits import format_nbytes
from shmstage.memory.sweep import LeftObject, SweepReport, SweptObject, sweep_with_reasons
from shmstage.operate.run_status import locate
from shmstage.transport.endpoint_lock import sweep_endpoints
from shmstage.transport.endpoints import endpoint_for, runtime_dir, socket_path

#: who listens, or holds a socket's lock, in a run
ROLES = ("launcher", "trainer")


def main(argv: Sequence[str]) -> int:
    with json_on_failure("--json" in argv):
        return _main(argv)


def _main(argv: Sequence[str]) -> int:
    parser = CommandParser(
        prog="shmstage gc",
        description="Remove pools, locks and sockets of this user whose owner is provably dead. Nothing is judged by "
        "its age, and nothing of a living process is touched.",
    )
    parser.add_argument(
        "run",
        nargs="?",
        metavar="RUN",
        help="only what this run left: an OUT directory, a run id, or the beginning of one",
    )
    parser.add_argument("--dry-run", action="store_true", help="say what would be removed, remove nothing")
    parser.add_argument("--json", action="store_true", help="print one JSON object on stdout")
    args = parser.parse_args(argv)
    run_id = None if args.run is None else locate(args.run)[0]
    if run_id == "":
        raise SettingsError(
            f"the run.json in {args.run} does not say which run it is; without RUN, gc frees what all dead runs left"
        )
    report = collect(run_id, dry_run=args.dry_run)
    if args.json:
        print(json.dumps(as_json(report, dry_run=args.dry_run)))
    else:
        print("\n".join(in_words(report, dry_run=args.dry_run)))
    return 0


def collect(run_id: str | None = None, *, dry_run: bool) -> SweepReport:
    """Sweep shared memory, then the runtime directory; any number of processes may do so at once."""
    memory = sweep_with_reasons(run_id, dry_run=dry_run)
    if run_id is None:
        endpoints = [lock.with_suffix("") for lock in sorted(runtime_dir().glob("*.lock"))]
    else:
        endpoints = [socket_path(endpoint_for(run_id, role)) for role in ROLES]
    looks = sweep_endpoints(endpoints, dry_run=dry_run)
    return SweepReport(
        (*memory.removed, *(SweptObject(str(look.found), look.reason, 0) for look in looks if look.stale)),
        (*memory.left_alone, *(LeftObject(str(look.found), look.reason) for look in looks if not look.stale)),
    )


def as_json(report: SweepReport, *, dry_run: bool) -> dict[str, object]:
    return {"dry_run": dry_run, **asdict(report)}


def in_words(report: SweepReport, *, dry_run: bool) -> list[str]:
    """One line per file, then the sum."""
    verb = "would remove" if dry_run else "removed"
    lines = [f"{verb} {printable(item.name)} ({format_nbytes(item.nbytes)}): {item.reason}" for item in report.removed]
    lines += [f"left alone {printable(item.name)}: {item.reason}" for item in report.left_alone]
    if not report.removed:
        return [*lines, "nothing to remove"]
    count, nbytes = len(report.removed), format_nbytes(sum(item.nbytes for item in report.removed))
    return [*lines, f"{verb} {count} file{'s' * (count > 1)}, {nbytes} of shared memory"]
