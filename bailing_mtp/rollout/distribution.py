"""From logits to the distribution that a token is drawn from, row by row.

In this order: suppression and min-new-tokens masks, temperature, top-k, top-p. The mass of top-p is taken before
top-k; a token stays while the mass of the likelier ones is <= top_p; ties go to the lower id; temperature 0 is a
one-hot at the largest logit. The vocabulary is split over the tensor-parallel group; only top-k and top-p need a
whole row on every rank.

Shapes: r rows of logits (one token to draw each), V whole vocabulary, v this rank's rows of it, X ids of a list.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from bailing_mtp.parallel import vocab
from bailing_mtp.parallel.collectives import all_gather

Group = dist.ProcessGroup | None


@dataclass(frozen=True)
class StepRules:
    """What the host knows of a step's rows before it runs, so that no row pays for what none of them asks."""

    truncates: bool = False
    """Some row sets top-k or top-p."""
    masks: bool = False
    """Some row suppresses ids or has a min_new_tokens."""
    greedy: bool = False
    """Some row has temperature 0."""

    @property
    def is_plain(self) -> bool:
        """Nothing but temperatures: a token can be drawn without writing its distribution."""
        return not (self.masks or self.truncates)

    def joined(self, other: StepRules) -> StepRules:
        """What the rows of both ask for."""
        return StepRules(
            self.truncates or other.truncates, self.masks or other.masks, self.greedy or other.greedy
        )


class RowSettings(NamedTuple):
    """How each of r rows is drawn."""

    temperature: Tensor
    """fp32 [r]; 0 = greedy."""
    top_k: Tensor
    """int [r]; 0 = all."""
    top_p: Tensor
    """fp32 [r]; 1 = all."""
    min_new: Tensor
    """int [r]."""
    response_index: Tensor
    """int [r]: index in the response of the token that is drawn."""
    stop_ids: Tensor
    """int [r, X], -1 padded."""
    suppress_ids: Tensor
    """int [r, X], -1 padded."""

    def spread(self, columns: int) -> RowSettings:
        """[n] -> [n * columns]: consecutive tokens of every row."""
        spread = RowSettings(*(field.repeat_interleave(columns, dim=0) for field in self))
        ahead = torch.arange(columns, device=self.response_index.device).repeat(self.response_index.shape[0])
        return spread._replace(response_index=spread.response_index + ahead)

    def later(self, tokens: int) -> RowSettings:
        """Settings of the token `tokens` further in each response."""
        return self._replace(response_index=self.response_index + tokens)


class Distribution(NamedTuple):
    """Log-probability of token x: logits[x] - lse."""

    logits: Tensor
    """fp32 [r, v], -inf outside the kept set; never the memory of the logits they came from."""
    lse: Tensor
    """fp32 [r]: log-sum-exp over the whole vocabulary."""
    kept_logmass: Tensor
    """fp32 [r]: log of the tempered mass that masks and truncation left; NaN for greedy rows."""
    finite: Tensor
    """bool [r]: False where the logits hold NaN or inf; such a row is uniform over what the masks leave."""

    def rows(self, index: Tensor) -> Distribution:
        return Distribution(*(field[index] for field in self))


def process(logits_rv: Tensor, settings: RowSettings, rules: StepRules, group: Group) -> Distribution:
    """The sampled distribution of each row. `logits_rv` is read only."""
    is_greedy_r = settings.temperature <= 0
    scaled_rv = logits_rv / torch.where(is_greedy_r, 1.0, settings.temperature).unsqueeze(-1)
    all_lse_r = vocab.log_sum_exp(scaled_rv, group)
    finite_r = all_lse_r.isfinite()
    scaled_rv = torch.where(finite_r.unsqueeze(-1), scaled_rv, 0.0)
    if rules.is_plain and not rules.greedy:
        uniform_lse = _log_vocab(logits_rv, group)
        lse_r = torch.where(finite_r, all_lse_r, uniform_lse)
        return Distribution(scaled_rv, lse_r, torch.zeros_like(all_lse_r), finite_r)
    if rules.masks:
        _mask(scaled_rv, settings, group)
    if rules.truncates:
        _truncate(scaled_rv, settings, group)
    kept_lse_r = vocab.log_sum_exp(scaled_rv, group)
    kept_logmass_r = kept_lse_r - all_lse_r
    if rules.greedy:
        best_r, _ = vocab.argmax(scaled_rv, group)
        one_hot_rv = torch.where(_ids(scaled_rv, group) == best_r.unsqueeze(-1), 0.0, -torch.inf)
        scaled_rv = torch.where(is_greedy_r.unsqueeze(-1), one_hot_rv, scaled_rv)
        kept_lse_r = torch.where(is_greedy_r, 0.0, kept_lse_r)
        kept_logmass_r = torch.where(is_greedy_r, torch.nan, kept_logmass_r)
    return Distribution(scaled_rv, kept_lse_r, kept_logmass_r, finite_r)


def values_at(logits: Sequence[Tensor], ids: Tensor, group: Group) -> Tensor:
    """Each tensor [..., v] read at the given global ids [...], stacked; one collective."""
    v = logits[0].shape[-1]
    row = ids - first_id(v, group)
    here = (row >= 0) & (row < v)
    index = row.clamp(0, v - 1).unsqueeze(-1)
    values = torch.stack([tensor.gather(-1, index).squeeze(-1) for tensor in logits]).masked_fill(~here, 0.0)
    return sum_over_ranks(values, group)


def sum_over_ranks(x: Tensor, group: Group) -> Tensor:
    """In place; `x` is contiguous."""
    if is_split(group):
        dist.all_reduce(x, group=group)
    return x


def first_id(v: int, group: Group) -> int:
    """Global id of this rank's first vocabulary row."""
    return 0 if group is None else group.rank() * v


def _mask(logits_rv: Tensor, settings: RowSettings, group: Group) -> None:
    """In place: suppressed ids, and stop ids while the response is shorter than min_new, become -inf."""
    too_early_r1 = (settings.response_index < settings.min_new).unsqueeze(-1)
    stop_rX = torch.where(too_early_r1, settings.stop_ids, -1)
    ids_rX = torch.cat([settings.suppress_ids, stop_rX], dim=-1).long()
    v = logits_rv.shape[-1]
    row_rX = ids_rX - first_id(v, group)
    here_rX = (ids_rX >= 0) & (row_rX >= 0) & (row_rX < v)
    # Ids that are not here aim at some row too, with a value that a minimum leaves alone.
    value_rX = torch.where(here_rX, -torch.inf, torch.inf)
    logits_rv.scatter_reduce_(-1, row_rX.clamp(0, v - 1), value_rX, reduce="amin")


def _truncate(logits_rv: Tensor, settings: RowSettings, group: Group) -> None:
    """In place: top-k and top-p, on whole rows."""
    whole_rV = _gather_vocabulary(logits_rv, group)
    sorted_rV, order_rV = whole_rV.sort(dim=-1, descending=True, stable=True)
    before_rV = sorted_rV.softmax(-1).cumsum(-1).roll(1, dims=-1)
    before_rV[:, 0] = 0.0
    rank_V = torch.arange(whole_rV.shape[-1], device=whole_rV.device)
    top_k_r1, top_p_r1 = settings.top_k.unsqueeze(-1), settings.top_p.unsqueeze(-1)
    keep_rV = ((top_k_r1 <= 0) | (rank_V < top_k_r1)) & ((top_p_r1 >= 1) | (before_rV <= top_p_r1))
    keep_rV = torch.zeros_like(keep_rV).scatter_(-1, order_rV, keep_rV)
    first, v = first_id(logits_rv.shape[-1], group), logits_rv.shape[-1]
    logits_rv.masked_fill_(~keep_rV[:, first : first + v], -torch.inf)


def _gather_vocabulary(logits_rv: Tensor, group: Group) -> Tensor:
    if not is_split(group):
        return logits_rv
    return torch.cat(all_gather(logits_rv, group).unbind(0), dim=-1)


def _ids(logits_rv: Tensor, group: Group) -> Tensor:
    v = logits_rv.shape[-1]
    return first_id(v, group) + torch.arange(v, device=logits_rv.device)


def _log_vocab(logits_rv: Tensor, group: Group) -> Tensor:
    size = logits_rv.shape[-1] * (group.size() if is_split(group) else 1)
    return torch.full((), float(size), device=logits_rv.device).log()


def is_split(group: Group) -> bool:
    """Whether a row of logits lies on several ranks."""
    return group is not None and group.size() > 1
