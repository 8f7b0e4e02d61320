"""What surrounds the delta rule in a prefill: short convolution before it, gated norm after it.

Shape legend: T tokens of a pack, s segments, h heads, V value size, Y convolution channels, W taps; t tokens and
c channels of a tile.

Source: Bailing V3 spec section 2.1.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from bailing_mtp.kernels.reference.kda_prefill import Pack
from bailing_mtp.kernels.triton import train

TILE_TOKENS, TILE_CHANNELS = 16, 128
WINDOW_CHANNELS = 1024


@triton.jit
def _short_conv(
    q,
    k,
    v,
    x,
    weight,
    history,
    cu_seqlens,
    segment_T,
    T,
    x_stride,
    q_size,
    k_size,
    v_size,
    W: tl.constexpr,
    HAS_HISTORY: tl.constexpr,
    T_TILE: tl.constexpr,
    C_TILE: tl.constexpr,
):
    ids_t = tl.program_id(0).to(tl.int64) * T_TILE + tl.arange(0, T_TILE)
    ids_c = tl.program_id(1) * C_TILE + tl.arange(0, C_TILE)
    channels = q_size + k_size + v_size
    in_t, in_c = ids_t < T, ids_c < channels
    segment_t = tl.load(segment_T + ids_t, mask=in_t, other=0)
    position_t = ids_t - tl.load(cu_seqlens + segment_t)
    sum_tc = tl.zeros([T_TILE, C_TILE], tl.float32)
    for tap in tl.static_range(W):
        back = W - 1 - tap
        inside_t = position_t >= back
        x_tc = tl.load(
            x + (ids_t - back)[:, None] * x_stride + ids_c[None, :],
            mask=(in_t & inside_t)[:, None] & in_c[None, :],
            other=0.0,
        ).to(tl.float32)
        if HAS_HISTORY:
            row_t = segment_t * (W - 1) + W - 1 + position_t - back
            x_tc += tl.load(
                history + row_t[:, None] * channels + ids_c[None, :],
                mask=(in_t & (position_t < back))[:, None] & in_c[None, :],
                other=0.0,
            ).to(tl.float32)
        weight_c = tl.load(weight + ids_c * W + tap, mask=in_c, other=0.0).to(tl.float32)
        sum_tc += x_tc * weight_c[None, :]
    y_tc = (sum_tc * tl.sigmoid(sum_tc)).to(q.dtype.element_ty)
    in_q, in_k = ids_c < q_size, (ids_c >= q_size) & (ids_c < q_size + k_size)
    in_v = in_c & (ids_c >= q_size + k_size)
    tl.store(q + ids_t[:, None] * q_size + ids_c[None, :], y_tc, mask=in_t[:, None] & in_q[None, :])
    k_c, v_c = ids_c - q_size, ids_c - q_size - k_size
    tl.store(k + ids_t[:, None] * k_size + k_c[None, :], y_tc, mask=in_t[:, None] & in_k[None, :])
    tl.store(v + ids_t[:, None] * v_size + v_c[None, :], y_tc, mask=in_t[:, None] & in_v[None, :])


@triton.jit
def _last_inputs(
    window,
    x,
    history,
    cu_seqlens,
    x_stride,
    channels,
    W: tl.constexpr,
    HAS_HISTORY: tl.constexpr,
    C_TILE: tl.constexpr,
):
    segment = tl.program_id(0).to(tl.int64)
    ids_c = tl.program_id(1) * C_TILE + tl.arange(0, C_TILE)
    in_c = ids_c < channels
    first, end = tl.load(cu_seqlens + segment), tl.load(cu_seqlens + segment + 1)
    for row in tl.static_range(W - 1):
        token = end - (W - 1) + row
        value_c = tl.load(x + token * x_stride + ids_c, mask=in_c & (token >= first), other=0.0)
        if HAS_HISTORY:
            source = segment * (W - 1) + W - 1 + token - first
            value_c += tl.load(history + source * channels + ids_c, mask=in_c & (token < first), other=0.0)
        tl.store(window + (segment * (W - 1) + row) * channels + ids_c, value_c, mask=in_c)


def short_conv_qkv(
    x_TY: Tensor,
    weight_YW: Tensor,
    pack: Pack,
    history_sWY: Tensor | None,
    sizes: tuple[int, int, int],
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """As kernels.reference.kda_prefill.short_conv_qkv; q, k and v are contiguous."""
    (T, channels), taps, n_segments = x_TY.shape, weight_YW.shape[1], len(pack.lengths)
    assert x_TY.stride(1) == 1 and weight_YW.is_contiguous() and sum(sizes) == channels
    assert history_sWY is None or (history_sWY.is_contiguous() and history_sWY.dtype == x_TY.dtype)
    q_Tx, k_Tx, v_Tx = (torch.empty(T, size, dtype=x_TY.dtype, device=x_TY.device) for size in sizes)
    window_sWY = torch.empty(n_segments, taps - 1, channels, dtype=x_TY.dtype, device=x_TY.device)
    history = x_TY if history_sWY is None else history_sWY
    shared = {"W": taps, "HAS_HISTORY": history_sWY is not None}
    _short_conv[(triton.cdiv(T, TILE_TOKENS), triton.cdiv(channels, TILE_CHANNELS))](
        q_Tx,
        k_Tx,
        v_Tx,
        x_TY,
        weight_YW,
        history,
        pack.cu_seqlens,
        pack.segment_T,
        T,
        x_TY.stride(0),
        *sizes,
        T_TILE=TILE_TOKENS,
        C_TILE=TILE_CHANNELS,
        num_warps=4,
        **shared,
    )
    _last_inputs[(n_segments, triton.cdiv(channels, WINDOW_CHANNELS))](
        window_sWY,
        x_TY,
        history,
        pack.cu_seqlens,
        x_TY.stride(0),
        channels,
        C_TILE=WINDOW_CHANNELS,
        num_warps=4,
        **shared,
    )
    return q_Tx, k_Tx, v_Tx, window_sWY


def gated_norm(o_ThV: Tensor, gate_Tx: Tensor, weight_V: Tensor, eps: float) -> Tensor:
    """As kernels.reference.kda_prefill.gated_norm; o and gate in one dtype."""
    assert o_ThV.dtype == gate_Tx.dtype, f"{o_ThV.dtype}, {gate_Tx.dtype}"
    return train.gated_norm(o_ThV, gate_Tx.unflatten(1, o_ThV.shape[1:]), weight_V, eps).flatten(1)
