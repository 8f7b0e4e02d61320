"""Kimi delta attention over a pack of segments that go on from a state, in plain torch.

Shape legend: T tokens of a pack, X keys of its segments (prefixes included), s segments, h heads of this rank,
D key size, V value size, Y convolution channels (of q, k and v), W convolution taps, M chunks.
Source: Bailing V3 spec section 2.1.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from bailing_mtp.kernels.reference import kda

CHUNK_TOKENS = 64
"""Tokens of a chunk of `Pack.chunks_M2`; what the twins compute does not depend on it."""


@dataclass(frozen=True)
class Pack:
    """Segments laid one after another: lengths in tokens on the host, and the same as tables on the device."""

    lengths: tuple[int, ...]
    """New tokens of each segment, at least one."""
    key_lengths: tuple[int, ...]
    """All tokens of its sequence so far, the new ones last."""
    cu_seqlens: Tensor
    """int64 [s + 1], ends of the segments' new tokens."""
    segment_T: Tensor
    """int64, the segment of each token."""
    chunks_M2: Tensor
    """int64, segment and number in it of each chunk of CHUNK_TOKENS tokens; a segment's last may be shorter."""
    chunk_offsets: Tensor
    """int64 [s + 1], ends of the segments' chunks."""
    query_ends: Tensor
    """int32 [s + 1], as cu_seqlens."""
    key_ends: Tensor
    """int32 [s + 1], ends of the segments' keys."""


def short_conv_qkv(
    x_TY: Tensor,
    weight_YW: Tensor,
    pack: Pack,
    history_sWY: Tensor | None,
    sizes: tuple[int, int, int],
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Causal convolution and SiLU of each segment: q, k, v of `sizes` channels each, and the last W-1 raw inputs.

    history_sWY [s, W-1, Y]: raw inputs before each segment; zeros if None. Summed in fp32, in x's dtype.
    """
    y_TY, window_sWY = kda.short_conv(x_TY, weight_YW, pack.cu_seqlens, history_sWY, return_history=True)
    q_Tx, k_Tx, v_Tx = y_TY.split(sizes, dim=-1)
    return q_Tx, k_Tx, v_Tx, window_sWY


def gated_delta_rule(
    q_Tx: Tensor,
    k_Tx: Tensor,
    v_Tx: Tensor,
    f_Tx: Tensor,
    beta_Th: Tensor,
    A_log_h: Tensor,
    dt_bias_hD: Tensor,
    lower_bound: float | None,
    pack: Pack,
    state_shVD: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Outputs [T, h, V] in q's dtype and the states after each segment, [s, h, V, D] in fp32.

    q, k, v, f (before the decay's activation) and beta (before its sigmoid) as the projections give them, heads
    side by side. state_shVD: before each segment; zeros if None.
    """
    heads, D = dt_bias_hD.shape
    q_ThD, k_ThD, v_ThV, f_ThD = (x.unflatten(-1, (heads, -1)) for x in (q_Tx, k_Tx, v_Tx, f_Tx))
    assert q_ThD.shape[-1] == D
    o_ThV, state_shDV = kda.chunk_kda(
        q_ThD,
        k_ThD,
        v_ThV,
        kda.kda_gate(f_ThD, A_log_h, dt_bias_hD, lower_bound),
        beta_Th.float().sigmoid(),
        pack.cu_seqlens,
        pack.lengths,
        initial_state_Nhkv=None if state_shVD is None else state_shVD.transpose(-1, -2).contiguous(),
        output_final_state=True,
    )
    assert state_shDV is not None
    return o_ThV, state_shDV.transpose(-1, -2)


def gated_norm(o_ThV: Tensor, gate_Tx: Tensor, weight_V: Tensor, eps: float) -> Tensor:
    """RMSNorm over each head's values times sigmoid(gate), [T, h * V] in the gate's dtype; computed in fp32."""
    normed_ThV = F.rms_norm(o_ThV.float(), weight_V.shape, weight_V.float(), eps)
    gate_ThV = gate_Tx.unflatten(-1, o_ThV.shape[1:]).float().sigmoid()
    return (normed_ThV * gate_ThV).flatten(1).to(gate_Tx.dtype)


def chunk_table(lengths: tuple[int, ...]) -> Tensor:
    """`Pack.chunks_M2` of these lengths, on the host."""
    counts = torch.tensor([-(-length // CHUNK_TOKENS) for length in lengths])
    segment_M = torch.arange(len(lengths)).repeat_interleave(counts)
    first_M = (counts.cumsum(0) - counts).repeat_interleave(counts)
    return torch.stack([segment_M, torch.arange(len(segment_M)) - first_M], 1)
