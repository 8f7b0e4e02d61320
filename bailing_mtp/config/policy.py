"""Config of the verb that trains a policy on its own rollouts: grpo."""

from typing import Self

from pydantic import model_validator

from .build import show
from .checks import check_mtp_divisor
from .errors import ConfigError
from .rollout import RlConfig, RolloutConfig, SamplingConfig, check_rollout
from .training import MtpConfig, OptimConfig, PolicyTrainConfig, PromptDataConfig
from .verbs import RunConfig, check_lengths


class GrpoConfig(RunConfig):
    """python -m recipes.grpo"""

    data: PromptDataConfig
    """Prompts."""
    train: PolicyTrainConfig
    """Length of the run."""
    rl: RlConfig = RlConfig()
    """Rewards, advantages and the policy loss."""
    sampling: SamplingConfig
    """How rollouts draw tokens."""
    rollout: RolloutConfig = RolloutConfig()
    """The rollout engine."""
    optim: OptimConfig = OptimConfig()
    """Optimizer and schedule."""
    mtp: MtpConfig = MtpConfig()
    """MTP loss, on response tokens."""

    @model_validator(mode="after")
    def _rollout_settings_agree(self) -> Self:
        check_rollout(self.rollout, self.parallel.tp)
        return self

    @model_validator(mode="after")
    def _sizes_fit(self) -> Self:
        check_lengths(self.train, self.optim, self.data.seq_tokens)
        response = self.sampling.max_new_tokens
        if response >= self.data.seq_tokens:
            raise ConfigError(
                f"sampling.max_new_tokens: {response} leaves no room for a prompt in data.seq_tokens="
                f"{self.data.seq_tokens}; use less"
            )
        return self

    @model_validator(mode="after")
    def _samples_can_be_trained(self) -> Self:
        sampling, problems = self.sampling, []
        if sampling.temperature == 0:
            problems.append(
                "sampling.temperature: 0 draws greedily, and a policy loss needs the probability of what was drawn; "
                "must be above 0"
            )
        if sampling.samples_per_prompt < 2:
            problems.append(
                "sampling.samples_per_prompt: 1 leaves nothing to compare a response with; must be at least 2"
            )
        if problems:
            raise ConfigError(*problems)
        return self

    @model_validator(mode="after")
    def _minibatches_come_out(self) -> Self:
        n, most = self.rl.minibatches, self.rl.prompts_per_rollout * self.sampling.samples_per_prompt
        if n > most:
            raise ConfigError(f"rl.minibatches: {n} is more than the {most} samples of a rollout; use at most {most}")
        whole = {
            "train.steps": self.train.steps,
            "train.eval_every": self.train.eval_every,
            "checkpoint.save_every": self.checkpoint.save_every,
        }
        for name, steps in whole.items():
            if steps is not None and steps % n:
                raise ConfigError(f"{name}: {steps} is not a multiple of rl.minibatches={n}: a rollout is used whole")
        return self

    @model_validator(mode="after")
    def _held_out_prompts_are_evaluated(self) -> Self:
        path, every = self.data.valid_path, self.train.eval_every
        if (path is None) != (every is None):
            raise ConfigError(
                f"data.valid_path: {show(path)} with train.eval_every={show(every)}; give both, or leave both null"
            )
        return self

    @model_validator(mode="after")
    def _carries_something(self) -> Self:
        if self.rl.carry_limit is not None and self.rl.oversample == 1:
            raise ConfigError(
                f"rl.carry_limit: {self.rl.carry_limit} limits what rl.oversample=1 never does; use null, or "
                "an rl.oversample above 1"
            )
        return self

    @model_validator(mode="after")
    def _mtp_has_its_own_divisor(self) -> Self:
        if self.rl.loss == "gspo":
            check_mtp_divisor(loss_scale=self.mtp.loss_scale, detach=self.mtp.detach, main_loss="rl.loss=gspo")
        return self
