"""Choice of experts for decoding: logits in one launch, the rest in another.

Shape legend: R rows, H hidden size, E experts, k experts per row, G groups, g experts of a group;
m rows, e experts and c channels of a tile.

Source: Bailing V3 spec section 2.3.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from bailing_mtp.kernels.triton.linear import MOST_ROWS, products

SMALLEST = tl.constexpr(-(2**63))


@triton.jit
def _logits(
    logits,
    x,
    weight,
    R,
    x_stride,
    H: tl.constexpr,
    E: tl.constexpr,
    M_TILE: tl.constexpr,
    E_TILE: tl.constexpr,
    C_TILE: tl.constexpr,
    WIDE: tl.constexpr,
):
    ids_m = tl.program_id(1) * M_TILE + tl.arange(0, M_TILE)
    ids_e = tl.program_id(0) * E_TILE + tl.arange(0, E_TILE)
    ids_c = tl.arange(0, C_TILE)
    rows = x + ids_m.to(tl.int64)[:, None] * x_stride + ids_c[None, :]
    columns = weight + ids_e[None, :] * H + ids_c[:, None]
    acc_me = tl.zeros([M_TILE, E_TILE], tl.float32)
    for start in range(0, H, C_TILE):
        in_c = start + ids_c < H
        x_mc = tl.load(rows + start, mask=(ids_m < R)[:, None] & in_c[None, :], other=0.0)
        weight_ce = tl.load(columns + start, mask=in_c[:, None] & (ids_e < E)[None, :], other=0.0)
        if WIDE:
            x_mc, weight_ce = x_mc.to(tl.float32), weight_ce.to(tl.float32)
        # Products of bf16 are exact in fp32, which is what they are summed in.
        acc_me = tl.dot(x_mc, weight_ce, acc_me, input_precision="ieee")
    mask_me = (ids_m < R)[:, None] & (ids_e < E)[None, :]
    tl.store(logits + ids_m[:, None] * E + ids_e[None, :], acc_me, mask=mask_me)


@triton.jit
def _key(value, index):
    """int64 that orders by value, then by the lower index; NaN is the least of values."""
    value = tl.where(value == value, value, float("-inf")) + 0.0
    bits = value.to(tl.int32, bitcast=True)
    ordered = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits).to(tl.int64)
    return ordered * 4294967296 + (2147483647 - index).to(tl.int64)


@triton.jit
def _choose(
    ids,
    weights,
    logits,
    bias,
    scaling,
    k: tl.constexpr,
    G: tl.constexpr,
    g: tl.constexpr,
    GROUPS: tl.constexpr,
    G_PAD: tl.constexpr,
    g_PAD: tl.constexpr,
    k_PAD: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    group_G, member_g = tl.arange(0, G_PAD), tl.arange(0, g_PAD)
    expert_Gg = group_G[:, None] * g + member_g[None, :]
    real_Gg = (group_G < G)[:, None] & (member_g < g)[None, :]
    score_Gg = tl.sigmoid(tl.load(logits + row * (G * g) + expert_Gg, mask=real_Gg, other=0.0))
    selection_Gg = score_Gg + tl.load(bias + expert_Gg, mask=real_Gg, other=0.0).to(tl.float32)
    key_Gg = tl.where(real_Gg, _key(selection_Gg, expert_Gg), SMALLEST)
    if G > 1:
        best_G = tl.max(key_Gg, axis=1)
        first_Gg = key_Gg == best_G[:, None]
        high_G = tl.sum(tl.where(first_Gg & real_Gg, selection_Gg, 0.0), axis=1)
        next_G = tl.max(tl.where(first_Gg, SMALLEST, key_Gg), axis=1)
        second_Gg = (key_Gg == next_G[:, None]) & real_Gg
        worth_G = high_G + tl.sum(tl.where(second_Gg, selection_Gg, 0.0), axis=1)
        group_key_G = tl.where(group_G < G, _key(worth_G, group_G), SMALLEST)
        kept_G = tl.zeros([G_PAD], tl.int1)
        for _ in tl.static_range(GROUPS):
            best_G = group_key_G == tl.max(group_key_G, axis=0)
            kept_G = kept_G | best_G
            group_key_G = tl.where(best_G, SMALLEST, group_key_G)
        key_Gg = tl.where(kept_G[:, None], key_Gg, SMALLEST)
    ids_k = tl.arange(0, k_PAD)
    chosen_k = tl.zeros([k_PAD], tl.int32)
    key_E = tl.reshape(key_Gg, [G_PAD * g_PAD])
    for i in tl.static_range(k):
        best = tl.max(key_E, axis=0)
        # The low half of a key holds the expert.
        chosen_k = tl.where(ids_k == i, 2147483647 - (best & 0xFFFFFFFF).to(tl.int32), chosen_k)
        key_E = tl.where(key_E == best, SMALLEST, key_E)
    logit_k = tl.load(logits + row * (G * g) + chosen_k, mask=ids_k < k, other=float("-inf"))
    chosen_score_k = tl.sigmoid(logit_k)
    weight_k = chosen_score_k / (tl.sum(chosen_score_k, axis=0) + 1e-20) * scaling
    tl.store(ids + row * k + ids_k, chosen_k.to(tl.int64), mask=ids_k < k)
    tl.store(weights + row * k + ids_k, weight_k, mask=ids_k < k)


def _many_logits(x_RH: Tensor, weight_EH: Tensor) -> Tensor:
    R, (E, H) = x_RH.shape[0], weight_EH.shape
    logits_RE = torch.empty(R, E, dtype=torch.float32, device=x_RH.device)
    if not R:
        return logits_RE
    wide = x_RH.dtype == torch.float32 or weight_EH.dtype == torch.float32
    m_tile = 16 if R <= 256 else 32
    _logits[(triton.cdiv(E, 16), triton.cdiv(R, m_tile))](
        logits_RE,
        x_RH,
        weight_EH,
        R,
        x_RH.stride(0),
        H=H,
        E=E,
        M_TILE=m_tile,
        E_TILE=16,
        C_TILE=64 if wide else 512,
        WIDE=wide,
        num_warps=4,
        num_stages=2 if wide else 3,
    )
    return logits_RE


def route(
    x_RH: Tensor,
    weight_EH: Tensor,
    bias_E: Tensor,
    num_groups: int,
    groups_per_token: int,
    experts_per_token: int,
    scaling: float,
) -> tuple[Tensor, Tensor]:
    """As kernels.reference.router.route; ties go to the lower expert, and to the lower group."""
    R = x_RH.shape[0]
    assert x_RH.stride(1) == 1 and weight_EH.is_contiguous()
    few = 0 < R <= MOST_ROWS
    logits_RE = products(x_RH, weight_EH, torch.float32) if few else _many_logits(x_RH, weight_EH)
    return choose(logits_RE, bias_E, num_groups, groups_per_token, experts_per_token, scaling)


def choose(
    logits_RE: Tensor,
    bias_E: Tensor,
    num_groups: int,
    groups_per_token: int,
    experts_per_token: int,
    scaling: float,
) -> tuple[Tensor, Tensor]:
    """As kernels.reference.router.choose; ties as in `route`."""
    (R, E), device = logits_RE.shape, logits_RE.device
    assert logits_RE.dtype == torch.float32 and logits_RE.is_contiguous() and E % num_groups == 0
    group_size = E // num_groups
    weights_Rk = torch.empty(R, experts_per_token, dtype=torch.float32, device=device)
    ids_Rk = torch.empty(R, experts_per_token, dtype=torch.int64, device=device)
    if not R:
        return ids_Rk, weights_Rk
    _choose[(R,)](
        ids_Rk,
        weights_Rk,
        logits_RE,
        bias_E,
        scaling,
        k=experts_per_token,
        G=num_groups,
        g=group_size,
        GROUPS=groups_per_token,
        G_PAD=triton.next_power_of_2(num_groups),
        g_PAD=triton.next_power_of_2(group_size),
        k_PAD=triton.next_power_of_2(experts_per_token),
        num_warps=1,
    )
    return ids_Rk, weights_Rk
