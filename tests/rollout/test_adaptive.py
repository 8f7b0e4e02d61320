"""Rollouts whose number of drafts changes from step to step, and what the controller is told of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import cycle

import pytest
import torch

from bailing_mtp.contracts.samples import SamplingParams
from bailing_mtp.model.build import BuiltModel
from bailing_mtp.parallel.context import ParallelContext
from bailing_mtp.rollout.engine import RolloutEngine
from bailing_mtp.rollout.lockstep import Shapes
from bailing_mtp.rollout.sequences import Plan, Row
from bailing_mtp.rollout.session import RolloutSession
from tests.rollout import test_engine_law
from tests.rollout.engine_rig import Scripted, all_samples, make_engine, random_prompts, responses, scored
from tests.rollout.helpers import chi_square_p
from tests.rollout.program_rig import random_model
from tests.rollout.test_engine_law import V
from tests.rollout.test_graphs import FakeCapturer, graphed

VOCAB = 24
SAMPLED = SamplingParams(max_new_tokens=14, seed=3)


def scripted(
    built: BuiltModel, context: ParallelContext, drafts: Sequence[int], **config: object
) -> tuple[RolloutEngine, Scripted]:
    engine = make_engine(built, context, max(drafts), adaptive=True, **config)
    engine._controller = Scripted(drafts)
    return engine, engine._controller


@pytest.mark.parametrize("drafts", [(2, 0, 1), (0, 3), (1, 1, 0, 0, 2)])
def test_alternating_drafts_decode_like_none(small: BuiltModel, alone: ParallelContext, drafts: Sequence[int]):
    """Greedy rows: every state that a step leaves is that of plain decoding, whatever steps come before."""
    prompts = random_prompts(7, VOCAB, replace(SAMPLED, temperature=0.0), samples=2)
    plain = make_engine(small, alone).generate(prompts)
    engine, controller = scripted(small, alone, drafts)
    found = engine.generate(prompts)
    assert responses(found) == responses(plain)
    for ours, theirs in zip(all_samples(found), all_samples(plain), strict=True):
        assert ours.logprobs == pytest.approx(theirs.logprobs, abs=1e-4)
    assert [k for _, k in controller.ran] == [k for _, k in zip(controller.ran, cycle(drafts), strict=False)]
    by_drafts = engine.stats.steps_by_drafts
    assert sum(by_drafts) == engine.stats.steps and all(by_drafts[k] > 0 for k in drafts)
    assert engine.stats.accepted[0] > 0


def test_alternating_drafts_keep_the_law(alone: ParallelContext, monkeypatch: pytest.MonkeyPatch):
    eight = random_model(alone, vocab_size=V)

    def alternating(built: BuiltModel, context: ParallelContext, k: int, **config: object) -> RolloutEngine:
        return scripted(built, context, (1, 0, 2), **config)[0]

    monkeypatch.setattr(test_engine_law, "make_engine", alternating)
    sampling = SamplingParams(temperature=0.8, max_new_tokens=4, seed=11)
    tokens = test_engine_law.first_tokens(eight, alone, 2, sampling)
    pairs = torch.bincount(tokens[:, 0] * V + tokens[:, 1], minlength=V * V)
    assert chi_square_p(pairs, test_engine_law.exact_pairs(eight, alone, 0.8, None)) > 0.01


def test_log_probs_are_the_trainers(small: BuiltModel, alone: ParallelContext):
    """With the controller itself, through two rollouts: it goes on with what it has learnt."""
    engine = make_engine(small, alone, 2, adaptive=True)
    prompts = random_prompts(6, VOCAB, replace(SAMPLED, temperature=0.9), samples=2)
    for step in range(2):
        for sample in all_samples(engine.generate(prompts, rollout_step=step)):
            logits = scored(small, alone, sample)
            picked = torch.tensor(sample.response_ids).unsqueeze(-1)
            raw = logits.log_softmax(-1).gather(-1, picked).squeeze(-1)
            torch.testing.assert_close(torch.tensor(sample.logprobs), raw, atol=1e-4, rtol=1e-4)
            assert len(sample.response_ids) == 14
    assert sum(engine.stats.steps_by_drafts) == engine.stats.steps
    controller = engine._controller
    assert controller._step > engine.stats.steps
    assert any(arm.cost_s for arms in controller._arms.values() for arm in arms) and controller._reached[0] > 0


def test_what_the_controller_hears(small: BuiltModel, alone: ParallelContext):
    engine, controller = scripted(small, alone, (1, 0, 2), max_running=4)
    prompts = random_prompts(4, VOCAB, SAMPLED, longest=4)
    engine.generate(prompts)
    stats = engine.stats
    assert [sum(column) for column in zip(*(reached for reached, _ in controller.news), strict=True)] == stats.reached
    assert [sum(column) for column in zip(*(passed for _, passed in controller.news), strict=True)] == stats.accepted
    assert controller.begun == 1
    assert [time[:2] for time in controller.times] == controller.ran
    # Each follows the one before, or the first tokens, at once.
    assert all(0 < seconds < 5 for _, _, seconds in controller.times)
    # Steps that drafted nothing tell nothing of drafts.
    assert not any(any(reached[k:]) for (_, k), (reached, _) in zip(controller.ran, controller.news, strict=True))


def test_a_prefill_before_a_step_is_in_no_cost(small: BuiltModel, alone: ParallelContext):
    """A prompt that comes in chunks beside a response: steps between them are not timed."""
    engine, controller = scripted(small, alone, (1,), prefill_tokens=4)
    prompts = random_prompts(2, VOCAB, replace(SAMPLED, max_new_tokens=20), longest=1)
    prompts[1] = replace(prompts[1], prompt_ids=tuple(range(22)))
    before: list[tuple[int, bool]] = []
    launch = RolloutSession._launch

    def watch(session: RolloutSession, plan: Plan, running: Sequence[Row], shapes: Shapes) -> None:
        if running:
            before.append((shapes.prefill_tokens, bool(plan.starters)))
        launch(session, plan, running, shapes)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(RolloutSession, "_launch", watch)
        engine.generate(prompts)
    expected = [bool(tokens) and not starts for tokens, starts in before]
    assert expected.count(True) >= 4
    assert [seconds is None for _, _, seconds in controller.times] == expected


def test_graphs_are_captured_for_the_drafts_that_run(small: BuiltModel, alone: ParallelContext):
    prompts = random_prompts(5, VOCAB, SAMPLED, samples=2)
    capturer = FakeCapturer()
    engine, told = graphed(small, alone, 2, capturer, adaptive=True)
    engine._controller = Scripted((2, 0))
    found = responses(engine.generate(prompts))
    shapes = set(engine._steps.graphs._graphs)
    assert {shape.drafts for shape in shapes} == {0, 2} and capturer.captured == len(shapes)
    assert {(shape.rows, shape.drafts) for shape in shapes} == set(engine._controller.ran)
    eager, _ = scripted(small, alone, (2, 0), max_running=6, context_tokens=40)
    assert responses(eager.generate(prompts)) == found
