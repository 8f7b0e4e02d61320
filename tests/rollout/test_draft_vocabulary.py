"""Drafts from a part of the vocabulary: exact, whatever the part; the rows of the head are those of the weights."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from bailing_mtp.contracts.batch import PackedLayout, TokenBatch
from bailing_mtp.contracts.clock import WeightsClock
from bailing_mtp.contracts.samples import Prompt, SamplingParams
from bailing_mtp.errors import UserError
from bailing_mtp.model.build import BuiltModel
from bailing_mtp.parallel.context import ParallelContext
from bailing_mtp.rollout.accept import Drafts
from bailing_mtp.rollout.draft import MtpDrafter
from bailing_mtp.rollout.memory import GIB
from bailing_mtp.rollout.reduced_head import read_draft_ids
from bailing_mtp.training.scoring import score_batch
from tests.rollout.engine_rig import all_samples, make_engine, random_prompts, responses
from tests.rollout.helpers import chi_square_p
from tests.rollout.program_rig import random_model
from tests.rollout.test_engine_law import PROMPT, SAMPLES, V

LISTED = (1, 2, 5)


def listing(folder: Path, ids: object) -> str:
    path = folder / "drafts.json"
    path.write_text(json.dumps(ids))
    return str(path)


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> list[Drafts]:
    """All drafts of all steps."""
    found: list[Drafts] = []
    draft = MtpDrafter.draft

    def watch(*arguments: object) -> Drafts:
        found.append(draft(*arguments))
        return found[-1]

    monkeypatch.setattr(MtpDrafter, "draft", watch)
    return found


@pytest.mark.parametrize(
    ("temperature", "rules"),
    [
        (1.0, {}),
        (0.7, {}),
        (1.0, {"top_p": 0.8}),
        (0.7, {"top_p": 0.8}),
        # Not one listed id is left for a draft.
        (1.0, {"suppress_token_ids": LISTED}),
    ],
)
def test_samples_follow_the_target(
    alone: ParallelContext, tmp_path: Path, drawn: list[Drafts], temperature: float, rules: dict
):
    built = random_model(alone, vocab_size=V)
    sampling = SamplingParams(temperature=temperature, max_new_tokens=4, seed=11, **rules)
    prompt = Prompt(prompt_ids=PROMPT, index=0, sampling=sampling, samples_per_prompt=SAMPLES)
    path = listing(tmp_path, LISTED)
    engine = make_engine(built, alone, 2, max_running=500, prefill_tokens=64, draft_vocabulary=path)
    samples = all_samples(engine.generate([prompt]))
    tokens = torch.tensor([sample.response_ids for sample in samples])
    pairs = torch.bincount(tokens[:, 1] * V + tokens[:, 2], minlength=V * V)
    assert chi_square_p(pairs, second_pairs(built, alone, temperature, rules)) > 0.01
    if "suppress_token_ids" in rules:
        assert engine.stats.accepted == [0, 0]
        return
    assert 0.05 < engine.stats.summary()["accept_depth"][0] < 0.95
    listed = torch.tensor(LISTED)
    for drafts in drawn:
        assert torch.isin(drafts.tokens_nk, listed).all()
        assert drafts.logits_nkv[..., [0, 3, 4, 6, 7]].isneginf().all()
    assert not torch.isin(tokens, listed).all()


def second_pairs(built: BuiltModel, context: ParallelContext, temperature: float, rules: dict) -> torch.Tensor:
    """Probability of the second and third token, [V, V], over all first ones."""
    total = torch.zeros(V, V)
    first = step_law(built, context, PROMPT, temperature, rules)
    for x in range(V):
        if first[x] > 0:
            second = step_law(built, context, (*PROMPT, x), temperature, rules)
            third = [step_law(built, context, (*PROMPT, x, y), temperature, rules) for y in range(V)]
            total += first[x] * second[:, None] * torch.stack(third)
    return total


def step_law(
    built: BuiltModel, context: ParallelContext, ids: tuple[int, ...], temperature: float, rules: dict
) -> torch.Tensor:
    """Processed distribution after `ids`, [V], from a training forward."""
    logits = last_logits(built, context, ids)
    logits[list(rules.get("suppress_token_ids", ()))] = -torch.inf
    p = (logits / temperature).softmax(-1)
    order = p.argsort(descending=True, stable=True)
    before = p[order].cumsum(-1) - p[order]
    p[order[before > rules.get("top_p", 1.0)]] = 0
    return p / p.sum()


def last_logits(built: BuiltModel, context: ParallelContext, ids: tuple[int, ...]) -> torch.Tensor:
    rows = torch.tensor(ids)
    batch = TokenBatch(rows, torch.ones_like(rows, dtype=torch.bool), PackedLayout.build([len(rows)]))
    return score_batch(built, batch, context, with_logits=True).logits_TV[-1]


@pytest.mark.parametrize("rules", [{}, {"suppress_token_ids": (3, 4)}])
def test_greedy_is_greedy(small: BuiltModel, alone: ParallelContext, tmp_path: Path, rules: dict):
    sampling = SamplingParams(temperature=0.0, max_new_tokens=20, **rules)
    prompts = random_prompts(6, 24, sampling)
    plain = responses(make_engine(small, alone, 0).generate(prompts))
    # The commonest half, so that some drafts are right.
    tokens = [token for response in plain for token in response]
    common = sorted(set(tokens), key=tokens.count)[-8:]
    engine = make_engine(small, alone, 3, draft_vocabulary=listing(tmp_path, common))
    assert responses(engine.generate(prompts)) == plain
    assert engine.stats.accepted[0] > 0


def test_all_ids_draft_like_no_list(small: BuiltModel, alone: ParallelContext, tmp_path: Path):
    prompts = random_prompts(6, 24, SamplingParams(max_new_tokens=12, seed=2))
    every = make_engine(small, alone, 2, draft_vocabulary=listing(tmp_path, list(range(24))[::-1]))
    none = make_engine(small, alone, 2)
    assert responses(every.generate(prompts)) == responses(none.generate(prompts))
    assert every.stats.accepted == none.stats.accepted


def test_rows_are_those_of_each_rollouts_weights_and_go_with_the_memory(
    alone: ParallelContext, tmp_path: Path, drawn: list[Drafts]
):
    built, clock = random_model(alone), WeightsClock()
    options = {"keep_memory": True, "context_tokens": 40, "draft_vocabulary": listing(tmp_path, LISTED)}
    engine = make_engine(built, alone, 1, clock=clock, **options)
    prompts = random_prompts(2, 24, SamplingParams(max_new_tokens=4))
    engine.generate(prompts)
    before, place = engine.memory_bytes, engine._reduced._rows_xH.data_ptr()
    held = [*engine._memory.tensors(), engine._reduced._rows_xH]
    assert before == sum(tensor.nbytes for tensor in held)
    with torch.no_grad():
        built.trunk.head_weight.mul_(2)
    clock.trained += 1
    engine.generate(prompts)
    assert torch.equal(engine._reduced._rows_xH, built.trunk.head_weight[list(LISTED)])
    assert engine._reduced._rows_xH.data_ptr() == place and engine.memory_bytes == before
    engine.release()
    assert engine.memory_bytes == 0 and engine._reduced._rows_xH is None
    engine.generate(prompts)
    assert all(torch.isin(drafts.tokens_nk, torch.tensor(LISTED)).all() for drafts in drawn)


def test_the_rows_are_part_of_the_budget(small: BuiltModel, alone: ParallelContext, tmp_path: Path):
    """The least budget that does without a list is too little with one."""
    prompts, path = random_prompts(2, 24, SamplingParams(max_new_tokens=4)), listing(tmp_path, LISTED)
    with pytest.raises(UserError, match="rollout.memory_gb: .* is too little"):
        make_engine(small, alone, 1, memory_gb=1e-9).generate(prompts)
    engine = make_engine(small, alone, 1, keep_memory=True)
    engine.generate(prompts)
    plan = engine._memory.plan
    least_gb = (plan.fixed_bytes + plan.max_blocks * plan.block_bytes + 0.5) / GIB
    make_engine(small, alone, 1, memory_gb=least_gb).generate(prompts)
    with pytest.raises(UserError, match="rollout.memory_gb: .* is too little"):
        make_engine(small, alone, 1, memory_gb=least_gb, draft_vocabulary=path).generate(prompts)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("[1, 2", "cannot be read as JSON"),
        ('{"ids": [1]}', "must hold a list of at least one token id"),
        ("[]", "must hold a list of at least one token id"),
        ("[1, 24]", "entry 1: 24 is no token id; allowed: integers from 0 to 23"),
        ("[-1]", "entry 0: -1 is no token id"),
        ("[3, true]", "entry 1: true is no token id"),
        ("[1.0]", "entry 0: 1.0 is no token id"),
        ("[5, 1, 5]", "entry 2: 5 stands there twice; allowed: distinct ids"),
    ],
)
def test_a_file_that_will_not_do_is_named(tmp_path: Path, content: str, message: str):
    path = tmp_path / "drafts.json"
    path.write_text(content)
    with pytest.raises(UserError) as caught:
        read_draft_ids(str(path), 24)
    assert str(caught.value).startswith(f"rollout.draft_vocabulary: {path}") and message in str(caught.value)


def test_a_missing_file_is_named(tmp_path: Path):
    with pytest.raises(UserError, match="rollout.draft_vocabulary: .*none.json cannot be read"):
        read_draft_ids(str(tmp_path / "none.json"), 24)
