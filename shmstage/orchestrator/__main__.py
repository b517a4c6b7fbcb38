"""``python -m shmstage.orchestrator``: a child of the launcher; its standard streams are logs only."""

from __future__ import annotations

import argparse
import sys
import traceback

from shmstage.errors import ShmstageError
from shmstage.events import write_failure
from shmstage.memory.lifeline import Lifeline
from shmstage.orchestrator.session import train, write_summary
from shmstage.settings import Settings


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m shmstage.orchestrator")
    parser.add_argument("--settings", required=True, help="the settings as JSON")
    parser.add_argument("--epoch", type=int, default=1)
    parser.add_argument("--lifeline", action="store_true", help="stop at the end of standard input")
    args = parser.parse_args()
    settings = Settings.model_validate_json(args.settings)
    lifeline = Lifeline(watch_stdin=args.lifeline)
    try:
        summary = train(settings, epoch=args.epoch, stop_requested=lifeline.stop_requested)
        write_summary(settings, summary)
        return 0
    except ShmstageError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr, flush=True)
        return write_failure(settings.out_dir, "orchestrator", error)
    except Exception as error:
        traceback.print_exc()
        return write_failure(settings.out_dir, "orchestrator", error)


if __name__ == "__main__":
    sys.exit(main())
