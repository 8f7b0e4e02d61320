"""Log-probabilities of given tokens under the trunk and the MTP layer, without gradients.

Shapes: T tokens of the pack, t of a chunk, H hidden size, V whole vocabulary, v this rank's rows of it.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.distributed as dist
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from torch import Tensor

from bailing_mtp.contracts.batch import TokenBatch
from bailing_mtp.model.build import BuiltModel
from bailing_mtp.model.trunk import sequence_shard
from bailing_mtp.parallel import vocab
from bailing_mtp.parallel.context import ParallelContext


class Scores(NamedTuple):
    """Per site; NaN where the document has no such token. Logits only when asked for."""

    logprobs_T: Tensor
    """fp32, of token t+1 at site t."""
    mtp_logprobs_T: Tensor | None
    """fp32, of token t+2 at site t; None without an MTP layer."""
    logits_TV: Tensor | None
    mtp_logits_TV: Tensor | None


@torch.no_grad()
def score_batch(
    built: BuiltModel,
    batch: TokenBatch,
    context: ParallelContext,
    with_logits: bool = False,
    chunk_tokens: int = 1024,
) -> Scores:
    """Score one pack; the same result on every tensor-parallel rank. The modules must be in eval mode."""
    n_tokens = batch.layout.n_tokens
    batch = batch.padded_to(built.trunk.token_multiple).to(context.device)
    trunk = built.trunk
    hidden = trunk(batch)
    streams = {"trunk": (hidden, 1)}
    if built.mtp is not None:
        rope = trunk.rope(batch.layout.position_ids_T)
        uncounted_s = sequence_shard(batch.layout.padding_T, context)
        (mtp_hidden,) = built.mtp([trunk.embed(batch.token_ahead(1))], hidden, [rope], batch.layout, [uncounted_s])
        streams["mtp"] = (mtp_hidden, 2)
    scored: dict[str, tuple[Tensor, Tensor | None]] = {}
    for name, (stream, n_ahead) in streams.items():
        hidden_TH = _whole(stream, context)
        logprobs_T = _log_probs(hidden_TH, trunk.head_weight, batch, n_ahead, context, chunk_tokens)
        logits_TV = _all_logits(hidden_TH, trunk.head_weight, context)[:n_tokens] if with_logits else None
        scored[name] = (logprobs_T[:n_tokens], logits_TV)
    mtp_logprobs_T, mtp_logits_TV = scored.get("mtp", (None, None))
    return Scores(scored["trunk"][0], mtp_logprobs_T, scored["trunk"][1], mtp_logits_TV)


def _log_probs(
    hidden_TH: Tensor,
    weight_vH: Tensor,
    batch: TokenBatch,
    n_ahead: int,
    context: ParallelContext,
    chunk_tokens: int,
) -> Tensor:
    def chunk(logits_tv: Tensor, target_ids_t: Tensor) -> tuple[Tensor]:
        return (vocab.log_prob(logits_tv, target_ids_t, context.tp_group),)

    (logprobs_T,) = vocab.head_apply(hidden_TH, weight_vH, chunk, (batch.token_ahead(n_ahead),), chunk_tokens)
    return torch.where(batch.has_token_ahead(n_ahead), logprobs_T, float("nan"))


def _all_logits(hidden_TH: Tensor, weight_vH: Tensor, context: ParallelContext) -> Tensor:
    logits_Tv = vocab.head_logits(hidden_TH, weight_vH)
    if context.tp == 1:
        return logits_Tv
    shards = [torch.empty_like(logits_Tv) for _ in range(context.tp)]
    dist.all_gather(shards, logits_Tv, group=context.tp_group)
    return torch.cat(shards, dim=-1)


def _whole(hidden: Tensor, context: ParallelContext) -> Tensor:
    if context.tp > 1:
        hidden = gather_from_sequence_parallel_region(hidden, group=context.tp_group)
    return hidden.squeeze(1)
