"""The trunk: embedding, planned layers, final norm. Heads and losses are applied outside, in token chunks.

Shapes: T tokens of the pack, s of this rank's sequence shard (T / tp under sequence parallel), H hidden size,
v this rank's vocabulary rows.
"""

from __future__ import annotations

import torch
from megatron.core.tensor_parallel.layers import VocabParallelEmbedding
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_block import TransformerBlock
from torch import Tensor, nn

from bailing_mtp.contracts.architecture import Architecture
from bailing_mtp.contracts.batch import TokenBatch
from bailing_mtp.model.layers import rope_table, sharded_parameter
from bailing_mtp.model.replay import Pack, RouteReplay
from bailing_mtp.model.settings import ModelSettings, transformer_config
from bailing_mtp.model.specs import head_kernels, trunk_spec
from bailing_mtp.parallel.context import ParallelContext


class OutputHead(nn.Module):
    """Holds the vocabulary rows of this rank; the product is taken in token chunks by the losses."""

    def __init__(self, weight: nn.Parameter) -> None:
        super().__init__()
        self.weight = weight


class BailingModel(MegatronModule):
    """Token ids -> hidden states after the final norm (what the head and the MTP layer read)."""

    def __init__(self, arch: Architecture, settings: ModelSettings, context: ParallelContext) -> None:
        config = transformer_config(arch, settings, context)
        super().__init__(config)
        self.arch = arch
        self.context = context
        self.token_multiple = context.tp * settings.size_multiple
        """What the tokens of a pack must be a multiple of."""
        self.head_kernels = head_kernels(settings)
        """What the losses read logits with; None for torch's functions."""
        self.embedding = VocabParallelEmbedding(
            arch.vocab_size,
            arch.hidden_size,
            init_method=_filled_by_weights,
            reduce_scatter_embeddings=config.sequence_parallel,
            config=config,
            tp_group=context.tp_group,
        )
        self.decoder = TransformerBlock(config, trunk_spec(arch, settings), pg_collection=context.groups)
        if not arch.tie_embeddings:
            shard = (arch.vocab_size // context.tp, arch.hidden_size)
            self.head = OutputHead(sharded_parameter(shard, config, settings.dtype))

    @property
    def head_weight(self) -> nn.Parameter:
        """[v, H]; the embedding's own rows when the checkpoint ties them."""
        return self.embedding.weight if self.arch.tie_embeddings else self.head.weight

    def embed(self, ids_T: Tensor) -> Tensor:
        """[T] -> this rank's sequence shard [s, 1, H]."""
        embedded = self.embedding(ids_T[None])
        return embedded if self.config.sequence_parallel else embedded.transpose(0, 1)

    def rope(self, position_ids_T: Tensor) -> Tensor:
        """Rotary table for these positions, for all T tokens."""
        return rope_table(position_ids_T, self.arch.qk_rope_head_dim, self.arch.rope_theta)

    def forward(self, batch: TokenBatch, replay: RouteReplay | None = None) -> Tensor:
        """Hidden states after the final norm, this rank's sequence shard [s, 1, H].

        T must be a multiple of token_multiple (TokenBatch.padded_to); padding takes part in nothing that counts. With
        `replay` the routers take its choices where it has some.
        """
        if replay is not None:
            replay.check(self.arch)
        return self.decoder(
            hidden_states=self.embed(batch.input_ids_T),
            attention_mask=None,
            rotary_pos_emb=self.rope(batch.layout.position_ids_T),
            packed_seq_params=Pack(batch.layout, replay),
            padding_mask=sequence_shard(batch.layout.padding_T, self.context)[None],
        )


def sequence_shard(values_T: Tensor, context: ParallelContext) -> Tensor:
    """This rank's part of a per-token tensor under sequence parallel."""
    return values_T.chunk(context.tp)[context.tp_rank] if context.tp > 1 else values_T


def _filled_by_weights(_: torch.Tensor) -> None:
    raise AssertionError("parameters are filled by the weights package, never by megatron-core")
