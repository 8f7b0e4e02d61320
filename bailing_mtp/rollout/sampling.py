"""What a step draws: drafts, and the verdict on them. Two ways of one meaning, chosen by what the rows ask for.

Rows that neither mask nor truncate (the common case) are drawn in single passes over the logits by the kernel set's
`draw`, `draw_fresh` and `log_sum_exps`; the tempered distribution is then never written. Any other batch goes through
distribution.process, a whole pass over the logits per rule. Either way a token depends on its request and position
alone, so that a row draws the same ones beside any others, up to ties in fp32.

Shapes: n rows, k drafts, S = k + 1 columns, v this rank's vocabulary rows.
"""

from __future__ import annotations

from types import ModuleType
from typing import NamedTuple

import torch
from torch import Tensor

from bailing_mtp.kernels.reference import noise
from bailing_mtp.kernels.reference.sampling import Drawn
from bailing_mtp.parallel import vocab
from bailing_mtp.parallel.collectives import gathered
from bailing_mtp.rollout.accept import Drafts, accept, from_first_rank, token_log_probs
from bailing_mtp.rollout.distribution import Group, first_id, is_split, process, sum_over_ranks
from bailing_mtp.rollout.rows import StepRows


class Draft(NamedTuple):
    """One draft per row; log q = logits / temperature - lse, with the temperature of Drafts."""

    token_n: Tensor
    logits_nv: Tensor
    lse_n: Tensor


class Verdict(NamedTuple):
    """What the target's distributions decide."""

    tokens_nS: Tensor
    """int64: the accepted drafts, then one fresh token; later columns repeat it."""
    n_accepted_n: Tensor
    """int64, 0..k."""
    log_probs_3nS: Tensor
    """fp32, of each column's token: raw, processed, and the kept mass."""
    finite_nS: Tensor
    """bool: False where the logits hold NaN or inf; what such a column drew must not be kept."""


def draw_draft(kernels: ModuleType, logits_nv: Tensor, rows: StepRows, index: int) -> Draft:
    """The draft that comes to stand at position P + 1 + index, from the drafter's logits."""
    v, group, ahead = logits_nv.shape[-1], rows.group, 1 + index
    if rows.rules.is_plain:
        drawn, lse_n = kernels.draw(
            logits_nv, rows.settings.temperature, rows.keys, rows.position_n, ahead, first_id(v, group)
        )
        token_n, lse_n = _over_ranks(drawn, v, group, lse_n)
        return Draft(token_n, logits_nv, lse_n)
    drawn = process(logits_nv, rows.settings.later(index), rows.rules, group)
    gumbel_nv = noise.gumbel(rows.keys, rows.position_n + ahead, noise.DRAFT, first_id(v, group), v)
    token_n, _ = vocab.gumbel_argmax(drawn.logits, gumbel_nv, group)
    return Draft(token_n, drawn.logits, drawn.lse)


def judge(kernels: ModuleType, logits_nSv: Tensor, drafts: Drafts, rows: StepRows, position_n: Tensor) -> Verdict:
    """Accept and draw, and the log-probabilities of what came out. position_n: as accept.accept."""
    if rows.rules.is_plain:
        return _judge_plain(kernels, logits_nSv, drafts, rows, position_n)
    columns, logits_rv = logits_nSv.shape[1], logits_nSv.flatten(0, 1)
    target = process(logits_rv, rows.settings.spread(columns), rows.rules, rows.group)
    n_accepted_n, tokens_nS = accept(target, drafts, rows.keys, position_n, rows.group)
    log_probs = token_log_probs(logits_rv, target, tokens_nS, rows.group)
    return Verdict(tokens_nS, n_accepted_n, torch.stack(log_probs), target.finite.view(-1, columns))


def _judge_plain(
    kernels: ModuleType, logits_nSv: Tensor, drafts: Drafts, rows: StepRows, position_n: Tensor
) -> Verdict:
    (n, S, v), group, temperature_n = logits_nSv.shape, rows.group, rows.settings.temperature
    first = first_id(v, group)
    lses_2nS = kernels.log_sum_exps(logits_nSv.flatten(0, 1), temperature_n).view(2, n, S)
    if drafts.tokens_nk.shape[1]:
        lses_2nS, n_accepted_n = _test_drafts(kernels, logits_nSv, lses_2nS, drafts, rows, position_n)
    else:
        n_accepted_n = torch.zeros_like(position_n)
    drawn = kernels.draw_fresh(
        logits_nSv, lses_2nS[1], drafts.logits_nkv, drafts.lse_nk, n_accepted_n, temperature_n, rows.keys,
        position_n, first,
    )  # fmt: skip
    if S > 1:
        (fresh_n,) = _over_ranks(drawn, v, group)
    else:
        # Nothing has needed them of the whole vocabulary before.
        fresh_n, lses_2nS = _over_ranks(drawn, v, group, lses_2nS)
    tokens_nS, log_probs_3nS, finite_nS = kernels.block_log_probs(
        logits_nSv, lses_2nS, drafts.tokens_nk, n_accepted_n, fresh_n, temperature_n, first
    )
    sum_over_ranks(log_probs_3nS[:2], group)
    return Verdict(tokens_nS, n_accepted_n, log_probs_3nS, finite_nS)


def _test_drafts(
    kernels: ModuleType, logits_nSv: Tensor, lses_2nS: Tensor, drafts: Drafts, rows: StepRows, position_n: Tensor
) -> tuple[Tensor, Tensor]:
    """Log-sum-exps over the whole vocabulary from this rank's, and what accept.accept counts; two collectives."""
    group, temperature_n, k = rows.group, rows.settings.temperature, drafts.tokens_nk.shape[1]
    best = ()
    if rows.rules.greedy:
        best = vocab.local_best(logits_nSv[:, :k].flatten(0, 1), group)
    # Where ranks share a row their log-sum-exps come together with what is read at the drafts, and are taken off after.
    lse_nS = torch.zeros_like(lses_2nS[1]) if is_split(group) else lses_2nS[1]
    at_2nk = kernels.draft_log_probs(
        logits_nSv, lse_nS, drafts.logits_nkv, drafts.lse_nk, drafts.tokens_nk, temperature_n,
        first_id(logits_nSv.shape[-1], group),
    )  # fmt: skip
    *best, lses_g2nS, at_g2nk = gathered((*best, lses_2nS, at_2nk), group)
    if is_split(group):
        lses_2nS, log_probs_2nk = lses_g2nS.logsumexp(0), at_g2nk.sum(0)
        log_probs_2nk[0] -= lses_2nS[1, :, :k]
    else:
        log_probs_2nk = at_2nk
    is_best_nk = vocab.best(*best)[0].view(-1, k) == drafts.tokens_nk if best else None
    n_accepted_n = kernels.count_accepted(log_probs_2nk, is_best_nk, temperature_n, rows.keys, position_n)
    return lses_2nS, from_first_rank(n_accepted_n, group)


def _over_ranks(drawn: Drawn, v: int, group: Group, *lses: Tensor) -> list[Tensor]:
    """The id drawn from the whole vocabulary, the likeliest one where nothing is left of p - q: always an id that
    exists. Then log-sum-exps over all of it. One collective; equal on all ranks."""
    if not is_split(group):
        return [drawn.token_n, *lses]
    mine = (torch.stack([drawn.id_n, drawn.likeliest_id_n]), torch.stack([drawn.value_n, drawn.likeliest_n]))
    id_g2n, value_g2n, *lses_g = gathered((*mine, *lses), group)
    (id_n, likeliest_id_n), (is_drawn_n, _) = vocab.best(id_g2n, value_g2n)
    id_n = torch.where(is_drawn_n, id_n, likeliest_id_n).clamp(0, v * group.size() - 1)
    return [id_n, *(lse_g.logsumexp(0) for lse_g in lses_g)]
