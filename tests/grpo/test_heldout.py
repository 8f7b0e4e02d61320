"""Evaluations on held-out prompts: when they happen, the same draws each time, metrics that are what they say."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from bailing_mtp.config import ConfigError, GrpoConfig, build_config
from bailing_mtp.contracts.samples import Prompt, RolloutGroup
from bailing_mtp.rollout.stats import RolloutStats
from recipes.heldout import HeldOut
from recipes.judge import Scores
from tests.grpo.test_rollouts import BASE
from tests.rl.test_advantages_and_samples import sample

REWARDS = [[1.0, 0.0], [1.0, 1.0], [0.25, 0.0], []]


class Rollouts:
    """Stands in for prompts, engine and judge; remembers what it was asked."""

    def __init__(self) -> None:
        self.asked: list[tuple[list[Prompt], int]] = []
        self.stats = RolloutStats(1, samples=8, tokens=24, row_steps=10, step_tokens=16, seconds=2.0)

    def all(self) -> list[Prompt]:
        return [Prompt(prompt_ids=(1,), index=index, record={}) for index in range(len(REWARDS))]

    def generate(self, prompts: list[Prompt], rollout_step: int) -> list[RolloutGroup]:
        self.asked.append((prompts, rollout_step))
        return [RolloutGroup(prompt, (sample(prompt.index, 0, 1, 3),)) for prompt in prompts]

    def score(self, groups: list[RolloutGroup]) -> Scores:
        return Scores(REWARDS, 0)


def held_out(rig: Rollouts, every: int | None = 2, steps: int = 5) -> HeldOut:
    train = SimpleNamespace(eval_every=every, steps=steps)
    return HeldOut(SimpleNamespace(train=train), None if every is None else rig, rig, rig)


def test_evaluates_before_the_first_step_every_so_many_and_after_the_last():
    assert [step for step in range(6) if held_out(Rollouts()).is_due(step)] == [0, 2, 4, 5]
    none = held_out(Rollouts(), every=None)
    assert not any(none.is_due(step) for step in range(6)) and none.evaluate(0) == {}


def test_metrics_and_noise():
    rig = Rollouts()
    first, second = (held_out(rig).evaluate(step) for step in (0, 2))
    assert held_out(rig).evaluate(3) == {} and first == second
    # Means by prompt 0.5, 1, 0.125: the standard deviation over prompts / sqrt(3).
    assert first == pytest.approx(
        {
            "valid/reward_mean": 3.25 / 6, "valid/reward_standard_error": 0.25344, "valid/reward_solved": 0.5,
            "valid/response_tokens": 3, "valid/rollout_s": 2, "valid/accept_length": 1.6,
        },
        abs=1e-4,
    )  # fmt: skip
    # Rollouts of training are numbered from 1, so no evaluation shares noise with one.
    assert rig.asked == [(rig.all(), 0)] * 2


@pytest.mark.parametrize(
    ("data", "train", "message"),
    [
        ({"valid_path": "v"}, {}, "data.valid_path: 'v' with train.eval_every=null; give both"),
        ({}, {"eval_every": 2}, "data.valid_path: null with train.eval_every=2; give both"),
        ({"valid_path": "v"}, {"eval_every": 3}, "train.eval_every: 3 is not a multiple of rl.minibatches=2"),
    ],
)
def test_what_does_not_go_together_is_refused(data: dict, train: dict, message: str):
    changes = {"data": BASE["data"] | data, "train": BASE["train"] | train, "rl": {"minibatches": 2}}
    with pytest.raises(ConfigError, match=message):
        build_config(GrpoConfig, BASE | changes)
