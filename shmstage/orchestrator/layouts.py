"""What slots hold: the fields of a micro-batch, from the first trajectory of an input and the settings."""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

from shmstage.memory.layout import Layout
from shmstage.packing.fields import late_fields, microbatch_layout
from shmstage.packing.reference import Described
from shmstage.packing.routing import experts_for
from shmstage.settings import Settings


@final
@dataclass(frozen=True)
class Layouts:
    """What slots hold: micro-batches to train and, with an evaluation bundle, those to evaluate."""

    train: Layout
    evaluate: Layout | None
    #: their routing's number of experts, 0 where it is not known
    experts: int = 0
    eval_experts: int = 0

    @property
    def all(self) -> list[Layout]:
        """Each once: an evaluation bundle may have the very layout of the input."""
        return list(dict.fromkeys(layout for layout in (self.train, self.evaluate) if layout is not None))

    def uses(self, settings: Settings) -> dict[int, set[str]]:
        """Layout id → what the trainer compiles programs for: those of a first evaluation or scoring take long, too."""
        found: dict[int, set[str]] = {self.train.layout_id: {"train"}}
        if settings.recompute_old_logps or settings.reference_logps:
            found[self.train.layout_id].add("score")
        if self.evaluate is not None and settings.eval_every:
            found.setdefault(self.evaluate.layout_id, set()).add("evaluate")
        return found


def layouts_of(
    settings: Settings, first: Described, evaluated: Described | None, *, tiles: tuple[int, int] | None = None
) -> Layouts:
    """Taken from the first trajectory of each: all of an input carry the same fields.

    ``tiles``: in how many parts rows and tokens are cut over the devices of several hosts: encoded routing lies so.
    """
    evaluate, eval_experts = None, 0
    if evaluated is not None:
        evaluate, eval_experts = layout_of(evaluated, settings, late=(), tiles=tiles), experts_of(evaluated, settings)
    train = layout_of(first, settings, late=late_fields(settings), tiles=tiles)
    return Layouts(train, evaluate, experts_of(first, settings), eval_experts)


def experts_of(first: Described, settings: Settings) -> int:
    """Experts that the routing of trajectories like ``first`` is encoded for; 0: not known. ``SettingsError``."""
    if first.routing is None:
        return 0
    who = f"trajectory {first.trajectory_id!r}"
    return experts_for(settings.routing_encoding, asked=settings.experts, said=first.experts, who=who)


def layout_of(
    first: Described, settings: Settings, *, late: tuple[str, ...], tiles: tuple[int, int] | None = None
) -> Layout:
    """The layout of micro-batches of trajectories like ``first``."""
    layers, top_k = first.routing.shape[1:] if first.routing is not None else (0, 0)
    return microbatch_layout(
        settings.rows, settings.tokens, optional=first.optional, layers=int(layers), top_k=int(top_k),
        late=late, encoding=settings.routing_encoding, experts=experts_of(first, settings),
        max_real_tokens=settings.max_real_tokens, tiles=tiles,
    )  # fmt: skip
