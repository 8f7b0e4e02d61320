"""Kimi delta attention layer: one fused input projection, short convolution, gated delta rule, gated norm.

Shapes: T tokens of the pack, s of this rank's sequence shard, h heads of this rank, d key size, v value size.
Source: Bailing V3 spec section 2.1.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

import torch
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer import TransformerConfig
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from bailing_mtp.contracts.architecture import Architecture
from bailing_mtp.contracts.batch import PackedLayout
from bailing_mtp.model import fused
from bailing_mtp.model.layers import replicated_parameter, sharded_parameter


class OutputNorm(nn.Module):
    """RMSNorm over each head's values, times sigmoid(gate); one weight for all heads."""

    def __init__(self, config: TransformerConfig, head_dim: int, kernels: ModuleType | None) -> None:
        super().__init__()
        self.kernels = kernels
        # Each rank has only its heads' part of the gradient: summed over TP like a sequence-parallel parameter.
        self.weight = replicated_parameter((head_dim,), config, config.params_dtype)
        self.eps = config.layernorm_epsilon

    def forward(self, o_Thv: Tensor, gate_Thv: Tensor) -> Tensor:
        if self.kernels is not None:
            return fused.gated_norm(self.kernels, o_Thv, gate_Thv, self.weight, self.eps)
        normed = F.rms_norm(o_Thv.float(), self.weight.shape, self.weight.float(), self.eps)
        return (normed * gate_Thv.float().sigmoid()).to(o_Thv.dtype)


class KdaMixer(nn.Module):
    """The linear-attention mixer of a trunk layer, tensor-parallel over heads.

    in_proj holds this rank's rows of q | k | v | f | g | beta, conv_weight its channels of q | k | v, so that
    decoding feeds a layer with one GEMM. `layers` is the module of the linears (model.layers or model.te), `kernels`
    the one that computes (the torch twin or fla's), `elementwise` that of the output norm (None: torch's functions).
    With `recompute` the backward computes everything between the two projections again.
    """

    def __init__(
        self,
        config: TransformerConfig,
        pg_collection: ProcessGroupCollection,
        arch: Architecture,
        layers: ModuleType,
        kernels: ModuleType,
        elementwise: ModuleType | None = None,
        recompute: bool = False,
        **_: Any,
    ) -> None:
        super().__init__()
        tp = pg_collection.tp.size()
        self.kernels, self.recompute = kernels, recompute
        self.heads, self.key_dim, self.value_dim = arch.num_heads // tp, arch.kda_head_dim, arch.v_head_dim
        self.lower_bound = arch.kda_lower_bound
        self.rows = tuple(rows // tp for rows in arch.kda_in_rows)
        self.in_proj = layers.ColumnLinear(arch.hidden_size, sum(arch.kda_in_rows), config, pg_collection.tp)
        channels = sum(self.rows[:3])
        self.conv_weight = sharded_parameter((channels, arch.conv_kernel), config, config.params_dtype)
        self.A_log = sharded_parameter((self.heads,), config, torch.float32)
        self.dt_bias = sharded_parameter((self.heads * self.key_dim,), config, torch.float32)
        self.o_norm = OutputNorm(config, self.value_dim, elementwise)
        self.out_proj = layers.RowLinear(arch.num_heads * self.value_dim, arch.hidden_size, config, pg_collection.tp)

    def forward(self, hidden: Tensor, packed_seq_params: PackedLayout, **_: Any) -> tuple[Tensor, None]:
        """[s, 1, H] normalised input -> ([s, 1, H], no bias). Documents never see each other."""
        projected_TR = self.in_proj(hidden).squeeze(1)
        if self.recompute and torch.is_grad_enabled():
            inputs = (projected_TR, packed_seq_params)
            o_Thv = checkpoint(self._mix, *inputs, use_reentrant=False, preserve_rng_state=False)
        else:
            o_Thv = self._mix(projected_TR, packed_seq_params)
        return self.out_proj(o_Thv.flatten(1).unsqueeze(1)), None

    def _mix(self, projected_TR: Tensor, layout: PackedLayout) -> Tensor:
        """From the input projection of all tokens to the normalised, gated values [T, h, v]."""
        kernels = self.kernels
        qkv_TC, f_TR, g_TR, beta_Th = projected_TR.split((sum(self.rows[:3]), *self.rows[3:]), dim=-1)
        qkv_TC = kernels.short_conv(qkv_TC, self.conv_weight, layout.cu_seqlens, lengths=layout.lengths)
        q_TR, k_TR, v_TR = qkv_TC.split(self.rows[:3], dim=-1)
        o_Thv = kernels.gated_chunk_kda(
            self._heads(q_TR, self.key_dim),
            self._heads(k_TR, self.key_dim),
            self._heads(v_TR, self.value_dim),
            self._heads(f_TR, self.key_dim),
            beta_Th,
            self.A_log,
            self.dt_bias.view(self.heads, -1),
            self.lower_bound,
            layout.cu_seqlens,
            layout.lengths,
        )
        return self.o_norm(o_Thv, self._heads(g_TR, self.value_dim))

    def _heads(self, x_TR: Tensor, size: int) -> Tensor:
        return x_TR.unflatten(-1, (self.heads, size))
