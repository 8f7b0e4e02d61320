"""What a step draws: drafts, and the verdict on them. Two ways of one meaning, chosen by what the rows ask for.

Rows that neither mask nor truncate (the common case) are drawn in single passes over the logits by the kernel set's
`draw` and `log_sum_exps`; the tempered distribution is then never written. Any other batch goes through
distribution.process, a whole pass over the logits per rule. Either way a token depends on its request and position
alone, so that a row draws the same ones beside any others, up to ties in fp32.

Shapes: n rows, k drafts, S = k + 1 columns, r = n * S rows of logits, v this rank's vocabulary rows.
"""

from __future__ import annotations

from types import ModuleType
from typing import NamedTuple

import torch
from torch import Tensor

from bailing_mtp.kernels.reference import noise
from bailing_mtp.kernels.reference.sampling import Drawn, Residual
from bailing_mtp.parallel import vocab
from bailing_mtp.rollout.accept import (
    Accepted,
    Drafts,
    TokenLogProbs,
    accept,
    assemble,
    from_first_rank,
    token_log_probs,
)
from bailing_mtp.rollout.distribution import Group, first_id, process, values_at
from bailing_mtp.rollout.rows import StepRows


class Draft(NamedTuple):
    """One draft per row; log q = logits / temperature - lse, with the temperature of Drafts."""

    token_n: Tensor
    logits_nv: Tensor
    lse_n: Tensor


class Verdict(NamedTuple):
    """What the target's distributions decide."""

    accepted: Accepted
    log_probs: TokenLogProbs
    finite_nS: Tensor
    """bool: False where the logits hold NaN or inf; what such a column drew must not be kept."""


def draw_draft(kernels: ModuleType, logits_nv: Tensor, rows: StepRows, index: int) -> Draft:
    """The draft that comes to stand at position P + 1 + index, from the drafter's logits."""
    position_n, group = rows.position_n + 1 + index, rows.group
    if rows.rules.is_plain:
        return _draw_plain(kernels, logits_nv, rows, position_n)
    drawn = process(logits_nv, rows.settings.later(index), rows.rules, group)
    v = logits_nv.shape[-1]
    gumbel_nv = noise.gumbel(rows.keys, position_n, noise.DRAFT, first_id(v, group), v)
    token_n, _ = vocab.gumbel_argmax(drawn.logits, gumbel_nv, group)
    return Draft(token_n, drawn.logits, drawn.lse)


def judge(kernels: ModuleType, logits_rv: Tensor, drafts: Drafts, rows: StepRows, position_n: Tensor) -> Verdict:
    """Accept and draw, and the log-probabilities of what came out. position_n: as accept.accept."""
    if rows.rules.is_plain:
        return _judge_plain(kernels, logits_rv, drafts, rows, position_n)
    columns = drafts.tokens_nk.shape[1] + 1
    target = process(logits_rv, rows.settings.spread(columns), rows.rules, rows.group)
    accepted = accept(target, drafts, rows.keys, position_n, rows.group)
    log_probs = token_log_probs(logits_rv, target, accepted.tokens_nS, rows.group)
    return Verdict(accepted, log_probs, target.finite.view(-1, columns))


def _draw_plain(kernels: ModuleType, logits_nv: Tensor, rows: StepRows, position_n: Tensor) -> Draft:
    (n, v), group = logits_nv.shape, rows.group
    temperature_n = rows.settings.temperature
    drawn = kernels.draw(
        logits_nv, torch.arange(n, device=logits_nv.device), temperature_n, rows.keys,
        position_n * 4 + noise.DRAFT, first_id(v, group),
    )  # fmt: skip
    _, lse_n = kernels.log_sum_exps(logits_nv, temperature_n)
    return Draft(_drawn_id(drawn, v, group), logits_nv, vocab.join_log_sum_exps(lse_n, group))


def _judge_plain(
    kernels: ModuleType, logits_rv: Tensor, drafts: Drafts, rows: StepRows, position_n: Tensor
) -> Verdict:
    (n, k), group = drafts.tokens_nk.shape, rows.group
    temperature_n = rows.settings.temperature
    lses = kernels.log_sum_exps(logits_rv, temperature_n.repeat_interleave(k + 1))
    raw_lse_nS, lse_nS = vocab.join_log_sum_exps(torch.stack(lses), group).view(2, n, k + 1)
    n_accepted_n = _count_accepted(logits_rv, lse_nS, drafts, rows, position_n)
    fresh_n = _draw_fresh(kernels, logits_rv, lse_nS, drafts, n_accepted_n, rows, position_n)
    accepted = assemble(drafts, n_accepted_n, from_first_rank(fresh_n, group))
    (logit_nS,) = values_at((logits_rv.view(n, k + 1, -1),), accepted.tokens_nS, group)
    greedy_n1 = (temperature_n <= 0).unsqueeze(-1)
    tempered_nS = logit_nS / torch.where(greedy_n1, 1.0, temperature_n.unsqueeze(-1)) - lse_nS
    log_probs = TokenLogProbs(
        logit_nS - raw_lse_nS,
        torch.where(greedy_n1, 0.0, tempered_nS),
        torch.where(greedy_n1, torch.nan, 0.0).expand_as(tempered_nS),
    )
    return Verdict(accepted, log_probs, lse_nS.isfinite())


def _count_accepted(
    logits_rv: Tensor, lse_nS: Tensor, drafts: Drafts, rows: StepRows, position_n: Tensor
) -> Tensor:
    """As accept.accept. Where q is not finite nothing is accepted, and the fresh token comes from p: exact too."""
    (n, k), group = drafts.tokens_nk.shape, rows.group
    if not k:
        return torch.zeros_like(position_n, dtype=torch.int64)
    logits_nkv = logits_rv.view(n, k + 1, -1)[:, :k]
    p_logit_nk, q_logit_nk = values_at((logits_nkv, drafts.logits_nkv), drafts.tokens_nk, group)
    is_greedy_n1 = (rows.settings.temperature <= 0).unsqueeze(-1)
    scale_n1 = torch.where(is_greedy_n1, 1.0, rows.settings.temperature.unsqueeze(-1))
    p_nk, q_nk = (p_logit_nk / scale_n1 - lse_nS[:, :k]).exp(), (q_logit_nk / scale_n1 - drafts.lse_nk).exp()
    if rows.rules.greedy:
        best_r, _ = vocab.argmax(logits_rv, group)
        is_best_nk = best_r.view(n, k + 1)[:, :k] == drafts.tokens_nk
        p_nk, q_nk = torch.where(is_greedy_n1, is_best_nk.float(), p_nk), torch.where(is_greedy_n1, 1.0, q_nk)
    columns_k = torch.arange(k, device=position_n.device)
    u_nk = noise.accept_uniform(rows.keys, position_n.unsqueeze(-1) + 1 + columns_k)
    accepts_nk = (u_nk * q_nk < p_nk) & (q_nk > 0)
    return from_first_rank(accepts_nk.long().cumprod(-1).sum(-1), group)


def _draw_fresh(
    kernels: ModuleType,
    logits_rv: Tensor,
    lse_nS: Tensor,
    drafts: Drafts,
    n_accepted_n: Tensor,
    rows: StepRows,
    position_n: Tensor,
) -> Tensor:
    (n, k), v, group = drafts.tokens_nk.shape, logits_rv.shape[-1], rows.group
    row_n, temperature_n = torch.arange(n, device=logits_rv.device), rows.settings.temperature
    residual = None
    if k:
        column_n = n_accepted_n.clamp(max=k - 1)
        q_lse_n = drafts.lse_nk[row_n, column_n]
        residual = Residual(
            q_logits_xv=drafts.logits_nkv.flatten(0, 1),
            q_row_n=row_n * k + column_n,
            p_lse_n=lse_nS[row_n, n_accepted_n],
            q_lse_n=q_lse_n,
            residual_n=(n_accepted_n < k) & (temperature_n > 0) & q_lse_n.isfinite(),
        )
    drawn = kernels.draw(
        logits_rv, row_n * (k + 1) + n_accepted_n, temperature_n, rows.keys,
        (position_n + n_accepted_n + 1) * 4 + noise.FRESH, first_id(v, group), residual,
    )  # fmt: skip
    return _drawn_id(drawn, v, group)


def _drawn_id(drawn: Drawn, v: int, group: Group) -> Tensor:
    """Over all ranks; the likeliest id where nothing is left of p - q. Always an id that exists."""
    ids, finite = vocab.best(
        torch.cat([drawn.id_n, drawn.likeliest_id_n]), torch.cat([drawn.value_n, drawn.likeliest_n]), group
    )
    n = drawn.id_n.shape[0]
    size = v * (1 if group is None else group.size())
    return torch.where(finite[:n], ids[:n], ids[n:]).clamp(0, size - 1)
