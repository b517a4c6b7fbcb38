"""How fast trajectories land in slots, beside plain Ray objects of the same sizes; `multihost.py` starts it on a host.

    python bench/multihost_rate.py WHAT_AS_JSON          prints one JSON object

``WHAT`` = ``{"address", "agents": [resource...], "stores": [resource...], "settings", "microbatches", "rounds"}``.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import ray
from multihost_actors import HostSide, StoreSide

from shmstage.packing.fields import microbatch_layout
from shmstage.packing.fill import microbatch_digest
from shmstage.packing.parts import digest_of_rows, part_of
from shmstage.packing.plan import PlannedMicrobatch, Planner, PlanSettings
from shmstage.packing.reference import Key, RoutingShape, TrajectoryReference
from shmstage.packing.window import Window
from shmstage.settings import Settings

Parts = list[tuple[bytes, bytes]]


def references(stores: list[Any]) -> list[TrajectoryReference]:
    """Of all stores, batch by batch; in one the groups take turns, so that every host's rows come from all stores."""
    found = []
    for store, groups in enumerate(ray.get([each.read.remote() for each in stores])):
        for group_number, group_id, batch_index, described in groups:
            for turn, (number, name, version, length, nbytes, loss_tokens, digest, *rest) in enumerate(described):
                optional, experts, shape = rest
                reference = TrajectoryReference(
                    Key(store, number), name, group_id, batch_index, version, length, nbytes, loss_tokens, digest,
                    frozenset(optional), experts, RoutingShape(tuple(shape)) if shape else None,
                )  # fmt: skip
                found.append(((batch_index, turn, group_number), reference))
    return [reference for _, reference in sorted(found, key=lambda each: each[0])]


def planned(settings: Settings, refs: dict[int, TrajectoryReference]) -> list[PlannedMicrobatch]:
    planner = Planner(PlanSettings(rows=settings.rows, tokens=settings.tokens))
    plans: list[PlannedMicrobatch] = []
    for arrival, reference in refs.items():
        planner.add(arrival, reference.length)
        if (arrival + 1) % settings.rows == 0:
            plans += planner.close_window()
    return plans


def placed(what: dict[str, Any], settings: Settings) -> tuple[list[Any], list[Any]]:
    """(stores, agents), each on its host, with the options that the launcher gives them."""
    stores = [
        ray.remote(num_cpus=0, max_concurrency=16)(StoreSide)
        .options(resources={resource: 1})
        .remote(settings.model_dump_json(), index, len(what["stores"]))
        for index, resource in enumerate(what["stores"])
    ]
    agents = [
        ray.remote(num_cpus=0, max_concurrency=8)(HostSide)
        .options(resources={resource: 1})
        .remote(settings.model_dump_json(), rank, len(what["agents"]), stores)
        for rank, resource in enumerate(what["agents"])
    ]
    return stores, agents


def land(agents: list[Any], parts: list[Parts]) -> list[tuple[float, list[tuple[int, int]], bytes]]:
    return ray.get([agent.land.remote(own) for agent, own in zip(agents, parts, strict=True)])


def plain(agents: list[Any], sizes: list[Any]) -> list[tuple[float, int]]:
    found: list[tuple[float, int]] = ray.get([a.plain.remote(own) for a, own in zip(agents, sizes, strict=True)])
    return found


def measure(what: dict[str, Any]) -> dict[str, Any]:
    settings = Settings.model_validate(what["settings"])
    stores, agents = placed(what, settings)
    try:
        refs = dict(enumerate(references(stores)))
        plans = planned(settings, refs)
        payload_nbytes, parts = opened(settings, agents, plans, refs)
        warm = land(agents, parts)  # processes, connections and pages that are there from then on
        check(plans, refs, [digests for _, _, digests in warm], settings.rows // len(agents))
        sizes = [by_microbatch(brought, len(plans), len(stores)) for _, brought, _ in warm]
        largest = max(nbytes for own in sizes for each in own for _, nbytes in each)
        ray.get([store.prepare_plain.remote(largest) for store in stores])
        plain(agents, sizes)
        rounds = []
        for number in range(what["rounds"]):
            measured: dict[str, Any] = {}
            for arm in ("ours", "plain") if number % 2 else ("plain", "ours"):
                if arm == "ours":
                    measured[arm] = [(s, sum(n for _, n in brought)) for s, brought, _ in land(agents, parts)]
                else:
                    measured[arm] = plain(agents, sizes)
            rounds.append(measured)
    finally:
        ray.get([agent.close.remote() for agent in agents])
    left = sorted({name for names in ray.get([agent.left.remote() for agent in agents]) for name in names})
    return {"payload_nbytes": payload_nbytes, "microbatches": len(plans), "rounds": rounds, "left": left}


def opened(
    settings: Settings, agents: list[Any], plans: list[PlannedMicrobatch], refs: dict[int, TrajectoryReference]
) -> tuple[int, list[Parts]]:
    """Bytes of a micro-batch in the slots of all hosts, and what each agent is asked for; rows are shared out."""
    hosts, first = len(agents), refs[0]
    rows = settings.rows // hosts
    layers, top_k = first.routing.shape[1:] if first.routing is not None else (0, 0)
    layout = microbatch_layout(
        rows, settings.tokens, optional=first.optional, layers=layers, top_k=top_k, experts=first.experts,
        encoding=settings.routing_encoding, tiles=(1, 1),
    )  # fmt: skip
    windows = [Window(rank * rows, (rank + 1) * rows, 0, settings.tokens) for rank in range(hosts)]
    opening = [
        agent.open.remote(layout.to_wire(), [w.row_begin, w.row_end, w.token_begin, w.token_end], [hosts, 1])
        for agent, w in zip(agents, windows, strict=True)
    ]
    parts = [[(part.plan, part.digests) for part in (part_of(plan, refs, w) for plan in plans)] for w in windows]
    return sum(ray.get(opening)), parts


def by_microbatch(brought: list[tuple[int, int]], microbatches: int, stores: int) -> list[list[tuple[int, int]]]:
    """(store, bytes) of each micro-batch: all have a row's worth of every store's, and sizes hardly differ."""
    each: list[list[tuple[int, int]]] = [[] for _ in range(microbatches)]
    for store in range(stores):
        own = [nbytes for which, nbytes in brought if which == store]
        for number, nbytes in enumerate(own):
            each[number].append((store, nbytes))
    return each


def check(plans: list[PlannedMicrobatch], refs: dict[int, TrajectoryReference], told: list[bytes], rows: int) -> None:
    """What was landed is what was planned: the digest of each whole micro-batch, from all hosts' rows."""
    for number, plan in enumerate(plans):
        at = number * rows * 16
        whole = digest_of_rows([digests[at : at + rows * 16] for digests in told])
        if whole != microbatch_digest(plan, refs):
            raise SystemExit(f"micro-batch {number} was landed with another digest than it was planned with")


def main() -> int:
    what = json.loads(sys.argv[1])
    ray.init(address=what["address"], log_to_driver=False, logging_level="ERROR")
    print(json.dumps(measure(what)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
