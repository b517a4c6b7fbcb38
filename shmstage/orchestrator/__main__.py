"""``python -m shmstage.orchestrator``: a child of the launcher; its standard streams are logs only."""

from __future__ import annotations

import sys
from pathlib import Path

from shmstage.child import Lifeline, run_child
from shmstage.orchestrator.session import train, write_summary
from shmstage.settings import Settings


def serve(settings: Settings, lifeline: Lifeline, epoch: int, peers_file: Path | None) -> None:
    summary = train(settings, epoch=epoch, stop_requested=lifeline.stop_requested, peers_file=peers_file)
    write_summary(settings, summary)


if __name__ == "__main__":
    sys.exit(run_child("orchestrator", serve))
