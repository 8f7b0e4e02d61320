"""Routers that take the rollout's choices: nothing changes where they are their own, and each is used where not.

Shapes: T tokens of the pack, L expert layers of the trunk, k experts per token, E experts.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from torch import Tensor

from bailing_mtp.config import ConfigError, MtpConfig, RlConfig, check_replay
from bailing_mtp.contracts.policy import PolicyBatch
from bailing_mtp.contracts.samples import SamplingParams
from bailing_mtp.model.replay import RouteReplay
from bailing_mtp.model.router import GroupLimitedRouter, route_weights, select_experts
from bailing_mtp.parallel.context import ParallelContext
from bailing_mtp.rl.samples import PolicyRow, make_policy_batch
from bailing_mtp.training.policy import PolicyObjective
from bailing_mtp.training.policy_scores import with_logprobs
from bailing_mtp.training.state import TrainState, build_state
from bailing_mtp.training.step import accumulate_gradients, train_step
from tests.distributed import worlds
from tests.mtp import models
from tests.rl.test_advantages_and_samples import sample
from tests.rollout.engine_rig import all_samples, make_engine, random_prompts
from tests.rollout.routes import random_routes, routers

TEMPERATURE = 0.8
MTP = MtpConfig(loss_scale=0.5, objective="soft", detach=True)
OFF, ON = (PolicyObjective(RlConfig(routing_replay=on), MTP, TEMPERATURE) for on in (False, True))
PER_TOKEN, N_EXPERTS = 4, 16


@pytest.fixture(scope="module")
def context() -> Iterator[ParallelContext]:
    with worlds.layout(tp=1, ep=1) as found:
        yield found


@pytest.fixture(scope="module")
def batch(context: ParallelContext) -> PolicyBatch:
    """Nine samples of three prompts, with the routes of their rollout, and padding."""
    engine = make_engine(worlds.fixture_model("moe", context), context, 2, records_routes=True)
    sampling = SamplingParams(temperature=TEMPERATURE, max_new_tokens=9, seed=3)
    samples = all_samples(engine.generate(random_prompts(3, 512, sampling, samples=3)))
    return make_policy_batch([PolicyRow(found, 1.0 - 0.7 * found.sample_index) for found in samples]).padded_to(16)


@pytest.fixture(scope="module")
def other(batch: PolicyBatch) -> PolicyBatch:
    """The same samples with routes that no router would choose."""
    routes_TLk = random_routes(batch.routes_TLk.shape, N_EXPERTS)
    return dataclasses.replace(batch, routes_TLk=torch.where(batch.routes_TLk >= 0, routes_TLk, -1))


def gradients(state: TrainState, batch: PolicyBatch, objective: PolicyObjective) -> dict[str, Tensor]:
    accumulate_gradients(state, [batch], objective)
    return models.main_grads(state)


def test_own_choices_replayed_change_nothing(context: ParallelContext, batch: PolicyBatch):
    states = [models.fixture_state(context) for _ in range(2)]
    off, on = (gradients(state, batch, objective) for state, objective in zip(states, (OFF, ON), strict=True))
    for name, grad in off.items():
        torch.testing.assert_close(on[name], grad, atol=1e-6, rtol=1e-6)
    for plain, replaying in zip(*(routers(state.trunk_module) for state in states), strict=True):
        assert torch.equal(plain.local_tokens_per_expert, replaying.local_tokens_per_expert)
    metrics = train_step(models.fixture_state(context), [batch], ON).metrics
    assert metrics["policy/ratio"] == pytest.approx(1, abs=1e-4) and metrics["rollout/logprob_gap"] < 1e-4
    assert metrics["rollout/route_agreement"] == 1
    assert "rollout/route_agreement" not in train_step(models.fixture_state(context), [batch], OFF).metrics


def test_every_layer_takes_every_record_and_weighs_it_itself(context: ParallelContext, other: PolicyBatch):
    """Maps, weights and counts of each trunk router, and its own choice where nothing is recorded."""
    state, seen = models.fixture_state(context), []
    for router in routers(state.trunk_module):
        router.register_forward_hook(lambda module, args, out: seen.append((args[0].detach(), *out)))
    found = accumulate_gradients(state, [other], ON)
    routes_TLk, n_agreed = other.routes_TLk.long(), 0
    recorded_T, padding_T = routes_TLk[:, 0, 0] >= 0, other.layout.padding_T
    assert len(seen) == routes_TLk.shape[1] and int((~recorded_T & ~padding_T).sum()) > 0 and int(padding_T.sum()) > 0
    for layer, (router, (x, probs_TE, map_TE)) in enumerate(zip(routers(state.trunk_module), seen, strict=True)):
        scores_TE = torch.sigmoid(router.gating(x).view(-1, N_EXPERTS).float())
        own_Tk = select_experts(scores_TE + router.expert_bias, 4, 2, PER_TOKEN)
        ids_Tk = torch.where(recorded_T[:, None], routes_TLk[:, layer], own_Tk)
        weights_Tk = route_weights(scores_TE, ids_Tk, router.config.moe_router_topk_scaling_factor)
        torch.testing.assert_close(probs_TE, torch.zeros_like(probs_TE).scatter(-1, ids_Tk, weights_Tk))
        assert torch.equal(map_TE, torch.zeros_like(map_TE).scatter(-1, ids_Tk, True))
        assert torch.equal(router.local_tokens_per_expert, map_TE[~padding_T].sum(0).float())
        own_TE = torch.zeros_like(map_TE).scatter(-1, own_Tk, True)
        n_agreed += int((own_TE & map_TE)[recorded_T].sum())
        assert router.weight.main_grad.abs().max() > 0 and router._replay is None
    assert int(found.sums["rollout/route_agreement"]) == n_agreed
    assert 0.1 < n_agreed / found.counts["routes"] < 0.6
    assert found.counts["routes"] == int(recorded_T.sum()) * state.trunk_module.arch.n_expert_layers * PER_TOKEN


def test_one_token_of_one_layer_moves_what_comes_after_it(context: ParallelContext, batch: PolicyBatch):
    state = models.fixture_state(context)
    (before,) = with_logprobs([batch], "old_logprob_T", state.trunk_module, context, TEMPERATURE)
    n_prompt = int(batch.loss_mask_T.long().argmax())
    for layer in range(batch.routes_TLk.shape[1]):
        routes_TLk = batch.routes_TLk.clone()
        routes_TLk[n_prompt + 2, layer] = (routes_TLk[n_prompt + 2, layer] + 1) % N_EXPERTS
        changed = dataclasses.replace(batch, routes_TLk=routes_TLk)
        (after,) = with_logprobs([changed], "old_logprob_T", state.trunk_module, context, TEMPERATURE)
        moved_T = (after.old_logprob_T - before.old_logprob_T).abs() > 1e-5
        assert moved_T.nonzero().min() == n_prompt + 3
        assert moved_T.nonzero().max() < batch.layout.document_end_T[0]


def test_the_gradient_flows_through_the_routers_own_scores(context: ParallelContext):
    (router, *_) = routers(worlds.fixture_model("moe", context).trunk)
    generator = torch.Generator().manual_seed(0)
    routes_TLk = random_routes((6, 1, PER_TOKEN), N_EXPERTS)
    logits = torch.randn(6, 1, N_EXPERTS, generator=generator, requires_grad=True)
    upstream_TE = torch.randn(6, N_EXPERTS, generator=generator)
    with router.replaying(RouteReplay.of(routes_TLk, context), 0):
        probs_TE, _ = router.routing(logits)
    (grad,) = torch.autograd.grad((probs_TE * upstream_TE).sum(), logits)
    chosen_Tk = torch.sigmoid(logits.squeeze(1)).gather(-1, routes_TLk[:, 0].long())
    weights_Tk = chosen_Tk / chosen_Tk.sum(-1, keepdim=True) * router.config.moe_router_topk_scaling_factor
    expected = torch.autograd.grad((weights_Tk * upstream_TE.gather(-1, routes_TLk[:, 0].long())).sum(), logits)
    torch.testing.assert_close(grad, expected[0])


def test_recomputed_layers_replay_and_count_the_same(context: ParallelContext, other: PolicyBatch):
    found = []
    for recompute in ("none", "full"):
        state = models.fixture_state(context, dataclasses.replace(worlds.FP32, recompute=recompute))
        sums = accumulate_gradients(state, [other, other], ON).sums
        counts = [router.local_tokens_per_expert.clone() for router in routers(state.trunk_module)]
        found.append((models.main_grads(state), counts, sums["rollout/route_agreement"]))
    (plain, plain_counts, plain_agreed), (again, counts, agreed) = found
    assert torch.equal(agreed, plain_agreed) and all(map(torch.equal, counts, plain_counts))
    for name, grad in plain.items():
        torch.testing.assert_close(again[name], grad, atol=1e-6, rtol=1e-5)


def test_layers_without_a_dispatcher_replay_the_same(context: ParallelContext, other: PolicyBatch):
    results = []
    for experts in ("loop", "grouped"):
        settings = dataclasses.replace(worlds.FP32, experts=experts)
        built = worlds.fixture_model("moe", context, settings)
        state = build_state(built, context, worlds.OPTIM, 10, models.PLAIN_DDP)
        grads = gradients(state, other, ON)
        counts = [router.local_tokens_per_expert.clone() for router in routers(state.trunk_module)]
        results.append((grads, counts))
    (loop, loop_counts), (grouped, grouped_counts) = results
    for name, grad in loop.items():
        torch.testing.assert_close(grouped[name], grad, atol=1e-6, rtol=1e-4, msg=name)
    assert loop_counts and all(torch.equal(*pair) for pair in zip(loop_counts, grouped_counts, strict=True))


def test_the_mtp_layer_never_replays(
    context: ParallelContext, other: PolicyBatch, monkeypatch: pytest.MonkeyPatch
):
    """Each trunk layer is asked once and in order, and the MTP layer's router chooses by its own scores."""
    asked, chosen = [], RouteReplay.chosen

    def spy(replay: RouteReplay, layer: int, own_ids_tk: Tensor) -> Tensor:
        asked.append(layer)
        return chosen(replay, layer, own_ids_tk)

    def check(router: GroupLimitedRouter, args: tuple, out: tuple) -> None:
        scores_TE = torch.sigmoid(router.gating(args[0]).view(-1, N_EXPERTS).float())
        own_Tk = select_experts(scores_TE + router.expert_bias, 4, 2, PER_TOKEN)
        assert torch.equal(out[1], torch.zeros_like(out[1]).scatter(-1, own_Tk, True))
        asked.append("mtp")

    monkeypatch.setattr(RouteReplay, "chosen", spy)
    state = models.fixture_state(context)
    (router,) = routers(state.mtp_module)
    router.register_forward_hook(check)
    accumulate_gradients(state, [other], ON)
    assert asked == [*range(state.trunk_module.arch.n_expert_layers), "mtp"]


def test_old_log_probs_replay_and_those_of_the_reference_do_not(context: ParallelContext, other: PolicyBatch):
    """With ratios taken to the old log-probabilities, those of a policy that has not moved are 1."""
    state = models.fixture_state(context)
    (scored,) = with_logprobs([other], "old_logprob_T", state.trunk_module, context, TEMPERATURE)
    (scored,) = with_logprobs([scored], "reference_logprob_T", state.trunk_module, context, TEMPERATURE)
    plain = dataclasses.replace(other, routes_TLk=None)
    (plain,) = with_logprobs([plain], "old_logprob_T", state.trunk_module, context, TEMPERATURE)
    assert torch.equal(scored.reference_logprob_T, plain.old_logprob_T)
    assert float((scored.old_logprob_T - plain.old_logprob_T).abs().max()) > 1e-2
    objective = PolicyObjective(RlConfig(routing_replay=True, truncate_importance=2.0), MTP, TEMPERATURE)
    metrics = train_step(state, [scored], objective).metrics
    assert metrics["policy/ratio"] == pytest.approx(1, abs=1e-5) and metrics["rollout/logprob_gap"] > 1e-3


def test_a_rank_without_samples_brings_the_same_sums(context: ParallelContext, batch: PolicyBatch):
    found = train_step(models.fixture_state(context), [make_policy_batch([]), batch], ON)
    assert found.metrics["rollout/route_agreement"] == 1
    empty = train_step(models.fixture_state(context), [make_policy_batch([])], ON)
    assert "rollout/route_agreement" not in empty.metrics
    with pytest.raises(AssertionError, match="needs recorded routes"):
        train_step(models.fixture_state(context), [dataclasses.replace(batch, routes_TLk=None)], ON)


def test_routes_of_another_model_are_noticed(context: ParallelContext, batch: PolicyBatch):
    """Such as one with the MTP layer's choices among them."""
    more = dataclasses.replace(batch, routes_TLk=torch.cat([batch.routes_TLk, batch.routes_TLk[:, :1]], 1))
    with pytest.raises(AssertionError, match="routes"):
        accumulate_gradients(models.fixture_state(context), [more], ON)


def test_routes_stand_at_their_tokens():
    routes = [np.arange(n * 2, dtype=np.uint8).reshape(n, 1, 2) for n in (6, 5)]
    rows = [PolicyRow(sample(0, i, 2, 4, routes=part), 1.0) for i, part in enumerate(routes)]
    found = make_policy_batch(rows).padded_to(5).to(torch.device("cpu")).routes_TLk
    assert found.dtype == torch.int16
    assert found[:, 0, 0].tolist() == [0, 2, 4, 6, 8, 10, 0, 2, 4, 6, 8, -1, -1, -1, -1]
    for wrong in (None, routes[0][:4], np.concatenate([routes[0], routes[0][:1]])):
        with pytest.raises(ValueError, match="prompt 0 sample 1: has routes of . of its 6 tokens"):
            make_policy_batch([rows[0], PolicyRow(sample(0, 1, 2, 4, routes=wrong), 1.0)])
    assert make_policy_batch([PolicyRow(sample(0, 0, 2, 4), 1.0)]).routes_TLk is None


def test_a_model_without_experts_is_refused():
    check_replay(4)
    with pytest.raises(ConfigError, match="rl.routing_replay: true needs expert layers and the model has none"):
        check_replay(0)
