"""`source = "grpo_arithmetic.rollouts:make_source"`: a live source whose groups are sampled while the run goes on.

Step k trains batch k-1, and nothing else (`task.shape_of`). With `max_staleness` = n, batch b is sampled with weights
of version >= b-n; it waits until there are some. With 0 that is version b exactly, so that everything that is trained
follows from the seed, whoever samples it and whatever dies; how long it is trained, too, unless the orchestrator dies:
the next one counts `stop_after` anew. No jax: the orchestrator runs it.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
from grpo_arithmetic.crew import Answer, Crew
from grpo_arithmetic.task import Rollouts, rollouts_of

from shmstage import Group, Trajectory
from shmstage.errors import RunFailedError, WaitTimeoutError

#: what a reader of the weights has to know
PUBLICATION = ("run_id", "pool", "epoch", "layout", "version")


class RolloutSource:
    """Journaled by the orchestrator, since nobody can sample the same again with weights that are gone."""

    replayable = False

    def __init__(self, rollouts: Rollouts) -> None:
        self._rollouts = rollouts
        self._condition = threading.Condition()
        self._weights: dict[str, Any] | None = None
        self._closed = False
        self._crew: Crew | None = None
        self._recent: deque[float] = deque(maxlen=rollouts.stop_after)

    # --- what the orchestrator calls ------------------------------------------------------------------------

    def example(self) -> Trajectory:
        """Which fields there are, before there is a policy that could be asked."""
        two = np.ones(2, np.float32)
        return Trajectory(
            trajectory_id="example", tokens=np.zeros(2, np.int32), loss_mask=two, advantages=two, old_logprobs=two,
            returns=two,
        )  # fmt: skip

    def expected_groups(self, batch_index: int) -> int:
        return self._rollouts.prompts_per_batch

    def on_weights(self, published: Mapping[str, Any]) -> None:
        with self._condition:
            self._weights = {key: published[key] for key in PUBLICATION}
            self._condition.notify_all()

    def groups(self, cursor: int) -> Iterator[Group]:
        """From group `cursor` on, in the order of the prompts. Ends with `close`, or when `stop_at` is reached."""
        rollouts = self._rollouts
        batch = cursor // rollouts.prompts_per_batch
        per_batch = rollouts.prompts_per_batch // rollouts.prompts_per_call
        while (weights := self._weights_for(batch)) is not None:
            crew = self._crew_of(weights["run_id"])
            if crew is None:
                return
            calls = range(batch * per_batch, (batch + 1) * per_batch)
            for call in calls:
                crew.ask(call)
            rewards = []
            for call in calls:
                answer = crew.answer(call)
                if answer is None:
                    return
                rewards.append(float(answer["reward"].mean()))
                for group in self._groups_of(batch, call, answer):
                    # a restart hit the middle of a batch: what is in the journal is not given again
                    if cursor <= int(group.group_id[1:]):
                        yield group
            batch += 1
            self._recent.append(sum(rewards) / len(rewards))
            if self._is_good_enough():
                return

    def close(self) -> None:
        with self._condition:
            self._closed = True
            crew = self._crew
            self._condition.notify_all()
        if crew is not None:
            crew.close()

    # ---------------------------------------------------------------------------------------------------------

    def _weights_for(self, batch: int) -> dict[str, Any] | None:
        """A publication of weights that may sample `batch`, waited for; `None` once the source is closed."""
        oldest = self._rollouts.oldest_version(batch)

        def there() -> bool:
            return self._closed or (self._weights is not None and self._weights["version"] >= oldest)

        with self._condition:
            if not self._condition.wait_for(there, self._rollouts.weights_timeout_s):
                newest = self._weights["version"] if self._weights else "none"
                raise WaitTimeoutError(
                    f"batch {batch} waited {self._rollouts.weights_timeout_s:g} s for weights of version {oldest}, the "
                    f"newest is {newest}: is a batch of {self._rollouts.trajectories} trajectories exactly one step "
                    "(rows x max_segments_per_row x microbatches_per_step), and order prompt_batch? Or raise "
                    "weights_timeout_s"
                )
            return None if self._closed else self._weights

    def _crew_of(self, run_id: str) -> Crew | None:
        with self._condition:
            if self._crew is None and not self._closed:
                self._crew = Crew(run_id, self._rollouts, self._newest)
            return self._crew

    def _newest(self) -> dict[str, Any]:
        assert self._weights is not None  # nothing is asked before there are some
        return self._weights

    def _groups_of(self, batch: int, call: int, answer: Answer) -> Iterator[Group]:
        got, version = (int(number) for number in answer["call_and_version"])
        oldest = self._rollouts.oldest_version(batch)
        if got != call or not oldest <= version <= batch:
            raise RunFailedError(
                f"call {call} of batch {batch} was answered as call {got}, sampled with version {version}; want one "
                f"from {oldest} to {batch}"
            )
        for place in range(self._rollouts.prompts_per_call):
            prompt = call * self._rollouts.prompts_per_call + place
            name = f"p{prompt}"
            yield Group(
                name, batch, tuple(
                    self._trajectory(answer, (place, member), f"{name}-{member}", name, batch, version)
                    for member in range(self._rollouts.group_size)
                ),
            )  # fmt: skip

    def _trajectory(
        self, answer: Answer, at: tuple[int, int], name: str, group: str, batch: int, version: int
    ) -> Trajectory:
        length = int(answer["length"][at])
        mask = np.zeros(length, np.float32)
        mask[int(answer["prompt_length"][at]) :] = 1
        return Trajectory(
            trajectory_id=name, group_id=group, batch_index=batch, policy_version=version,
            tokens=answer["tokens"][at][:length], loss_mask=mask, advantages=mask * answer["advantage"][at],
            old_logprobs=answer["logps"][at][:length], returns=mask * answer["reward"][at],
        )  # fmt: skip

    def _is_good_enough(self) -> bool:
        rollouts, recent = self._rollouts, self._recent
        return 0 < rollouts.stop_at <= sum(recent) / len(recent) and len(recent) == rollouts.stop_after


def make_source(settings: Mapping[str, Any]) -> RolloutSource:
    """The keys are those of `task.Rollouts`. Raises `SettingsError`."""
    return RolloutSource(rollouts_of(settings))
