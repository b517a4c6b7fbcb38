"""A rollout worker: a process that samples with the newest weights, scores, and hands groups back in shared memory.

    python -m grpo_arithmetic.worker NAME ROLLOUTS-AS-JSON

Requests are lines of JSON on standard input, {"call": n, "weights": a publication}; the answer to each is a slot of the
producer NAME. It ends with its input, so it does not outlive whoever asks.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import jax
import numpy as np
from grpo_arithmetic.engine import nested
from grpo_arithmetic.task import MAX_TOKENS, NO_WEIGHTS, Rollouts, fields_of, problem_of, rollouts_of

from shmstage import Producer, WeightsReader
from shmstage.demo.arithmetic import END, decode, encode, verify
from shmstage.demo.model import Params
from shmstage.demo.record import advantages_of
from shmstage.demo.sampling import sample
from shmstage.errors import PoolError


def rolled_out(params: Params, version: int, call: int, rollouts: Rollouts) -> dict[str, np.ndarray[Any, Any]]:
    """A function of its arguments alone: which worker it runs in makes no difference."""
    first = call * rollouts.prompts_per_call
    problems = [problem_of(rollouts.seed, first + number) for number in range(rollouts.prompts_per_call)]
    prompts = [encode(problem.prompt) for problem in problems for _ in range(rollouts.group_size)]
    key = jax.random.fold_in(jax.random.fold_in(jax.random.key(rollouts.seed), version), first)
    found = {name: np.zeros(shape, dtype) for name, (dtype, shape) in fields_of(rollouts).items()}
    for number, rollout in enumerate(sample(params, prompts, key, end=ord(END), max_tokens=MAX_TOKENS)):
        at = divmod(number, rollouts.group_size)
        length = len(rollout.tokens)
        found["tokens"][at][:length] = rollout.tokens
        found["logps"][at][:length] = rollout.logps
        found["length"][at], found["prompt_length"][at] = length, rollout.prompt_length
        found["reward"][at] = verify(problems[at[0]], decode(rollout.tokens[rollout.prompt_length :]))
    found["advantage"][:] = advantages_of(found["reward"].astype(np.float64))
    found["call_and_version"][:] = call, version
    return found


def main() -> None:
    name, rollouts = sys.argv[1], rollouts_of(json.loads(sys.argv[2]))
    reader: WeightsReader | None = None
    version, params = -1, {}
    with Producer(name, fields_of(rollouts), slots=2) as producer:
        print("ready", flush=True)
        try:
            for line in sys.stdin:
                request = json.loads(line)
                slot = producer.acquire()
                try:
                    reader = reader or WeightsReader(request["weights"])
                    reader.follow(request["weights"])
                except PoolError as error:
                    print(error, file=sys.stderr, flush=True)
                    slot.views["call_and_version"][:] = request["call"], NO_WEIGHTS
                    slot.publish()
                    continue
                with reader.take() as weights:
                    if weights.version != version:
                        version, params = weights.version, nested(weights.arrays)
                for field, array in rolled_out(params, version, request["call"], rollouts).items():
                    slot.views[field][...] = array
                slot.publish()
        finally:
            if reader is not None:
                reader.close()


if __name__ == "__main__":
    main()
