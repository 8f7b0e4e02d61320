"""Held-out prompts of grpo: their rewards and their speculation, on the same noise at every evaluation."""

import math
import statistics

from bailing_mtp.config import GrpoConfig
from bailing_mtp.data.prompts import PromptLoader
from bailing_mtp.rollout.engine import RolloutEngine

from .judge import Judge
from .rollouts import SOLVED

ROLLOUT = 0
"""Part of the noise key; the rollouts of training are numbered from 1."""


class HeldOut:
    """Evaluations of a policy. All ranks make the same calls."""

    def __init__(self, config: GrpoConfig, prompts: PromptLoader | None, engine: RolloutEngine, judge: Judge) -> None:
        """`prompts`: those of data.valid_path; None where it is null."""
        self._train, self._engine, self._judge = config.train, engine, judge
        self._prompts = [] if prompts is None else prompts.all()

    def is_due(self, step: int) -> bool:
        """Whether the weights after `step` optimizer steps are evaluated."""
        every = self._train.eval_every
        return every is not None and (step % every == 0 or step == self._train.steps)

    def evaluate(self, step: int) -> dict[str, float]:
        """Metrics of the weights as they are; none where no evaluation is due. Collective."""
        if not self.is_due(step):
            return {}
        groups = self._engine.generate(self._prompts, ROLLOUT)
        scores, stats = self._judge.score(groups), self._engine.stats
        rewards = [reward for group in scores.rewards for reward in group]
        values = {
            "valid/reward_mean": statistics.fmean(rewards) if rewards else 0.0,
            "valid/reward_standard_error": _standard_error(scores.rewards),
            "valid/reward_solved": sum(reward >= SOLVED for reward in rewards) / max(1, len(rewards)),
            "valid/response_tokens": stats.tokens / max(1, stats.samples),
            "valid/rollout_s": stats.seconds,
        }
        accept_length = stats.summary()["accept_length"]
        return values if accept_length is None else values | {"valid/accept_length": float(accept_length)}


def _standard_error(rewards: list[list[float]]) -> float:
    """Of the mean over prompts: samples of one prompt are no independent draws of the task."""
    means = [statistics.fmean(group) for group in rewards if group]
    return statistics.stdev(means) / math.sqrt(len(means)) if len(means) > 1 else 0.0
