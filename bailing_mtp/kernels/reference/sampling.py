"""Drawing from large vocabularies, in plain torch: log-sum-exp, and Gumbel argmax with its own noise.

Shape legend: r rows of logits, x rows of drafts' logits, n rows to draw, v this rank's vocabulary rows.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from bailing_mtp.kernels.reference.noise import NoiseKeys, gumbel_at


class Drawn(NamedTuple):
    """This rank's best of each row: global ids int64, values fp32 (-inf where nothing may be drawn)."""

    id_n: Tensor
    value_n: Tensor
    likeliest_id_n: Tensor
    """The id of the largest logit, for rows whose every score is -inf."""
    likeliest_n: Tensor


class Residual(NamedTuple):
    """The drafts' distributions, to be taken from the target's where `residual_n` says so."""

    q_logits_xv: Tensor
    q_row_n: Tensor
    """int64, row of q_logits."""
    p_lse_n: Tensor
    """fp32, of the tempered logits of the row drawn from; so is q_lse."""
    q_lse_n: Tensor
    residual_n: Tensor
    """bool."""


def log_sum_exps(logits_rv: Tensor, temperature_r: Tensor) -> tuple[Tensor, Tensor]:
    """Log-sum-exp of the logits, and of logits / temperature (as they are where that is 0); fp32 [r] each.

    NaN where the logits hold NaN; not finite where they hold inf.
    """
    logits_rv = logits_rv.float()
    return logits_rv.logsumexp(-1), (logits_rv / _divisor(temperature_r)).logsumexp(-1)


def draw(
    logits_rv: Tensor,
    row_n: Tensor,
    temperature_n: Tensor,
    keys: tuple[Tensor, Tensor, Tensor, Tensor],
    counter_n: Tensor,
    first_id: int,
    residual: Residual | None = None,
) -> Drawn:
    """Gumbel argmax of logits / temperature, or of log(max(p - q, 0)), in row `row_n` of the logits.

    keys: seed, step, prompt index, sample index, int64 [n]. counter_n: position * 4 + purpose. Ties go to the
    lower id; temperature 0 draws the largest logit. first_id: global id of this rank's first vocabulary row.
    What a row that holds NaN draws is one of its ids.
    """
    divisor_n1 = _divisor(temperature_n)
    logit_nv = logits_rv[row_n].float() / divisor_n1
    score_nv = logit_nv
    if residual is not None:
        p_nv = (logit_nv - residual.p_lse_n.unsqueeze(-1)).exp()
        q_logit_nv = residual.q_logits_xv[residual.q_row_n].float() / divisor_n1
        left_nv = p_nv - (q_logit_nv - residual.q_lse_n.unsqueeze(-1)).exp()
        score_nv = torch.where(residual.residual_n.unsqueeze(-1), left_nv.clamp(min=0).log(), logit_nv)
    gumbel_nv = gumbel_at(NoiseKeys(*keys), counter_n, first_id, logits_rv.shape[-1])
    value_n, column_n = (score_nv + torch.where(temperature_n.unsqueeze(-1) > 0, gumbel_nv, 0.0)).max(-1)
    likeliest_n, likeliest_column_n = logit_nv.max(-1)
    return Drawn(column_n + first_id, value_n, likeliest_column_n + first_id, likeliest_n)


def _divisor(temperature_n: Tensor) -> Tensor:
    return torch.where(temperature_n > 0, temperature_n, 1.0).unsqueeze(-1)
