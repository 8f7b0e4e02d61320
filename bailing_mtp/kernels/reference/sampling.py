"""Drawing from large vocabularies, in plain torch: log-sum-exp, and Gumbel argmax with its own noise.

Shape legend: n rows, k drafts, S = k + 1 columns of the target, r rows of logits, v this rank's vocabulary rows.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from bailing_mtp.kernels.reference import noise
from bailing_mtp.kernels.reference.noise import NoiseKeys


class Drawn(NamedTuple):
    """This rank's best of each row: global ids int64, values fp32 (-inf where nothing may be drawn)."""

    id_n: Tensor
    value_n: Tensor
    likeliest_id_n: Tensor
    """The id of the largest logit, for rows whose every score is -inf."""
    likeliest_n: Tensor
    token_n: Tensor
    """What a rank that holds the whole vocabulary draws: the id, or the likeliest one where its value is not
    finite. Always an id of this rank's."""


def log_sum_exps(logits_rv: Tensor, temperature_n: Tensor) -> Tensor:
    """Log-sum-exp of the logits, and of logits / temperature (as they are where that is 0); fp32 [2, r].

    Each temperature is that of r / n consecutive rows. NaN where the logits hold NaN; not finite where they hold
    inf.
    """
    logits_rv, temperature_r = logits_rv.float(), temperature_n.repeat_interleave(len(logits_rv) // len(temperature_n))
    return torch.stack([logits_rv.logsumexp(-1), (logits_rv / divisor(temperature_r)).logsumexp(-1)])


def draw(
    logits_nv: Tensor, temperature_n: Tensor, keys: NoiseKeys, position_n: Tensor, offset: int, first_id: int
) -> tuple[Drawn, Tensor]:
    """Gumbel argmax of logits / temperature, for drafts at position + offset, and its log-sum-exp, fp32 [n].

    Ties go to the lower id; temperature 0 draws the largest logit. first_id: global id of this rank's first
    vocabulary row. What a row that holds NaN draws is one of its ids.
    """
    logit_nv = logits_nv.float() / divisor(temperature_n)
    drawn = _best(logit_nv, logit_nv, temperature_n, keys, position_n + offset, noise.DRAFT, first_id)
    return drawn, logit_nv.logsumexp(-1)


def draw_fresh(
    logits_nSv: Tensor,
    lse_nS: Tensor,
    draft_logits_nkv: Tensor,
    draft_lse_nk: Tensor,
    n_accepted_n: Tensor,
    temperature_n: Tensor,
    keys: NoiseKeys,
    position_n: Tensor,
    first_id: int,
) -> Drawn:
    """The token after the accepted drafts: as `draw` from the column after them, or, where a draft was rejected at a
    temperature above 0, from log(max(p - q, 0)), with q the distribution of that draft.

    lse_nS, draft_lse_nk: of logits / temperature; where the latter is not finite, p is drawn from. position_n:
    absolute position of the first fed token.
    """
    (n, k), divisor_n1 = draft_lse_nk.shape, divisor(temperature_n)
    row_n = torch.arange(n, device=position_n.device)
    logit_nv = logits_nSv[row_n, n_accepted_n].float() / divisor_n1
    score_nv = logit_nv
    if k:
        column_n = n_accepted_n.clamp(max=k - 1)
        q_lse_n = draft_lse_nk[row_n, column_n]
        p_nv = (logit_nv - lse_nS[row_n, n_accepted_n].unsqueeze(-1)).exp()
        q_logit_nv = draft_logits_nkv[row_n, column_n].float() / divisor_n1
        left_nv = p_nv - (q_logit_nv - q_lse_n.unsqueeze(-1)).exp()
        residual_n = (n_accepted_n < k) & (temperature_n > 0) & q_lse_n.isfinite()
        score_nv = torch.where(residual_n.unsqueeze(-1), left_nv.clamp(min=0).log(), logit_nv)
    at_n = position_n + n_accepted_n + 1
    return _best(score_nv, logit_nv, temperature_n, keys, at_n, noise.FRESH, first_id)


def _best(
    score_nv: Tensor,
    logit_nv: Tensor,
    temperature_n: Tensor,
    keys: NoiseKeys,
    position_n: Tensor,
    purpose: int,
    first_id: int,
) -> Drawn:
    gumbel_nv = noise.gumbel(keys, position_n, purpose, first_id, logit_nv.shape[-1])
    value_n, column_n = (score_nv + torch.where(temperature_n.unsqueeze(-1) > 0, gumbel_nv, 0.0)).max(-1)
    likeliest_n, likeliest_column_n = logit_nv.max(-1)
    id_n, likeliest_id_n = column_n + first_id, likeliest_column_n + first_id
    token_n = torch.where(value_n.isfinite(), id_n, likeliest_id_n)
    return Drawn(id_n, value_n, likeliest_id_n, likeliest_n, token_n)


def divisor(temperature_n: Tensor) -> Tensor:
    """[n, 1]; 1 where the temperature is 0."""
    return torch.where(temperature_n > 0, temperature_n, 1.0).unsqueeze(-1)
