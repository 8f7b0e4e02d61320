"""One frozen config per recipe; the tree mirrors the YAML under conf/."""

from typing import Self

from pydantic import model_validator

from .errors import ConfigError
from .section import NonNegativeInt, Section, Text
from .training import (
    CheckpointConfig,
    DataConfig,
    LogConfig,
    ModelConfig,
    MtpConfig,
    OptimConfig,
    ParallelConfig,
    TrainConfig,
)


class RunConfig(Section):
    """What every recipe has."""

    run_dir: Text
    """Directory of everything the run writes, the same on all ranks."""
    seed: NonNegativeInt = 0
    """Seed of initialisation, data order and noise."""
    model: ModelConfig = ModelConfig()
    """Sizes, dtype, kernels."""
    parallel: ParallelConfig = ParallelConfig()
    """Layout of the ranks."""
    checkpoint: CheckpointConfig = CheckpointConfig()
    """What is read and written."""
    log: LogConfig = LogConfig()
    """Metrics sinks."""

    @model_validator(mode="after")
    def _has_a_model(self) -> Self:
        if self.model.architecture is None and self.checkpoint.load is None:
            raise ConfigError(
                "model.architecture: null needs checkpoint.load=<directory> to read it from; "
                "give one, or name a model (model=tiny, ling3_tiny, ling3_flash)"
            )
        return self


class PretrainConfig(RunConfig):
    """python -m recipes.pretrain"""

    data: DataConfig
    """Documents."""
    train: TrainConfig
    """Length and size of the run."""
    optim: OptimConfig = OptimConfig()
    """Optimizer and schedule."""
    mtp: MtpConfig = MtpConfig()
    """MTP loss."""

    @model_validator(mode="after")
    def _sizes_fit(self) -> Self:
        steps, optim = self.train.steps, self.optim
        if self.train.microbatch_tokens < self.data.seq_tokens:
            raise ConfigError(
                f"train.microbatch_tokens: {self.train.microbatch_tokens} cannot hold a document of "
                f"data.seq_tokens={self.data.seq_tokens}; use at least that many"
            )
        if optim.warmup_steps >= steps:
            raise ConfigError(f"optim.warmup_steps: {optim.warmup_steps} must be below train.steps={steps}")
        if optim.decay_steps is not None and optim.warmup_steps + optim.decay_steps > steps:
            raise ConfigError(
                f"optim.decay_steps: {optim.decay_steps} does not fit after "
                f"optim.warmup_steps={optim.warmup_steps} in train.steps={steps}; "
                f"use at most {steps - optim.warmup_steps}, or null"
            )
        return self


class ScoreConfig(RunConfig):
    """python -m recipes.score"""

    input: Text
    """safetensors: input_ids [T] int64, cu_seqlens [N+1] int64."""
    output: Text
    """safetensors that is written: logprobs [T], mtp_logprobs [T]."""
    write_logits: bool = False
    """Also write logits [T, V] and mtp_logits [T, V] in fp32."""

    @model_validator(mode="after")
    def _output_is_not_input(self) -> Self:
        if self.input == self.output:
            raise ConfigError(f"output: {self.output!r} is also the input; name another file")
        return self
