"""One configuration of the slot model: how many take part, what they may do, what may go wrong."""

from __future__ import annotations

from dataclasses import dataclass, fields


@dataclass(frozen=True)
class Case:
    """``writers`` are threads of the pool's owner, ``tasks`` threads of each consumer.

    ``generations``: a slot is claimed only while fewer than that many pairs of generations were used in all.
    ``masks``: whom a publication may be for. ``deaths``: how many processes may be killed, each after any step.
    ``withdraws``: a handle that was sent to nobody may be taken back; ``recalls``: one that was sent, too.
    ``resends``: a handle may be delivered twice. ``takeover``: another owner may follow a dead one, with a new pool.
    ``faults``: names of deliberate faults, see ``seeded_faults.py``.
    """

    slots: int = 1
    writers: int = 1
    consumers: int = 1
    tasks: int = 1
    generations: int = 2
    masks: tuple[int, ...] = ()
    deaths: int = 0
    incarnations: int = 1
    abandons: bool = True
    withdraws: bool = False
    recalls: bool = False
    resends: bool = False
    takeover: bool = False
    faults: frozenset[str] = frozenset()

    @property
    def all_masks(self) -> tuple[int, ...]:
        return self.masks or ((1 << self.consumers) - 1,)

    def __str__(self) -> str:
        said = [f"{self.slots} slots, {self.writers} writers, {self.consumers} consumers x {self.tasks}"]
        for field in fields(self)[4:]:
            value = getattr(self, field.name)
            if value != field.default:
                said.append(field.name if value is True else f"{field.name} {value}")
        return ", ".join(said)
