"""Stands in for a rollout worker: no policy, answers that say what was asked, and faults chosen by the seed."""

from __future__ import annotations

import json
import os
import sys
import threading

from grpo_arithmetic.task import NO_WEIGHTS, fields_of, rollouts_of

from shmstage import Producer

DIES_AT_EVERY_CALL, NEVER_READY, SAMPLES_WITH_OLD_WEIGHTS, ANSWERS_ANOTHER_CALL = 101, 102, 103, 104
HANGS_BEFORE_READY, HANGS_AT_EVERY_CALL, SAYS_SOMETHING_ELSE, CANNOT_READ_VERSION_0 = 105, 106, 107, 108
#: longer than any test waits
FOR_EVER_S = 600


def hang() -> None:
    threading.Event().wait(FOR_EVER_S)


def main() -> None:
    name, rollouts = sys.argv[1], rollouts_of(json.loads(sys.argv[2]))
    if rollouts.seed == NEVER_READY:
        sys.exit(9)
    if rollouts.seed == HANGS_BEFORE_READY:
        hang()
    if rollouts.seed == SAYS_SOMETHING_ELSE:
        print("a library's banner", flush=True)
        hang()
    with Producer(name, fields_of(rollouts), slots=2) as producer:
        print("ready", flush=True)
        for line in sys.stdin:
            request = json.loads(line)
            if rollouts.seed == HANGS_AT_EVERY_CALL:
                hang()
            if rollouts.seed == DIES_AT_EVERY_CALL:
                os.kill(os.getpid(), 9)
            call, version = request["call"], request["weights"]["version"]
            slot = producer.acquire()
            views = slot.views
            call_off = rollouts.seed == ANSWERS_ANOTHER_CALL
            too_old = 2 * (rollouts.seed == SAMPLES_WITH_OLD_WEIGHTS)
            views["call_and_version"][:] = call + call_off, version - too_old
            if rollouts.seed == CANNOT_READ_VERSION_0 and not version and call >= 2:
                views["call_and_version"][1] = NO_WEIGHTS
            views["tokens"][...] = 7 + call
            views["length"][...] = 5
            views["prompt_length"][...] = 2
            views["logps"][...] = -1
            views["reward"][...] = min(1.0, call / 10)
            views["advantage"][...] = 0.5
            slot.publish()


if __name__ == "__main__":
    main()
