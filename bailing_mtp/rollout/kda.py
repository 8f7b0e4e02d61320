"""Kimi delta attention of the rollout: deferred commit in a step, chunks in a prefill.

Shape legend: R rows (tokens) of a step, n its sequences, T tokens of a prefill, s its segments, h heads of
this rank, D key size, V value size, X convolution channels, W convolution taps, Y rows of the fused
projection, H hidden size; x: heads and their channels side by side.
Source: Bailing V3 spec section 2.1.
"""

from __future__ import annotations

from types import ModuleType

import torch
import torch.nn.functional as F
from torch import Tensor

from bailing_mtp.contracts.architecture import Architecture
from bailing_mtp.rollout.memory import KdaMemory, SlotState
from bailing_mtp.rollout.prefill import PrefillPlan
from bailing_mtp.weights.view import KdaWeights


class DeltaAttention:
    """The mixer, given an architecture and kernel sets; stateless.

    kernels: steps, such as kernels.reference.decode; prefill_kernels: packs, such as kernels.reference.prefill.
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
        plan: PrefillPlan,
    ) -> Tensor:
        """Run whole segments from their slots' states and windows, and write both back.

        A window goes to buffer 0; the caller sets count and parity to 0.
        """
        heads, key_dim, value_dim = (*weights.A_log_h.shape, self.arch.kda_head_dim, self.arch.v_head_dim)
        channels, taps = weights.conv_XW.shape
        sizes = (channels, heads * key_dim, heads * value_dim, heads)
        qkv_TX, f_Tx, g_Tx, beta_Th = F.linear(x_TH, weights.in_proj_YH).split(sizes, dim=-1)
        state_shVD, history_sWX = None, None
        slots_s, continues_s = plan.slots_s, plan.continues_s
        if continues_s is not None:
            state_shVD = torch.where(continues_s[:, None, None, None], kda.state_LNhVD[index, slots_s], 0)
            history_sWX = kda.conv_window_2LNwX[0, index, slots_s, : taps - 1]
            history_sWX = torch.where(continues_s[:, None, None], history_sWX, 0)
        ops = self.prefill_kernels
        q_Tx, k_Tx, v_Tx, window_sWX = ops.short_conv_qkv(
            qkv_TX,
            weights.conv_XW,
            plan.pack,
            history_sWX,
            (heads * key_dim, heads * key_dim, heads * value_dim),
        )
        o_ThV, state_shVD = ops.gated_delta_rule(
            q_Tx,
            k_Tx,
            v_Tx,
            f_Tx,
            beta_Th,
            weights.A_log_h,
            weights.dt_bias_hD,
            self.arch.kda_lower_bound,
            plan.pack,
            state_shVD,
        )
        kda.state_LNhVD[index, slots_s] = state_shVD
        kda.conv_window_2LNwX[0, index, slots_s, : taps - 1] = window_sWX
        o_Tx = ops.gated_norm(o_ThV, g_Tx, weights.o_norm_V, self.arch.rms_norm_eps)
        return F.linear(o_Tx, weights.out_proj_HhV)
