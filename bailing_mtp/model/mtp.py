"""The multi-token-prediction layer: one gated-MLA block appended after the trunk's final norm.

Shapes: T tokens of the pack, s of this rank's sequence shard, H hidden size, K key rows and Q asking rows of a part.
Source: Bailing V3 spec section 3. It has no embedding and no head of its own: both are the trunk's.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_layer import TransformerLayer
from torch import Tensor

from bailing_mtp.contracts.architecture import Architecture
from bailing_mtp.contracts.batch import PackedLayout
from bailing_mtp.contracts.sites import DraftSites
from bailing_mtp.model.settings import ModelSettings, transformer_config
from bailing_mtp.model.specs import layer_module, layer_submodules
from bailing_mtp.parallel.context import ParallelContext

MTP_GRAD_NORM_GROUP = "mtp"
"""megatron-core's name for the separate gradient norm, so that clipping the trunk never feels this layer."""


class MtpLayer(MegatronModule):
    """At site t: from the trunk's hidden state h_t (after its final norm) and the embedding of token t+1,
    a hidden state whose head predicts token t+2."""

    def __init__(self, arch: Architecture, settings: ModelSettings, context: ParallelContext) -> None:
        # One layer of many, and the one whose probabilities must be those of the drafts: never in FP8.
        settings = replace(settings, fp8=None)
        config = transformer_config(arch, settings, context)
        super().__init__(config)
        plan, layers = arch.mtp_plan(), layer_module(settings)
        self.enorm = layers.RmsNorm(config, arch.hidden_size, arch.rms_norm_eps)
        self.hnorm = layers.RmsNorm(config, arch.hidden_size, arch.rms_norm_eps)
        self.eh_proj = layers.ReplicatedLinear(2 * arch.hidden_size, arch.hidden_size, config)
        self.block = TransformerLayer(
            config,
            layer_submodules(plan, arch, settings),
            layer_number=plan.index + 1,
            pg_collection=context.groups,
            is_mtp_layer=True,
        )
        self.final_layernorm = layers.RmsNorm(config, arch.hidden_size, arch.rms_norm_eps)
        for parameter in self.parameters():
            parameter.grad_norm_group = MTP_GRAD_NORM_GROUP

    def forward(
        self,
        embeddings: Sequence[Tensor],
        hidden: Tensor,
        ropes: Sequence[Tensor],
        layout: PackedLayout,
        uncounted: Sequence[Tensor],
        part: DraftSites | None = None,
    ) -> tuple[Tensor, ...]:
        """Unroll the layer over D depths: tensors [s, 1, H] after final_layernorm, one per depth.

        embeddings[d-1]: of token t+d. hidden: the trunk's, after its final norm. ropes[d-1]: the rotary table of
        position t+d-1. uncounted[d-1]: bool [s], sites that stay out of the router's counts.

        part: without sequence parallel, the sites to work on. hidden, embeddings[0] and ropes[0] are then of its K
        key rows; further embeddings and ropes, every uncounted and the result of its Q asking rows.

        Depth d is the function that a rollout runs when it drafts: its query attends to the depth-1 rows (made
        of true trunk hidden states) up to t and to its own chain's rows, and its input hidden state is the depth
        d-1 output, with gradients through all depths.
        """
        assert len(embeddings) == len(ropes) == len(uncounted), "one embedding, table and mask per depth"
        mixer, outputs = self.block.self_attention, []
        lengths = layout.lengths if part is None else part.lengths
        query_lengths, queries_Q = (None, None) if part is None else (part.query_lengths, part.queries_Q)
        rows: list[tuple[Tensor, Tensor]] = []
        for embedding, rope, uncounted_s in zip(embeddings, ropes, uncounted, strict=True):
            x = self.eh_proj(torch.cat((self.enorm(embedding), self.hnorm(hidden)), dim=-1))
            inputs = mixer.project(self.block.input_layernorm(x), rope, queries_Q)
            if queries_Q is not None:
                x, queries_Q = x.index_select(0, queries_Q), None  # deeper, every row asks
            rows.append((inputs.k_Thd, inputs.v_Thv))
            o_Qhv = mixer.kernels.chained_causal_attention(
                inputs.q_Qhd, *rows[0], tuple(rows[1:]), lengths, mixer.softmax_scale, query_lengths
            )
            x = x + mixer.finish(o_Qhv, inputs.gate_Qh)
            mlp, _ = self.block.mlp(self.block.pre_mlp_layernorm(x), padding_mask=uncounted_s[None])
            hidden = self.final_layernorm(x + mlp)
            outputs.append(hidden)
        return tuple(outputs)
