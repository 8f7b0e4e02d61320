"""The experts that a rollout records are those of a training forward over the same tokens, however they came."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from bailing_mtp.contracts.samples import SamplingParams
from bailing_mtp.model.build import BuiltModel
from bailing_mtp.parallel.context import ParallelContext
from bailing_mtp.rollout.memory import RolloutMemory
from bailing_mtp.rollout.requests import Limits
from bailing_mtp.rollout.routes import RouteFormat, RouteLog, RouteRecord, pack_routes
from bailing_mtp.rollout.sequences import Chunk, Group, Row
from tests.rollout.drafters import ScriptedDrafter
from tests.rollout.engine_rig import all_samples, make_engine, random_prompts
from tests.rollout.routes import check_routes

VOCAB = 24
SAMPLED = SamplingParams(max_new_tokens=15, seed=3)
GREEDY = SamplingParams(temperature=0.0, max_new_tokens=17)


@pytest.mark.parametrize("k", [0, 2])
@pytest.mark.parametrize("room", [{}, {"prefill_tokens": 5}, {"memory_gb": None}], ids=["whole", "chunks", "tight"])
def test_records_are_the_trainers_choices(small: BuiltModel, alone: ParallelContext, k: int, room: dict):
    """Forked, drafted and rejected, prefilled in chunks, preempted."""
    prompts = random_prompts(5, VOCAB, SAMPLED, samples=3, longest=18)
    if "memory_gb" in room:
        room = {"memory_gb": tight_gb(small, alone, k)}
    engine = make_engine(small, alone, k, records_routes=True, **room)
    samples = all_samples(engine.generate(prompts))
    plain = make_engine(small, alone, k, **room)
    for sample, other in zip(samples, all_samples(plain.generate(prompts)), strict=True):
        assert (sample.response_ids, sample.logprobs) == (other.response_ids, other.logprobs)
        assert other.routes is None and sample.routes.dtype == np.uint8
        check_routes(small, alone, sample)
    assert (engine.stats.preemptions > 0) == ("memory_gb" in room)
    assert k == 0 or 0 < sum(engine.stats.accepted) < sum(engine.stats.reached)


def tight_gb(small: BuiltModel, alone: ParallelContext, k: int) -> float:
    """Room for four rows, and blocks for not much more than one context."""
    engine = make_engine(small, alone, k, keep_memory=True)
    engine.generate(random_prompts(5, VOCAB, SAMPLED, samples=3, longest=18))
    plan = engine._memory.plan
    engine.release()
    return (plan.fixed_bytes + (plan.max_blocks + 4) * plan.block_bytes) / 2**30


def test_a_cut_block_and_a_whole_one(small: BuiltModel, alone: ParallelContext):
    """All drafts right: a stop inside the block leaves a response whose last token was fed, one at its end does not."""
    prompts = random_prompts(4, VOCAB, GREEDY)
    full = {g.prompt.index: g.samples[0].response_ids for g in make_engine(small, alone).generate(prompts)}
    unfed = []
    for n_tokens in (1, 2, 4, 5, 8, 9):
        cut = [replace(p, sampling=replace(GREEDY, max_new_tokens=n_tokens)) for p in prompts]
        engine = make_engine(small, alone, 3, drafter=ScriptedDrafter(full, VOCAB), records_routes=True)
        unfed.append({check_routes(small, alone, sample) for sample in all_samples(engine.generate(cut))})
    # The first token comes from the prefill, then blocks of four: tokens 1, 5 and 9 end one.
    assert unfed == [{1}, {0}, {0}, {1}, {0}, {1}]


def test_a_text_that_ends_inside_a_block(small: BuiltModel, alone: ParallelContext):
    """Stop strings are found on the host, after the device has gone on."""

    class Letters:
        eos_ids = ()

        def decode(self, ids) -> str:
            return "".join("abcdefghijklmnopqrstuvwx"[token] for token in ids)

    prompts = random_prompts(6, VOCAB, GREEDY)
    full = {g.prompt.index: g.samples[0].response_ids for g in make_engine(small, alone).generate(prompts)}
    texts = {index: Letters().decode(ids[5:7]) for index, ids in full.items()}
    stopping = [replace(p, sampling=replace(GREEDY, stop_strings=(texts[p.index],))) for p in prompts]
    drafter = ScriptedDrafter(full, VOCAB)
    engine = make_engine(small, alone, 3, Letters(), drafter, records_routes=True)
    samples = all_samples(engine.generate(stopping))
    assert any(sample.finish_reason == "stop" for sample in samples)
    for sample in samples:
        check_routes(small, alone, sample)


def test_a_cancelled_sample_has_the_record_of_what_it_is(small: BuiltModel, alone: ParallelContext):
    engine = make_engine(small, alone, 2, records_routes=True)
    session = engine.open(Limits(context_tokens=40, max_running=3, n_templates=2))
    for prompt in random_prompts(3, VOCAB, SAMPLED):
        session.submit(prompt)
    for _ in range(3):
        session.step()
    session.cancel(1)
    (sample,) = [sample for sample in session.take() if sample.finish_reason == "cancelled"]
    assert sample.response_ids and check_routes(small, alone, sample) == 1
    session.cancel(0)
    session.cancel(2)
    session.step()
    assert session._runner.routes._parts == {}
    engine.close()


def test_records_take_no_rollout_memory(small: BuiltModel, alone: ParallelContext):
    plans = []

    def watch(_) -> None:
        assert isinstance(engine._memory, RolloutMemory)
        plans.append(engine._memory.plan)

    for records in (False, True):
        engine = make_engine(small, alone, 2, records_routes=records)
        engine.generate(random_prompts(1, VOCAB, SAMPLED), progress=watch)
        assert (engine.open(Limits(40, 2))._runner.program.new_record() is not None) == records
        engine.close()
    assert plans[0] == plans[-1]


@pytest.mark.parametrize(("num_experts", "dtype"), [(256, torch.uint8), (257, torch.int16)])
@pytest.mark.parametrize("S", [1, 3])
def test_records_pass_through_the_words_of_a_step(
    small: BuiltModel, num_experts: int, dtype: torch.dtype, S: int
):
    """Two rows, three layers, one expert a token: bytes that do not fill the last word."""
    arch = replace(small.trunk.arch, num_experts=num_experts, experts_per_token=1, num_layers=4, first_k_dense=1)
    format, record = RouteFormat.of(arch), RouteRecord(dtype)
    ids_LRk = (torch.arange(3 * 2 * S).view(3, 2 * S, 1) * 37 + 5) % num_experts
    ids_LRk[0, 0] = num_experts - 1
    for ids_Rk in ids_LRk:
        record.add(ids_Rk)
    routes_nSLk = record.routes().unflatten(0, (2, S))
    assert format == (3, 1, dtype) and routes_nSLk.dtype == dtype
    words_nW = pack_routes(routes_nSLk)
    assert words_nW.shape == (2, format.words(S)) and words_nW.dtype == torch.int32
    found = format.unpack(words_nW, S)
    np.testing.assert_array_equal(found, ids_LRk.transpose(0, 1).unflatten(0, (2, S)).numpy())


def test_a_sequence_that_begins_again_forgets_what_it_had():
    log, routes_TLk = RouteLog(), torch.arange(12, dtype=torch.uint8).view(6, 1, 2)
    row, group = Row(0, slot=0, prompt_ids=(1, 2, 3)), Group(1, slot=1)
    log.prefilled([Chunk(row, 0, 0, 2), Chunk(group, 1, 0, 4)], routes_TLk)
    log.prefilled([Chunk(row, 0, 0, 3)], routes_TLk)
    log.committed(row, routes_TLk[:2].numpy())
    row.response += [7]
    first, second = (Row(1, slot=slot, prompt_ids=(1, 2, 3, 4), response=[5, 6]) for slot in (2, 3))
    log.forked(first, group)
    log.forked(second, group)
    group.slot = None
    log.forget()
    log.committed(first, routes_TLk[5:].numpy())
    assert log.take(row)[:, 0, 0].tolist() == [0, 2, 4, 0]
    assert log.take(first)[:, 0, 0].tolist() == [4, 6, 8, 10, 10]
    assert log.take(second)[:, 0, 0].tolist() == [4, 6, 8, 10]
    assert log.take(row) is None and log._parts == {}
