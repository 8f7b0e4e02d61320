"""One frozen config per recipe; the tree mirrors the YAML under conf/."""

from pathlib import Path
from typing import Literal, Self

from pydantic import model_validator

from .checks import check_eval_depth
from .errors import ConfigError
from .section import NonNegativeInt, PositiveFloat, PositiveInt, Section, Text
from .training import (
    CheckpointConfig,
    DataConfig,
    LogConfig,
    ModelConfig,
    MtpConfig,
    OptimConfig,
    ParallelConfig,
    PolicyTrainConfig,
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


def check_lengths(
    train: TrainConfig | PolicyTrainConfig, optim: OptimConfig, seq_tokens: int, rows_together: int = 1
) -> None:
    """Refuse packs that cannot hold `rows_together` documents, and schedules longer than the run."""
    needed = rows_together * seq_tokens
    if train.microbatch_tokens < needed:
        what = "a document" if rows_together == 1 else "a pair of rows"
        raise ConfigError(
            f"train.microbatch_tokens: {train.microbatch_tokens} cannot hold {what} of "
            f"data.seq_tokens={seq_tokens}; use at least {'that many' if rows_together == 1 else needed}"
        )
    steps = train.steps
    if optim.warmup_steps >= steps:
        raise ConfigError(f"optim.warmup_steps: {optim.warmup_steps} must be below train.steps={steps}")
    if optim.decay_steps is not None and optim.warmup_steps + optim.decay_steps > steps:
        raise ConfigError(
            f"optim.decay_steps: {optim.decay_steps} does not fit after "
            f"optim.warmup_steps={optim.warmup_steps} in train.steps={steps}; "
            f"use at most {steps - optim.warmup_steps}, or null"
        )


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
    def _evaluated_depths_exist(self) -> Self:
        check_eval_depth(self.train.eval_depth, self.mtp.loss_scale)
        return self

    @model_validator(mode="after")
    def _sizes_fit(self) -> Self:
        check_lengths(self.train, self.optim, self.data.seq_tokens)
        return self


class ScoreConfig(RunConfig):
    """python -m recipes.score"""

    input: Text
    """safetensors: input_ids [T] int64, cu_seqlens [N+1] int64; for a report also the JSONL that generate wrote."""
    output: Text | None = None
    """safetensors that is written: logprobs [T], mtp_logprobs [T]; unused by a report."""
    write_logits: bool = False
    """Also write logits [T, V] and mtp_logits [T, V] in fp32."""
    report: Literal["none", "acceptance"] = "none"
    """acceptance: no scores, but what drafts of the MTP layer would be worth on these samples."""
    temperature: PositiveFloat = 1.0
    """Sampling temperature of the samples that a report reads."""

    @model_validator(mode="after")
    def _output_is_not_input(self) -> Self:
        if self.output is None and self.report == "none":
            raise ConfigError("output: null is only for report=acceptance; give the safetensors file to write")
        if self.output is not None and Path(self.input).resolve() == Path(self.output).resolve():
            raise ConfigError(f"output: {self.output!r} is also the input; name another file")
        return self


class ConvertConfig(Section):
    """python -m recipes.convert"""

    source: Text
    """Checkpoint that is read: an HF directory, or a sharded one (<run_dir>/checkpoints/step_<n>)."""
    target: Text
    """Directory that is written; it must be new."""
    format: Literal["hf", "sharded"]
    """What is written: an HF directory with safetensors, or a sharded checkpoint of weights."""
    max_shard_bytes: PositiveInt = 5_000_000_000
    """Largest weight file; a larger tensor gets a file of its own."""


class LoadConfig(Section):
    """The checkpoint that a verb looks at."""

    load: Text
    """HF directory, or a sharded checkpoint."""


class DoctorConfig(Section):
    """python -m recipes.doctor"""

    checkpoint: LoadConfig
    """What is examined."""
    graft_from: Text | None = None
    """Checkpoint whose MTP layer the copy at `target` gets; null = only examine."""
    target: Text | None = None
    """HF directory that is written with graft_from; it must be new."""
    max_embedding_difference: PositiveFloat = 0.1
    """Largest |a - b| / |b| (Frobenius norms) of the two embeddings, and of the two heads, for a graft."""

    @model_validator(mode="after")
    def _graft_is_whole(self) -> Self:
        if (self.graft_from is None) != (self.target is None):
            raise ConfigError("graft_from and target: give both, or neither")
        return self


class PlotConfig(Section):
    """python -m recipes.plot"""

    runs: Text
    """Run directories, separated by commas; several are compared in the same charts."""
    labels: Text | None = None
    """A name for each run, separated by commas; null = the directories' own names."""
    output: Text | None = None
    """Directory for the PNG files; null = charts/ of the run, or charts/compared of the first of several."""

    @model_validator(mode="after")
    def _one_label_each(self) -> Self:
        if self.labels is not None and len(split_list(self.labels)) != len(split_list(self.runs)):
            raise ConfigError(
                f"labels: {self.labels!r} must name each of the {len(split_list(self.runs))} runs once, in their order"
            )
        return self


def split_list(text: str) -> list[str]:
    """The items of a comma-separated value."""
    return [item.strip() for item in text.split(",")]
