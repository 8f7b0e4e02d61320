"""Policy losses and their gradients by hand."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from bailing_mtp.contracts.batch import PackedLayout
from bailing_mtp.losses.documents import document_sums
from bailing_mtp.losses.grpo import Clip, kl_k3, sequence_terms, token_terms, truncated_weights

CLIP = Clip(0.2, 0.3)


def logs(*ratios: float) -> Tensor:
    return torch.tensor([math.log(r) for r in ratios], requires_grad=True)


def test_token_loss_by_hand():
    """Ratios below, inside and above [0.8, 1.3], with advantage 2 and then -2."""
    log_prob_T = logs(0.5, 1.1, 2.0, 0.5, 1.1, 2.0)
    advantage_T = torch.tensor([2.0, 2, 2, -2, -2, -2])
    terms = token_terms(log_prob_T, torch.zeros(6), advantage_T, CLIP)
    torch.testing.assert_close(terms.loss, torch.tensor([-1.0, -2.2, -2.6, 1.6, 2.2, 4.0]))
    torch.testing.assert_close(terms.ratio, torch.tensor([0.5, 1.1, 2.0, 0.5, 1.1, 2.0]))
    assert terms.clipped.tolist() == [0, 0, 1, 1, 0, 0]
    terms.loss.sum().backward()
    torch.testing.assert_close(log_prob_T.grad, torch.tensor([-1.0, -2.2, 0.0, 0.0, 2.2, 4.0]))


def test_ratio_is_to_the_rollouts_log_probability():
    """On-policy the gradient is -A, and the rollout's value gets none."""
    log_prob_T, old_T = torch.tensor([-1.0, -2.0], requires_grad=True), torch.tensor([-1.0, -2.5], requires_grad=True)
    terms = token_terms(log_prob_T, old_T, torch.tensor([0.5, -1.0]), CLIP)
    torch.testing.assert_close(terms.ratio, torch.tensor([1.0, math.exp(0.5)]))
    terms.loss.sum().backward()
    torch.testing.assert_close(log_prob_T.grad, torch.tensor([-0.5, math.exp(0.5)]))
    assert old_T.grad is None


def test_huge_ratios_stay_finite():
    log_prob_T = torch.tensor([-1.0, -200.0], requires_grad=True)
    terms = token_terms(log_prob_T, torch.tensor([-500.0, -1.0]), torch.tensor([0.0, 1.0]), CLIP)
    terms.loss.sum().backward()
    assert terms.loss.isfinite().all() and log_prob_T.grad.isfinite().all()


def test_sequence_loss_by_hand():
    """Documents of 3 and 2 tokens and padding; the first site of each is prompt. Ratio = geometric mean."""
    layout = PackedLayout.build([3, 2, 1], [False, False, True])
    valid_T = torch.tensor([True, True, False, True, False, False])
    log_prob_T = torch.tensor([math.log(1.2), math.log(1.3), math.nan, math.log(2.0), 7.0, math.nan])
    log_prob_T.requires_grad_()
    advantage_N = torch.tensor([1.0, -1.0, 0.0])
    terms = sequence_terms(log_prob_T, torch.zeros(6), advantage_N, valid_T, layout, CLIP)
    mean = math.sqrt(1.2 * 1.3)
    torch.testing.assert_close(terms.ratio, torch.tensor([mean, 2.0, 1.0], dtype=torch.float64))
    torch.testing.assert_close(terms.loss[:2], torch.tensor([-mean, 2.0], dtype=torch.float64))
    terms.loss[:2].sum().backward()
    torch.testing.assert_close(log_prob_T.grad, torch.tensor([-mean / 2, -mean / 2, 0, 2.0, 0, 0]))
    upper = sequence_terms(log_prob_T.detach() + 1, torch.zeros(6), advantage_N, valid_T, layout, CLIP)
    assert upper.clipped.tolist()[:2] == [1, 0] and float(upper.loss[0]) == pytest.approx(-1.3)


def test_kl_estimate_is_unbiased_and_its_gradient_is_the_derivative():
    p, q = torch.tensor([0.7, 0.2, 0.1]).log(), torch.tensor([0.3, 0.3, 0.4]).log()
    values = kl_k3(p, q)
    assert (values >= 0).all()
    torch.testing.assert_close((p.exp() * values).sum(), (p.exp() * (p - q)).sum())
    x = torch.tensor([-1.0], requires_grad=True)
    kl_k3(x, torch.tensor([-1.5])).sum().backward()
    assert float(x.grad) == pytest.approx(1 - math.exp(-0.5), rel=1e-6)


def test_truncated_weights():
    weights = truncated_weights(torch.tensor([-1.0, -1.0, -1.0]), torch.tensor([-1.0, -3.0, 0.0]), 2.0)
    torch.testing.assert_close(weights, torch.tensor([1.0, 2.0, math.exp(-1.0)]))


def test_document_sums():
    layout = PackedLayout.build([2, 0, 3])
    values = torch.tensor([1.0, math.nan, 4.0, 8.0, 16.0])
    valid_T = torch.tensor([True, False, True, False, True])
    assert document_sums(values, valid_T, layout).tolist() == [1, 0, 20]
