"""One update of grpo: rollouts of the policy as it is, their rewards, optimizer steps on them."""

import statistics
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import NamedTuple, Protocol

from bailing_mtp.config import GrpoConfig
from bailing_mtp.contracts.policy import PolicyBatch
from bailing_mtp.contracts.samples import RolloutGroup
from bailing_mtp.rl.advantages import advantages
from bailing_mtp.rollout.engine import RolloutEngine
from bailing_mtp.rollout.stats import RolloutStats
from bailing_mtp.training.policy import PolicyObjective
from bailing_mtp.training.step import StepResult, train_step

from .backlog import Backlog
from .judge import Judge
from .policy import Policy
from .rollouts import Rollouts

OF_THE_START = ("rollout/logprob_gap", "rollout/route_agreement")
"""Metrics that mean the weights that rolled out, so the first of several optimizer steps."""


class Watcher(Protocol):
    """Who looks on."""

    def rolling(self) -> AbstractContextManager[None]:
        """Around everything but training."""
        ...

    def watch(self, engine: RolloutEngine, rollouts: Rollouts) -> Callable[[RolloutStats], None]:
        """A callback for a rollout as it goes on."""
        ...

    def compare(self, rollouts: Rollouts, groups: Sequence[RolloutGroup]) -> None:
        """Called when rollouts and rewards are there and the weights are still those that drew them."""
        ...


class Update(NamedTuple):
    """What an update did: one result for each optimizer step, on this rank's microbatches of `minibatches`."""

    rollouts: Rollouts
    minibatches: list[list[PolicyBatch]]
    results: list[StepResult]


def update(
    config: GrpoConfig, policy: Policy, engine: RolloutEngine, backlog: Backlog, judge: Judge, watcher: Watcher
) -> Update:
    """Roll out until there is enough to learn from, then train. Collective."""
    state, rl = policy.state, config.rl
    objective = PolicyObjective(rl, config.mtp, config.sampling.temperature)
    rollouts = Rollouts(config, state.clock.trained)
    with watcher.rolling():
        while not rollouts.is_enough:
            with rollouts.timed("switch"):
                groups = backlog.roll(engine, watcher.watch(engine, rollouts))
            with rollouts.timed("reward"):
                scores = judge.score(groups)
            rollouts.add(groups, scores, advantages(scores.rewards, rl.advantage), engine.stats)
        watcher.compare(rollouts, groups)
    with rollouts.timed("train"):
        minibatches = policy.minibatches(rollouts.rows())
        results = [train_step(state, batches, objective) for batches in minibatches]
    return Update(rollouts, minibatches, results)


def over_steps(steps: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Each metric's mean over the optimizer steps of an update that have it, or that of the first step."""
    found: dict[str, list[float]] = {}
    for metrics in steps:
        for name, value in metrics.items():
            found.setdefault(name, []).append(value)
    for name in OF_THE_START:
        if name in found:
            found[name] = [steps[0][name]] if name in steps[0] else []
    return {name: statistics.fmean(values) for name, values in found.items() if values}
