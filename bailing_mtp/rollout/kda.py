"""Kimi delta attention of the rollout: deferred commit in a step, chunks in a prefill.

Shape legend: R rows (tokens) of a step, n its sequences, T tokens of a prefill, s its segments, h heads of
this rank, D key size, V value size, X convolution channels, W convolution taps, Y rows of the fused
projection, H hidden size.
Source: Bailing V3 spec section 2.1.
"""

from __future__ import annotations

from types import ModuleType

import torch
import torch.nn.functional as F
from torch import Tensor

from bailing_mtp.contracts.architecture import Architecture
from bailing_mtp.rollout.memory import KdaMemory, SlotState
from bailing_mtp.weights.view import KdaWeights


class DeltaAttention:
    """The mixer, given an architecture and kernel sets; stateless.

    kernels: steps, such as kernels.reference.decode; prefill_kernels: chunks, such as kernels.reference.kda.
    """

    def __init__(self, arch: Architecture, kernels: ModuleType, prefill_kernels: ModuleType) -> None:
        self.arch, self.kernels, self.prefill_kernels = arch, kernels, prefill_kernels

    def step(
        self,
        weights: KdaWeights,
        x_RH: Tensor,
        kda: KdaMemory,
        slots: SlotState,
        index: int,
        slots_n: Tensor,
        n_tokens: int,
    ) -> Tensor:
        """Replay what was committed, run the fed tokens, record them. `index`: which linear-attention layer."""
        o_Rx = self.kernels.kda_verify(
            self.kernels.linear(x_RH, weights.in_proj_YH),
            weights.conv_XW,
            weights.A_log_h,
            weights.dt_bias_hD,
            weights.o_norm_V,
            self.kernels.KdaLayerMemory(
                kda.state_LNhVD[index],
                kda.conv_window_2LNwX[:, index],
                kda.rec_decay_2LNRhD[:, index],
                kda.rec_key_2LNRhD[:, index],
                kda.rec_update_2LNRhV[:, index],
            ),
            slots.count,
            slots.parity,
            slots_n,
            n_tokens,
            self.arch.kda_lower_bound,
            self.arch.rms_norm_eps,
        )
        return self.kernels.linear(o_Rx, weights.out_proj_HhV)

    def prefill(
        self,
        weights: KdaWeights,
        x_TH: Tensor,
        kda: KdaMemory,
        index: int,
        slots_s: Tensor,
        continues_s: Tensor | None,
        cu_seqlens: Tensor,
        lengths: tuple[int, ...],
    ) -> Tensor:
        """Run whole segments from their slots' states and windows, and write both back.

        continues_s: bool, False where a segment begins its sequence and starts from zeros; None: all do.
        A window goes to buffer 0; the caller sets count and parity to 0.
        """
        heads, key_dim, value_dim = (*weights.A_log_h.shape, self.arch.kda_head_dim, self.arch.v_head_dim)
        channels, taps = weights.conv_XW.shape
        sizes = (channels, heads * key_dim, heads * value_dim, heads)
        qkv_TX, f_Tx, g_Tx, beta_Th = F.linear(x_TH, weights.in_proj_YH).split(sizes, dim=-1)
        state_shVD, history_sWX = None, None
        if continues_s is not None:
            state_shVD = torch.where(continues_s[:, None, None, None], kda.state_LNhVD[index, slots_s], 0)
            history_sWX = kda.conv_window_2LNwX[0, index, slots_s, : taps - 1]
            history_sWX = torch.where(continues_s[:, None, None], history_sWX, 0)
        ops = self.prefill_kernels
        qkv_TX, window_sWX = ops.short_conv(
            qkv_TX, weights.conv_XW, cu_seqlens, history_sWX, return_history=True, lengths=lengths
        )
        q_Tx, k_Tx, v_Tx = qkv_TX.split((heads * key_dim, heads * key_dim, heads * value_dim), dim=-1)
        o_ThV, state_shDV = ops.chunk_kda(
            q_Tx.unflatten(-1, (heads, key_dim)),
            k_Tx.unflatten(-1, (heads, key_dim)),
            v_Tx.unflatten(-1, (heads, value_dim)),
            ops.kda_gate(
                f_Tx.unflatten(-1, (heads, key_dim)),
                weights.A_log_h,
                weights.dt_bias_hD,
                self.arch.kda_lower_bound,
            ),
            beta_Th.float().sigmoid(),
            cu_seqlens,
            lengths,
            initial_state_Nhkv=None if state_shVD is None else state_shVD.transpose(-1, -2).contiguous(),
            output_final_state=True,
            bounded_decay=self.arch.kda_lower_bound is not None and self.arch.kda_lower_bound >= -5,
        )
        kda.state_LNhVD[index, slots_s] = state_shDV.transpose(-1, -2)
        kda.conv_window_2LNwX[0, index, slots_s, : taps - 1] = window_sWX
        o_ThV = F.rms_norm(
            o_ThV.float(), weights.o_norm_V.shape, weights.o_norm_V.float(), self.arch.rms_norm_eps
        )
        o_ThV = o_ThV * g_Tx.unflatten(-1, (heads, value_dim)).float().sigmoid()
        return F.linear(o_ThV.flatten(1).to(x_TH.dtype), weights.out_proj_HhV)
