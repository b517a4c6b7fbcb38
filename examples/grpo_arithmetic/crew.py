"""The crew of rollout workers: gives out calls, collects answers, starts a worker again that died. No jax."""

from __future__ import annotations

import contextlib
import json
import os
import select
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
from grpo_arithmetic.task import NO_WEIGHTS, Rollouts

from shmstage import Consumer
from shmstage.errors import PeerLostError, RunFailedError, ShmstageError, WaitTimeoutError
from shmstage.memory.sweep import sweep
from shmstage.transport.endpoint_lock import clear_stale_endpoints
from shmstage.transport.endpoints import endpoint_for, socket_path

Answer = dict[str, np.ndarray[Any, Any]]
#: the module; a test puts another in its place
WORKER = "grpo_arithmetic.worker"
STOP_S = 10.0
ASK_AGAIN_S = 0.2


class Crew:
    """One thread per worker, each with one process at a time. `ask` and `answers` are for one thread.

    A call whose worker died is given to whoever is free: the answer depends on the call and its weights alone.
    """

    def __init__(self, run_id: str, rollouts: Rollouts, newest: Callable[[], Mapping[str, Any]]) -> None:
        """`newest` is asked for the publication of weights that goes with a call, each time it is sent."""
        self._run_id = run_id
        self._newest = newest
        self._rollouts = rollouts
        self._condition = threading.Condition()
        self._calls: deque[int] = deque()
        self._answers: dict[int, Answer] = {}
        self._error: BaseException | None = None
        self._closed = False
        self._killed = False
        self._workers: dict[str, _Worker] = {}
        self._without_weights: dict[int, float] = {}
        self.restarts = 0
        self._threads = [
            threading.Thread(target=self._serve, args=(f"{run_id}-rollout-{index}",), name=f"rollout {index}")
            for index in range(rollouts.workers)
        ]
        for thread in self._threads:
            thread.daemon = True
            thread.start()

    def ask(self, call: int) -> None:
        """Have call `call` sampled with the newest weights there are."""
        with self._condition:
            self._calls.append(call)
            self._condition.notify_all()

    def answer(self, call: int) -> Answer | None:
        """Waits for it; `None` once the crew is closed. Raises `RunFailedError` when workers died too often."""
        with self._condition:
            self._condition.wait_for(lambda: self._closed or self._error is not None or call in self._answers)
            if call in self._answers:
                return self._answers.pop(call)
            if self._error is not None:
                raise self._error
            return None

    def close(self) -> None:
        """End the processes, and wait for them: one that hangs is killed after `STOP_S`. Harmless twice."""
        with self._condition:
            self._closed = True
            self._condition.notify_all()
        deadline = time.monotonic() + STOP_S
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        with self._condition:
            for worker in self._workers.values():  # whoever waits for it then sees that it is gone
                worker.process.kill()
        for thread in self._threads:
            thread.join()
        # a killed worker's lock as a reader of the run's weights. Not before: the pool of a trainer that died goes too,
        # and until there is the next one a worker that is started again reads it
        sweep(self._run_id)

    # --- a worker's thread ----------------------------------------------------------------------------------

    def _serve(self, name: str) -> None:
        worker: _Worker | None = None
        try:
            while (call := self._next()) is not None:
                try:
                    if worker is None:
                        worker = self._started(name)
                        worker.attach(self._rollouts.call_timeout_s)
                    if self._is_to_be_killed(call):
                        worker.process.kill()
                        worker.process.wait()  # or it could be quick enough to answer
                    # not those of when it was asked: their trainer may have died since, and its pool be gone
                    worker.send(call, self._newest())
                    answer = worker.receive(self._rollouts.call_timeout_s)
                except (PeerLostError, WaitTimeoutError, OSError) as error:
                    if worker is not None:
                        worker.kill()
                    worker = None
                    self._lost(name, call, error)
                    continue
                if answer["call_and_version"][1] == NO_WEIGHTS:
                    self._ask_again(call)
                    continue
                with self._condition:
                    self._answers[call] = answer
                    self._condition.notify_all()
        except BaseException as error:
            with self._condition:
                self._error = self._error or error
                self._condition.notify_all()
        finally:
            if worker is not None:
                worker.stop()

    def _started(self, name: str) -> _Worker:
        with self._condition:  # what is started is known to `close`, or not started any more
            if self._closed:
                raise PeerLostError(f"{name} is not started: the crew is closed")
            worker = self._workers[name] = _Worker(name, self._rollouts)
            return worker

    def _next(self) -> int | None:
        with self._condition:
            self._condition.wait_for(lambda: self._closed or self._error is not None or self._calls)
            return None if self._closed or self._error is not None else self._calls.popleft()

    def _is_to_be_killed(self, call: int) -> bool:
        with self._condition:
            now = not self._killed and call == self._rollouts.kill_at // self._rollouts.prompts_per_call
            self._killed = self._killed or now
            return now

    def _ask_again(self, call: int) -> None:
        """In a while, when the trainer that is started again may have published."""
        with self._condition:
            began = self._without_weights.setdefault(call, time.monotonic())
            if time.monotonic() - began > self._rollouts.weights_timeout_s:
                raise WaitTimeoutError(
                    f"call {call} waited {self._rollouts.weights_timeout_s:g} s for weights that can be read; the last "
                    f"ones were of version {self._newest()['version']}; see trainer.log, or raise weights_timeout_s"
                )
            self._condition.wait_for(lambda: self._closed, ASK_AGAIN_S)
            self._calls.appendleft(call)
            self._condition.notify_all()

    def _lost(self, name: str, call: int, error: Exception) -> None:
        with self._condition:
            if self._closed:
                return
            self.restarts += 1
            if self.restarts > self._rollouts.max_restarts:
                raise RunFailedError(
                    f"rollout workers died {self.restarts} times, the last one, {name}, at call {call}: {error}; "
                    f"max_restarts = {self._rollouts.max_restarts}; what it said is in orchestrator.log"
                )
            print(f"{name} was lost at call {call} and is started again: {error}", flush=True)
            self._calls.appendleft(call)
            self._condition.notify_all()


class _Worker:
    """One process. Raises `PeerLostError` where it died, `WaitTimeoutError` where it hangs."""

    def __init__(self, name: str, rollouts: Rollouts) -> None:
        """Started, not waited for: `attach` before the first call."""
        self.name = name
        here = str(Path(__file__).parents[1])
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join([here, *filter(None, [os.environ.get("PYTHONPATH")])]),
            "JAX_PLATFORMS": "cpu",  # the trainer has the accelerator
            # several small processes share the cores: each computes on one
            "XLA_FLAGS": f"{os.environ.get('XLA_FLAGS', '')} --xla_cpu_multi_thread_eigen=false",
        }
        self.process = subprocess.Popen(
            [sys.executable, "-m", WORKER, name, json.dumps(asdict(rollouts))],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1, env=environment,
            start_new_session=True,  # Ctrl-C is for the launcher; a worker ends with its input
        )  # fmt: skip
        self._consumer: Consumer | None = None

    def attach(self, timeout_s: float) -> None:
        """Waits until it says that it is ready, then for its pool."""
        assert self.process.stdout is not None
        if not select.select([self.process.stdout], [], [], timeout_s)[0]:
            raise WaitTimeoutError(f"{self.name} was not ready within {timeout_s:g} s; raise call_timeout_s")
        said = self.process.stdout.readline()
        if not said:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(STOP_S)
            raise PeerLostError(f"{self.name} ended before it was ready, with exit code {self.process.poll()}")
        if said != "ready\n":
            raise PeerLostError(f"{self.name} said {said!r} where 'ready' is due: nothing else may go to its stdout")
        self._consumer = Consumer(self.name, timeout_s=STOP_S)
        print(f"{self.name} is process {self.process.pid}", flush=True)

    def send(self, call: int, weights: Mapping[str, Any]) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps({"call": call, "weights": weights}) + "\n")
        self.process.stdin.flush()

    def receive(self, timeout_s: float) -> Answer:
        assert self._consumer is not None
        lease = self._consumer.receive(timeout_s)
        if lease is None:
            raise PeerLostError(f"{self.name} ended although more was asked of it")
        with lease:
            return {field: np.array(view) for field, view in lease.views.items()}

    def stop(self) -> None:
        """In good order: the end of its input, then of its stream."""
        try:
            assert self.process.stdin is not None
            self.process.stdin.close()
            if self._consumer is not None:
                while self._consumer.receive(STOP_S) is not None:
                    pass
                self._consumer.close()
            self.process.wait(STOP_S)
        except (ShmstageError, OSError, subprocess.TimeoutExpired) as error:
            print(f"{self.name} did not end in good order: {error}", flush=True)
        finally:
            self.kill()

    def kill(self) -> None:
        """And take away what a killed process leaves; harmless for one that is gone."""
        self.process.kill()
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe is not None:
                try:
                    pipe.close()
                except OSError:  # what was not flushed has no reader
                    pass
        if self._consumer is not None:
            self._consumer.close()
        sweep(self.name)
        clear_stale_endpoints([socket_path(endpoint_for(self.name, "producer"))])
