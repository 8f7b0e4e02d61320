"""Tempered log-probabilities of rollout samples under weights that are not being differentiated.

Shapes: T tokens of the pack.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Literal

import torch
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from torch import Tensor

from bailing_mtp.contracts.policy import PolicyBatch
from bailing_mtp.contracts.sites import HeadRows
from bailing_mtp.losses.heads import HeadOptions, chosen_chunk_tokens, head_outputs
from bailing_mtp.model.replay import RouteReplay
from bailing_mtp.model.trunk import BailingModel
from bailing_mtp.parallel.context import ParallelContext

Field = Literal["old_logprob_T", "reference_logprob_T"]


@torch.no_grad()
def with_logprobs(
    batches: Sequence[PolicyBatch], field: Field, trunk: BailingModel, context: ParallelContext, temperature: float
) -> list[PolicyBatch]:
    """The batches with `field` filled by `trunk`'s log softmax(logits / temperature), 0 outside responses.

    Computed as the training objective computes its own. Weights and router counts are left as they are. Collective:
    every rank brings the same number of batches. Old log-probabilities are taken with the batches' routes, as the
    objective takes its own; the reference is another model and chooses its experts itself.
    """
    was_training = trunk.training
    trunk.eval()
    replays = field == "old_logprob_T"
    found = [
        replace(batch, **{field: _token_logprobs(batch, trunk, context, temperature, replays)}) for batch in batches
    ]
    trunk.train(was_training)
    return found


def _token_logprobs(
    batch: PolicyBatch, trunk: BailingModel, context: ParallelContext, temperature: float, replays: bool
) -> Tensor:
    padded = batch.padded_to(trunk.token_multiple).to(context.device)
    hidden = trunk(padded, RouteReplay.of(padded.routes_TLk, context) if replays else None)
    if context.tp > 1:
        hidden = gather_from_sequence_parallel_region(hidden, group=context.tp_group)
    kernels = trunk.head_kernels
    chunk_tokens = chosen_chunk_tokens(trunk.head_weight.shape[0], kernels)
    options = HeadOptions(chunk_tokens, policy_temperature=temperature, kernels=kernels)
    rows = HeadRows.of(padded, n_depths=0)
    heads = head_outputs(hidden.squeeze(1), (), trunk.head_weight, padded, context.tp_group, options, rows)
    # A site predicts the next token; the batch keeps values at the token.
    logprob_T = heads.log_prob_T[: batch.layout.n_tokens].float().cpu().roll(1)
    return torch.where(batch.loss_mask_T, logprob_T, 0.0)
