"""The policy objective on a real model, and tempered log-probabilities of the head pass."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from bailing_mtp.config import MtpConfig, RlConfig
from bailing_mtp.contracts.policy import PolicyBatch
from bailing_mtp.losses.heads import HeadOptions, head_outputs
from bailing_mtp.rl.samples import PolicyRow, make_policy_batch
from bailing_mtp.training.policy import PolicyObjective
from bailing_mtp.training.state import TrainState
from tests.distributed import worlds
from tests.mtp import models
from tests.rl.test_advantages_and_samples import sample

TEMPERATURE = 0.7
ROWS = [PolicyRow(sample(0, 0, 3, 4), 1.0), PolicyRow(sample(0, 1, 3, 2), -1.0), PolicyRow(sample(1, 0, 1, 3), 0.5)]
BATCH = make_policy_batch(ROWS).padded_to(8)


@pytest.fixture(scope="module")
def state() -> Iterator[TrainState]:
    with worlds.layout(tp=1, ep=1) as context:
        yield models.fixture_state(context)


@pytest.mark.parametrize("temperature", [1.0, 0.5, 2.0])
def test_tempered_log_probs_and_entropy(temperature: float):
    """Chunks of 4 tokens, 12 entries; the MTP loss and its gradient never feel the policy's temperature."""
    generator = torch.Generator().manual_seed(0)
    streams = [torch.randn(16, 8, generator=generator, requires_grad=True) for _ in range(2)]
    head_VH = torch.randn(12, 8, generator=generator)
    batch = dataclasses.replace(BATCH.tokens(), input_ids_T=BATCH.input_ids_T % 12)
    options = HeadOptions(chunk_tokens=4, objective="soft", policy_temperature=temperature, with_entropy=True)
    found = head_outputs(streams[0], (streams[1],), head_VH, batch, None, options)
    log_probs_TV = (streams[0] @ head_VH.T / temperature).log_softmax(-1)
    targets_T = batch.token_ahead(1)
    torch.testing.assert_close(found.log_prob_T, log_probs_TV.gather(1, targets_T[:, None]).squeeze(1))
    torch.testing.assert_close(found.entropy_T, -(log_probs_TV.exp() * log_probs_TV).sum(-1).detach())
    weights_T = torch.arange(16.0)
    plain_T = log_probs_TV.gather(1, targets_T[:, None]).squeeze(1)
    (expected,) = torch.autograd.grad((plain_T * weights_T).sum(), streams[0])
    (grad,) = torch.autograd.grad((found.log_prob_T * weights_T).sum(), streams[0])
    torch.testing.assert_close(grad, expected, atol=1e-4, rtol=1e-4)
    plain = head_outputs(streams[0], (streams[1],), head_VH, batch, None, HeadOptions(4, "soft"))
    assert torch.equal(found.depths[0].loss_T, plain.depths[0].loss_T)
    assert torch.equal(plain.entropy_T, torch.zeros(16))
    if temperature == 1.0:
        assert torch.equal(found.log_prob_T, plain.log_prob_T)


def log_probs(state: TrainState) -> Tensor:
    """Plain torch: tempered log-probability of the response tokens, in order."""
    logits_TV = state.trunk(BATCH).squeeze(1) @ state.trunk_module.head_weight.T / TEMPERATURE
    sites = [t - 1 for t in range(len(BATCH.input_ids_T)) if BATCH.loss_mask_T[t]]
    return torch.stack([logits_TV[t].log_softmax(-1)[BATCH.input_ids_T[t + 1]] for t in sites])


@pytest.mark.parametrize("loss", ["grpo", "gspo"])
def test_against_plain_torch(state: TrainState, loss: str):
    """9 response tokens of 3 samples; rollout values near the trainer's, so that some ratios are clipped."""
    rl = RlConfig(loss=loss, clip_low=0.1, clip_high=0.1, kl_coef=0.5)
    objective = PolicyObjective(rl, MtpConfig(loss_scale=0.2, detach=True), TEMPERATURE, chunk_tokens=8)
    shift_T = torch.tensor([0.3, -0.3, 0.05, 0.0, 0.02, 0.3, 0.3, 0.01, -0.02])
    with torch.no_grad():
        now_n = log_probs(state)
    batch = with_values(now_n + shift_T, now_n - 0.4)
    counts = objective.count(batch)
    assert counts == {"samples": 3, "sites_depth0": 9, "sites_depth1": 8}
    models.clear_gradients(state)
    found = objective(state, batch, {"samples": 6, "sites_depth0": 18, "sites_depth1": 16})
    found.total.backward()
    ours = {name: grad for name, grad in models.main_grads(state).items() if name.startswith("trunk.")}
    models.clear_gradients(state)
    lp_n = log_probs(state)
    log_ratio_n, x_n = lp_n - (now_n + shift_T), now_n - 0.4 - lp_n
    spans, values = ((0, 4, 1.0), (4, 6, -1.0), (6, 9, 0.5)), []
    for begin, end, advantage in spans:
        part = log_ratio_n[begin:end]
        ratio = part.exp() if loss == "grpo" else part.mean().exp()
        values.append(-torch.minimum(ratio * advantage, ratio.clamp(0.9, 1.1) * advantage).sum())
    expected = sum(values) / (18 if loss == "grpo" else 6) + 0.5 * (x_n.exp() - x_n - 1).sum() / 18
    expected.backward()
    mtp = 0.2 * found.sums["mtp/loss_depth1"] / 16
    torch.testing.assert_close(found.total.float(), expected + mtp, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(found.sums["rollout/logprob_gap"], shift_T.abs().sum(), atol=1e-3, rtol=1e-3)
    assert int(found.sums["policy/clipped"]) == (2 if loss == "grpo" else 1)
    for name, grad in ours.items():
        scale = float(grad.abs().max())
        plain = {f"trunk.{n}": p.main_grad for n, p in state.trunk_module.named_parameters()}[name]
        torch.testing.assert_close(grad, plain, atol=1e-3 * scale + 1e-7, rtol=1e-2)


def test_truncated_importance_weighs_the_trainers_own_ratio(state: TrainState):
    objective = PolicyObjective(RlConfig(truncate_importance=1.2), MtpConfig(), TEMPERATURE, 8)
    with torch.no_grad():
        now_n = log_probs(state)
        gap_n = torch.tensor([0.0, 1.0, -1.0, 0.1, 0.0, 2.0, 0.0, 0.0, -0.1])
        batch = dataclasses.replace(with_values(now_n - gap_n, now_n), reference_logprob_T=None)
        batch = dataclasses.replace(batch, old_logprob_T=at_tokens(now_n))
        sums = objective(state, batch, objective.count(batch)).sums
    weights_n = gap_n.exp().clamp(max=1.2)
    advantage_n = torch.tensor([1.0] * 4 + [-1.0] * 2 + [0.5] * 3)
    assert float(sums["policy/loss"]) == pytest.approx(-float((weights_n * advantage_n).sum()), abs=1e-3)
    assert float(sums["policy/ratio"]) == pytest.approx(9, abs=1e-3)


def at_tokens(values_n: Tensor) -> Tensor:
    values_T = torch.zeros(len(BATCH.input_ids_T))
    values_T[BATCH.loss_mask_T] = values_n
    return values_T


def with_values(rollout_n: Tensor, reference_n: Tensor) -> PolicyBatch:
    return dataclasses.replace(
        BATCH, rollout_logprob_T=at_tokens(rollout_n), reference_logprob_T=at_tokens(reference_n)
    )
