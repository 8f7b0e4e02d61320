"""What grpo needs beside a checkpoint and data, made up: a policy of random weights, random prompts, random rewards."""

import random
from collections.abc import Iterator
from typing import Any

import torch

from bailing_mtp.config import (
    BenchmarkConfig,
    GrpoConfig,
    PolicyTrainConfig,
    PromptDataConfig,
    RlConfig,
    SamplingConfig,
)
from bailing_mtp.contracts.architecture import Architecture
from bailing_mtp.data.prompts import PromptLoader
from bailing_mtp.data.sources import BadLines
from bailing_mtp.model.build import build_model
from bailing_mtp.parallel.context import ParallelContext
from bailing_mtp.training.state import build_state

from .bench_train_size import random_source
from .bench_weights import fill_random
from .memory import watch_memory
from .policy import Policy
from .prompts import sampling_params
from .session import model_settings

REWARD = "recipes.bench_policy_reward:coin"


def policy_config(config: BenchmarkConfig, drafts: int) -> GrpoConfig:
    """The grpo run of one arm."""
    longest = config.prompt_tokens[0] + config.new_tokens
    rollout = {"speculative_tokens": drafts, "context_tokens": longest}
    return GrpoConfig(
        run_dir=config.run_dir,
        seed=config.seed,
        model=config.model,
        data=PromptDataConfig(path="random", seq_tokens=longest),
        train=PolicyTrainConfig(
            steps=config.steps * len(config.drafts),
            microbatch_tokens=config.microbatch_tokens,
            recompute=config.recompute,
        ),
        rl=RlConfig(
            prompts_per_rollout=config.prompts, reward=REWARD, routing_replay=config.routing_replay
        ),
        sampling=SamplingConfig(
            max_new_tokens=config.new_tokens, samples_per_prompt=config.samples, ignore_eos=True
        ),
        rollout=config.rollout.model_copy(update=rollout),
        optim=config.optim,
        mtp=config.mtp,
    )


def random_policy(config: GrpoConfig, arch: Architecture, context: ParallelContext) -> Policy:
    """Planned and built as open_policy does, with weights made on the device. Raises UserError where it cannot fit."""
    source, optim = random_source(arch), config.optim
    memory = watch_memory(config, source, context, config.rollout)
    settings = model_settings(
        config.model, source, config.train.recompute, optim.expert_bias_rate, optim.fused == "apex"
    )
    trains_mtp = config.mtp.loss_scale is not None
    built = build_model(arch, settings, context, with_mtp=trains_mtp or config.rollout.speculative_tokens > 0)
    fill_random(built.modules, torch.Generator(context.device).manual_seed(config.seed))
    state = build_state(built, context, optim, config.train.steps, trains_mtp=trains_mtp)
    return Policy(config, state, built, None, memory)


class RandomRecords:
    """Numbered prompts, as a source of data; RandomIds makes tokens of them."""

    path, policy = "random", "fail"

    def __init__(self, n: int) -> None:
        self._n = n

    def identity(self) -> str:
        return f"random {self._n}"

    def records(self, bad_lines: BadLines) -> Iterator[tuple[Any, str]]:
        for number in range(self._n):
            yield {"prompt": str(number)}, f"prompt {number}"


class RandomIds:
    """Stands where a chat format does: every prompt becomes random ids of one length."""

    digest = "random"

    def __init__(self, arch: Architecture, n_tokens: int, seed: int) -> None:
        self._vocab_size, self._n_tokens, self._seed = arch.vocab_size, n_tokens, seed

    def encode_prompt(self, prompt: Any) -> list[int]:
        drawn = random.Random(f"{self._seed} {prompt}")
        return [drawn.randrange(self._vocab_size) for _ in range(self._n_tokens)]


def random_prompts(config: GrpoConfig, arch: Architecture, n_tokens: int) -> PromptLoader:
    """As many as a rollout has, and the same for every rollout."""
    params = sampling_params(config.sampling, config.seed)
    records, ids = RandomRecords(config.rl.prompts_per_rollout), RandomIds(arch, n_tokens, config.seed)
    return PromptLoader(records, ids, params, config.sampling.samples_per_prompt, n_tokens, config.seed)


def as_text(ids: Any) -> str:
    """Stands where a tokenizer's decode does."""
    return " ".join(map(str, ids))


class WeightsSample:
    """Some values of every parameter, to see whether they moved."""

    PER_TENSOR = 4096

    def __init__(self, policy: Policy) -> None:
        self._tensors = [p.detach().view(-1)[: self.PER_TENSOR] for m in policy.built.modules for p in m.parameters()]
        self._before = [x.clone() for x in self._tensors]

    def changed(self) -> float:
        """Share of these values that are others than at the last call."""
        n_changed = sum(int((x != y).sum()) for x, y in zip(self._tensors, self._before, strict=True))
        self._before = [x.clone() for x in self._tensors]
        return n_changed / sum(x.numel() for x in self._tensors)
