"""The decisions of a step from a few numbers per row, in plain torch: draft log-probabilities, acceptance, and the
log-probabilities of what came out. For rows that neither mask nor truncate.

A vocabulary may be split over ranks: log-probabilities are then 0 but on the rank that holds the token, so that
their sum over the ranks is the value itself.

Shape legend: n rows, k drafts, S = k + 1 columns, v this rank's vocabulary rows.
"""

import torch
from torch import Tensor

from bailing_mtp.kernels.reference import noise
from bailing_mtp.kernels.reference.noise import NoiseKeys
from bailing_mtp.kernels.reference.sampling import divisor


def draft_log_probs(
    logits_nSv: Tensor,
    lse_nS: Tensor,
    draft_logits_nkv: Tensor,
    draft_lse_nk: Tensor,
    tokens_nk: Tensor,
    temperature_n: Tensor,
    first_id: int,
) -> Tensor:
    """Log p and log q of each draft: logits / temperature - lse; fp32 [2, n, k]."""
    k, scale_n1 = tokens_nk.shape[1], divisor(temperature_n)
    p_nk, here_nk = _at(logits_nSv[:, :k], tokens_nk, first_id)
    q_nk, _ = _at(draft_logits_nkv, tokens_nk, first_id)
    both = torch.stack([p_nk / scale_n1 - lse_nS[:, :k], q_nk / scale_n1 - draft_lse_nk])
    return torch.where(here_nk, both, 0.0)


def count_accepted(
    log_probs_2nk: Tensor, is_best_nk: Tensor | None, temperature_n: Tensor, keys: NoiseKeys, position_n: Tensor
) -> Tensor:
    """Drafts accepted, int64 [n]: u * q < p and q > 0, up to the first that is not.

    is_best_nk: bool, whether a draft is the target's likeliest token, which alone decides at temperature 0; None
    where no row has that. position_n: absolute position of the first fed token. Where q is not finite nothing is
    accepted, and the fresh token comes from p: exact too.
    """
    p_nk, q_nk = log_probs_2nk.exp()
    if is_best_nk is not None:
        is_greedy_n1 = (temperature_n <= 0).unsqueeze(-1)
        p_nk, q_nk = torch.where(is_greedy_n1, is_best_nk.float(), p_nk), torch.where(is_greedy_n1, 1.0, q_nk)
    columns_k = torch.arange(p_nk.shape[1], device=position_n.device)
    u_nk = noise.accept_uniform(keys, position_n.unsqueeze(-1) + 1 + columns_k)
    accepts_nk = (u_nk * q_nk < p_nk) & (q_nk > 0)
    return accepts_nk.long().cumprod(-1).sum(-1)


def assemble(drafts_nk: Tensor, n_accepted_n: Tensor, fresh_n: Tensor) -> Tensor:
    """The accepted drafts, then one fresh token, which later columns repeat: int64 [n, S]."""
    padded_nS = torch.cat([drafts_nk, fresh_n.unsqueeze(-1)], dim=-1)
    is_draft_nS = torch.arange(padded_nS.shape[1], device=fresh_n.device) < n_accepted_n.unsqueeze(-1)
    return torch.where(is_draft_nS, padded_nS, fresh_n.unsqueeze(-1))


def block_log_probs(
    logits_nSv: Tensor,
    lses_2nS: Tensor,
    drafts_nk: Tensor,
    n_accepted_n: Tensor,
    fresh_n: Tensor,
    temperature_n: Tensor,
    first_id: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """The block of each row and what is known of it.

    lses_2nS: log-sum-exps of the logits and of logits / temperature. Returns tokens as `assemble`; fp32 [3, n, S],
    their log-probability, the tempered one (at temperature 0: 0), and the log of the mass that the row's rules left,
    which is all of it (at temperature 0: NaN); and bool [n, S], False where the logits hold NaN or inf.
    """
    tokens_nS = assemble(drafts_nk, n_accepted_n, fresh_n)
    is_greedy_n1 = (temperature_n <= 0).unsqueeze(-1)
    logit_nS, here_nS = _at(logits_nSv, tokens_nS, first_id)
    raw_nS = torch.where(here_nS, logit_nS - lses_2nS[0], 0.0)
    tempered_nS = logit_nS / divisor(temperature_n) - lses_2nS[1]
    tempered_nS = torch.where(is_greedy_n1 | ~here_nS, 0.0, tempered_nS)
    kept_logmass_nS = torch.where(is_greedy_n1, torch.nan, 0.0).expand_as(raw_nS)
    return tokens_nS, torch.stack([raw_nS, tempered_nS, kept_logmass_nS]), lses_2nS[1].isfinite()


def _at(logits: Tensor, ids: Tensor, first_id: int) -> tuple[Tensor, Tensor]:
    """Logits [..., v] at global ids [...], fp32, and whether the id is of this rank's."""
    v, row = logits.shape[-1], ids - first_id
    here = (row >= 0) & (row < v)
    return logits.gather(-1, row.clamp(0, v - 1).unsqueeze(-1)).squeeze(-1).float(), here
