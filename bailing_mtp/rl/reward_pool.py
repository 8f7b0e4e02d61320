"""Rewards in processes of their own: a reward that hangs, crashes or eats its process costs one sample.

Every process has one sample at a time, a time limit, and a small environment of its own (no CUDA device, one
thread, nothing of the launch); a process that overruns or dies is killed with all it started and replaced.
"""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import selectors
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

from bailing_mtp.errors import UserError
from bailing_mtp.log import logger
from bailing_mtp.rl.reward_worker import read_frame, write_frame

START_LIMIT_S = 120.0
_WORKER = "bailing_mtp.rl.reward_worker"


@dataclass(frozen=True)
class Rewards:
    """One reward per sample, in order, and how many samples failed, by kind (error, crash, timeout)."""

    values: tuple[float, ...]
    failures: dict[str, int]
    first_failure: str | None = None
    """Kind, number of the sample and message."""


class RewardPool:
    """A fixed number of reward processes, started at once and used until `close`."""

    def __init__(self, reward: str, n_workers: int, timeout_s: float, on_failure: float) -> None:
        """reward: as in config (`rl.reward`). Raises UserError where it cannot be loaded."""
        self._reward, self._timeout_s, self._on_failure = reward, timeout_s, on_failure
        self._selector = selectors.DefaultSelector()
        self._workers: list[_Worker] = []
        for _ in range(n_workers):
            self._start()
        try:
            while any(worker.state == "starting" for worker in self._workers):
                self._wait(None)
        except UserError:
            self.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def score(self, samples: Sequence[dict[str, Any]]) -> Rewards:
        """Reward every sample. A failure of any kind scores `on_failure` and is counted.

        Raises UserError where a replaced process cannot load the reward any more.
        """
        run = _Run(samples)
        while not run.is_done:
            for worker in self._workers:
                if worker.state == "idle" and run.waiting:
                    self._send(worker, run)
            self._wait(run)
        values = tuple(self._on_failure if value is None else value for value in run.values)
        if run.first is not None:
            logger.warning("rewards: %d of %d samples failed; %s", sum(run.failed.values()), len(samples), run.first)
        return Rewards(values, dict(run.failed), run.first)

    def close(self) -> None:
        """End all processes."""
        for worker in list(self._workers):
            self._discard(worker)
        self._selector.close()

    def _start(self) -> None:
        worker = _Worker(self._reward)
        self._workers.append(worker)
        self._selector.register(worker.process.stdout, selectors.EVENT_READ, worker)

    def _discard(self, worker: _Worker) -> None:
        self._selector.unregister(worker.process.stdout)
        worker.kill()
        self._workers.remove(worker)

    def _replace(self, worker: _Worker, run: _Run | None, kind: str, message: str) -> None:
        if worker.state == "starting":
            raise UserError(f"rl.reward: {self._reward}: its process does not start: {message}")
        self._discard(worker)
        if run is not None and worker.sample is not None:
            run.fail(worker.sample, kind, message)
        self._start()

    def _send(self, worker: _Worker, run: _Run) -> None:
        index = run.waiting.pop()
        worker.begin(index, self._timeout_s)
        try:
            write_frame(worker.process.stdin, pickle.dumps(run.samples[index]))
        except BrokenPipeError:
            self._replace(worker, run, "crash", "ended before its sample")

    def _wait(self, run: _Run | None) -> None:
        """Take what processes say until the next deadline at most."""
        now_s = time.monotonic()
        nearest_s = min((worker.deadline_s for worker in self._workers if worker.state != "idle"), default=now_s)
        for key, _ in self._selector.select(max(0.0, nearest_s - now_s)):
            self._hear(key.data, run)
        now_s = time.monotonic()
        for worker in list(self._workers):
            if worker.state != "idle" and now_s >= worker.deadline_s:
                limit_s = START_LIMIT_S if worker.state == "starting" else self._timeout_s
                self._replace(worker, run, "timeout", f"no answer within {limit_s:g} s")

    def _hear(self, worker: _Worker, run: _Run | None) -> None:
        body = read_frame(worker.process.stdout)
        if body is None:
            code = worker.process.wait()
            self._replace(worker, run, "crash", f"its process ended with code {code}")
            return
        said = json.loads(body)
        if "refused" in said:
            raise UserError(said["refused"])
        if worker.state == "busy" and run is not None:
            if "reward" in said:
                run.settle(worker.sample, said["reward"])
            else:
                run.fail(worker.sample, "error", said["error"])
        worker.rest()


class _Run:
    """The samples of one call: what waits, what is known, what failed."""

    def __init__(self, samples: Sequence[dict[str, Any]]) -> None:
        self.samples = samples
        self.values: list[float | None] = [None] * len(samples)
        self.failed: Counter[str] = Counter()
        self.waiting = list(range(len(samples)))[::-1]
        self._failures: dict[int, str] = {}
        self._n_open = len(samples)

    @property
    def is_done(self) -> bool:
        return self._n_open == 0

    @property
    def first(self) -> str | None:
        """The failure of the first sample that failed, whichever was heard first."""
        return f"sample {min(self._failures)}: {self._failures[min(self._failures)]}" if self._failures else None

    def settle(self, index: int, value: float) -> None:
        self.values[index] = value
        self._n_open -= 1

    def fail(self, index: int, kind: str, message: str) -> None:
        self.failed[kind] += 1
        self._failures[index] = f"{kind}: {message}"
        self._n_open -= 1


class _Worker:
    """A reward process and what it is doing: starting, idle, or busy with a sample."""

    def __init__(self, reward: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", _WORKER, reward],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=_environment(),
            # A group of its own, so that what a reward starts dies with it, and Ctrl-C meets the trainer alone.
            start_new_session=True,
        )
        self.state, self.sample = "starting", None
        self.deadline_s = time.monotonic() + START_LIMIT_S

    def begin(self, sample: int, timeout_s: float) -> None:
        self.state, self.sample = "busy", sample
        self.deadline_s = time.monotonic() + timeout_s

    def rest(self) -> None:
        self.state, self.sample = "idle", None

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        for stream in (self.process.stdin, self.process.stdout):
            with contextlib.suppress(BrokenPipeError):
                stream.close()
        self.process.wait()


def _environment() -> dict[str, str]:
    """All that a reward process inherits: the import path, and settings that make it small and repeatable."""
    return {
        "CUDA_VISIBLE_DEVICES": "",
        "LANG": "C.UTF-8",
        "OMP_NUM_THREADS": "1",
        "PATH": os.defpath,
        "PYTHONHASHSEED": "0",
        "PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path),
    }
