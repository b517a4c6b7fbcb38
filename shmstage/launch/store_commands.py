"""The commands of a store's door: what an orchestrator may ask of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from shmstage.launch.door import Arguments, Command
from shmstage.launch.trajectory_store import TrajectoryStore
from shmstage.wire.messages import Hello

#: no answer is waited for longer than this: the door has other commands to hear
MAX_WAIT_S = 5.0


def welcome(store: TrajectoryStore) -> Callable[[Hello], dict[str, Any]]:
    return lambda hello: store.open_session(hello.epoch)


def commands(store: TrajectoryStore) -> dict[str, Command]:
    """Name → command, for ``Door``."""

    def read(arguments: Arguments, given_up: Callable[[], bool]) -> dict[str, Any]:
        take = arguments.take
        pass_number, cursor, count = take("pass_number", int), take("cursor", int), take("count", int)
        what = arguments.get("what", str, "train")
        if what != "train":
            return store.read_evaluation(what, cursor, count)
        return store.read(pass_number, cursor, count, min(take("wait_s", float), MAX_WAIT_S))

    def first(arguments: Arguments, given_up: Callable[[], bool]) -> dict[str, Any]:
        return store.first(arguments.get("what", str, "train"), min(arguments.take("wait_s", float), MAX_WAIT_S))

    def expected(arguments: Arguments, given_up: Callable[[], bool]) -> dict[str, Any]:
        return {"groups": store.expected(arguments.take("batch_index", int))}

    def release(arguments: Arguments, given_up: Callable[[], bool]) -> dict[str, Any]:
        store.release(arguments.take("below", int))
        return {}

    def covered(arguments: Arguments, given_up: Callable[[], bool]) -> dict[str, Any]:
        store.covered(arguments.take("cursor", int))
        return {}

    return {"read": read, "first": first, "expected": expected, "release": release, "covered": covered}
