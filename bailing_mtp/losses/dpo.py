"""Direct preference optimisation (Rafailov et al. 2023, arXiv 2305.18290).

Shapes: P pairs; a column for the chosen and one for the rejected row: [P, 2].
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid


class DpoTerms(NamedTuple):
    """Per pair; only `loss_P` has a gradient."""

    loss_P: Tensor
    reward_P2: Tensor
    """beta * (policy - reference) of the chosen and the rejected row."""


def dpo_terms(policy_P2: Tensor, reference_P2: Tensor, beta: float, label_smoothing: float) -> DpoTerms:
    """Loss per pair from the rows' summed log-probabilities, in their dtype.

    With x = beta * ((pi_c - pi_r) - (ref_c - ref_r)) the loss is -(1 - s) logsigmoid(x) - s logsigmoid(-x), where
    s is the share of labels taken as wrong (conservative DPO).
    """
    log_ratio_P2 = policy_P2 - reference_P2
    x_P = beta * (log_ratio_P2[:, 0] - log_ratio_P2[:, 1])
    loss_P = -(1.0 - label_smoothing) * logsigmoid(x_P) - label_smoothing * logsigmoid(-x_P)
    return DpoTerms(loss_P, beta * log_ratio_P2.detach())


def dpo_metrics(terms: DpoTerms) -> dict[str, Tensor]:
    """Sums over pairs, by metric name; a pair of equal rewards counts as half right."""
    margin_P = terms.reward_P2[:, 0] - terms.reward_P2[:, 1]
    return {
        "dpo/loss": terms.loss_P.detach().sum(),
        "dpo/accuracy": (0.5 + 0.5 * torch.sign(margin_P)).sum(),
        "dpo/margin": margin_P.sum(),
        "dpo/chosen_reward": terms.reward_P2[:, 0].sum(),
        "dpo/rejected_reward": terms.reward_P2[:, 1].sum(),
    }
