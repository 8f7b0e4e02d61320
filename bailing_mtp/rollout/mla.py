"""Latent attention of the rollout: absorbed over the paged cache in a step, expanded in a prefill.

Shape legend: R rows (tokens) of a call, n rows of a step, S tokens fed to each, T tokens of a prefill, X of
its keys (prefixes included), h heads of this rank, d = n + r query size (no-position and rotary parts),
C latent rank, x = C + r, v value size, H hidden size, B blocks, b tokens of a block, M blocks of a table.
Source: Bailing V3 spec section 2.2.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import ModuleType

import torch
import torch.nn.functional as F
from torch import Tensor

from bailing_mtp.contracts.architecture import Architecture
from bailing_mtp.kernels.reference.kda_prefill import Pack
from bailing_mtp.weights.view import MlaWeights

LATENT_NORM_EPS = 1e-6
"""Eps of the two latent norms, whatever rms_norm_eps says."""


@dataclass(frozen=True)
class Placement:
    """Where the tokens of a prefill stand, and where their latent rows go."""

    rope_R: Tensor
    """[R, 2, r/2], cosines and sines."""
    write_position_R: Tensor
    """Position in the sequence; past the block table: the row goes to the scratch block."""
    block_table_RM: Tensor
    """Each token's own block table."""


@dataclass(frozen=True)
class Prefixes:
    """The keys of a prefill's segments, and where each lies in the cache."""

    pack: Pack
    block_X: Tensor
    offset_X: Tensor


class LatentAttention:
    """The mixer, given an architecture and kernel sets; stateless.

    kernels: such as kernels.reference.decode; prefill_kernels: attention of a prefill, such as
    kernels.reference.prefill.
    """

    def __init__(self, arch: Architecture, kernels: ModuleType, prefill_kernels: ModuleType) -> None:
        self.arch, self.kernels, self.prefill_kernels = arch, kernels, prefill_kernels
        self.scale = arch.qk_head_dim**-0.5

    def step(
        self,
        weights: MlaWeights,
        x_RH: Tensor,
        rope_P: Tensor,
        latents_Bbx: Tensor,
        block_table_nM: Tensor,
        position_n: Tensor,
    ) -> Tensor:
        """Write the rows of S tokens per sequence and attend, queries folded through the key up-projection.

        rope_P: rotations of all positions, [P, 2, r/2].
        """
        ops, q_latent = self.kernels, weights.q_a_QH is not None
        reads_x = (weights.kv_a_rows_H, weights.gate_hH, *((weights.q_a_QH,) if q_latent else ()))
        kv_Rx, gate_Rh, *q_RQ = ops.linears(x_RH, reads_x)
        normed_RQ = ops.cache_latents(
            kv_Rx, weights.kv_a_norm_C, q_RQ[0] if q_latent else None, weights.q_a_norm_Q, LATENT_NORM_EPS,
            rope_P, latents_Bbx, block_table_nM, position_n,
        )  # fmt: skip
        q_Rx = ops.linear(normed_RQ if q_latent else x_RH, weights.q_b)
        key_up_hnC, value_up_hvC = self._up(weights)
        q_Rhd = q_Rx.unflatten(-1, (key_up_hnC.shape[0], -1))
        q_nShx = ops.absorb_queries(q_Rhd, key_up_hnC, rope_P, position_n)
        o_nShC = ops.mla_verify(
            q_nShx, latents_Bbx, block_table_nM, position_n, self.scale, self.arch.kv_lora_rank
        )
        return ops.linear(ops.gated_values(o_nShC, value_up_hvC, gate_Rh), weights.out_proj_HhV)

    def prefill(
        self, weights: MlaWeights, x_TH: Tensor, at: Placement, latents_Bbx: Tensor, prefixes: Prefixes
    ) -> Tensor:
        """Write the rows of the new tokens and attend to the whole sequences with expanded keys and values."""
        rows_Xx = self.write(weights, x_TH, at, latents_Bbx)
        if prefixes.pack.lengths != prefixes.pack.key_lengths:
            rows_Xx = latents_Bbx[prefixes.block_X, prefixes.offset_X]
        q_Thd = torch.cat(self._queries(weights, x_TH, at), dim=-1)
        latent_XC, k_rope_Xr = self._split(rows_Xx)
        heads = weights.kv_b_hxC.shape[0]
        kv_Xhx = F.linear(latent_XC, weights.kv_b_hxC.flatten(0, 1)).unflatten(-1, (heads, -1))
        k_nope_Xhn, v_Xhv = kv_Xhx.split((self.arch.qk_nope_head_dim, self.arch.v_head_dim), dim=-1)
        k_Xhd = torch.cat((k_nope_Xhn, k_rope_Xr.unsqueeze(1).expand(-1, heads, -1)), dim=-1)
        o_Thv = self.prefill_kernels.attend(q_Thd, k_Xhd, v_Xhv, prefixes.pack, self.scale)
        return self._finish(weights, x_TH, o_Thv)

    def write(self, weights: MlaWeights, x_RH: Tensor, at: Placement, latents_Bbx: Tensor) -> Tensor:
        """Cache the latent rows of the tokens; returns them, [R, x]."""
        latent_RC, k_rope_Rr = self._split(F.linear(x_RH, weights.kv_a_rows_H))
        latent_RC = self.kernels.rms_norm(latent_RC, weights.kv_a_norm_C, LATENT_NORM_EPS)
        k_rope_Rr = self.kernels.apply_rope(k_rope_Rr.unsqueeze(1), at.rope_R).squeeze(1)
        rows_Rx = torch.cat((latent_RC, k_rope_Rr), dim=-1)
        self.kernels.write_latents(rows_Rx, latents_Bbx, at.block_table_RM, at.write_position_R)
        return rows_Rx

    def _queries(self, weights: MlaWeights, x_RH: Tensor, at: Placement) -> tuple[Tensor, Tensor]:
        if weights.q_a_QH is not None:
            x_RH = self.kernels.rms_norm(F.linear(x_RH, weights.q_a_QH), weights.q_a_norm_Q, LATENT_NORM_EPS)
        q_Rhd = F.linear(x_RH, weights.q_b).unflatten(-1, (weights.kv_b_hxC.shape[0], -1))
        q_nope_Rhn, q_rope_Rhr = q_Rhd.split((self.arch.qk_nope_head_dim, self.arch.qk_rope_head_dim), dim=-1)
        return q_nope_Rhn, self.kernels.apply_rope(q_rope_Rhr, at.rope_R)

    def _split(self, rows_x: Tensor) -> tuple[Tensor, Tensor]:
        return rows_x.split((self.arch.kv_lora_rank, self.arch.qk_rope_head_dim), dim=-1)

    def _up(self, weights: MlaWeights) -> tuple[Tensor, Tensor]:
        return weights.kv_b_hxC.split((self.arch.qk_nope_head_dim, self.arch.v_head_dim), dim=1)

    @staticmethod
    def _finish(weights: MlaWeights, x_RH: Tensor, o_Rhv: Tensor) -> Tensor:
        gate_Rh = F.linear(x_RH, weights.gate_hH).sigmoid()
        return F.linear((o_Rhv * gate_Rh.unsqueeze(-1)).flatten(1), weights.out_proj_HhV)
