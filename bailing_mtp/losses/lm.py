"""Next-token cross-entropy of the trunk, or of any hidden states, in token chunks.

Shapes: T tokens of the pack, t of a chunk, H hidden size, v this rank's vocabulary rows.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from bailing_mtp.parallel import vocab


class TokenLoss(NamedTuple):
    """A summed loss and what can be read beside it, all fp32 scalars on the device, not divided by anything."""

    loss_sum: Tensor
    """Differentiable; sum over valid sites."""
    correct_sum: Tensor
    """Valid sites whose argmax is the target."""


def cross_entropy_sum(
    hidden_TH: Tensor,
    head_weight_vH: Tensor,
    target_ids_T: Tensor,
    valid_T: Tensor,
    group: ProcessGroup,
    chunk_tokens: int,
) -> TokenLoss:
    """Sum over valid sites of -log softmax(hidden W^T)[target], vocabulary split over `group`.

    Never more than `chunk_tokens` rows of logits exist at a time, in forward or backward. The gradient of
    `hidden_TH` is this rank's part of a sum over the group (see parallel.vocab.head_apply). A batch without
    valid sites gives 0 and zero gradients, in the same collectives as any other.
    """

    def chunk(logits_tv: Tensor, target_ids_t: Tensor, valid_t: Tensor) -> tuple[Tensor, Tensor]:
        log_prob_t = vocab.log_prob(logits_tv, target_ids_t, group)
        best_t, _ = vocab.argmax(logits_tv.detach(), group)
        correct_t = (best_t == target_ids_t) & valid_t
        return torch.where(valid_t, -log_prob_t, 0.0), correct_t.float()

    loss_T, correct_T = vocab.head_apply(
        hidden_TH, head_weight_vH, chunk, (target_ids_T, valid_T), chunk_tokens
    )
    return TokenLoss(loss_T.sum(), correct_T.sum().detach())
