"""Groups that are carried from one rollout to the next: the same samples as in one go, each token with its weights."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch

from bailing_mtp.contracts.clock import WeightsClock
from bailing_mtp.contracts.samples import PartialGroup, Prompt, RolloutGroup, Sample, SamplingParams
from bailing_mtp.model.build import BuiltModel
from bailing_mtp.parallel.context import ParallelContext
from bailing_mtp.rollout.engine import RolloutEngine
from bailing_mtp.rollout.tally import Tally, part
from tests.rollout.drafters import ScriptedDrafter
from tests.rollout.engine_rig import all_samples, make_engine, random_prompts, responses, scored
from tests.rollout.program_rig import random_model
from tests.rollout.test_engine_life import Letters

VOCAB = 24
SAMPLED = SamplingParams(temperature=0.9, top_k=20, max_new_tokens=21, seed=3, stop_token_ids=(7,))


def cut(engine: RolloutEngine, groups: Sequence[PartialGroup], n_steps: int) -> list[PartialGroup]:
    """The groups after a session of `n_steps` steps at most."""
    session = engine.open(engine._limits([group.prompt for group in groups]))
    for group in groups:
        if not group.is_complete:
            session.resume(group)
    for _ in range(n_steps):
        session.step()
    unfinished = session.suspend()
    ended = [(sample, 1) for sample in session.take()]
    engine.close()
    assert session.finished() and not session.suspend()
    return part(groups, ended, unfinished, 0, frozenset()).carried


@pytest.mark.parametrize("k", [0, 2])
@pytest.mark.parametrize("longest", [2, 7])
def test_a_carried_sample_is_the_uninterrupted_one(small: BuiltModel, alone: ParallelContext, k: int, longest: int):
    """Cut again and again, after a few steps each: running, in prefill, queued and unforked samples, all of them."""
    rng = random.Random(longest)
    prompts = [replace(p, samples_per_prompt=1 + p.index % 4) for p in random_prompts(5, VOCAB, SAMPLED, longest=20)]
    expected = make_engine(small, alone, k, max_running=6).generate(prompts, rollout_step=8)
    engine = make_engine(small, alone, k, max_running=6, prefill_tokens=16 if longest > 2 else 150)
    groups, n_cuts = [PartialGroup(prompt, 8) for prompt in prompts], 0
    while n_cuts < 100 and not all(group.is_complete for group in groups):
        before, groups, n_cuts = groups, cut(engine, groups, rng.randint(1, longest)), n_cuts + 1
        assert engine.memory_bytes == 0
        for old, new in zip(before, groups, strict=True):
            assert len(new.samples) == new.prompt.samples_per_prompt
            for was, now in zip(old.samples, new.samples, strict=bool(old.samples)):
                n = len(was.response_ids)
                assert now.response_ids[:n] == was.response_ids and now.logprobs[:n] == was.logprobs
    assert 4 <= n_cuts < 100
    found = [sample for group in groups for sample in group.samples]
    for ours, theirs in zip(found, all_samples(expected), strict=True):
        assert (ours.response_ids, ours.finish_reason) == (theirs.response_ids, theirs.finish_reason)
        for name in ("logprobs", "processed_logprobs", "kept_logmass"):
            assert getattr(ours, name) == pytest.approx(getattr(theirs, name), abs=1e-4)


def at_version(context: ParallelContext, version: int) -> BuiltModel:
    """The small model, moved by training or what looks like it."""
    built, generator = random_model(context), torch.Generator().manual_seed(version)
    with torch.no_grad():
        for parameter in itertools.chain(*(module.parameters() for module in built.modules)):
            parameter += 0.1 * parameter.abs().mean() * torch.randn(parameter.shape, generator=generator)
    return built


@pytest.mark.parametrize("k", [0, 2])
def test_every_token_has_the_probability_that_the_weights_of_its_version_give(alone: ParallelContext, k: int):
    """Four rollouts with other weights each; samples that span three of them or more."""
    weights = {version: at_version(alone, version) for version in range(4, 8)}
    groups = [PartialGroup(p, 2) for p in random_prompts(3, VOCAB, replace(SAMPLED, stop_token_ids=()), samples=2)]
    pending: list[tuple[Sample, Sample]] = []
    for version, n_steps in zip(weights, (3, 2, 3, 100), strict=True):
        before = [sample for group in groups for sample in group.samples]
        engine = make_engine(weights[version], alone, k, clock=WeightsClock(version), max_running=6, prefill_tokens=200)
        groups = cut(engine, groups, n_steps)
        pending += zip(before, [sample for group in groups for sample in group.samples], strict=False)
    assert all(group.is_complete for group in groups)
    for was, now in pending:
        # The last token was pending at the cut, and none is drawn again.
        assert now.versions[: len(was.versions)] == was.versions and now.response_ids[: len(was.versions)] == (
            was.response_ids
        )
    samples = [sample for group in groups for sample in group.samples]
    assert sum(len(set(sample.versions)) >= 3 for sample in samples) >= 4
    for sample in samples:
        by_version = {v: scored(weights[v], alone, sample).log_softmax(-1) for v in set(sample.versions)}
        expected = [
            float(by_version[v][place, token])
            for place, (v, token) in enumerate(zip(sample.versions, sample.response_ids, strict=True))
        ]
        assert sample.logprobs == pytest.approx(expected, abs=1e-4)
        gaps = [(by_version[max(by_version)] - lp).abs().max() for lp in by_version.values()]
        assert len(gaps) == 1 or max(gaps) > 1e-2


@pytest.mark.parametrize("k", [0, 2])
def test_a_stop_string_may_span_a_cut(small: BuiltModel, alone: ParallelContext, k: int):
    tokenizer = Letters()
    greedy = SamplingParams(temperature=0.0, max_new_tokens=19, ignore_eos=True)
    (prompt,) = random_prompts(1, VOCAB, greedy)
    full = responses(make_engine(small, alone).generate([prompt]))[0]
    text = tokenizer.decode(full[5:8])
    end = next(n for n in range(1, 20) if text in tokenizer.decode(full[:n]))
    prompt = replace(prompt, sampling=replace(greedy, stop_strings=(text,)))
    engine = make_engine(small, alone, k, tokenizer, ScriptedDrafter({0: full}, VOCAB))
    for first in range(1, 5):
        groups = cut(engine, [PartialGroup(prompt, 0)], first)
        (group,) = cut(engine, groups, 30)
        assert group.samples[0].response_ids == full[:end] and group.samples[0].finish_reason == "stop"


@pytest.mark.parametrize("keep", [False, True])
def test_rollouts_end_with_enough_groups_and_lose_nothing(small: BuiltModel, alone: ParallelContext, keep: bool):
    """New prompts join in every rollout, with indices that are free: the same samples as each rollout's alone."""
    engine = make_engine(small, alone, 2, keep_memory=keep, max_running=5, context_tokens=40)
    expected, found, carried, n_tokens = {}, {}, [], 0
    for step in range(4):
        taken = {group.prompt.index for group in carried}
        free = [index for index in range(20) if index not in taken]
        made = random_prompts(6 - len(carried), VOCAB, SAMPLED, seed=step, samples=3)
        prompts = [replace(prompt, index=index) for prompt, index in zip(made, free, strict=False)]
        for group in make_engine(small, alone, 2).generate(prompts, step):
            expected[step, group.prompt.index] = responses([group])
        begun = {(step, prompt.index): PartialGroup(prompt, step) for prompt in prompts}
        begun |= {(group.rollout_step, group.prompt.index): group for group in carried}
        advanced = engine.advance([*carried, *(PartialGroup(prompt, step) for prompt in prompts)], enough=3)
        n_tokens += engine.stats.tokens
        carried = advanced.carried
        assert len(advanced.complete) == 3 == len(carried)
        rest = {(group.rollout_step, group.prompt.index) for group in carried}
        for key in begun.keys() - rest:
            (group,) = [g for g in advanced.complete if g.prompt is begun[key].prompt]
            found[key] = responses([group])
        assert (engine.memory_bytes > 0) == keep
    assert len(found) == 12 and all(expected[key] == ids for key, ids in found.items())
    assert any(sample.response_ids for group in carried for sample in group.samples)
    in_hand = sum(len(sample.response_ids) for group in carried for sample in group.samples)
    assert n_tokens == in_hand + sum(len(ids) for group in found.values() for ids in group)
    engine.release()


def test_a_required_group_is_waited_for(small: BuiltModel, alone: ParallelContext):
    prompts = random_prompts(4, VOCAB, replace(SAMPLED, max_new_tokens=4, stop_token_ids=()))
    prompts[3] = replace(prompts[3], sampling=replace(prompts[3].sampling, max_new_tokens=20))
    groups = [PartialGroup(prompt, 0) for prompt in prompts]
    engine = make_engine(small, alone)
    found = engine.advance(groups, enough=2)
    assert [group.prompt.index for group in found.complete] == [0, 1]
    assert [group.is_complete for group in found.carried] == [True, False]
    # What is complete already needs no step.
    more = engine.advance(found.carried, enough=1)
    assert [group.prompt.index for group in more.complete] == [2] and engine.stats.steps == 0
    assert more.carried == found.carried[1:]
    waiting = engine.advance(groups, 2, required=frozenset({3}))
    assert [group.prompt.index for group in waiting.complete] == [0, 3]
    assert len(waiting.complete[1].samples[0].response_ids) == 20


def sample(prompt: int, index: int, reason: str = "stop") -> Sample:
    return Sample(
        prompt_index=prompt,
        sample_index=index,
        prompt_ids=(1,),
        response_ids=(2,),
        logprobs=(0.0,),
        processed_logprobs=(0.0,),
        kept_logmass=(0.0,),
        finish_reason=reason,
    )


def test_the_first_complete_groups_whatever_the_order_of_news():
    groups = [PartialGroup(Prompt(prompt_ids=(1,), index=i, samples_per_prompt=2), 0) for i in range(4)]
    groups[0] = replace(groups[0], samples=(sample(0, 0, "unfinished"), sample(0, 1)))
    ended = [(sample(0, 0), 9), *((sample(i, j), step) for i, j, step in ((1, 0, 2), (1, 1, 5), (2, 1, 5), (2, 0, 3)))]
    rest = [sample(3, 0, "unfinished"), sample(3, 1, "unfinished")]
    for news in (ended, ended[::-1]):
        complete, carried = part(groups, news, rest, 1, frozenset())
        assert complete == [RolloutGroup(groups[1].prompt, (sample(1, 0), sample(1, 1)))]
        assert [group.unfinished for group in carried] == [(), (), (0, 1)]
        complete, _ = part(groups, news, rest, 2, frozenset({0}))
        assert [group.prompt.index for group in complete] == [0, 1]
    tally = Tally(groups, frozenset({0, 3, 17}))
    assert (tally.n_complete, tally.n_required_open) == (0, 2)
    tally.add([s for s, _ in ended], 1)
    assert (tally.n_complete, tally.n_required_open) == (3, 1)
