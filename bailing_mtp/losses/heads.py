"""What the training losses and the acceptance metrics read off the trunk's and the MTP depths' logits.

Shapes: T tokens of the pack, n rows of a stream that meet the head, r rows of the trunk's chunk, t of a depth's, D
MTP depths, v this rank's vocabulary rows, H hidden size.
Site t of depth d predicts token t+1+d; its counterpart in the trunk is site t+d, which predicts the same token
(architecture: MTP objective; Bailing V3 spec section 5).
"""

from __future__ import annotations

from dataclasses import dataclass
from types import ModuleType
from typing import Literal, NamedTuple

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from bailing_mtp.contracts.batch import TokenBatch
from bailing_mtp.contracts.sites import HeadRows
from bailing_mtp.losses.chunked import Pass, chunk_tokens_for, head_pass
from bailing_mtp.losses.fused_head import FusedPlan, fused_chunk_tokens, fused_outputs
from bailing_mtp.parallel import vocab


@dataclass(frozen=True)
class HeadOptions:
    """objective: the MTP target, the data's token or the trunk's own detached distribution.
    detach_mtp: the MTP streams leave the head weight alone. temperature: of the acceptance metric's distributions.
    policy_temperature: divides the trunk's logits for log_prob_T and entropy_T, and for nothing else.
    with_entropy: compute entropy_T.
    kernels: the module of one-pass kernels over logits (losses.fused_head); None composes torch's functions.
    """

    chunk_tokens: int
    objective: Literal["hard", "soft"] = "hard"
    detach_mtp: bool = False
    temperature: float = 1.0
    policy_temperature: float = 1.0
    with_entropy: bool = False
    kernels: ModuleType | None = None


class DepthOutputs(NamedTuple):
    """One MTP depth, per site. Sites that the heads left out hold zeros; what lies outside the documents means
    nothing and must be masked."""

    loss_T: Tensor
    """Cross-entropy to the objective's target, differentiable."""
    accept_T: Tensor
    """sum over the vocabulary of min(p, q): the chance that a draft of this depth is accepted here."""
    agree_T: Tensor
    """1 where the MTP layer's argmax is the trunk's."""
    ratio_T: Tensor
    """min(1, q(x)/p(x)) at the token x present: the chance that this depth's draft, had it been x, is accepted."""


class HeadOutputs(NamedTuple):
    """The trunk, per site (zeros where left out), and every MTP depth."""

    log_prob_T: Tensor
    """log softmax of logits / policy_temperature at token t+1, differentiable."""
    correct_T: Tensor
    """1 where the argmax is token t+1."""
    depths: tuple[DepthOutputs, ...]
    entropy_T: Tensor
    """Nats, of the distribution of log_prob_T, without gradient; means nothing unless asked for."""


def chosen_chunk_tokens(vocab_rows: int, kernels: ModuleType | None) -> int:
    """Tokens of a chunk for a rank with `vocab_rows` rows of the vocabulary. kernels: as in HeadOptions."""
    return chunk_tokens_for(vocab_rows) if kernels is None else fused_chunk_tokens(vocab_rows)


def head_outputs(
    trunk_TH: Tensor,
    mtp: tuple[Tensor, ...],
    weight_vH: Tensor,
    batch: TokenBatch,
    group: ProcessGroup | None,
    options: HeadOptions,
    rows: HeadRows | None = None,
) -> HeadOutputs:
    """One chunked pass over the logits of the trunk and of D = len(mtp) depths, at the sites of `rows` (None: all).

    mtp: [T, H] of every depth, or what of it `rows` was made for. Gradients: log_prob_T reaches trunk_TH and the
    weight; loss_T of depth d reaches mtp[d-1], and the weight unless detach_mtp. Nothing of the trunk's logits feels
    the soft target or a metric. The gradients of the hidden states are this rank's part of a sum over `group`.
    """
    T, n_depths = trunk_TH.shape[0], len(mtp)
    rows = HeadRows.every(T, n_depths, trunk_TH.device) if rows is None else rows
    assert len(rows.depths) == n_depths, f"rows of {len(rows.depths)} depths for {n_depths} streams"
    trains_weight = (True, *(not options.detach_mtp for _ in mtp))
    sites = (rows.sites_n, *(depth.sites_n for depth in rows.depths))
    targets = tuple(batch.token_ahead(1 + depth)[sites_n] for depth, sites_n in enumerate(sites))
    if options.kernels is None:
        plan = Pass(_ChunkOutputs(group, options), options.chunk_tokens, trains_weight, rows)
        flat = head_pass((trunk_TH, *mtp), weight_vH, plan, targets)
    else:
        fused = FusedPlan(
            kernels=options.kernels,
            group=group,
            chunk_tokens=options.chunk_tokens,
            objective=options.objective,
            trains_weight=trains_weight,
            temperature=options.temperature,
            policy_temperature=options.policy_temperature,
        )
        flat = fused_outputs(fused, rows, targets, weight_vH, (trunk_TH, *mtp))
    owners = [0] * 3 + [depth + 1 for depth in range(n_depths) for _ in DepthOutputs._fields]
    whole = [values_n.new_zeros(T).index_copy(0, sites[i], values_n) for i, values_n in zip(owners, flat, strict=True)]
    depths = tuple(DepthOutputs(*whole[3 + 4 * d : 7 + 4 * d]) for d in range(n_depths))
    return HeadOutputs(whole[0], whole[1], depths, whole[2])


@dataclass(frozen=True)
class _ChunkOutputs:
    """The chunk function of `head_outputs`: trunk log-prob, hit and entropy, then four values a depth."""

    group: ProcessGroup | None
    options: HeadOptions

    def __call__(
        self, logits: list[Tensor], partners: list[Tensor | None], targets: list[Tensor]
    ) -> tuple[Tensor, ...]:
        trunk_rv = logits[0]
        temperature = self.options.policy_temperature
        policy_rv = trunk_rv if temperature == 1.0 else trunk_rv / temperature
        log_prob_r = vocab.log_prob(policy_rv, targets[0], self.group)
        correct_r = entropy_r = torch.zeros_like(log_prob_r).detach()
        if not torch.is_grad_enabled():
            best_r, _ = vocab.argmax(trunk_rv, self.group)
            correct_r = (best_r == targets[0]).float()
            entropy_r = vocab.entropy(policy_rv, self.group) if self.options.with_entropy else entropy_r
        outputs = [log_prob_r, correct_r, entropy_r]
        for q_tv, partners_t, target_t in zip(logits[1:], partners[1:], targets[1:], strict=True):
            outputs += self._depth(q_tv, trunk_rv.detach(), partners_t, target_t)
        return tuple(outputs)

    def _depth(self, q_tv: Tensor, p_rv: Tensor, partners_t: Tensor, target_t: Tensor) -> list[Tensor]:
        hard = self.options.objective == "hard"
        # The trunk's logits that predict the same tokens; the gradient of the hard loss does not read them.
        p_tv = None if hard and torch.is_grad_enabled() else p_rv[partners_t]
        if not hard:
            loss_t = vocab.soft_cross_entropy(q_tv, p_tv, self.group)
        else:
            loss_t = -vocab.log_prob(q_tv, target_t, self.group)
        if torch.is_grad_enabled():
            # The backward pass calls again, for the gradient alone; metrics have none.
            nothing_t = torch.zeros_like(loss_t).detach()
            return [loss_t, nothing_t, nothing_t, nothing_t]
        return [loss_t, *self._metrics(q_tv, p_tv, target_t)]

    @torch.no_grad()
    def _metrics(self, q_tv: Tensor, p_tv: Tensor, target_t: Tensor) -> list[Tensor]:
        q_best_t, _ = vocab.argmax(q_tv, self.group)
        p_best_t, _ = vocab.argmax(p_tv, self.group)
        if self.options.temperature != 1.0:
            q_tv, p_tv = q_tv / self.options.temperature, p_tv / self.options.temperature
        accept_t = vocab.sum_min(p_tv, q_tv, self.group)
        q_log_t, p_log_t = (vocab.log_prob(x, target_t, self.group) for x in (q_tv, p_tv))
        ratio_t = (q_log_t - p_log_t).clamp(max=0.0).exp()
        return [accept_t, (q_best_t == p_best_t).float(), ratio_t]


def reach(depths: tuple[DepthOutputs, ...]) -> list[Tensor]:
    """Per depth d and site [T]: the chance that depths 1..d-1 were accepted at the tokens present."""
    weights = [torch.ones_like(depths[0].ratio_T)] if depths else []
    for earlier in depths[:-1]:
        weights.append(weights[-1] * earlier.ratio_T)
    return weights
