"""Sources with seeded content, for the tests of what stands between a source and the feeder."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
from hypothesis import strategies as st

from shmstage.packing.plan import PlanSettings
from shmstage.packing.trajectory import Group, Trajectory

TOKENS = 12


def make_group(number: int, batch: int, lengths: Sequence[int]) -> Group:
    """Content differs from trajectory to trajectory, so that digests tell them apart."""
    trajectories = []
    for i, length in enumerate(lengths):
        ones = np.ones(length, np.float32)
        trajectories.append(
            Trajectory(
                trajectory_id=f"t{number}.{i}", group_id=f"g{number}", batch_index=batch, policy_version=batch,
                tokens=np.arange(length, dtype=np.int32) + 1000 * number + 100 * i,
                loss_mask=ones, advantages=ones, old_logprobs=-ones,
            )
        )  # fmt: skip
    return Group(f"g{number}", batch, tuple(trajectories))


class Given:
    """Replayable; notes the cursor of each call."""

    replayable = True

    def __init__(self, groups: Sequence[Group]) -> None:
        self.given = tuple(groups)
        self.cursors: list[int] = []

    def groups(self, cursor: int) -> Iterator[Group]:
        self.cursors.append(cursor)
        yield from self.given[cursor:]


class Sized(Given):
    """Also says how many groups a batch will have."""

    def expected_groups(self, batch_index: int) -> int:
        return sum(group.batch_index == batch_index for group in self.given)


plan_settings = st.builds(
    PlanSettings,
    rows=st.integers(1, 3),
    tokens=st.just(TOKENS),
    max_segments_per_row=st.integers(0, 3),
    segment_align=st.sampled_from([1, 4]),
    max_real_tokens=st.sampled_from([0, TOKENS, 20]),
    on_overlong=st.just("drop"),
)
#: 0 is empty, above TOKENS over-long
lengths = st.lists(st.integers(0, TOKENS + 1), max_size=4)
#: batch indices as sources give them: in order, interleaved with their neighbours, or jumping about
batches = st.lists(st.integers(0, 5), min_size=1, max_size=10).flatmap(
    lambda drawn: st.sampled_from([sorted(drawn), [b // 2 for b in sorted(drawn)], drawn])
)


@st.composite
def group_lists(draw: st.DrawFn) -> list[Group]:
    """At least one trajectory can be trained."""
    first = make_group(0, 0, [draw(st.integers(1, TOKENS))])
    return [first, *(make_group(i, batch, draw(lengths)) for i, batch in enumerate(draw(batches), 1))]
