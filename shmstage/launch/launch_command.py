"""``shmstage launch``: the settings of ``shmstage run``, on several hosts that Ray knows."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from typing import Any

from shmstage.errors import SettingsError
from shmstage.launch.command import CommandParser, json_on_failure
from shmstage.launch.run_command import add_settings, print_config, resolve_args, with_progress
from shmstage.launch.run_directory import completed
from shmstage.settings import Settings

MAX_HOSTS = 4096


def main(argv: Sequence[str]) -> int:
    with json_on_failure("--json" in argv):
        return _main(argv)


def _main(argv: Sequence[str]) -> int:
    parser = CommandParser(
        prog="shmstage launch",
        description="Train on several hosts: Ray places an agent and a trainer on each, the orchestrator runs here. "
        "Takes every option of `shmstage run`; OUT has to lie on a file system that all hosts share.",
    )
    add_settings(parser)
    parser.add_argument("--hosts", type=int, metavar="N", help="hosts (default: every node, 2 of a local cluster)")
    where = parser.add_mutually_exclusive_group()
    where.add_argument("--address", metavar="HOST:PORT", help="of the Ray cluster (default $RAY_ADDRESS)")
    where.add_argument("--local-cluster", action="store_true", help="several raylets on this machine, to try it out")
    parser.add_argument("--print-config", action="store_true", help="print every setting and where it came from")
    parser.add_argument("--json", action="store_true", help="print the summary as one JSON object on stdout")
    args = parser.parse_args(argv)
    resolved = resolve_args(args)
    if args.print_config:
        print_config(resolved, as_json=args.json)
        return 0
    if args.hosts is not None and not 1 <= args.hosts <= MAX_HOSTS:
        raise SettingsError(f"hosts = {args.hosts}; give 1 to {MAX_HOSTS}")
    address = None if args.local_cluster else args.address or os.environ.get("RAY_ADDRESS")
    if address is None and not args.local_cluster:
        raise SettingsError("no cluster is named: give --address HOST:PORT (or $RAY_ADDRESS), or --local-cluster")
    summary = launch_with_progress(completed(resolved.settings), args.hosts, address, as_json=args.json)
    if args.json:
        print(json.dumps(summary))
    return 0


def launch_with_progress(
    settings: Settings, hosts: int | None, address: str | None, *, as_json: bool = False
) -> dict[str, Any]:
    """Launch with live progress on stderr; returns the summary."""
    from shmstage.launch.multi_host import launch

    return with_progress(
        settings, lambda progress: launch(settings, hosts, address, progress, progress.say), as_json=as_json
    )
