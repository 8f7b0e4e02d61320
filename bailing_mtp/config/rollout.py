"""Sections of the recipes that generate: rollout engine, sampling, reinforcement learning, preferences."""

from typing import Annotated, Literal

from pydantic import Field, ValidationInfo, field_validator

from .checks import check_drafts, check_graphs, check_tp_sum
from .section import (
    Fraction,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    Section,
    Text,
    Texts,
    TokenIds,
)

Reward = Annotated[str, Field(pattern=r"^(reasoning_gym|math_verify|exact|[A-Za-z_][\w.]*:[A-Za-z_]\w*)$")]


class RolloutConfig(Section):
    """The rollout engine."""

    speculative_tokens: NonNegativeInt = 0
    """Drafts per step by the MTP layer; 0 = plain decoding, no MTP work at all."""
    adaptive: bool = False
    """Choose the drafts per step in 0..speculative_tokens from measured cost and acceptance."""
    max_running: PositiveInt = 256
    """Rows decoded together on one rollout replica."""
    context_tokens: PositiveInt | None = None
    """Longest prompt and response together, in tokens; null = what the longest request needs."""
    prefill_tokens: PositiveInt = 8192
    """Prompt tokens of one prefill; a longer prompt comes in several, with decode steps between them."""
    block_tokens: PositiveInt = 64
    """Positions of one block of the paged latent cache."""
    memory_gb: PositiveFloat | None = None
    """Device memory for caches and states, GiB per rank; null = what max_running full rows need."""
    keep_memory: bool = False
    """Keep caches and graphs between rollouts instead of handing their memory to training."""
    cuda_graphs: bool = False
    """Replay one CUDA graph per (rows, drafts) instead of launching kernels one by one; needs kernels=triton."""
    kernels: Literal["torch", "triton"] = "torch"
    """Rollout kernels: the torch twins (any device), or Triton, with fla in prefills. A model in fp32 decodes with
    Triton but is prefilled by the twins, because fla and flash attention are not exact in fp32."""
    tp_sum: Literal["library", "peer"] = "library"
    """Sums over tensor-parallel ranks in decode steps: by NCCL, or in launches over one another's memory, of few rows
    together with the norm that follows (torch's symmetric memory; the ranks' GPUs must reach one another, as over
    NVLink)."""
    draft_vocabulary: Text | None = None
    """JSON file with the token ids that drafts are drawn from; null = all."""


def check_rollout(rollout: RolloutConfig, tp: int) -> None:
    """Refuse keys that need one another, or parallel.tp, where a user gives them; ConfigError."""
    check_tp_sum(tp_sum=rollout.tp_sum, kernels=rollout.kernels, tp=tp)
    check_graphs(cuda_graphs=rollout.cuda_graphs, kernels=rollout.kernels)
    check_drafts(
        speculative_tokens=rollout.speculative_tokens,
        adaptive=rollout.adaptive,
        draft_vocabulary=rollout.draft_vocabulary,
    )


class SamplingConfig(Section):
    """How tokens are drawn and when a response ends. A line of prompts may carry its own values."""

    temperature: NonNegativeFloat = 1.0
    """Divides the logits; 0 = greedy."""
    top_k: PositiveInt | None = None
    """Keep the k likeliest tokens; null = all."""
    top_p: Fraction = 1.0
    """Keep the likeliest tokens while the mass before them is <= top_p; 1 = all."""
    min_new_tokens: NonNegativeInt = 0
    """Response tokens before a stop token may be drawn, or a stop string may end the response."""
    max_new_tokens: Annotated[PositiveInt, Field(validate_default=True)] = 256
    """Longest response in tokens; at least min_new_tokens."""
    seed: NonNegativeInt | None = None
    """Seed of the noise; null = that of the run."""
    stop_token_ids: TokenIds = ()
    """Token ids that end a response, beside the tokenizer's end of text."""
    stop_strings: Texts = ()
    """Texts that end a response."""
    suppress_token_ids: TokenIds = ()
    """Token ids that are never drawn."""
    ignore_eos: bool = False
    """Do not end at the tokenizer's end of text."""
    samples_per_prompt: PositiveInt = 1
    """Responses per prompt."""

    @field_validator("max_new_tokens")
    @classmethod
    def _not_below_the_least(cls, value: int, info: ValidationInfo) -> int:
        least = info.data.get("min_new_tokens", 0)
        if value < least:
            raise ValueError(f"{value}; allowed: at least min_new_tokens, {least}")
        return value


class RlConfig(Section):
    """Policy-gradient training on rollouts."""

    loss: Literal["grpo", "gspo"] = "grpo"
    """Importance ratio per token, or per sequence."""
    prompts_per_rollout: PositiveInt = 32
    """Prompts of one rollout, over all data-parallel ranks."""
    minibatches: PositiveInt = 1
    """Optimizer steps on the samples of one rollout, each on its own share of them."""
    refill: bool = False
    """Draw further prompts in place of those whose rewards are all equal."""
    max_rollouts: PositiveInt = 8
    """Rollouts for one update, at most: further ones refill, or follow where all rewards were equal."""
    reward: Reward = "reasoning_gym"
    """reasoning_gym, math_verify, exact, or module:function."""
    reward_timeout_s: PositiveFloat = 10.0
    """Longest time that one reward may take."""
    reward_on_failure: float = 0.0
    """Reward of a sample whose reward function fails, crashes or takes too long."""
    reward_workers: PositiveInt = 4
    """Processes that compute rewards, for each data-parallel rank."""
    advantage: Literal["group", "rloo"] = "group"
    """Reward standardised within a prompt's samples, or minus the mean of the others."""
    clip_low: PositiveFloat = 0.2
    """Ratios below 1 - clip_low are clipped."""
    clip_high: PositiveFloat = 0.2
    """Ratios above 1 + clip_high are clipped."""
    truncate_importance: PositiveFloat | None = None
    """Largest weight for the mismatch between rollout and trainer, with ratios taken to the trainer's own
    log-probabilities; null = ratios are taken to the rollout's."""
    kl_coef: NonNegativeFloat = 0.0
    """Weight of the KL term to the reference model; 0 = no reference model."""
    routing_replay: bool = False
    """Train with the experts that the rollout chose, but for the MTP layer and the reference model."""
    oversample: Annotated[float, Field(ge=1)] = 1.0
    """Prompts under way / prompts trained. Above 1 a rollout ends when prompts_per_rollout prompts have all their
    samples; the others go on in the next one, their tokens with the log-probabilities that drew them. Which end first
    depends on parallel.* and rollout.max_running."""
    carry_limit: PositiveInt | None = None
    """Rollouts that an over-sampled prompt may be carried over; the next one waits for it. null = any number."""
    samples_kept: NonNegativeInt = 16
    """Samples of every rollout that are written to <run_dir>/rollouts, with their rewards; 0 = none."""


class PreferenceConfig(Section):
    """Direct preference optimisation."""

    beta: PositiveFloat = 0.1
    """Strength of the pull to the reference model."""
    label_smoothing: Annotated[float, Field(ge=0, lt=0.5)] = 0.0
    """Share of pairs taken as labelled the wrong way round."""
    reference_dir: Text | None = None
    """Directory for the reference model's log-probabilities, which runs may share; null = <run_dir>/data."""
