"""A rollout engine on a small model, and the training path's opinion of what it produced."""

from __future__ import annotations

import random
from collections.abc import Sequence
from itertools import cycle

import torch
from torch import Tensor

from bailing_mtp.config import RolloutConfig
from bailing_mtp.contracts.batch import PackedLayout, TokenBatch
from bailing_mtp.contracts.clock import WeightsClock
from bailing_mtp.contracts.samples import Prompt, RolloutGroup, Sample, SamplingParams
from bailing_mtp.model.build import BuiltModel
from bailing_mtp.parallel.context import ParallelContext
from bailing_mtp.rollout.controller import Controller
from bailing_mtp.rollout.engine import RolloutEngine
from bailing_mtp.training.scoring import score_batch
from bailing_mtp.weights.view import publish
from tests.distributed.worlds import shard_of


class Scripted(Controller):
    """Says what it is told to, and remembers what it hears."""

    def __init__(self, drafts: Sequence[int]) -> None:
        super().__init__(max(drafts))
        self.wishes = cycle(drafts)
        self.begun, self.ran, self.times, self.news = 0, [], [], []

    def begin(self) -> None:
        self.begun += 1

    def choose(self, rows: int, may_try: bool = True) -> int:
        return next(self.wishes)

    def launched(self, rows: int, drafts: int) -> None:
        self.ran.append((rows, drafts))

    def timed(self, rows: int, drafts: int, shape: object, seconds: float | None) -> None:
        self.times.append((rows, drafts, seconds))

    def tested(self, reached: Sequence[int], accepted: Sequence[int]) -> None:
        self.news.append((reached, accepted))


def make_engine(
    built: BuiltModel,
    context: ParallelContext,
    k: int = 0,
    tokenizer: object = None,
    drafter: object = None,
    clock: WeightsClock | None = None,
    records_routes: bool = False,
    **config: object,
) -> RolloutEngine:
    """Small blocks and prefills, so that every border is met."""
    for module in built.modules:
        module.eval()
    clock = clock or WeightsClock()
    shard = shard_of(context)
    settings = {"max_running": 4, "block_tokens": 4, "prefill_tokens": 16} | config
    return RolloutEngine(
        lambda: publish(built.trunk, built.mtp if k else None, shard, clock),
        context,
        RolloutConfig(speculative_tokens=k, **settings),
        tokenizer,
        drafter,
        records_routes=records_routes,
    )


def random_prompts(
    n: int, vocab: int, sampling: SamplingParams, seed: int = 0, longest: int = 14, samples: int = 1
) -> list[Prompt]:
    rng = random.Random(seed)
    return [
        Prompt(
            prompt_ids=tuple(rng.randrange(vocab) for _ in range(rng.randint(1, longest))),
            index=index,
            sampling=sampling,
            samples_per_prompt=samples,
        )
        for index in range(n)
    ]


def responses(groups: Sequence[RolloutGroup]) -> list[tuple[int, ...]]:
    return [sample.response_ids for group in groups for sample in group.samples]


def all_samples(groups: Sequence[RolloutGroup]) -> list[Sample]:
    return [sample for group in groups for sample in group.samples]


def scored(built: BuiltModel, context: ParallelContext, sample: Sample) -> Tensor:
    """Teacher-forced logits of the distribution of each response token, [n, V]."""
    ids = torch.tensor([*sample.prompt_ids, *sample.response_ids])
    batch = TokenBatch(ids, torch.ones_like(ids, dtype=torch.bool), PackedLayout.build([len(ids)]))
    logits_TV = score_batch(built, batch, context, with_logits=True).logits_TV
    first = len(sample.prompt_ids) - 1
    return logits_TV[first : first + len(sample.response_ids)]
