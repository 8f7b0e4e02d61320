"""The host launches ahead of what it has read: same tokens, nothing lost, nothing of anybody else's touched."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from bailing_mtp.contracts.samples import Prompt, Sample, SamplingParams
from bailing_mtp.model.build import BuiltModel
from bailing_mtp.parallel.context import ParallelContext
from bailing_mtp.rollout.blocks import blocks_for
from bailing_mtp.rollout.requests import Limits
from bailing_mtp.rollout.runner import Runner
from bailing_mtp.rollout.session import RolloutSession
from tests.rollout.drafters import ScriptedDrafter
from tests.rollout.engine_rig import make_engine, random_prompts, responses

VOCAB = 24
SAMPLED = SamplingParams(temperature=1.0, max_new_tokens=13, seed=3)
LIMITS = Limits(context_tokens=40, max_running=4, n_templates=2)


def finish(
    session: RolloutSession, prompts: list[Prompt], between: Callable[[], None] = lambda: None
) -> dict[tuple[int, int], Sample]:
    for prompt in prompts:
        session.submit(prompt)
    samples = []
    while session.step():
        between()
        samples += session.take()
    samples += session.take()
    return {(s.prompt_index, s.sample_index): s for s in samples}


@pytest.mark.parametrize("k", [0, 2])
def test_tokens_do_not_depend_on_when_they_are_read(small: BuiltModel, alone: ParallelContext, k: int):
    """One iteration late, or at once; the counts of kept and accepted tokens are equal too."""
    stops = replace(SAMPLED, stop_token_ids=(1, 2, 3))
    prompts = [
        replace(p, sampling=stops if p.index % 2 else SAMPLED)
        for p in random_prompts(9, VOCAB, SAMPLED, samples=2)
    ]
    ahead, at_once = (make_engine(small, alone, k).open(LIMITS) for _ in range(2))
    late = finish(ahead, prompts)
    early = finish(at_once, prompts, at_once.drain)
    assert set(late) == set(early) and len(late) == 18
    for key, sample in late.items():
        assert (sample.response_ids, sample.finish_reason) == (early[key].response_ids, early[key].finish_reason)
        assert sample.logprobs == pytest.approx(early[key].logprobs, abs=1e-4)
    for name in ("tokens", "row_steps", "step_tokens", "accepted", "reached"):
        assert getattr(ahead.stats, name) == getattr(at_once.stats, name)


def test_a_step_is_launched_before_the_last_one_is_read(
    small: BuiltModel, alone: ParallelContext, monkeypatch: pytest.MonkeyPatch
):
    """And the first tokens' own step before they are read."""
    known: list[int] = []
    decode = Runner.decode

    def spy(runner, running, padded, rules, drafts):
        known.append(len(running[0].response))
        return decode(runner, running, padded, rules, drafts)

    monkeypatch.setattr(Runner, "decode", spy)
    finish(make_engine(small, alone, 0).open(LIMITS), random_prompts(1, VOCAB, replace(SAMPLED, max_new_tokens=5)))
    # The last launch names a row that has ended.
    assert known == [0, 0, 2, 3, 4]


@pytest.mark.parametrize("k", [0, 2])
def test_a_row_that_has_ended_unread_gains_nothing_and_touches_nothing(
    small: BuiltModel, alone: ParallelContext, k: int
):
    engine = make_engine(small, alone, k)
    session = engine.open(LIMITS)
    short = Prompt(prompt_ids=(5, 6, 7), index=0, sampling=replace(SAMPLED, max_new_tokens=2))
    session.submit(short)
    session.submit(Prompt(prompt_ids=(8, 9), index=1, sampling=SAMPLED))
    session.step()
    memory, scheduler = engine._memory, session._scheduler
    ended = next(row for row in scheduler.running if len(row.prompt_ids) == 3)
    assert memory.slots.finished[ended.slot] and not session.take()
    slot, position = ended.slot, int(memory.slots.position[ended.slot])
    own = {*ended.blocks, memory.scratch_block}
    others = [block for block in range(memory.plan.n_blocks) if block not in own]
    other_slot = next(row.slot for row in scheduler.running if row is not ended)
    mates = {block for row in scheduler.running if row is not ended for block in row.blocks}
    before, generated = memory.latents_LBbx.clone(), int(memory.slots.generated[slot])
    session.step()
    assert int(memory.slots.position[slot]) == position and int(memory.slots.count[slot]) == 0
    assert int(memory.slots.generated[slot]) == generated == 2
    untouched = [block for block in others if block not in mates]
    assert torch.equal(memory.latents_LBbx[:, untouched], before[:, untouched])
    assert int(memory.slots.position[other_slot]) > 2
    assert ended.state == "done" and [s.prompt_index for s in session.take()] == [0]
    while session.step():
        scheduler.check_integrity(LIMITS.max_running, LIMITS.n_templates)
    (other,) = session.take() or [None]
    (lone,) = responses(make_engine(small, alone, k).generate([Prompt(prompt_ids=(8, 9), index=1, sampling=SAMPLED)]))
    assert other is None or other.response_ids == lone
    assert scheduler.pool.n_free == memory.plan.n_blocks


@pytest.mark.parametrize("k", [0, 2])
def test_every_launched_step_has_its_blocks(
    small: BuiltModel, alone: ParallelContext, monkeypatch: pytest.MonkeyPatch, k: int
):
    """Even if all unread drafts are accepted, a step writes inside the blocks that were reserved for it."""
    seen = []
    decode = Runner.decode

    def check(runner, running, padded, rules, drafts):
        state, block_tokens = runner.memory.slots, runner.memory.plan.block_tokens
        for row in running:
            reached = row.fill_tokens + row.unread_tokens + drafts + 1
            needed = blocks_for(min(reached, row.limit_tokens), block_tokens)
            assert len(row.blocks) == needed
            assert state.block_table_NM[row.slot, :needed].tolist() == row.blocks
            assert int(state.position[row.slot]) <= row.fill_tokens + row.unread_tokens
            assert row.unread_tokens in (0, drafts + 1)
            seen.append(row.unread_tokens)
        return decode(runner, running, padded, rules, drafts)

    monkeypatch.setattr(Runner, "decode", check)
    prompts = random_prompts(6, VOCAB, SAMPLED, samples=2)
    full = {p.index: (1, 2, 3) * 9 for p in prompts}
    engine = make_engine(small, alone, k, drafter=ScriptedDrafter(full, VOCAB))
    finish(engine.open(LIMITS), prompts)
    assert k + 1 in seen and 0 in seen


def test_preemption_reads_what_is_under_way_first(small: BuiltModel, alone: ParallelContext):
    prompts = random_prompts(8, VOCAB, replace(SAMPLED, max_new_tokens=25))
    engine = make_engine(small, alone, 2)
    expected = finish(engine.open(LIMITS), prompts)
    tight = make_engine(small, alone, 2)
    session = tight.open(LIMITS)
    scheduler, preempt = session._scheduler, session._scheduler._preempt
    hidden = scheduler.pool.allocate(scheduler.pool.n_free - blocks_for(40, 4) - 6)
    victims = []

    def spy(victim):
        assert len(session._flights) == 0 and all(row.unread_tokens == 0 for row in scheduler.running)
        victims.append(victim)
        preempt(victim)

    scheduler._preempt = spy
    found = finish(session, prompts)
    assert len(victims) >= 3
    for key, sample in expected.items():
        assert found[key].response_ids == sample.response_ids
        assert found[key].logprobs == pytest.approx(sample.logprobs, abs=1e-4)
    scheduler.pool.free(hidden)
    assert scheduler.pool.n_free == tight._memory.plan.n_blocks


@pytest.mark.parametrize("k", [0, 2])
def test_cancel_with_a_step_under_way(small: BuiltModel, alone: ParallelContext, k: int):
    prompts = random_prompts(4, VOCAB, replace(SAMPLED, max_new_tokens=20))
    expected = finish(make_engine(small, alone, k).open(LIMITS), prompts)
    session = make_engine(small, alone, k).open(LIMITS)
    for prompt in prompts:
        session.submit(prompt)
    while len(session._scheduler.running) < 4:
        session.step()
    assert len(session._flights) and all(row.unread_tokens == k + 1 for row in session._scheduler.running)
    session.cancel(2)
    # The freed slot serves another request while the cancelled row's step is unread.
    session.submit(replace(prompts[2], index=9))
    found = {}
    while session.step():
        found |= {sample.prompt_index: sample for sample in session.take()}
        session._scheduler.check_integrity(LIMITS.max_running, LIMITS.n_templates)
    cut, whole = found[2].response_ids, expected[2, 0].response_ids
    assert found[2].finish_reason == "cancelled" and len(cut) < 20 and cut == whole[: len(cut)]
    assert len(found) == 5 and all(found[i].response_ids == expected[i, 0].response_ids for i in (0, 1, 3))
    assert len(found[9].response_ids) == 20
    assert session.stats.tokens == sum(len(sample.response_ids) for sample in found.values())


def test_rules_of_batch_mates_do_not_change_tokens(small: BuiltModel, alone: ParallelContext):
    """A row that only asks for a temperature draws the same ids in single passes and beside masks and top-p."""
    prompts = random_prompts(3, VOCAB, SAMPLED)
    alone_ids = responses(make_engine(small, alone, 2).generate(prompts))
    other = Prompt(prompt_ids=(1, 2), index=7, sampling=replace(SAMPLED, top_p=0.5, suppress_token_ids=(3,)))
    greedy = Prompt(prompt_ids=(1, 2), index=8, sampling=replace(SAMPLED, temperature=0.0))
    for mates in ([other], [greedy], [other, greedy]):
        assert responses(make_engine(small, alone, 2, max_running=8).generate([*prompts, *mates]))[:3] == alone_ids
