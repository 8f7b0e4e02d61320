"""What losses read off a chunk of logits, in plain torch.

Shape legend: t rows of a chunk, r rows of the trunk's chunk, v vocabulary rows of this rank. Every function speaks
of this rank's rows alone; the caller joins the ranks.
"""

from typing import NamedTuple

import torch
from torch import Tensor


class RowStats(NamedTuple):
    """Of scale * logits, row by row."""

    max_t: Tensor
    sum_t: Tensor
    """Sum of exp(x - max)."""
    weighted_t: Tensor
    """Sum of exp(x - max) * (x - max)."""
    best_t: Tensor
    """int64; the first of the largest."""
    target_t: Tensor
    """x at the target, 0 where the target is another rank's."""


def row_stats(logits_tv: Tensor, target_t: Tensor, scale: float) -> RowStats:
    """One pass over fp32 logits. `target_t`: ids counted from this rank's first row; may lie outside."""
    x_tv, v = logits_tv * scale, logits_tv.shape[-1]
    max_t, best_t = x_tv.amax(-1), x_tv.argmax(-1)
    shifted_tv = x_tv - max_t.unsqueeze(-1)
    exp_tv = shifted_tv.exp()
    weighted_tv = torch.where(exp_tv == 0, 0.0, exp_tv * shifted_tv)
    here_t = (target_t >= 0) & (target_t < v)
    found_t = x_tv.gather(-1, target_t.clamp(0, v - 1).unsqueeze(-1)).squeeze(-1)
    return RowStats(max_t, exp_tv.sum(-1), weighted_tv.sum(-1), best_t, torch.where(here_t, found_t, 0.0))


def pair_stats(
    p_rv: Tensor, p_lse_r: Tensor, p_rows_t: Tensor, q_tv: Tensor, q_lse_t: Tensor, scale: float
) -> tuple[Tensor, Tensor]:
    """Of the distributions exp(scale * logits - lse): sum of min(p, q), and sum of p * log q; both [t].

    p_rows_t: the row of p that each row of q meets.
    """
    p_prob_tv = (p_rv[p_rows_t] * scale - p_lse_r[p_rows_t].unsqueeze(-1)).exp()
    q_log_tv = q_tv * scale - q_lse_t.unsqueeze(-1)
    cross_tv = torch.where(p_prob_tv == 0, 0.0, p_prob_tv * q_log_tv)
    return torch.minimum(p_prob_tv, q_log_tv.exp()).sum(-1), cross_tv.sum(-1)


def target_grad(
    logits_tv: Tensor, lse_t: Tensor, target_t: Tensor, grad_t: Tensor, scale: float, dtype: torch.dtype
) -> Tensor:
    """Gradient for the logits of grad * (log-softmax of scale * logits at the target); [t, v] in `dtype`."""
    v = logits_tv.shape[-1]
    hit_tv = (torch.arange(v, device=logits_tv.device) == target_t.unsqueeze(-1)).float()
    prob_tv = (logits_tv * scale - lse_t.unsqueeze(-1)).exp()
    return ((hit_tv - prob_tv) * (scale * grad_t).unsqueeze(-1)).to(dtype)


def soft_grad(
    q_tv: Tensor, q_lse_t: Tensor, p_rv: Tensor, p_lse_r: Tensor, p_rows_t: Tensor, grad_t: Tensor, dtype: torch.dtype
) -> Tensor:
    """Gradient for q's logits of grad * (cross-entropy from softmax(p) to softmax(q)); [t, v] in `dtype`.

    p_rows_t as in pair_stats.
    """
    q_prob_tv = (q_tv - q_lse_t.unsqueeze(-1)).exp()
    p_prob_tv = (p_rv[p_rows_t] - p_lse_r[p_rows_t].unsqueeze(-1)).exp()
    return ((q_prob_tv - p_prob_tv) * grad_t.unsqueeze(-1)).to(dtype)
