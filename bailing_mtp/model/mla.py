"""Multi-head latent attention with a per-head output gate, written on megatron-core's parallel linears.

Shapes: T tokens of the pack, Q of them that ask, s of this rank's sequence shard, h heads of this rank, n no-position
size, r rotary size, d = n + r, v value size, C latent rank.
Source: Bailing V3 spec section 2.2.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any, NamedTuple

import torch
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from megatron.core.transformer import TransformerConfig
from torch import Tensor, nn

from bailing_mtp.contracts.architecture import Architecture
from bailing_mtp.contracts.batch import PackedLayout
from bailing_mtp.model.layers import ColumnLinear, apply_rope

LATENT_NORM_EPS = 1e-6
"""Eps of the two latent norms, whatever rms_norm_eps says (Bailing V3 spec section 2.2)."""


class AttentionInputs(NamedTuple):
    """What attention reads, for all T tokens and this rank's heads; positions are already applied."""

    q_Qhd: Tensor
    k_Thd: Tensor
    v_Thv: Tensor
    gate_Qh: Tensor


class GatedMla(nn.Module):
    """The softmax mixer of a trunk or MTP layer, tensor-parallel over heads.

    The low-rank input projections q_a and kv_a are replicated and work on this rank's sequence shard; the
    up-projections gather the (small) latents. Queries come from q_b(norm(q_a x)), or directly from q_proj when
    the model has no q_lora_rank. `layers` is the module of the linears and norms (model.layers or model.te), `kernels`
    the one that attends (kernels.attention or kernels.flash).
    """

    def __init__(
        self,
        config: TransformerConfig,
        pg_collection: ProcessGroupCollection,
        arch: Architecture,
        layers: ModuleType,
        kernels: ModuleType,
        **_: Any,
    ) -> None:
        super().__init__()
        self.kernels = kernels
        tp_group, n_heads, hidden = pg_collection.tp, arch.num_heads, arch.hidden_size
        self.tp_group = tp_group
        self.sequence_parallel = config.sequence_parallel
        self.heads = n_heads // tp_group.size()
        self.nope_dim, self.rope_dim, self.value_dim = arch.qk_nope_head_dim, arch.qk_rope_head_dim, arch.v_head_dim
        self.kv_rank = arch.kv_lora_rank
        self.softmax_scale = arch.qk_head_dim**-0.5
        if arch.q_lora_rank is None:
            self.q_proj = layers.ColumnLinear(hidden, n_heads * arch.qk_head_dim, config, tp_group)
        else:
            self.q_a_proj = layers.ReplicatedLinear(hidden, arch.q_lora_rank, config)
            self.q_a_layernorm = layers.RmsNorm(config, arch.q_lora_rank, LATENT_NORM_EPS)
            self.q_b_proj = layers.ColumnLinear(arch.q_lora_rank, n_heads * arch.qk_head_dim, config, tp_group)
        self.kv_a_proj = layers.ReplicatedLinear(hidden, self.kv_rank + self.rope_dim, config)
        self.kv_a_layernorm = layers.RmsNorm(config, self.kv_rank, LATENT_NORM_EPS)
        self.kv_b_proj = layers.ColumnLinear(self.kv_rank, n_heads * (self.nope_dim + self.value_dim), config, tp_group)
        # One row a head: always in full precision, and nothing to gain.
        self.gate_proj = ColumnLinear(hidden, n_heads, config, tp_group)
        self.out_proj = layers.RowLinear(n_heads * self.value_dim, hidden, config, tp_group)

    def forward(
        self, hidden: Tensor, rotary_pos_emb: Tensor, packed_seq_params: PackedLayout, **_: Any
    ) -> tuple[Tensor, None]:
        """[s, 1, H] normalised input -> ([s, 1, H], no bias); causal inside each document.

        rotary_pos_emb: the [T, 2, r/2] table of layers.rope_table for all T tokens.
        """
        inputs = self.project(hidden, rotary_pos_emb)
        o_Thv = self.kernels.packed_causal_attention(
            inputs.q_Qhd, inputs.k_Thd, inputs.v_Thv, packed_seq_params.lengths, self.softmax_scale
        )
        return self.finish(o_Thv, inputs.gate_Qh), None

    def project(self, hidden: Tensor, rotary_pos_emb: Tensor, queries_Q: Tensor | None = None) -> AttentionInputs:
        """Keys and values of all tokens from this rank's sequence shard of the layer input; queries and gates of the
        rows `queries_Q`, without sequence parallel (None: of all)."""
        asking, asking_table = hidden, rotary_pos_emb
        if queries_Q is not None:
            assert not self.sequence_parallel, "a sequence shard does not hold all rows"
            asking, asking_table = hidden.index_select(0, queries_Q), rotary_pos_emb.index_select(0, queries_Q)
        q_Qhd = self._queries(asking).unflatten(-1, (self.heads, -1))
        latent, k_rope = self.kv_a_proj(hidden).split((self.kv_rank, self.rope_dim), dim=-1)
        kv_Thx = self.kv_b_proj(self.kv_a_layernorm(latent)).squeeze(1).unflatten(-1, (self.heads, -1))
        k_nope_Thn, v_Thv = kv_Thx.split((self.nope_dim, self.value_dim), dim=-1)
        q_nope_Qhn, q_rope_Qhr = q_Qhd.split((self.nope_dim, self.rope_dim), dim=-1)
        if self.sequence_parallel:
            # Its gradient is a sum over this rank's heads: the backward of the gather adds the ranks' sums.
            k_rope = gather_from_sequence_parallel_region(k_rope, group=self.tp_group)
        k_rope_T1r = apply_rope(k_rope, rotary_pos_emb)
        q_Qhd = torch.cat((q_nope_Qhn, apply_rope(q_rope_Qhr, asking_table)), dim=-1)
        k_Thd = torch.cat((k_nope_Thn, k_rope_T1r.expand(-1, self.heads, -1)), dim=-1)
        return AttentionInputs(q_Qhd, k_Thd, v_Thv, self.gate_proj(asking).squeeze(1).sigmoid())

    def finish(self, o_Qhv: Tensor, gate_Qh: Tensor) -> Tensor:
        """Gate each head and project back: [Q, h, v] -> this rank's shard [s, 1, H]."""
        gated = o_Qhv * gate_Qh.unsqueeze(-1)
        return self.out_proj(gated.flatten(1).unsqueeze(1))

    def _queries(self, hidden: Tensor) -> Tensor:
        if hasattr(self, "q_proj"):
            return self.q_proj(hidden).squeeze(1)
        return self.q_b_proj(self.q_a_layernorm(self.q_a_proj(hidden))).squeeze(1)
