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
        return Draft(_drawn_id(drawn, v, group), logits_nv, vocab.join_log_sum_exps(lse_n, group))
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
    group, temperature_n, first = rows.group, rows.settings.temperature, first_id(logits_nSv.shape[-1], rows.group)
    lses_2r = kernels.log_sum_exps(logits_nSv.flatten(0, 1), temperature_n)
    lses_2nS = vocab.join_log_sum_exps(lses_2r, group).view(2, *logits_nSv.shape[:2])
    n_accepted_n = _count_accepted(kernels, logits_nSv, lses_2nS[1], drafts, rows, position_n)
    drawn = kernels.draw_fresh(
        logits_nSv, lses_2nS[1], drafts.logits_nkv, drafts.lse_nk, n_accepted_n, temperature_n, rows.keys,
        position_n, first,
    )  # fmt: skip
    fresh_n = from_first_rank(_drawn_id(drawn, logits_nSv.shape[-1], group), group)
    tokens_nS, log_probs_3nS, finite_nS = kernels.block_log_probs(
        logits_nSv, lses_2nS, drafts.tokens_nk, n_accepted_n, fresh_n, temperature_n, first
    )
    sum_over_ranks(log_probs_3nS[:2], group)
    return Verdict(tokens_nS, n_accepted_n, log_probs_3nS, finite_nS)


def _count_accepted(
    kernels: ModuleType, logits_nSv: Tensor, lse_nS: Tensor, drafts: Drafts, rows: StepRows, position_n: Tensor
) -> Tensor:
    """As accept.accept."""
    k, group, temperature_n = drafts.tokens_nk.shape[1], rows.group, rows.settings.temperature
    if not k:
        return torch.zeros_like(position_n)
    log_probs_2nk = kernels.draft_log_probs(
        logits_nSv, lse_nS, drafts.logits_nkv, drafts.lse_nk, drafts.tokens_nk, temperature_n,
        first_id(logits_nSv.shape[-1], group),
    )  # fmt: skip
    sum_over_ranks(log_probs_2nk, group)
    is_best_nk = None
    if rows.rules.greedy:
        best_r, _ = vocab.argmax(logits_nSv.flatten(0, 1), group)
        is_best_nk = best_r.view(lse_nS.shape)[:, :k] == drafts.tokens_nk
    n_accepted_n = kernels.count_accepted(log_probs_2nk, is_best_nk, temperature_n, rows.keys, position_n)
    return from_first_rank(n_accepted_n, group)


def _drawn_id(drawn: Drawn, v: int, group: Group) -> Tensor:
    """Over all ranks; the likeliest id where nothing is left of p - q. Always an id that exists."""
    if not is_split(group):
        return drawn.token_n
    ids, finite = vocab.best(
        torch.cat([drawn.id_n, drawn.likeliest_id_n]), torch.cat([drawn.value_n, drawn.likeliest_n]), group
    )
    n = drawn.id_n.shape[0]
    return torch.where(finite[:n], ids[:n], ids[n:]).clamp(0, v * group.size() - 1)
