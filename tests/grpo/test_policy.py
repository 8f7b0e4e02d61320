"""Rollout and trainer on one set of weights: ratios of 1, no stale drafter, no trunk moved by the MTP layer."""

from __future__ import annotations

import dataclasses
import gc
import weakref
from collections.abc import Iterator, Sequence
from types import ModuleType

import pytest
import torch

from bailing_mtp.config import MtpConfig, OptimConfig, RlConfig
from bailing_mtp.contracts.policy import PolicyBatch
from bailing_mtp.contracts.samples import SamplingParams
from bailing_mtp.kernels.reference import head as head_kernels
from bailing_mtp.model.build import BuiltModel
from bailing_mtp.parallel.context import ParallelContext
from bailing_mtp.rl.samples import PolicyRow, make_policy_batch
from bailing_mtp.rollout.engine import RolloutEngine
from bailing_mtp.rollout.stats import RolloutStats
from bailing_mtp.training.objective import PretrainObjective
from bailing_mtp.training.policy import PolicyObjective
from bailing_mtp.training.policy_scores import with_logprobs
from bailing_mtp.training.state import DdpOptions, TrainState, build_state
from bailing_mtp.training.step import train_step
from bailing_mtp.weights.view import StaleWeights, publish
from tests.distributed import worlds
from tests.mtp import models
from tests.rollout.engine_rig import all_samples, make_engine, random_prompts

VOCAB, DRAFTS = 512, 2
STILL = dataclasses.replace(worlds.FP32, expert_bias_rate=0.0)
SOFT = MtpConfig(loss_scale=0.5, objective="soft", detach=True)


@pytest.fixture(scope="module")
def context() -> Iterator[ParallelContext]:
    with worlds.layout(tp=1, ep=1) as found:
        yield found


def engine_of(state: TrainState, drafts: int = DRAFTS, **config: object) -> RolloutEngine:
    built = BuiltModel(state.trunk_module, state.mtp_module)
    engine = make_engine(built, state.context, drafts, clock=state.clock, **config)
    for module in built.modules:
        module.train()
    return engine


def roll(engine: RolloutEngine, rollout_step: int = 0, **sampling: object) -> list[PolicyRow]:
    """Four samples of each of three prompts; advantages that differ."""
    params = SamplingParams(**{"max_new_tokens": 10, "seed": 3, **sampling})
    groups = engine.generate(random_prompts(3, VOCAB, params, samples=4), rollout_step)
    return [PolicyRow(sample, 1.0 - 0.7 * sample.sample_index) for sample in all_samples(groups)]


@pytest.mark.parametrize(("temperature", "top_p"), [(0.7, 1.0), (1.0, 1.0), (1.3, 1.0), (0.7, 0.9), (1.3, 0.9)])
def test_the_ratio_of_an_unchanged_policy_is_one(context: ParallelContext, temperature: float, top_p: float):
    state = models.fixture_state(context)
    batch = make_policy_batch(roll(engine_of(state), temperature=temperature, top_p=top_p))
    (scored,) = with_logprobs([batch], "old_logprob_T", state.trunk_module, context, temperature)
    gap_T = (scored.old_logprob_T - batch.rollout_logprob_T).abs()
    assert float(gap_T.max()) < 1e-4 and int((scored.old_logprob_T != 0).sum()) == int(batch.loss_mask_T.sum()) == 120
    assert state.trunk_module.training
    metrics = train_step(state, [batch], PolicyObjective(RlConfig(), SOFT, temperature)).metrics
    assert metrics["policy/ratio"] == pytest.approx(1, abs=1e-4) and metrics["policy/clipped"] == 0
    assert metrics["rollout/logprob_gap"] < 1e-4


@pytest.mark.parametrize("kernels", [None, head_kernels], ids=["torch", "one pass"])
def test_old_log_probabilities_are_the_objectives_bit_for_bit(context: ParallelContext, kernels: ModuleType | None):
    state = models.fixture_state(context)
    state.trunk_module.head_kernels = kernels
    batch = make_policy_batch(roll(engine_of(state)))
    (scored,) = with_logprobs([batch], "old_logprob_T", state.trunk_module, context, 0.7)
    ours_T = PretrainObjective(MtpConfig()).heads(state, batch, 0.7).log_prob_T.detach().roll(1)
    assert torch.equal(scored.old_logprob_T[batch.loss_mask_T], ours_T[batch.loss_mask_T])


def test_a_second_minibatch_has_true_ratios(context: ParallelContext):
    """Without a step between, its ratio is 1; after one, it is what the moved weights say."""
    state, objective = models.fixture_state(context), PolicyObjective(RlConfig(), SOFT)
    rows = roll(engine_of(state))
    first, second = (make_policy_batch(rows[i::2]) for i in range(2))
    train_step(state, [first], objective)
    (now,) = with_logprobs([second], "old_logprob_T", state.trunk_module, context, 1.0)
    expected = (now.old_logprob_T - second.rollout_logprob_T)[second.loss_mask_T].exp().mean()
    ratio = train_step(state, [second], objective).metrics["policy/ratio"]
    assert ratio == pytest.approx(float(expected), abs=1e-5) and abs(ratio - 1) > 1e-3


def test_drafter_and_verifier_are_the_trainers_own_weights(context: ParallelContext):
    state = models.fixture_state(context)
    engine = engine_of(state)
    batch = make_policy_batch(roll(engine))
    view = publish(state.trunk_module, state.mtp_module, worlds.shard_of(context), state.clock)
    before = view.mtp.eh_proj_H2H.clone(), view.head_vH.clone()
    train_step(state, [batch], PolicyObjective(RlConfig(), SOFT))
    assert view.mtp.eh_proj_H2H.data_ptr() == state.mtp_module.eh_proj.weight.data_ptr()
    assert view.head_vH.data_ptr() == state.trunk_module.head_weight.data_ptr()
    assert not torch.equal(view.mtp.eh_proj_H2H, before[0]) and not torch.equal(view.head_vH, before[1])
    with pytest.raises(StaleWeights, match="published at version 0, but the trainer is at 1"):
        view.require_current()
    (row, *_) = roll(engine, 1)
    assert set(row.sample.versions) == {1}


def test_a_session_under_way_notices_an_optimizer_step(context: ParallelContext):
    state = models.fixture_state(context)
    engine = engine_of(state, keep_memory=False)
    batch = make_policy_batch(roll(engine))
    prompts = random_prompts(1, VOCAB, SamplingParams(max_new_tokens=20), samples=2)
    session = engine.open(engine._limits(prompts))
    session.submit(prompts[0])
    assert session.step()
    train_step(state, [batch], PolicyObjective(RlConfig(), SOFT))
    with pytest.raises(StaleWeights):
        session.step()
    engine.close()


def test_a_step_without_learning_rate_leaves_the_rollout_as_it_was(context: ParallelContext):
    built = worlds.fixture_model("moe", context, STILL)
    still = OptimConfig(lr=1e-30, schedule="constant", weight_decay=0.0)
    state = build_state(built, context, still, 10, DdpOptions(overlap_grad_reduce=False))
    engine = engine_of(state)
    before = roll(engine)
    length = engine.stats.summary()["accept_length"]
    train_step(state, [make_policy_batch(before)], PolicyObjective(RlConfig(), SOFT))
    after = roll(engine)
    assert state.clock.trained == 1 and [r.sample.response_ids for r in after] == [
        r.sample.response_ids for r in before
    ]
    assert engine.stats.summary()["accept_length"] == length > 1


def steps_on(state: TrainState, batches: Sequence[PolicyBatch], mtp: MtpConfig) -> dict[str, torch.Tensor]:
    """Five steps, the later ones on batches that the policy has already moved away from, so that clipping acts."""
    objective = PolicyObjective(RlConfig(clip_low=0.02, clip_high=0.02), mtp, 0.8)
    clipped = [train_step(state, [batches[i % len(batches)]], objective).metrics["policy/clipped"] for i in range(5)]
    assert max(clipped) > 0.01
    return models.weights(state)


def test_the_trunk_is_bit_equal_with_the_mtp_loss_off_frozen_and_detached(context: ParallelContext):
    """Five steps on the same recorded rollouts; frozen: the layer drafts, but is in no optimizer."""
    rows = roll(engine_of(models.fixture_state(context)), temperature=0.8)
    batches = [make_policy_batch(rows[i::3]) for i in range(3)]
    on = steps_on(models.fixture_state(context), batches, SOFT)
    off = steps_on(models.fixture_state(context), batches, MtpConfig())
    built = worlds.fixture_model("moe", context)
    start = built.mtp.eh_proj.weight.clone()
    frozen = build_state(built, context, worlds.OPTIM, 10, models.PLAIN_DDP, trains_mtp=False)
    assert frozen.mtp is None and frozen.mtp_module is built.mtp and len(frozen.chunks) == 1
    only_trunk = steps_on(frozen, batches, MtpConfig())
    trunk = [name for name in on if name.startswith("trunk.")]
    assert trunk == list(only_trunk) and any("expert_bias" in name for name in trunk)
    assert all(torch.equal(on[name], off[name]) and torch.equal(on[name], only_trunk[name]) for name in trunk)
    assert torch.equal(built.mtp.eh_proj.weight, start) and not torch.equal(on["mtp.eh_proj.weight"], start)


@pytest.mark.parametrize(("keep", "offload"), [(False, "none"), (False, "cpu"), (True, "none")])
@pytest.mark.parametrize("drafts", [0, DRAFTS])
def test_memory_over_ten_switches(context: ParallelContext, drafts: int, keep: bool, offload: str):
    """Given back after every rollout, or the same all along; in both cases nobody else holds a tensor of it. The
    weights stay where they are, and offloaded optimizer states are out of the way while a rollout runs."""
    optim = worlds.OPTIM.model_copy(update={"offload": offload})
    state = build_state(worlds.fixture_model("moe", context), context, optim, 10, models.PLAIN_DDP)
    engine = engine_of(state, drafts, keep_memory=keep, context_tokens=32)
    all_states = 8 * sum(p.numel() for chunk in state.chunks for p in chunk.parameters())
    addresses = [p.data_ptr() for chunk in state.chunks for p in chunk.parameters()]
    held: list[weakref.ref[torch.Tensor]] = []
    seen: list[int] = []

    def watch(stats: RolloutStats) -> None:
        seen.append(engine.memory_bytes)
        assert state.offload is None or state.step == 0 or state.offload.host_bytes == all_states
        held.extend(weakref.ref(tensor) for tensor in engine._memory.tensors())

    for step in range(10):
        params = SamplingParams(max_new_tokens=4, seed=step)
        groups = engine.generate(random_prompts(2, VOCAB, params, seed=step, samples=2), step, watch)
        assert (engine.memory_bytes > 0) == keep and live_bytes(held) == engine.memory_bytes
        rows = [PolicyRow(sample, 1.0 - sample.sample_index) for sample in all_samples(groups)]
        train_step(state, [make_policy_batch(rows)], PolicyObjective(RlConfig(), SOFT))
    assert len(set(seen)) == 1 and seen[0] > 0
    assert addresses == [p.data_ptr() for chunk in state.chunks for p in chunk.parameters()]
    engine.release()
    assert engine.memory_bytes == live_bytes(held) == 0


def live_bytes(held: list[weakref.ref[torch.Tensor]]) -> int:
    gc.collect()
    live = {id(tensor): tensor for ref in held if (tensor := ref()) is not None}
    return sum(tensor.numel() * tensor.element_size() for tensor in live.values())
