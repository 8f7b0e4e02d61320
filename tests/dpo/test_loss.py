"""The DPO loss by hand."""

from __future__ import annotations

import math

import pytest
import torch

from bailing_mtp.losses.dpo import dpo_metrics, dpo_terms

# Pair 0: policy -3, -5 against reference -4, -4; pair 1 the other way round and weaker; pair 2 undecided.
POLICY = torch.tensor([[-3.0, -5.0], [-5.0, -4.5], [-2.0, -2.0]], dtype=torch.float64)
REFERENCE = torch.tensor([[-4.0, -4.0], [-4.0, -4.0], [-2.0, -2.0]], dtype=torch.float64)
X = (0.5 * 2.0, 0.5 * -0.5, 0.0)


def log_sigmoid(x: float) -> float:
    return -math.log1p(math.exp(-x))


@pytest.mark.parametrize("smoothing", [0.0, 0.2])
def test_loss_and_gradient_by_hand(smoothing: float):
    policy = POLICY.clone().requires_grad_()
    terms = dpo_terms(policy, REFERENCE, beta=0.5, label_smoothing=smoothing)
    expected = [-(1 - smoothing) * log_sigmoid(x) - smoothing * log_sigmoid(-x) for x in X]
    assert terms.loss_P.tolist() == pytest.approx(expected, rel=1e-12)
    terms.loss_P.sum().backward()
    slopes = [0.5 * (1 / (1 + math.exp(-x)) - (1 - smoothing)) for x in X]
    assert policy.grad[:, 0].tolist() == pytest.approx(slopes, rel=1e-9)
    assert policy.grad[:, 1].tolist() == pytest.approx([-slope for slope in slopes], rel=1e-9)


def test_metrics_by_hand():
    sums = dpo_metrics(dpo_terms(POLICY, REFERENCE, beta=0.5, label_smoothing=0.0))
    assert float(sums["dpo/loss"]) == pytest.approx(-sum(map(log_sigmoid, X)))
    assert float(sums["dpo/accuracy"]) == 1.5
    assert float(sums["dpo/margin"]) == pytest.approx(sum(X))
    assert float(sums["dpo/chosen_reward"]) == pytest.approx(0.5 * (1 - 1 + 0))
    assert float(sums["dpo/rejected_reward"]) == pytest.approx(0.5 * (-1 - 0.5 + 0))
