"""Decode steps as CUDA graphs: equal to eager ones bit for bit, never waiting, and gone when their memory is."""

from __future__ import annotations

from typing import NamedTuple

import pytest
import torch

from bailing_mtp.config import RolloutConfig
from bailing_mtp.contracts.architecture import Architecture
from bailing_mtp.contracts.samples import Prompt, Sample, SamplingParams
from bailing_mtp.parallel.context import ParallelContext
from bailing_mtp.rollout.engine import RolloutEngine
from bailing_mtp.rollout.lockstep import buckets
from bailing_mtp.rollout.requests import Limits
from bailing_mtp.weights.view import WeightsView
from recipes.bench_case import Draw
from recipes.bench_weights import random_view
from tests.weights.stand_in import tiny_config

pytestmark = pytest.mark.gpu

PLAIN = SamplingParams(max_new_tokens=40, seed=3)
MIB = 2**20


class Rig(NamedTuple):
    """Random weights, and the GPU that holds them."""

    view: WeightsView
    context: ParallelContext


@pytest.fixture(scope="module")
def rig(context: ParallelContext) -> Rig:
    sizes = {
        "hidden_size": 256, "head_dim": 64, "v_head_dim": 64, "vocab_size": 5000, "kv_lora_rank": 64,
        "qk_nope_head_dim": 64, "qk_rope_head_dim": 32, "rotary_dim": 32,
    }  # fmt: skip
    arch = Architecture.from_hf(tiny_config(**sizes), "test")
    return Rig(random_view(arch, Draw(context.device, torch.bfloat16, 1)), context)


def make_engine(rig: Rig, k: int, told: list[str] | None = None, **config: object) -> RolloutEngine:
    settings = {"max_running": 24, "keep_memory": True, "kernels": "triton", "cuda_graphs": True} | config
    told = [] if told is None else told
    rollout = RolloutConfig(speculative_tokens=k, **settings)
    return RolloutEngine(lambda: rig.view, rig.context, rollout, tell=told.append)


def prompts(n: int, sampling: SamplingParams = PLAIN) -> list[Prompt]:
    return [Prompt(prompt_ids=tuple(range(1, 2 + i % 7)), index=i, sampling=sampling) for i in range(n)]


def samples(engine: RolloutEngine, asked: list[Prompt], step: int = 0) -> list[Sample]:
    return [sample for group in engine.generate(asked, step) for sample in group.samples]


@pytest.mark.parametrize("k", [0, 2])
@pytest.mark.parametrize("n", [1, 3, 11, 24])
def test_a_graph_is_the_eager_step_bit_for_bit(rig: Rig, k: int, n: int):
    """Tokens and log-probabilities; rows end at other times, so that several buckets take part."""
    asked = prompts(n) + [
        Prompt(prompt_ids=(9, 8), index=100 + i, sampling=SamplingParams(max_new_tokens=3 + 2 * i, seed=i))
        for i in range(n // 2)
    ]
    graphed, eager = make_engine(rig, k), make_engine(rig, k, cuda_graphs=False)
    found, expected = samples(graphed, asked), samples(eager, asked)
    assert found == expected
    shapes = {shape.rows for shape in graphed._steps.graphs._graphs}
    assert shapes <= set(buckets(24)) and len(shapes) >= (2 if n > 3 else 1)
    assert all(shape.drafts == k for shape in graphed._steps.graphs._graphs)
    for engine in (graphed, eager):
        engine.release()


@pytest.mark.parametrize("rules", [{"top_p": 0.8}, {"suppress_token_ids": (3, 4)}, {"temperature": 0.0}])
def test_every_set_of_rules_can_be_captured(rig: Rig, rules: dict):
    asked = prompts(5, SamplingParams(max_new_tokens=12, seed=3, **rules)) + [Prompt(prompt_ids=(5,), index=50)]
    asked[-1] = Prompt(prompt_ids=(5,), index=50, sampling=PLAIN)
    graphed, eager = make_engine(rig, 2), make_engine(rig, 2, cuda_graphs=False)
    found, expected = samples(graphed, asked), samples(eager, asked)
    for ours, theirs in zip(found, expected, strict=True):
        assert ours.response_ids == theirs.response_ids and ours.logprobs == theirs.logprobs
    graphed.release(), eager.release()


@pytest.mark.parametrize("k", [0, 2])
def test_the_host_waits_for_nothing_inside_a_step(rig: Rig, k: int):
    engine = make_engine(rig, k)
    session = engine.open(Limits(context_tokens=400, max_running=8, n_templates=0))
    for prompt in prompts(8, SamplingParams(max_new_tokens=380, seed=1)):
        session.submit(prompt)
    while len(session._scheduler.running) < 8:
        session.step()
    for _ in range(4):
        session.step()
    before = session.stats.tokens
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(40):
            assert session.step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert session.stats.tokens >= before + 8 * 40
    assert len(session._flights) == 1
    session.drain()
    engine.release()


def test_graphs_outlive_updates_of_the_weights_and_many_rollouts(rig: Rig):
    told: list[str] = []
    engine, asked = make_engine(rig, 2, told), prompts(9)
    first = samples(engine, asked)
    with torch.no_grad():
        rig.view.head_vH.mul_(2.0)  # and back, exactly
    try:
        changed = samples(engine, asked)
        assert changed == samples(make_engine(rig, 2, cuda_graphs=False), asked) != first
    finally:
        with torch.no_grad():
            rig.view.head_vH.div_(2.0)
    assert samples(engine, asked) == first
    for step in range(10):
        samples(engine, asked, step)
    assert len(engine._steps.graphs) == sum("capturing" in line for line in told)
    engine.release()


@pytest.mark.parametrize("graphs", [False, True])
def test_memory_returns_to_where_it_was(rig: Rig, graphs: bool):
    """After a first rollout, which leaves the libraries their workspaces."""
    samples(make_engine(rig, 2, keep_memory=False), prompts(9))
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    engine = make_engine(rig, 2, keep_memory=False, cuda_graphs=graphs)
    for step in range(3):
        samples(engine, prompts(9), step)
        assert engine.memory_bytes == 0
        torch.cuda.synchronize()
        assert abs(torch.cuda.memory_allocated() - before) <= MIB


def test_many_requests_over_few_slots(rig: Rig):
    """200 requests of other lengths over 8 slots with graphs: the tokens of eager steps, nothing left behind."""
    asked = [
        Prompt(
            prompt_ids=(1 + i % 9,) * (1 + i % 5),
            index=i,
            sampling=SamplingParams(max_new_tokens=1 + i % 13, seed=i),
        )
        for i in range(200)
    ]
    graphed, eager = (make_engine(rig, 2, max_running=8, cuda_graphs=on) for on in (True, False))
    found, expected = samples(graphed, asked), samples(eager, asked)
    assert [s.response_ids for s in found] == [s.response_ids for s in expected]
    assert all(len(s.response_ids) == 1 + s.prompt_index % 13 for s in found)
    graphed.release(), eager.release()
