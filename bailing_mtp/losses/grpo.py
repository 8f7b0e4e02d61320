"""Policy-gradient losses on rollouts: per token (GRPO) and per sequence (GSPO), as undivided values.

Every log-probability here is tempered: log-softmax of logits / sampling temperature, over the whole vocabulary,
at the token that was drawn. Shapes: T sites of the pack (a site predicts the next token), N documents; one
document is one sample.

Sources: PPO's clipped ratio (Schulman et al. 2017, arXiv 1707.06347) with two clip widths (DAPO, arXiv
2503.14476); GSPO (arXiv 2507.18071); the k3 estimator (Schulman, "Approximating KL divergence", 2020);
truncated importance weights (Yao et al. 2025, "Your efficient RL framework secretly brings you off-policy RL").
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from bailing_mtp.contracts.batch import PackedLayout
from bailing_mtp.losses.documents import document_sums

# exp(20) is far outside every clip; beyond it a ratio only threatens the range of fp32.
MAX_LOG_RATIO = 20.0


@dataclass(frozen=True)
class Clip:
    """Ratios outside [1 - low, 1 + high] stop pulling."""

    low: float
    high: float


class PolicyTerms(NamedTuple):
    """Per site or per document; only `loss` has a gradient. What is not valid means nothing."""

    loss: Tensor
    ratio: Tensor
    clipped: Tensor
    """1 where the clip took the gradient away."""


def token_terms(log_prob_T: Tensor, old_T: Tensor, advantage_T: Tensor, clip: Clip) -> PolicyTerms:
    """-min(r A, clip(r) A) per site, r = exp(log_prob - old); `old_T` are the log-probabilities that the ratio is
    taken to: the rollout's, or the trainer's own before the update (then weigh with `truncated_weights`).
    """
    return _clipped(log_prob_T - old_T.detach(), advantage_T, clip)


def sequence_terms(
    log_prob_T: Tensor, old_T: Tensor, advantage_N: Tensor, valid_T: Tensor, layout: PackedLayout, clip: Clip
) -> PolicyTerms:
    """The same per document, with the geometric mean of its valid sites' ratios. Documents without valid sites
    have ratio 1 and loss -A: leave them out of the sum, or give them advantage 0.
    """
    n_sites_N = document_sums(torch.ones_like(log_prob_T), valid_T, layout)
    total_N = document_sums(log_prob_T - old_T.detach(), valid_T, layout)
    return _clipped(total_N / n_sites_N.clamp(min=1.0), advantage_N, clip)


def kl_k3(log_prob_T: Tensor, reference_T: Tensor) -> Tensor:
    """exp(x) - x - 1 with x = reference - log_prob: at tokens drawn from the policy an unbiased, never negative
    estimate of KL(policy || reference). Differentiable in `log_prob_T`.
    """
    x_T = _bounded(reference_T.detach() - log_prob_T)
    return x_T.exp() - x_T - 1.0


def truncated_weights(trainer_T: Tensor, rollout_T: Tensor, largest: float) -> Tensor:
    """min(exp(trainer - rollout), largest): weights for tokens that the rollout's kernels drew with slightly other
    probabilities than the trainer gives them, before any update. No gradient.
    """
    return _bounded((trainer_T - rollout_T).detach()).exp().clamp(max=largest)


def _clipped(log_ratio: Tensor, advantage: Tensor, clip: Clip) -> PolicyTerms:
    ratio = _bounded(log_ratio).exp()
    free = ratio * advantage
    held = ratio.clamp(1.0 - clip.low, 1.0 + clip.high) * advantage
    return PolicyTerms(-torch.minimum(free, held), ratio.detach(), (held < free).detach().to(ratio.dtype))


def _bounded(log_ratio: Tensor) -> Tensor:
    return log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
