"""What an update learns from: groups that teach nothing, refills, predictions that rollouts do not bear out."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest

from bailing_mtp.config import ConfigError, GrpoConfig, MtpConfig, RlConfig, UserError, build_config, check_backends
from bailing_mtp.contracts.samples import Prompt, RolloutGroup
from bailing_mtp.rl.advantages import advantages
from bailing_mtp.rollout.stats import RolloutStats
from bailing_mtp.training.acceptance import Ratio
from recipes.judge import Scores
from recipes.predicted import FallAlarm, parted, predicted_metrics
from recipes.rollouts import Rollouts
from recipes.update import over_steps
from tests.rl.test_advantages_and_samples import sample

BASE = {
    "run_dir": "out",
    "checkpoint": {"load": "hf"},
    "data": {"path": "p", "seq_tokens": 64},
    "train": {"steps": 4},
    "sampling": {"samples_per_prompt": 2, "max_new_tokens": 8},
}


def rollouts(**rl: object) -> Rollouts:
    config = build_config(GrpoConfig, BASE | {"rl": {"prompts_per_rollout": 3, **rl}})
    return Rollouts(config, version=9)


def add(found: Rollouts, *rewards: tuple[float, ...]) -> None:
    """A rollout of one prompt for each tuple of rewards, a sample for each reward."""
    groups = []
    for index, values in enumerate(rewards):
        samples = tuple(sample(index, i, 2, 3) for i in range(len(values)))
        groups.append(RolloutGroup(Prompt(prompt_ids=(1,), index=index, record={"answer": "7"}), samples))
    stats = RolloutStats(0, samples=sum(map(len, rewards)), tokens=3 * sum(map(len, rewards)), seconds=2.0)
    found.add(groups, Scores([list(values) for values in rewards], 1), advantages(rewards, "group"), stats)


def test_equal_rewards_are_left_out_and_counted():
    found = rollouts()
    assert not found.is_enough
    add(found, (1.0, 1.0), (0.0, 1.0), (0.0, 0.0))
    assert found.is_enough
    assert [(row.name, row.advantage) for row in found.rows()] == [
        ("prompt 1 sample 0", pytest.approx(-1, abs=1e-5)),
        ("prompt 1 sample 1", pytest.approx(1, abs=1e-5)),
    ]
    metrics = found.metrics()
    expected = {
        "reward/mean": 0.5, "reward/solved": 0.5, "reward/failed": 1, "rollout/groups_dropped": 2,
        "rollout/samples_trained": 2, "rollout/response_tokens": 3, "rollout/tokens_per_second": 9,
        "time/rollout_s": 2, "time/train_s": 0,
    }  # fmt: skip
    assert {name: metrics[name] for name in expected} == pytest.approx(expected)


def test_staleness_counts_the_trained_tokens():
    """Tokens of versions 7 and 9 under weights of version 9; of the group that teaches nothing, none."""
    found = rollouts(oversample=1.5)
    groups = []
    for index, versions in enumerate([(7, 7, 9), (9, 9, 9), (0, 0, 0)]):
        samples = tuple(sample(index, i, 2, 3, versions=versions) for i in range(2))
        groups.append(RolloutGroup(Prompt(prompt_ids=(1,), index=index), samples))
    rewards = [[0.0, 1.0], [0.0, 1.0], [1.0, 1.0]]
    found.add(groups, Scores(rewards, 0), advantages(rewards, "group"), RolloutStats(0))
    metrics = found.metrics()
    assert metrics["rollout/stale_tokens"] == pytest.approx(1 / 3)
    assert metrics["rollout/mean_version_lag"] == pytest.approx(2 / 3)
    assert "rollout/stale_tokens" not in rollouts().metrics()


def test_a_rollout_that_teaches_nothing_is_followed_by_another():
    found = rollouts(max_rollouts=3)
    for _ in range(2):
        add(found, (1.0, 1.0), (0.0, 0.0))
        assert not found.is_enough
    with pytest.raises(UserError, match="rl.max_rollouts: 3 rollouts gave 0 samples .*mean reward 0.5"):
        add(found, (1.0, 1.0), (0.0, 0.0))


def test_refill_goes_on_until_as_many_prompts_teach_as_a_rollout_has():
    found = rollouts(refill=True, max_rollouts=3)
    add(found, (0.0, 1.0), (0.0, 0.0), (1.0, 1.0))
    assert not found.is_enough
    add(found, (0.0, 1.0), (1.0, 0.0), (0.0, 1.0))
    assert found.is_enough and len(found.rows()) == 6 and found.metrics()["rollout/groups_dropped"] == 2
    assert found.stats.samples == 12 and found.metrics()["time/rollout_s"] == 4
    poor = rollouts(refill=True, max_rollouts=2)
    add(poor, (0.0, 1.0), (0.0, 0.0), (1.0, 1.0))
    add(poor, (0.0, 0.0), (0.0, 0.0), (1.0, 1.0))
    assert poor.is_enough and len(poor.rows()) == 2


def test_samples_are_kept_with_their_rewards(tmp_path: Path):
    found = rollouts(samples_kept=3)
    add(found, (0.0, 1.0), (0.5, 0.5))
    found.keep(tmp_path / "a" / "step_1.jsonl", SimpleNamespace(decode=lambda ids: f"{len(ids)} tokens"))
    lines = [json.loads(line) for line in (tmp_path / "a" / "step_1.jsonl").read_text().splitlines()]
    assert [(line["sample_index"], line["reward"]) for line in lines] == [(0, 0.0), (0, 0.5), (1, 1.0)]
    assert lines[0]["response"] == "3 tokens" and lines[0]["answer"] == "7"
    assert lines[0]["advantage"] == pytest.approx(-1, abs=1e-5) and lines[1]["advantage"] is None


def ratio(value: float) -> Ratio:
    """100 documents of 10 sites that spread little."""
    found = Ratio()
    for index in range(100):
        found.add(10 * value + (0.5 if index % 2 else -0.5), 10, 10)
    return found


@pytest.mark.parametrize(("accepted", "reached", "warns"), [(700, 1000, False), (760, 1000, True), (7, 9, False)])
def test_a_prediction_that_the_rollout_does_not_bear_out(accepted: int, reached: int, warns: bool):
    stats = RolloutStats(1, reached=[reached], accepted=[accepted])
    estimates = {"alpha_1_k1": ratio(0.69), "accept_length_k1": ratio(1.69)}
    assert bool(parted(estimates, stats)) == warns
    assert predicted_metrics(estimates, 1) == pytest.approx(
        {"predicted/accept_length": 1.69, "predicted/accept_depth1": 0.69}
    )


def test_a_fall_of_the_accept_length_is_said_once():
    """1000 steps of two drafts each, so that a tenth is no chance; 20 steps say nothing."""
    alarm = FallAlarm()

    def check(length: float, n_steps: int = 1000) -> str | None:
        return alarm.check(RolloutStats(2, row_steps=n_steps, step_tokens=round(length * n_steps)))

    said = [check(length) for length in (2.0, 2.2, 2.0, 1.9, 1.85, 1.6)]
    assert [text is not None for text in said] == [False, False, False, True, False, True]
    assert said[3] == "accept length fell to 1.900 from 2.200"
    assert check(1.0, n_steps=20) is None and alarm.check(RolloutStats(2)) is None


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"sampling": BASE["sampling"] | {"temperature": 0}}, "sampling.temperature: 0 draws greedily"),
        ({"sampling": {"samples_per_prompt": 1, "max_new_tokens": 8}}, "samples_per_prompt: 1 .* at least 2"),
        ({"sampling": {"samples_per_prompt": 2, "max_new_tokens": 64}}, "max_new_tokens: 64 leaves no room"),
        ({"rl": {"minibatches": 3}}, "train.steps: 4 is not a multiple of rl.minibatches=3"),
        ({"rl": {"minibatches": 2}, "checkpoint": {"load": "hf", "save_every": 3}}, "checkpoint.save_every: 3 is not"),
        ({"rl": {"minibatches": 4, "prompts_per_rollout": 1}}, "rl.minibatches: 4 is more than the 2 samples"),
        ({"rl": {"carry_limit": 2}}, "rl.carry_limit: 2 limits what rl.oversample=1 never does"),
        ({"rl": {"oversample": 0.9}}, "rl.oversample: 0.9"),
        ({"rl": {"loss": "gspo"}, "mtp": {"loss_scale": 0.1}}, "mtp.detach: false with rl.loss=gspo"),
        ({"train": {"steps": 4, "microbatch_tokens": 63}}, "train.microbatch_tokens: 63 cannot hold"),
        ({"train": {"steps": 4, "tokens_per_step": 64}}, "train.tokens_per_step: unknown key"),
    ],
)
def test_what_cannot_be_trained_is_refused(changes: dict, message: str):
    with pytest.raises(ConfigError, match=message):
        build_config(GrpoConfig, BASE | changes)


def test_routing_replay_needs_nothing():
    check_backends(build_config(GrpoConfig, BASE | {"rl": {"routing_replay": True}}), has_gpu=False)


def test_joint_mtp_is_allowed_beside_a_token_loss():
    config = build_config(GrpoConfig, BASE | {"mtp": {"loss_scale": 0.1}})
    assert config.rl == RlConfig() and config.mtp == MtpConfig(loss_scale=0.1)
    check_backends(config, has_gpu=False)


@pytest.mark.parametrize("setting", [{"adaptive": True}, {"draft_vocabulary": "v.json"}])
def test_settings_of_drafts_need_drafts(setting: dict):
    check_backends(build_config(GrpoConfig, BASE | {"rollout": setting | {"speculative_tokens": 1}}), has_gpu=False)
    with pytest.raises(ConfigError, match="needs rollout.speculative_tokens > 0"):
        build_config(GrpoConfig, BASE | {"rollout": setting})


def test_a_step_without_a_metric_has_no_part_in_its_mean():
    steps = [{"policy/loss": 1.0, "rollout/logprob_gap": 0.25}, {"policy/loss": 3.0, "rollout/logprob_gap": 9.0}]
    steps.append({"policy/loss": 5.0, "mtp/loss_depth1": 0.5, "rollout/logprob_gap": 9.0})
    expected = {"policy/loss": 3.0, "rollout/logprob_gap": 0.25, "mtp/loss_depth1": 0.5}
    assert over_steps(steps) == expected and list(over_steps(steps)) == list(expected)
    # Later steps have other weights than those that rolled out.
    assert "rollout/logprob_gap" not in over_steps([{"policy/loss": 1.0}, *steps])
