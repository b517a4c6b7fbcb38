"""The Ray cluster that a launch uses: one that is there, or several raylets on this machine for the length of it."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import secrets
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, final

from shmstage.errors import MissingExtraError, RunFailedError, SettingsError, ShmstageError, named
from shmstage.memory.limits import format_nbytes

#: of one local raylet; its object store holds what is fetched ahead, in /dev/shm
LOCAL_NODE: dict[str, Any] = {"num_cpus": 1, "object_store_memory": 100 << 20}
#: Ray's own words are for its log files, not between ours
QUIET = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_DEDUP_LOGS": "0", "RAY_COLOR_PREFIX": "0"}
#: by itself Ray runs workers at nice 15, and what they start: the trainers would starve beside anything else
EAGER = {"RAY_worker_niceness": "0"}
#: between looks for dead nodes, while their places are waited for
REPLACE_S = 2.0
#: a cluster that is complete needs less to place the hosts
PLACED_SOON_S = 3.0
_LOOK_S = 0.1

Look = Callable[[], None]
"""Called while something is waited for; may raise to end the wait."""


@final
@dataclass(frozen=True, slots=True)
class Died:
    """An actor that will not answer any more; ``why`` in Ray's words."""

    why: str


def need_ray() -> None:
    """Raises ``MissingExtraError``. Imports nothing: Ray reads its switches from the environment on import."""
    if importlib.util.find_spec("ray") is None:
        raise MissingExtraError("shmstage launch needs Ray; pip install 'shmstage[ray]'")


@contextlib.contextmanager
def cluster(address: str | None, hosts: int | None) -> Iterator[Cluster]:
    """Connected to the cluster at ``address``, or to a local one of ``hosts`` raylets that ends with the block.

    ``hosts`` ``None``: one per living node of the cluster, 2 of a local one.

    Raises ``SettingsError`` if there is none.
    """
    need_ray()
    with contextlib.ExitStack() as stack:
        stack.enter_context(_environment({**QUIET, **EAGER}))
        if address is None and "ray" not in sys.modules:  # one that is imported has made up its mind
            token = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
            stack.enter_context(_environment(token))
        import ray as imported

        ray: Any = imported
        local = None
        if address is None:
            local = _LocalNodes(hosts or 2)
            stack.callback(local.close)
            address = local.address
        try:
            stack.callback(ray.shutdown)
            with _signals_kept():
                ray.init(address=address, log_to_driver=False, logging_level="ERROR", namespace="shmstage")
        except (ConnectionError, RuntimeError, ValueError) as error:
            raise SettingsError(
                f"address = {named(address)}: {' '.join(str(error).split())[:300]}; start Ray there (`ray start "
                "--head`, its token in RAY_AUTH_TOKEN) or use --local-cluster"
            ) from None
        yield Cluster(ray, hosts or max(1, sum(bool(node["Alive"]) for node in ray.nodes())), local)


@contextlib.contextmanager
def _environment(values: dict[str, str]) -> Iterator[None]:
    """Ray reads its switches from the environment, and so do the processes that it starts."""
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


@contextlib.contextmanager
def _signals_kept() -> Iterator[None]:
    """Ray takes SIGTERM for itself where it connects and with each node it starts, and exits without our clean-up.

    It has no switch for that; a signal that is blocked meanwhile would be blocked in the raylets, too.
    """
    before = signal.getsignal(signal.SIGTERM)
    private: Any = sys.modules.get("ray._private.utils")
    taking = getattr(private, "set_sigterm_handler", None)
    try:
        if taking is not None:
            private.set_sigterm_handler = lambda handler: None
        yield
    finally:
        if taking is not None:
            private.set_sigterm_handler = taking
        signal.signal(signal.SIGTERM, before)  # should another version of Ray take it otherwise


@final
class _LocalNodes:
    """Raylets on this machine, as many as hosts."""

    def __init__(self, hosts: int) -> None:
        from ray.cluster_utils import Cluster as RayCluster

        # sockets and logs of Ray's, gone with the cluster: a short path, for the sockets in it
        self._directory = tempfile.mkdtemp(prefix="ray-", dir="/tmp")
        self._cluster: Any = RayCluster(initialize_head=False, shutdown_at_exit=True)
        try:
            # one level below: Ray opens the directory that it is given to everybody, with the sockets and logs in it
            self.add(include_dashboard=False, temp_dir=f"{self._directory}/r")
            for _ in range(hosts - 1):
                self.add()
            self.address = str(self._cluster.address)
        except Exception as error:  # Ray says what it lacks in errors of all kinds
            self.close()
            each = format_nbytes(int(LOCAL_NODE["object_store_memory"]))
            raise SettingsError(
                f"a local cluster of {hosts} cannot be started: {' '.join(str(error).split())[:300]}; each of its "
                f"nodes takes {each} of /dev/shm: lower --hosts, or run on one"
            ) from None
        except BaseException:
            self.close()
            raise

    def add(self, **more: Any) -> None:
        with _signals_kept():
            self._cluster.add_node(**LOCAL_NODE, **more)

    def close(self) -> None:
        self._cluster.shutdown()
        shutil.rmtree(self._directory, ignore_errors=True)


@final
class Cluster:
    """What the launcher asks of Ray. Every wait has a deadline and calls ``look`` meanwhile."""

    def __init__(self, ray: Any, hosts: int, local: _LocalNodes | None) -> None:
        self.ray = ray
        self.hosts = hosts
        self._local = local
        self._group: Any = None
        self._replaced_at = 0.0

    def alive_nodes(self) -> list[str]:
        """Ids of the nodes that Ray takes to be alive."""
        return [str(node["NodeID"]) for node in self.ray.nodes() if node["Alive"]]

    def place(self, timeout_s: float, look: Look, say: Callable[[str], None]) -> None:
        """One bundle per host, each on a node of its own; nodes may join meanwhile, which is said.

        Raises ``SettingsError`` if there are too few of them in the end.
        """
        from ray.util.placement_group import placement_group

        self._group = placement_group([{"CPU": 1}] * self.hosts, strategy="STRICT_SPREAD")
        placed = [self._group.ready()]
        soon_s = min(timeout_s, PLACED_SOON_S)
        if self.wait(placed, soon_s, look):
            say(f"waiting up to {timeout_s:g} s for {self.hosts} nodes with a free CPU; {self._what_there_is()}")
            if self.wait(placed, timeout_s - soon_s, look):
                raise SettingsError(
                    f"hosts = {self.hosts}: not placed within {timeout_s:g} s; {self._what_there_is()}, and each host "
                    "wants a node of its own with one; add nodes or lower --hosts"
                )

    def _what_there_is(self) -> str:
        free = self.ray.available_resources().get("CPU", 0.0)
        return f"the cluster has {len(self.alive_nodes())} living nodes and {free:g} free CPUs"

    def replace_lost_nodes(self) -> None:
        """Of a local cluster: start raylets for those that Ray takes to be dead, looking now and then.

        Elsewhere whoever runs the cluster does that.
        """
        now = time.monotonic()
        if self._local is not None and now >= self._replaced_at + REPLACE_S:
            self._replaced_at = now
            for _ in range(self.hosts - len(self.alive_nodes())):
                self._local.add()

    def agent(self, rank: int, actor: type, *arguments: Any) -> Any:
        """An actor in the bundle of host ``rank``; made when Ray finds the time, never again if it dies."""
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        where = PlacementGroupSchedulingStrategy(self._group, placement_group_bundle_index=rank)
        made = self.ray.remote(num_cpus=1, max_concurrency=8, max_restarts=0, max_task_retries=0)(actor)
        return made.options(scheduling_strategy=where).remote(*arguments)

    def store(self, node: str, actor: type, *arguments: Any) -> Any:
        """An actor on a node."""
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        made = self.ray.remote(num_cpus=0, max_concurrency=16, max_restarts=0, max_task_retries=0)(actor)
        return made.options(scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=False)).remote(*arguments)

    def wait(self, calls: Sequence[Any], timeout_s: float, look: Look) -> list[Any]:
        """Those of ``calls`` that have no answer after ``timeout_s``."""
        deadline = time.monotonic() + timeout_s
        left = list(calls)
        while left:
            left_s = deadline - time.monotonic()
            _, left = self.ray.wait(left, num_returns=len(left), timeout=max(0.0, min(left_s, _LOOK_S)))
            if left_s <= 0:
                break
            look()
        return left

    def answer(self, call: Any) -> Any:
        """What an answered call gave; ``Died`` if its actor is no more. Raises what the actor raised."""
        from ray.exceptions import RayError, RayTaskError

        try:
            return self.ray.get(call, timeout=10.0)
        except RayTaskError as error:
            if isinstance(error.cause, ShmstageError):
                raise error.cause from None
            raise RunFailedError(f"an actor failed: {' '.join(str(error).split())[-500:]}") from None
        except RayError as error:
            return Died(_first_line(error))

    def kill(self, actor: Any) -> None:
        """At once, whatever it is at; harmless for one that is dead."""
        with contextlib.suppress(Exception):
            self.ray.kill(actor, no_restart=True)

    def kill_local(self) -> None:
        """End a local cluster without asking Ray for anything."""
        if self._local is not None:
            self._local.close()

    def close(self) -> None:
        """Give the places back."""
        if self._group is not None:
            from ray.util.placement_group import remove_placement_group

            with contextlib.suppress(Exception):
                remove_placement_group(self._group)
            self._group = None


def _first_line(error: BaseException) -> str:
    text = str(error).strip().splitlines()
    return text[0].strip()[:300] if text else type(error).__name__
