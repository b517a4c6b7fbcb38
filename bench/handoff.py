"""How long it takes until the trainer can read a packed micro-batch: ours and what people use today.

The same micro-batch (a dict of packed arrays, dense routing, rows full) goes from this process to another on the same
machine, each path in its turn, in one run. Two figures:

* **hand-off**: from the packed micro-batch lying where the path wants it (ours: in the slot, before ``publish``; Ray:
  numpy arrays before ``put``; gRPC: before serialisation; iceoryx2: in the loaned sample) until its arrays can be read
  in the other process.
* **whole path**: from trajectories in the orchestrator until packed arrays can be read in the trainer. Planning and
  native filling are in it for everyone; who wants private memory gets it filled into a warm private buffer.

The receiver stamps CLOCK_MONOTONIC, which all processes share, when it has the arrays, then reads every byte: its xxh3
must be the sender's in every single transfer, and in every transfer a word is another one. Unequal: exit 1.

    python bench/handoff.py [--sizes 1KB,1MB,64MB,256MB,1GB] [--paths ours,grpc_stream,ray] [--rounds 3] [--json]
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any, NoReturn

from handoff_report import plot, print_tables
from paths import PATHS
from paths import Path as TransportPath
from paths.batch import Batch
from paths.ends import Arrays, Sender
from paths.measured import Cell, ends_of, peer_of
from paths.memory import Peak, pss_nbytes, room_nbytes
from paths.peer import PathError
from results import RESULTS, keep, machine, print_targets, verdict

from shmstage.budget.sizes import parse_size
from shmstage.errors import ShmstageError
from shmstage.memory.limits import format_nbytes

SIZES = "1KB,1MB,64MB,256MB,1GB"
#: hand-offs of one path and size in all rounds together, fewer where a round of them takes longer than this
HANDOFFS, HANDOFFS_S = 200, 0.4
WHOLE_PATHS, WHOLE_PATHS_S = 20, 0.5
#: or where reading and checking every byte of them does
TURN_S = 5.0
KB, GB = 1_000, 1_000_000_000


class Run:
    """All paths, alternating; the processes at the other ends live as long as this."""

    def __init__(self, paths: Sequence[TransportPath], sizes: Sequence[int], rounds: int, handoffs: int) -> None:
        self.figures: dict[str, dict[str, Any]] = {}
        self.problems: list[str] = []
        self.notes: list[str] = []
        self._paths = {path.name: path for path in paths}
        self._sizes, self._rounds, self._handoffs = sizes, rounds, handoffs
        self._peers: dict[str, Any] = {}

    def measure(self) -> None:
        with ExitStack() as stack:
            for path in self._paths.values():
                fitting = [size for size in self._sizes if size <= path.limit_nbytes]
                with self._noted(path.name):
                    self._peers[path.name] = peer = peer_of(path, max(fitting, default=0))
                    stack.callback(peer.stop)
            for name in list(self._peers):
                with self._noted(name):
                    self._peers[name].begin()
            for size in self._sizes:
                self._measure_size(size)

    def _measure_size(self, size: int) -> None:
        said = format_nbytes(size)
        fitting = self._fitting(size)
        if not fitting:
            return
        note(f"{said}: making trajectories")
        batch = Batch(size)
        cells = {name: Cell() for name in fitting}
        for number in range(self._rounds):
            for name in fitting:
                if name in self._peers:  # it is still in the run
                    note(f"{said}, round {number + 1} of {self._rounds}: {name}")
                    with self._noted(name):
                        self._round(name, batch, cells[name], first=number == 0)
        for name, cell in cells.items():
            if cell.whole_path_s:
                self.figures[f"{name} {said}"] = cell.figure(self._paths[name], size, batch.nbytes)

    def _fitting(self, size: int) -> list[str]:
        """The paths that fit into memory with this size, the others said."""
        room, found = room_nbytes(), []
        for name in self._peers:
            path = self._paths[name]
            needed = int((path.peak_payloads + 1) * size) + min(size, 512 << 20)
            if size > path.limit_nbytes:
                most = format_nbytes(path.limit_nbytes)
                self.notes.append(f"{name} at {format_nbytes(size)} left out: a message holds {most}")
            elif needed > room:
                self.notes.append(
                    f"{name} at {format_nbytes(size)} left out: it takes {format_nbytes(needed)}, there is "
                    f"{format_nbytes(max(0, room))}"
                )
            else:
                found.append(name)
        return found

    def _round(self, name: str, batch: Batch, cell: Cell, *, first: bool) -> None:
        peer = self._peers[name]
        pids = [os.getpid(), *peer.pids()] if first else []
        baseline = pss_nbytes(pids)
        sender: Sender | None = None
        try:
            sender = ends_of(self._paths[name]).Sender(batch.layout, batch.private, peer)
            sender.connect(peer.open(batch.layout, sender.said()))
            with Peak(pids) as peak:  # everything is touched for the first time here, which does not count
                if self._whole_path(sender, peer, batch, cell) < WHOLE_PATHS_S:
                    self._hand_off(sender, peer, batch, cell)
            if first:
                cell.peak_nbytes = peak.nbytes - baseline
            for times, transfer, count, most_s in (
                (cell.hand_off_s, self._hand_off, self._handoffs, HANDOFFS_S),
                (cell.whole_path_s, self._whole_path, WHOLE_PATHS, WHOLE_PATHS_S),
            ):
                before, over = len(times), time.monotonic() + TURN_S
                for _ in range(-(-count // self._rounds)):
                    times.append(transfer(sender, peer, batch, cell))
                    if sum(times[before:]) > most_s or time.monotonic() > over:
                        break
        except BaseException:
            peer.stop()  # first: it may be waiting for what will not come
            with suppress(Exception):
                if sender is not None:
                    sender.close()
            raise
        sender.close()  # first: who reads sees the end of the stream, not a loss
        peer.close()

    def _hand_off(self, sender: Sender, peer: Any, batch: Batch, cell: Cell) -> float:
        batch.next_serial()
        views, filled = sender.place(fresh=False)
        if not filled:
            batch.copy_into(views)
        batch.mark(views)
        peer.expect()
        begin_ns = time.monotonic_ns()
        sender.send()
        return self._arrived(peer, batch, cell, begin_ns, views)

    def _whole_path(self, sender: Sender, peer: Any, batch: Batch, cell: Cell) -> float:
        batch.next_serial()
        peer.expect()
        begin_ns = time.monotonic_ns()
        views, _ = sender.place(fresh=True)
        batch.fill(views)
        batch.mark(views)
        sender.send()
        return self._arrived(peer, batch, cell, begin_ns, views)

    def _arrived(self, peer: Any, batch: Batch, cell: Cell, begin_ns: int, sent: Arrays) -> float:
        report = peer.report()
        cell.received(report, self._paths[peer.name], sent)
        if report["digest"] != batch.expected.digest(batch.serial):
            raise PathError(f"{peer.name}, {batch.nbytes} bytes: other bytes arrived than were sent")
        return float((report["ready_ns"] - begin_ns) / 1e9)

    @contextmanager
    def _noted(self, name: str) -> Iterator[None]:
        """A path that fails leaves the run, and makes it fail; the others go on."""
        try:
            yield
        except Exception as error:
            self.problems.append(f"{name}: {type(error).__name__}: {error}")
            note(self.problems[-1])
            if name in self._peers:
                self._peers.pop(name).stop()


def targets_of(figures: dict[str, dict[str, Any]]) -> list[dict[str, Any]]:
    """Those whose sizes and paths are there."""
    at = {(each["path"], each["nbytes"]): each for each in figures.values()}

    def median(path: str, nbytes: int, figure: str) -> float | None:
        found = at.get((path, nbytes))
        return found[figure]["median"] if found else None

    wanted = [
        ("hand-off, ours, 1 GB / 1 KB", ("ours", GB, "hand_off_s"), ("ours", KB, "hand_off_s"), 1.3, False),
        *(
            (f"{said} of 1 GB, {path} / ours", (path, GB, figure), ("ours", GB, figure), least, True)
            for said, figure, limits in (
                ("hand-off", "hand_off_s", {"grpc_stream": 1000, "ray": 300}),
                ("whole path", "whole_path_s", {"grpc_stream": 5, "ray": 2}),
            )
            for path, least in limits.items()
        ),
    ]
    found = []
    for name, above, below, target, at_least in wanted:
        numerator, denominator = median(*above), median(*below)
        if numerator is not None and denominator is not None:
            found.append(verdict(name, numerator / denominator, target, at_least=at_least))
    return found


@contextmanager
def stdout_kept() -> Iterator[None]:
    """What libraries and their processes print goes to stderr: stdout is for the result."""
    sys.stdout.flush()
    kept = os.dup(1)
    os.dup2(2, 1)
    try:
        yield
    finally:
        sys.stdout.flush()
        os.dup2(kept, 1)
        os.close(kept)


def note(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _terminated(number: int, frame: Any) -> NoReturn:
    sys.exit(128 + number)  # through everything that has to be ended


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", default=SIZES, help="of the packed micro-batch, with commas; to 5GB")
    parser.add_argument("--paths", default=",".join(PATHS), help=f"of {', '.join(PATHS)}, with commas")
    parser.add_argument("--rounds", type=int, default=3, help="how often each path has its turn")
    parser.add_argument("--handoffs", type=int, default=HANDOFFS, help="per path and size, where they are short")
    parser.add_argument("--results", type=Path, default=RESULTS, help="directory of the kept result")
    parser.add_argument("--json", action="store_true", help="print one JSON object on stdout")
    args = parser.parse_args()
    if unknown := [each for each in args.paths.split(",") if each not in PATHS]:
        parser.error(f"path {', '.join(unknown)}: want some of {', '.join(PATHS)}")
    if args.rounds < 1 or args.handoffs < 1:
        parser.error("--rounds and --handoffs: at least 1")
    try:
        sizes = sorted(parse_size(each) for each in args.sizes.split(","))
    except ShmstageError as error:
        parser.error(str(error))
    chosen = [PATHS[each] for each in args.paths.split(",")]
    signal.signal(signal.SIGTERM, _terminated)
    run = Run([path for path in chosen if not path.missing], sizes, args.rounds, args.handoffs)
    run.notes += [
        f"{path.name} left out: {path.package} is missing; pip install 'shmstage[bench]'"
        for path in chosen
        if path.missing
    ]
    load = machine()
    try:
        with stdout_kept():
            run.measure()
    except KeyboardInterrupt:
        return 130
    result = {
        "machine": load, "rounds": args.rounds, "figures": run.figures, "targets": targets_of(run.figures),
        "copies": {path.name: path.copies for path in chosen}, "notes": run.notes, "problems": run.problems,
    }  # fmt: skip
    kept = keep("handoff", result, args.results)
    if run.figures and not plot(result, kept.with_suffix(".svg")):
        run.notes.append("no plot: matplotlib is missing; pip install 'shmstage[bench]'")
    if args.json:
        print(json.dumps(result))
    else:
        print_tables(result)
        print_targets(result["targets"])
        print("\n".join([*run.notes, *run.problems]))
    return 1 if run.problems else 0


if __name__ == "__main__":
    sys.exit(main())
