"""The multi-token-prediction layer: one gated-MLA block appended after the trunk's final norm.

Shapes: T tokens of the pack, s of this rank's sequence shard, H hidden size.
Source: Bailing V3 spec section 3. It has no embedding and no head of its own: both are the trunk's.
"""

from __future__ import annotations

import torch
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_layer import TransformerLayer
from torch import Tensor

from bailing_mtp.contracts.architecture import Architecture
from bailing_mtp.contracts.batch import PackedLayout
from bailing_mtp.model.layers import ReplicatedLinear, RmsNorm
from bailing_mtp.model.settings import ModelSettings, transformer_config
from bailing_mtp.model.specs import layer_submodules
from bailing_mtp.parallel.context import ParallelContext

MTP_GRAD_NORM_GROUP = "mtp"
"""megatron-core's name for the separate gradient norm, so that clipping the trunk never feels this layer."""


class MtpLayer(MegatronModule):
    """At site t: from the trunk's hidden state h_t (after its final norm) and the embedding of token t+1,
    a hidden state whose head predicts token t+2."""

    def __init__(self, arch: Architecture, settings: ModelSettings, context: ParallelContext) -> None:
        config = transformer_config(arch, settings, context)
        super().__init__(config)
        plan = arch.mtp_plan()
        self.enorm = RmsNorm(config, arch.hidden_size, arch.rms_norm_eps)
        self.hnorm = RmsNorm(config, arch.hidden_size, arch.rms_norm_eps)
        self.eh_proj = ReplicatedLinear(2 * arch.hidden_size, arch.hidden_size, config)
        self.block = TransformerLayer(
            config,
            layer_submodules(plan, arch, settings),
            layer_number=plan.index + 1,
            pg_collection=context.groups,
            is_mtp_layer=True,
        )
        self.final_layernorm = RmsNorm(config, arch.hidden_size, arch.rms_norm_eps)
        for parameter in self.parameters():
            parameter.grad_norm_group = MTP_GRAD_NORM_GROUP

    def forward(
        self,
        next_embedding: Tensor,
        hidden: Tensor,
        rotary_pos_emb: Tensor,
        layout: PackedLayout,
        uncounted: Tensor,
    ) -> Tensor:
        """[s, 1, H] each -> [s, 1, H] after final_layernorm.

        rotary_pos_emb: the table of the trunk positions t (not t+1). uncounted: bool [s], sites that stay out
        of the router's counts. The concatenation puts the embedding first.
        """
        x = self.eh_proj(torch.cat((self.enorm(next_embedding), self.hnorm(hidden)), dim=-1))
        x, _ = self.block(
            hidden_states=x,
            attention_mask=None,
            rotary_pos_emb=rotary_pos_emb,
            packed_seq_params=layout,
            padding_mask=uncounted[None],
        )
        return self.final_layernorm(x)
