"""The engine on a small model: speculation changes nothing but the number of steps."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from bailing_mtp.contracts.clock import WeightsClock
from bailing_mtp.contracts.samples import Prompt, SamplingParams
from bailing_mtp.model.build import BuiltModel
from bailing_mtp.parallel.context import ParallelContext
from bailing_mtp.rollout.memory import GIB, MemoryPlan
from bailing_mtp.rollout.program import Program
from bailing_mtp.rollout.session import RolloutSession
from bailing_mtp.weights.names import Shard
from bailing_mtp.weights.view import StaleWeights
from tests.rollout.drafters import ScriptedDrafter
from tests.rollout.engine_rig import all_samples, make_engine, random_prompts, responses, scored
from tests.rollout.program_rig import fixture_model

VOCAB = 24
GREEDY = SamplingParams(temperature=0.0, max_new_tokens=19)
SAMPLED = SamplingParams(temperature=1.0, max_new_tokens=15, seed=3)


@pytest.mark.parametrize("k", [1, 2, 3, 4])
@pytest.mark.parametrize("wrong_every", [0, 2, 3])
def test_greedy_with_drafts_is_greedy_without(
    small: BuiltModel, alone: ParallelContext, k: int, wrong_every: int
):
    prompts = random_prompts(11, VOCAB, GREEDY)
    plain = make_engine(small, alone).generate(prompts)
    right = {group.prompt.index: group.samples[0].response_ids for group in plain}
    engine = make_engine(small, alone, k, drafter=ScriptedDrafter(right, VOCAB, wrong_every))
    assert responses(engine.generate(prompts)) == responses(plain)
    if wrong_every == 0:
        assert engine.stats.accepted == engine.stats.reached and engine.stats.summary()["accept_length"] > 0.7 * (k + 1)
    else:
        assert 0 < sum(engine.stats.accepted) < sum(engine.stats.reached)


@pytest.mark.parametrize("k", [0, 3])
def test_a_rejected_draft_costs_no_second_forward(
    small: BuiltModel, alone: ParallelContext, monkeypatch: pytest.MonkeyPatch, k: int
):
    """One pass of the trunk a step, whatever was rejected, and none of the MTP layer without drafts."""
    calls = dict.fromkeys(("verify", "mtp_refresh", "mtp_step", "mtp_row", "prefill"), 0)

    def counted(name: str, real):
        def call(*arguments, **more):
            calls[name] += 1
            return real(*arguments, **more)

        return call

    for name in calls:
        monkeypatch.setattr(Program, name, counted(name, getattr(Program, name)))
    prompts = random_prompts(4, VOCAB, SAMPLED)
    engine = make_engine(small, alone, k, max_running=4)
    engine.generate(prompts)
    stats = engine.stats
    assert k == 0 or 0 < sum(stats.accepted) < sum(stats.reached)
    # A step that was launched before the last rows were known to have ended is no step of the statistics.
    assert 0 <= calls["verify"] - stats.steps <= 1 and calls["prefill"] <= len(prompts)
    n_mtp = calls["verify"] if k else 0
    # A row's first token has a pass of its own.
    drafted = calls["mtp_step"] - calls["mtp_row"]
    assert (calls["mtp_refresh"], drafted) == (n_mtp, max(0, k - 1) * n_mtp)
    assert (calls["mtp_row"] > 0) == (k > 0)


@pytest.mark.parametrize("kind", ["dense", "moe"])
def test_the_mtp_layer_drafts_without_changing_greedy(alone: ParallelContext, kind: str):
    built = fixture_model(kind, alone)
    prompts = random_prompts(5, 512, replace(GREEDY, max_new_tokens=10), longest=30)
    plain = make_engine(built, alone).generate(prompts)
    engine = make_engine(built, alone, 2)
    assert responses(engine.generate(prompts)) == responses(plain)
    assert engine.stats.tokens == 50 and engine.stats.samples == 5


@pytest.mark.parametrize("k", [0, 3])
def test_caps_and_stop_ids_cut_inside_a_block(small: BuiltModel, alone: ParallelContext, k: int):
    prompts = random_prompts(8, VOCAB, GREEDY)
    full = {g.prompt.index: g.samples[0].response_ids for g in make_engine(small, alone).generate(prompts)}
    drafter = ScriptedDrafter(full, VOCAB)
    for cap in (1, 2, 5, 6):
        stops = {index: (ids[min(cap, 3)],) for index, ids in full.items()}
        cut = [
            replace(p, sampling=replace(p.sampling, max_new_tokens=cap, stop_token_ids=stops[p.index]))
            for p in prompts
        ]
        engine = make_engine(small, alone, k, drafter=drafter)
        groups = engine.generate(cut)
        for group in groups:
            (sample,) = group.samples
            whole, stop = full[group.prompt.index], stops[group.prompt.index][0]
            end = whole.index(stop) + 1
            expected = whole[: min(end, cap)]
            assert sample.response_ids == expected
            assert sample.finish_reason == ("stop" if end <= cap else "length")
            assert len(sample.logprobs) == len(sample.versions) == len(expected)
        kept = sum(len(ids) for ids in responses(groups))
        assert engine.stats.tokens == kept and engine.stats.step_tokens == kept - len(prompts)


@pytest.mark.parametrize("k", [2, 3])
def test_the_last_position_of_the_context(small: BuiltModel, alone: ParallelContext, k: int):
    """Responses that end exactly at the context limit: fed drafts reach past it, log-probs are those of k = 0."""
    prompts = [
        Prompt(prompt_ids=tuple(range(1, n + 1)), index=n, sampling=replace(SAMPLED, max_new_tokens=21 - n))
        for n in range(1, 9)
    ]
    context_tokens = {"context_tokens": 21, "block_tokens": 4}
    found = all_samples(make_engine(small, alone, k, **context_tokens).generate(prompts))
    for sample in found:
        assert len(sample.prompt_ids) + len(sample.response_ids) == 21
        check_logprobs(small, alone, sample)


def check_logprobs(built: BuiltModel, context: ParallelContext, sample) -> None:
    logits = scored(built, context, sample)
    expected = logits.log_softmax(-1)[torch.arange(len(logits)), torch.tensor(sample.response_ids)]
    torch.testing.assert_close(torch.tensor(sample.logprobs), expected, atol=1e-4, rtol=1e-4)


def test_log_probs_of_every_kind_of_token(
    small: BuiltModel, alone: ParallelContext, monkeypatch: pytest.MonkeyPatch
):
    """Accepted, recovered, bonus and first tokens, told apart, against a training forward of the same tokens."""
    kinds: dict[tuple[int, int], list[str]] = {}
    receive = RolloutSession._receive

    def spy(session, row, result):
        is_first, k = not row.response, 2
        kept = receive(session, row, result)
        names = ["accepted"] * result.n_accepted + ["bonus" if result.n_accepted == k else "recovered"]
        kinds.setdefault(row.key, []).extend(["first"] if is_first else names[:kept])
        return kept

    monkeypatch.setattr(RolloutSession, "_receive", spy)
    sampling = replace(SAMPLED, temperature=0.8, top_k=12, suppress_token_ids=(3, 4))
    prompts = random_prompts(10, VOCAB, sampling)
    engine = make_engine(small, alone, 2, max_running=10)
    gaps: dict[str, list[float]] = {}
    for order, sample in enumerate(all_samples(engine.generate(prompts))):
        logits = scored(small, alone, sample)
        at = (torch.arange(len(logits)), torch.tensor(sample.response_ids))
        raw, tempered = logits.log_softmax(-1)[at], (logits / 0.8).log_softmax(-1)[at]
        masked = (logits / 0.8).index_fill(-1, torch.tensor([3, 4]), -torch.inf)
        processed = (logits / 0.8)[at] - masked.topk(12).values.logsumexp(-1)
        gap = (torch.tensor(sample.logprobs) - raw).abs()
        gap = gap.maximum((torch.tensor(sample.processed_logprobs) - processed).abs())
        joint = torch.tensor(sample.processed_logprobs) + torch.tensor(sample.kept_logmass)
        gap = gap.maximum((joint - tempered).abs())
        assert not {3, 4} & set(sample.response_ids)
        for kind, value in zip(kinds[(order, 0)], gap.tolist(), strict=True):
            gaps.setdefault(kind, []).append(value)
    assert set(gaps) == {"first", "accepted", "recovered", "bonus"}
    assert max(max(values) for values in gaps.values()) <= 1e-4, {k: max(v) for k, v in gaps.items()}
    assert all(len(values) >= 5 for values in gaps.values()), {k: len(v) for k, v in gaps.items()}


def test_tokens_do_not_depend_on_batch_mates_arrival_or_chunks(small: BuiltModel, alone: ParallelContext):
    prompts = random_prompts(9, VOCAB, SAMPLED, longest=20)
    together = responses(make_engine(small, alone, 2).generate(prompts))
    for prompt, expected in zip(prompts[:4], together, strict=False):
        assert responses(make_engine(small, alone, 2).generate([prompt])) == [expected]
    for prefill_tokens in (1, 3, 7, 1000):
        engine = make_engine(small, alone, 2, prefill_tokens=prefill_tokens, max_running=3)
        assert responses(engine.generate(prompts)) == together
    backwards = make_engine(small, alone, 2, max_running=2).generate(prompts[::-1])
    assert responses(backwards) == together[::-1]


@pytest.mark.parametrize("k", [0, 2])
def test_preempted_rows_continue_identically(small: BuiltModel, alone: ParallelContext, k: int):
    prompts = random_prompts(10, VOCAB, replace(SAMPLED, max_new_tokens=25), samples=2)
    expected = make_engine(small, alone, k).generate(prompts)
    arch = small.trunk.arch
    longest = max(len(p.prompt_ids) for p in prompts) + 25
    plan = MemoryPlan.build(arch, Shard(), k, 4, 8, longest, 4, torch.float32, None, 1, 1)
    tight = (plan.fixed_bytes + (plan.max_blocks + 9) * plan.block_bytes + 1) / GIB
    engine = make_engine(small, alone, k, memory_gb=tight)
    found = engine.generate(prompts)
    assert responses(found) == responses(expected)
    assert engine.stats.preemptions >= 3
    for ours, theirs in zip(all_samples(found), all_samples(expected), strict=True):
        assert ours.logprobs == pytest.approx(theirs.logprobs, abs=1e-4)


@pytest.mark.parametrize("k", [0, 2])
def test_samples_of_a_prompt_fork_from_one_prefill(small: BuiltModel, alone: ParallelContext, k: int):
    """Prompt lengths around a block's edge; sample 0 is what a lone request draws."""
    sampling = replace(SAMPLED, max_new_tokens=9)
    prompts = [
        Prompt(prompt_ids=tuple(range(n)), index=n, sampling=sampling, samples_per_prompt=6) for n in range(1, 10)
    ]
    engine = make_engine(small, alone, k)
    groups = engine.generate(prompts)
    assert engine.stats.prefilled_tokens == sum(range(1, 10))
    single = make_engine(small, alone, k).generate([replace(p, samples_per_prompt=1) for p in prompts])
    for group, lone in zip(groups, single, strict=True):
        assert [s.sample_index for s in group.samples] == list(range(6))
        assert group.samples[0].response_ids == lone.samples[0].response_ids
        assert len({s.response_ids for s in group.samples}) >= 5
    one_at_a_time = make_engine(small, alone, k, max_running=1).generate(prompts)
    assert responses(one_at_a_time) == responses(groups)
    for sample in all_samples(groups)[::7]:
        check_logprobs(small, alone, sample)


def test_seed_and_rollout_step_are_the_noise(small: BuiltModel, alone: ParallelContext):
    prompts = random_prompts(4, VOCAB, SAMPLED)
    other = [replace(p, sampling=replace(p.sampling, seed=4)) for p in prompts]
    engine = make_engine(small, alone, 1)
    first = responses(engine.generate(prompts))
    assert responses(engine.generate(prompts)) == first
    assert responses(engine.generate(prompts, rollout_step=1)) != first
    assert responses(engine.generate(other)) != first


def test_rows_with_other_settings_mix(small: BuiltModel, alone: ParallelContext):
    kinds = [
        SamplingParams(temperature=0, max_new_tokens=8),
        SamplingParams(temperature=0.5, max_new_tokens=12),
        SamplingParams(top_k=3, max_new_tokens=5),
        SamplingParams(top_p=0.5, max_new_tokens=9, stop_token_ids=(1, 2), min_new_tokens=4),
        SamplingParams(suppress_token_ids=tuple(range(12)), max_new_tokens=10),
    ]
    prompts = [replace(p, sampling=kinds[p.index]) for p in random_prompts(5, VOCAB, SAMPLED)]
    mixed = make_engine(small, alone, 2, max_running=5).generate(prompts)
    for prompt, group in zip(prompts, mixed, strict=True):
        (lone,) = make_engine(small, alone, 2).generate([prompt])
        assert group.samples[0].response_ids == lone.samples[0].response_ids
        assert group.samples[0].processed_logprobs == pytest.approx(lone.samples[0].processed_logprobs, abs=1e-4)
    assert mixed[0].samples[0].kept_logmass is None
    assert mixed[1].samples[0].kept_logmass == pytest.approx([0.0] * 12)
    assert min(mixed[4].samples[0].response_ids) >= 12
    assert len(mixed[3].samples[0].response_ids) >= 5


def test_min_new_tokens_holds_stop_ids_off(small: BuiltModel, alone: ParallelContext):
    stops = tuple(range(0, VOCAB, 2))
    sampling = replace(SAMPLED, stop_token_ids=stops, min_new_tokens=6, max_new_tokens=15)
    for sample in all_samples(make_engine(small, alone, 3).generate(random_prompts(6, VOCAB, sampling))):
        early, rest = sample.response_ids[:6], sample.response_ids[6:]
        assert not set(early) & set(stops)
        assert not set(rest[:-1]) & set(stops)
        assert (sample.finish_reason == "stop") == (rest[-1] in stops)


def test_an_optimizer_step_under_a_rollout_is_refused(small: BuiltModel, alone: ParallelContext):
    clock = WeightsClock(7)
    engine = make_engine(small, alone, 1, clock=clock)
    prompts = random_prompts(2, VOCAB, SAMPLED)
    assert set(all_samples(engine.generate(prompts))[0].versions) == {7}

    def train(_) -> None:
        clock.trained += 1

    with pytest.raises(StaleWeights):
        engine.generate(prompts, progress=train)
    assert set(all_samples(engine.generate(prompts))[0].versions) == {8}
