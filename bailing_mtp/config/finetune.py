"""Configs of the verbs that fine-tune on data of their user: sft, dpo."""

from typing import Self

from pydantic import model_validator

from .checks import check_eval_depth, check_mtp_divisor
from .errors import ConfigError
from .rollout import PreferenceConfig
from .training import DialogueDataConfig, MtpConfig, OptimConfig, TrainConfig
from .verbs import RunConfig, check_lengths


class SftConfig(RunConfig):
    """python -m recipes.sft"""

    data: DialogueDataConfig
    """Conversations."""
    train: TrainConfig
    """Length and size of the run."""
    optim: OptimConfig = OptimConfig()
    """Optimizer and schedule."""
    mtp: MtpConfig = MtpConfig()
    """MTP loss."""

    @model_validator(mode="after")
    def _sizes_fit(self) -> Self:
        check_lengths(self.train, self.optim, self.data.seq_tokens)
        check_eval_depth(self.train.eval_depth, self.mtp.loss_scale)
        return self


class DpoConfig(RunConfig):
    """python -m recipes.dpo"""

    data: DialogueDataConfig
    """Preference pairs."""
    train: TrainConfig
    """Length and size of the run."""
    dpo: PreferenceConfig = PreferenceConfig()
    """The loss."""
    optim: OptimConfig = OptimConfig()
    """Optimizer and schedule."""
    mtp: MtpConfig = MtpConfig()
    """MTP loss, on chosen rows only."""

    @model_validator(mode="after")
    def _sizes_fit(self) -> Self:
        check_lengths(self.train, self.optim, self.data.seq_tokens, rows_together=2)
        return self

    @model_validator(mode="after")
    def _mtp_has_its_own_divisor(self) -> Self:
        check_mtp_divisor(loss_scale=self.mtp.loss_scale, detach=self.mtp.detach, main_loss="dpo")
        return self

    @model_validator(mode="after")
    def _evaluates_what_it_trains(self) -> Self:
        if self.train.eval_depth is not None:
            raise ConfigError(f"train.eval_depth: {self.train.eval_depth} is not supported by dpo; allowed: null")
        return self
