"""Rejection sampling of drafts: the kept tokens are distributed exactly as the target's own.

Source: Leviathan et al. 2023 (arXiv 2211.17192), Chen et al. 2023 (arXiv 2302.01318), on processed distributions.

Shapes: n rows, k drafts, S = k + 1 columns, v this rank's vocabulary rows. Column j holds the distribution that
follows the j-th fed token, so that draft j + 1 (index j) is tested against column j.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from bailing_mtp.kernels.reference import noise
from bailing_mtp.kernels.reference.noise import NoiseKeys
from bailing_mtp.kernels.reference.verdict import assemble
from bailing_mtp.parallel import vocab
from bailing_mtp.rollout.distribution import Distribution, Group, first_id, values_at


class Drafts(NamedTuple):
    """Drafts and the distributions that they were drawn from, exactly as drawn."""

    tokens_nk: Tensor
    """int64."""
    logits_nkv: Tensor
    """fp32. Where some row masks or truncates: processed, and log q = logits - lse. Else as the drafter's head gave
    them, and log q = logits / temperature - lse; at temperature 0, q is a one-hot at the token."""
    lse_nk: Tensor
    """fp32."""


class Accepted(NamedTuple):
    """What one verification decided."""

    n_accepted_n: Tensor
    """int64, 0..k."""
    tokens_nS: Tensor
    """int64: the accepted drafts, then one fresh token; later columns repeat it."""


class TokenLogProbs(NamedTuple):
    """fp32 [n, S], of the token of each column under that column's distribution."""

    raw_nS: Tensor
    processed_nS: Tensor
    kept_logmass_nS: Tensor


def no_drafts(n: int, v: int, device: torch.device) -> Drafts:
    """Drafts of a step with k = 0."""
    empty = torch.empty(n, 0, device=device)
    return Drafts(empty.long(), torch.empty(n, 0, v, device=device), empty)


def accept(
    target: Distribution, drafts: Drafts, keys: NoiseKeys, position_n: Tensor, group: Group
) -> Accepted:
    """Test the drafts and draw one fresh token per row.

    target: distributions of the n * S columns, row-major. position_n: absolute position of the first fed token;
    the token of column j comes to stand at position + j + 1. Draft j is accepted iff u * q(d) < p(d) and
    q(d) > 0; the first rejection draws from max(p - q, 0), full acceptance from the last column's p; where
    nothing is left of p - q, its largest p is taken. Rank 0 of the group decides for all of its ranks.
    """
    n, k = drafts.tokens_nk.shape
    logits_nSv, lse_nS = target.logits.view(n, k + 1, -1), target.lse.view(n, k + 1)
    columns_k = torch.arange(k, device=position_n.device)
    if k:
        logp_nk, logq_nk = values_at((logits_nSv[:, :k], drafts.logits_nkv), drafts.tokens_nk, group)
        p_nk, q_nk = (logp_nk - lse_nS[:, :k]).exp(), (logq_nk - drafts.lse_nk).exp()
        u_nk = noise.accept_uniform(keys, position_n.unsqueeze(-1) + 1 + columns_k)
        accepts_nk = (u_nk * q_nk < p_nk) & (q_nk > 0)
        n_accepted_n = accepts_nk.long().cumprod(-1).sum(-1)
    else:
        n_accepted_n = torch.zeros_like(position_n, dtype=torch.int64)
    n_accepted_n = from_first_rank(n_accepted_n, group)
    fresh_n = _draw_fresh(logits_nSv, lse_nS, drafts, n_accepted_n, keys, position_n, group)
    fresh_n = from_first_rank(fresh_n, group)
    return Accepted(n_accepted_n, assemble(drafts.tokens_nk, n_accepted_n, fresh_n))


def _draw_fresh(
    logits_nSv: Tensor,
    lse_nS: Tensor,
    drafts: Drafts,
    n_accepted_n: Tensor,
    keys: NoiseKeys,
    position_n: Tensor,
    group: Group,
) -> Tensor:
    n, k = drafts.tokens_nk.shape
    v = logits_nSv.shape[-1]
    row_n = torch.arange(n, device=position_n.device)
    logits_nv = logits_nSv[row_n, n_accepted_n]
    score_nv = logits_nv
    if k:
        rejected_n1 = (n_accepted_n < k).unsqueeze(-1)
        column_n = n_accepted_n.clamp(max=k - 1)
        p_nv = (logits_nv - lse_nS[row_n, n_accepted_n].unsqueeze(-1)).exp()
        q_nv = (drafts.logits_nkv[row_n, column_n] - drafts.lse_nk[row_n, column_n].unsqueeze(-1)).exp()
        score_nv = torch.where(rejected_n1, (p_nv - q_nv).clamp(min=0).log(), logits_nv)
    gumbel_nv = noise.gumbel(keys, position_n + n_accepted_n + 1, noise.FRESH, first_id(v, group), v)
    ids, finite = vocab.argmax(torch.cat([score_nv + gumbel_nv, logits_nv]), group)
    return torch.where(finite[:n], ids[:n], ids[n:])


def token_log_probs(
    raw_logits_rv: Tensor, target: Distribution, tokens_nS: Tensor, group: Group
) -> TokenLogProbs:
    """Log-probabilities of each column's token; `raw_logits_rv` are the head's own logits of the n * S columns."""
    n, columns = tokens_nS.shape
    raw_lse_nS = vocab.log_sum_exp(raw_logits_rv, group).view(n, columns)
    by_column = tuple(logits_rv.view(n, columns, -1) for logits_rv in (raw_logits_rv, target.logits))
    raw_nS, processed_nS = values_at(by_column, tokens_nS, group)
    return TokenLogProbs(
        raw_nS - raw_lse_nS, processed_nS - target.lse.view(n, columns), target.kept_logmass.view(n, columns)
    )


def from_first_rank(decision_n: Tensor, group: Group) -> Tensor:
    """Rank 0's values: ranks whose logits or noise differ in a bit must not go different ways."""
    if group is not None and group.size() > 1:
        decision_n = decision_n.contiguous()
        dist.broadcast(decision_n, group=group, group_src=0)
    return decision_n
