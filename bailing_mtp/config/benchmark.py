"""Settings of the benchmark verb."""

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from .build import show
from .errors import raise_if_any
from .rollout import RolloutConfig, check_rollout
from .section import NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt
from .training import MtpConfig, OptimConfig
from .verbs import RunConfig

Sizes = Annotated[tuple[PositiveInt, ...], Field(strict=False, min_length=1)]
Counts = Annotated[tuple[NonNegativeInt, ...], Field(strict=False, min_length=1)]
Temperatures = Annotated[tuple[NonNegativeFloat, ...], Field(strict=False, min_length=1)]
Routings = Annotated[tuple[Literal["uniform", "skewed"], ...], Field(strict=False)]
Acceptances = Annotated[tuple[Literal["own", "all", "none"], ...], Field(strict=False)]


class BenchmarkConfig(RunConfig):
    """python -m recipes.benchmark"""

    what: Literal["kernels", "decode", "adaptive", "train", "grpo"]
    """kernels: each Triton decode kernel against its bytes, and the passes of a decode step. decode: whole rollouts
    of the engine, with CUDA graphs. adaptive: rollouts with rollout.adaptive against those of each fixed k. train:
    training steps with and without the MTP loss and recompute, and where the time of one goes. grpo: whole updates of
    the grpo recipe, from rollouts to weights, for each number of drafts."""
    rows: Sizes = (1, 4, 8, 16, 32, 64, 256)
    """Sequences of a step."""
    fed_tokens: Sizes = (1, 3)
    """what=kernels: tokens that a step feeds to each sequence: drafts + 1."""
    context_tokens: PositiveInt = 256
    """what=kernels: cached positions of each sequence."""
    tokens: Sizes = (8192, 4096, 16384)
    """what=train: tokens of a packed microbatch; the first count is measured with every MTP loss and recompute, the
    others without any and with the joint one."""
    layers: PositiveInt | None = None
    """what=train: trunk layers; null = as many whole groups of layers as fit beside reserve_gb on every rank."""
    reserve_gb: PositiveFloat = 48.0
    """what=train: GiB left to activations where `layers` is null."""
    optim: OptimConfig = OptimConfig()
    """what=train, grpo: the optimizer of the timed steps."""
    steps: PositiveInt = 4
    """what=train: timed steps; their median is printed. what=grpo: updates for each number of drafts."""
    lines: PositiveInt | None = None
    """what=train: first lines of the table to measure; null = all of them."""
    replays: PositiveInt = 12
    """what=kernels: timed replays of each CUDA graph; their median is printed."""
    copy_tb_per_s: PositiveFloat = 4.3
    """Memory bandwidth that the floor assumes, in 10^12 bytes/s; 4.3 is a measured copy on an H200."""
    drafts: Counts = (0, 1, 2, 3)
    """what=decode, adaptive, grpo: drafts of a step; adaptive: the controller may choose up to the most of them."""
    temperatures: Temperatures = (1.0, 0.0)
    """what=decode: sampling temperatures; 0 = greedy."""
    prompt_tokens: Sizes = (128, 2048)
    """what=decode: tokens of every prompt. what=grpo: the first."""
    new_tokens: PositiveInt = 256
    """what=decode, adaptive, grpo: tokens of every response."""
    prompts: PositiveInt = 64
    """what=grpo: prompts of a rollout."""
    samples: PositiveInt = 8
    """what=grpo: samples of each prompt."""
    microbatch_tokens: PositiveInt = 8192
    """what=grpo: as train.microbatch_tokens; at least one prompt with its response."""
    recompute: Literal["none", "selective", "full"] = "none"
    """what=grpo: as train.recompute."""
    routing_replay: bool = False
    """what=grpo: as rl.routing_replay."""
    rollout: RolloutConfig = RolloutConfig()
    """what=grpo: the rollout engine."""
    mtp: MtpConfig = MtpConfig()
    """what=grpo: MTP loss."""
    tp_sum: Literal["library", "peer"] = "library"
    """what=decode: as rollout.tp_sum."""
    routing: Routings = ("uniform", "skewed")
    """what=decode: whether all experts are chosen equally often, or some much more often."""
    acceptance: Acceptances = ("all", "none")
    """what=decode: drafts that are kept: all or none of them by force, or those that random weights happen to agree
    on. Greedy rows always keep their own."""

    @model_validator(mode="after")
    def _runs_on_random_weights(self) -> Self:
        problems, what = [], self.what
        if self.checkpoint.load is not None:
            problems.append(f"checkpoint.load: is not read by what={what}, whose weights are random; leave it null")
        for name in ("tp", "ep"):
            size = getattr(self.parallel, name)
            if size > 1 and what == "kernels":
                problems.append(f"parallel.{name}: {size} is not allowed; what={what} runs on one GPU; allowed: 1")
        if what not in ("train", "grpo") and self.optim.name != "adamw":
            problems.append(f"optim.name: {self.optim.name!r} is not used by what={what}; allowed here: adamw")
        if what != "grpo" and self.optim.offload != "none":
            problems.append(f"optim.offload: {self.optim.offload!r} is not measured by what={what}; allowed here: none")
        if self.tp_sum == "peer" and (what != "decode" or self.parallel.tp == 1):
            problems.append("tp_sum: 'peer' is for what=decode at parallel.tp > 1; allowed here: library")
        longest = max(self.fed_tokens)
        if self.context_tokens < longest:
            problems.append(f"context_tokens: {self.context_tokens} must be at least {longest}, the most of fed_tokens")
        empty = [name for name in ("routing", "acceptance") if not getattr(self, name)]
        problems += [f"{name}: [] is not allowed; give one at least" for name in empty]
        problems += self._update_problems() if what == "grpo" else []
        if what in ("decode", "adaptive") and self.drafts[0] != 0:
            problems.append(
                f"drafts: {list(self.drafts)} must begin with 0, plain decoding, which the others are compared with"
            )
        if what == "adaptive" and not any(self.drafts):
            problems.append(
                f"drafts: {list(self.drafts)} leaves the controller nothing to choose; add a number above 0"
            )
        raise_if_any(problems)
        for k in self.drafts if what == "grpo" else (self.rollout.speculative_tokens,):
            check_rollout(self.rollout.model_copy(update={"speculative_tokens": k}), self.parallel.tp)
        return self

    def _update_problems(self) -> list[str]:
        """What grpo itself would refuse, in this verb's keys."""
        problems, longest, updates = [], self.prompt_tokens[0] + self.new_tokens, self.steps * len(self.drafts)
        if self.samples < 2:
            problems.append("samples: 1 leaves nothing to compare a response with; must be at least 2")
        if self.microbatch_tokens < longest:
            problems.append(
                f"microbatch_tokens: {self.microbatch_tokens} cannot hold a prompt of prompt_tokens="
                f"{self.prompt_tokens[0]} with a response of new_tokens={self.new_tokens}; use at least {longest}"
            )
        last = self.optim.warmup_steps + (self.optim.decay_steps or 1)
        if last > updates:
            problems.append(
                f"optim.warmup_steps: {self.optim.warmup_steps}, with optim.decay_steps="
                f"{show(self.optim.decay_steps)}, ends after the {updates} updates of steps={self.steps} and "
                f"drafts={list(self.drafts)}"
            )
        return problems
