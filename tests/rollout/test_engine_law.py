"""End to end on a vocabulary of eight: speculation draws from the distribution that plain decoding draws from."""

from __future__ import annotations

import pytest
import torch

from bailing_mtp.contracts.batch import PackedLayout, TokenBatch
from bailing_mtp.contracts.samples import Prompt, SamplingParams
from bailing_mtp.model.build import BuiltModel
from bailing_mtp.parallel.context import ParallelContext
from bailing_mtp.training.scoring import score_batch
from tests.rollout.engine_rig import all_samples, make_engine
from tests.rollout.helpers import chi_square_p, two_sample_p
from tests.rollout.program_rig import random_model

V, SAMPLES = 8, 3000
PROMPT = (3, 1, 4, 1, 5)


@pytest.fixture(scope="module")
def eight(alone: ParallelContext) -> BuiltModel:
    return random_model(alone, vocab_size=V)


def first_tokens(built: BuiltModel, context: ParallelContext, k: int, sampling: SamplingParams) -> torch.Tensor:
    """[samples, 3]."""
    prompt = Prompt(prompt_ids=PROMPT, index=0, sampling=sampling, samples_per_prompt=SAMPLES)
    engine = make_engine(built, context, k, max_running=500, prefill_tokens=64)
    samples = all_samples(engine.generate([prompt]))
    if k:
        assert 0.1 < engine.stats.summary()["accept_depth"][0] < 0.95
    return torch.tensor([sample.response_ids for sample in samples])


def exact_pairs(built: BuiltModel, context: ParallelContext, temperature: float, top_k: int | None) -> torch.Tensor:
    """Probability of every first pair of tokens, [V, V], from training forwards."""
    lengths = [len(PROMPT) + 1] * V
    ids = torch.tensor([[*PROMPT, x] for x in range(V)]).flatten()
    batch = TokenBatch(ids, torch.ones_like(ids, dtype=torch.bool), PackedLayout.build(lengths))
    logits = score_batch(built, batch, context, with_logits=True).logits_TV.view(V, -1, V)[:, -2:] / temperature
    if top_k is not None:
        logits = logits.masked_fill(logits < logits.topk(top_k).values[..., -1:], -torch.inf)
    first, second = logits[:, 0].softmax(-1), logits[:, 1].softmax(-1)
    return first[0][:, None] * second


@pytest.mark.parametrize(("temperature", "top_k"), [(1.0, None), (0.7, None), (1.3, 3)])
def test_speculative_and_plain_samples_have_one_law(
    eight: BuiltModel, alone: ParallelContext, temperature: float, top_k: int | None
):
    sampling = SamplingParams(temperature=temperature, top_k=top_k, max_new_tokens=4, seed=11)
    plain = first_tokens(eight, alone, 0, sampling)
    drafted = first_tokens(eight, alone, 2, sampling)
    exact = exact_pairs(eight, alone, temperature, top_k)
    for tokens in (plain, drafted):
        pairs = torch.bincount(tokens[:, 0] * V + tokens[:, 1], minlength=V * V)
        assert chi_square_p(pairs, exact) > 0.01
    tables = [
        torch.bincount((t[:, 1] * V + t[:, 2]) * V + t[:, 3], minlength=V**3) for t in (plain, drafted)
    ]
    assert two_sample_p(*tables) > 0.01
    # The second token of a block is not the plain one: the two rollouts do not share noise by accident.
    assert (plain[:, 1] != drafted[:, 1]).float().mean() > 0.05
